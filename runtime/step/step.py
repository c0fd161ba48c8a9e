"""Runs a program: one call of the model, and its backward.

Contract
    The ids' phases run first, then the forward; autograd calls the backward when the user's `loss.backward()` reaches
    the results. Gradients are delivered at its very end, together: a step either leaves all of its gradients or none.
    A backward that not all ranks come to, or that one of them cannot finish, leaves none on any rank: ranks meet at its
    head and at its end, and what it launches leaves in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.flow.next_batch import ANNOUNCEMENT, NextBatch
from embrace_fx.runtime.launch.launch_queue import Dropped
from embrace_fx.runtime.launch.spans import spanned
from embrace_fx.runtime.ranks.backward_barrier import BackwardBarrier
from embrace_fx.runtime.ranks.bad_batches import unreadable_batch
from embrace_fx.runtime.ranks.failure import TOLD, PeerFailure, failure_text, is_known_to_all_ranks
from embrace_fx.runtime.step.backward_flags import FAILED, Finish, launch_flags
from embrace_fx.runtime.step.program import LoweredPhase, Program
from embrace_fx.runtime.step.promised_logits import Logits, LogitsSource
from embrace_fx.runtime.step.runnable_phase import call_without_autograd, store_saved
from embrace_fx.runtime.step.streaming_backward import StreamingBackward
from embrace_fx.runtime.step.writable_results import sharing_memory, writable_results
from embrace_fx.vocabulary.graph import BatchInput, Gradient, OutputRole, Result, Values
from embrace_fx.vocabulary.step_variant import BackwardVariant, ForwardVariant
from embrace_fx.vocabulary.version_snapshot import VersionSnapshot

SECOND = (
    "backward() was called a second time for the results of the same call, after the first backward had reduced its "
    "gradients. Call the model again, or add the losses and call backward() once."
)
FREED = (
    "backward() was called after torch.autograd.grad() or backward(inputs=...) had freed what the same call saved for "
    "its backward. Pass retain_graph=True to the first of the two, or call the model again."
)
_TWICE = (
    "backward(create_graph=True): gradients of a compiled model cannot be differentiated again. For gradients of "
    "gradients with respect to the batch, such as a gradient penalty, pass route='eager' to compile()."
)
_NOTHING_READ = VersionSnapshot()


def run_step(program: Program, leaves: Sequence[Any], *, train: bool, following: NextBatch | None = None) -> list[Any]:
    """Runs the model on a flattened batch, and returns its flattened results. `train` says whether a backward will
    follow; `following` is the next batch, if it is known.
    """
    step = Step(program, leaves, following)
    tensors: Sequence[Any]
    if train and program.has_backward:
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        anchor = torch.empty((), requires_grad=True, device="cpu")
        made = anchor.view(()).grad_fn
        assert made is not None
        step.anchor = made.next_functions[0][0]
        tensors = CallNode.apply(step, anchor, *inputs)  # type: ignore[no-untyped-call]
    else:
        tensors = call_without_autograd(step.forward)
    results = program.constants | dict(zip(program.results, tensors, strict=True))
    for index, promise in program.promised.items():
        source = LogitsSource.of_call(promise, program.state, program.communicator, trains=train)
        results[index] = Logits(results[index], source)
    return [results[index] for index in range(len(results))]


class CallNode(torch.autograd.Function):
    """One call of the model, as a single node of the user's autograd graph."""

    @staticmethod
    def forward(ctx: Any, step: Step, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Runs the step's forward, and returns its results.

        Args:
            anchor: requires grad, so that the results have a backward even if no input requires grad.
            inputs: the tensors of the batch that require grad.
        """
        ctx.step = step
        ctx.set_materialize_grads(False)
        results = call_without_autograd(spanned, "forward", step.forward)
        program = step.program
        program.state.awaiting_backward.add(step)
        of_results = zip(program.results, results, strict=True)
        fixed = [r for i, r in of_results if i not in program.differentiable and isinstance(r, Tensor)]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Runs the step's backward. Returns the gradients of the inputs, from those of the results (or None)."""
        program, twice = ctx.step.program, torch.is_grad_enabled()
        program.state.graph_task = torch._C._current_graph_task_id()
        anchor, _ = ctx.next_functions[0]
        # `torch.autograd.grad` and `backward(inputs=...)` stop at their inputs, so they do not run the anchor's node.
        wanted = torch._C._will_engine_execute_node(anchor)
        # Only the anchor has a next function, so no tensor of the batch gets a gradient.
        final = twice and wanted and not program.state.tables and len(ctx.next_functions) == 1
        keeps = not wanted and torch._C._autograd._get_current_graph_task_keep_graph()
        run, options = ctx.step.backward, {"for_parameters": wanted, "twice": twice and not final, "keeps": keeps}
        with program.state.pending.closed(grows=program.overlaps_steps):
            gradients = call_without_autograd(spanned, "backward", run, tangents, **options)
        if final:
            _refuse_second_derivatives(program)
        return (None, None, *gradients)


class _NotDifferentiable(torch.autograd.Function):
    """Returns a gradient unchanged, and raises an error if that gradient is differentiated: a mean over ranks is no
    function that autograd knows. What DDP makes of it again is wrong, too.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RuntimeError(_TWICE)


def _refuse_second_derivatives(program: Program) -> None:
    """Makes the gradients of a backward with `create_graph=True` raise if they are differentiated."""
    program.flow.wait()
    with torch.enable_grad():
        for parameter in program.state.parameters():
            if parameter.grad is not None:
                parameter.grad = _NotDifferentiable.apply(parameter.grad.detach().requires_grad_())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class OpenedBackward:
    """A backward that has begun on this rank."""

    gate: BackwardBarrier | None  # where this rank waits until all ranks are in the backward; None if it need not
    variant: BackwardVariant
    phase: LoweredPhase
    needed: Values  # by the launches for which other ranks wait, if the backward fails


class Step:
    """One call of the model, from its announcement to other ranks until the end of its backward."""

    def __init__(self, program: Program, leaves: Sequence[Any], following: NextBatch | None) -> None:
        self.program = program
        self._leaves = leaves
        self._following = following
        self.anchor: Any = None  # an input whose autograd node every backward of this call reaches
        # Parameters with gradients from `no_sync`, which are reduced even if this backward does not reach them.
        self.unreduced: Collection[str] = program.state.unreduced
        self._values: Values | None = None
        self._ended = SECOND  # the error of a backward for which no saved values are left
        self._results: list[Any] = []  # the tensors and sizes that the model returns
        self._read_again = _NOTHING_READ

    def forward(self) -> list[Any]:
        """Announces the call, runs its forward, keeps what the backward needs, and returns the results."""
        program = self.program
        program.announcements.of_step = program.head(self._leaves)
        values, variant = self._begin_forward()
        self._announced = program.communicator.progress.step  # how many steps were announced, including this call
        forward = program.phase(variant)
        if program.share_buffers is not None:
            program.share_buffers()
        if program.regions is not None:
            program.regions.begin_step()
        outputs = self._run_forward(forward, values)
        results = [value for role, value in zip(forward.run.roles, outputs, strict=True) if isinstance(role, Result)]
        store_saved(forward.run.roles, outputs, values)
        self._values = values = program.read_after("forward", values)
        program.flow.recorder.end_forward()
        results, made = writable_results(results, program.differentiable_places)
        self._results = [r.detach() if isinstance(r, Tensor) else r for r in results]
        self._read_again = self._snapshot_reads(values, results, made)
        return results

    def _snapshot_reads(self, values: Values, results: Sequence[Any], made: Sequence[int]) -> VersionSnapshot:
        """Returns a snapshot of the tensors that the backward reads, to detect writes before it. `made` has the indices
        of the results that `writable_results` has replaced.
        """
        read = self.program.snapshot_reads(self._leaves, values)
        return read + sharing_memory((results[k] for k in made), read) if made else read

    def _run_forward(self, forward: LoweredPhase, values: Values) -> tuple[Any, ...]:
        """Runs the forward. Reports an error to the other ranks, and makes the launches for which they wait."""
        program = self.program
        needed = forward.missing.begin(values)
        try:
            return forward.run(self._leaves, values, {})
        except Exception as error:
            if is_known_to_all_ranks(error) or not self.program.flow.shares_failures:
                raise
            forward.missing.submit(needed)
            program.flow.give_up_forward()
            program.announcements.give_up(failure_text(error))
            error.add_note(TOLD)
            raise

    def _begin_forward(self) -> tuple[Values, ForwardVariant]:
        """Runs the phases that exchange ids. Returns the values that they save, and the forward's variant."""
        program = self.program
        if program.overlaps_steps:
            following, self._following = self._following, None
            return program.flow.begin_forward(
                program.ids_program, self._leaves, following, lambda variant: program.phase(variant).absent
            )
        values: Values = {}
        try:
            program.unique.run_and_save(self._leaves, values)
        except Exception as error:  # catch any error, because the other ranks must be informed
            program.announcements.announce_step((), unreadable_batch(error))
            raise
        if not program.announces:
            program.announcements.announce_step(())
        program.ids.run_and_save(self._leaves, values)
        program.flow.after_announcement()
        program.flow.begin_plain_forward()
        return program.read_after("ids", values), ForwardVariant()

    def backward(
        self, tangents: Sequence[Tensor | None], *, for_parameters: bool, twice: bool = False, keeps: bool = False
    ) -> list[Tensor | None]:
        """Runs the backward, stores the parameters' gradients, and returns the gradient of each tensor of the batch
        that requires one.

        Args:
            tangents: the gradients of the results, or None for results without one.
            for_parameters: whether parameters get gradients. False under `torch.autograd.grad` with respect to inputs.
            twice: whether `create_graph=True` was given.
            keeps: whether to keep the saved values for another backward (`retain_graph=True`, without gradients of
                parameters).

        Raises:
            RuntimeError: `twice` is True, this is a second backward, or tensors that the backward reads were written.
        """
        program = self.program
        if self._values is None:
            raise RuntimeError(self._ended)
        if twice and not self.program.flow.shares_failures:
            raise RuntimeError(_TWICE)
        program.state.awaiting_backward.discard(self)
        values, self._values = self._values, None
        kept = (values.copy(), self._read_again) if keeps else None
        self._ended = SECOND if for_parameters else FREED
        assert program.has_backward
        of_results = zip(program.results, tangents, strict=True)
        given = tuple([index for index, tangent in of_results if tangent is not None])
        state = program.state
        used = program.used.words(given, self.unreduced)
        if state.hooked:
            state.unreached = program.used.absent(program.used.words(given))
        opened, failure = self._open_backward(values), RuntimeError(_TWICE) if twice else None
        outputs, roles, counts = self._close_backward(opened, values, tangents, used, failure)
        if not for_parameters:
            program.flow.drop()
            if kept is not None:
                self._values, self._read_again = kept
                state.awaiting_backward.add(self)
            return self._batch_gradients(roles, outputs)
        absent = program.used.absent(counts)
        absent_here = program.used.absent(used) | program.used.local_unreached(given)
        given_away = [tangent for tangent in tangents if tangent is not None]
        program.deliver(roles, outputs, absent, absent_here, given_away)
        program.flow.mark_end()
        return self._batch_gradients(roles, outputs)

    def join_backward(self) -> None:
        """Takes part in the other ranks' backward without computing anything."""
        if (gate := self._enter_backward(0)) is not None:
            self._check_barrier(gate)
        self._launch_flags(self.program.used.words(()), 0)("", None, lambda: True)

    def _enter_backward(self, call: int) -> BackwardBarrier | None:
        """Tells the other ranks that this rank has entered the backward of a `call`: 1 for the last one, 2 for the one
        before, and so on, 0 if it computes nothing. Returns the barrier to wait at, or None for a single rank.
        """
        if not self.program.flow.shares_failures:
            return None
        program = self.program
        program.flow.wait()  # wait for gradients of an earlier backward, which must stay valid if this one fails
        return BackwardBarrier(program.announcements, call)

    def _open_backward(self, values: Values) -> OpenedBackward:
        """Begins a backward: tells the other ranks, and lets the launcher start its collectives once all ranks are
        there. Raises `PeerFailure`, on every rank that runs it, if another rank will not.
        """
        program, flow = self.program, self.program.flow
        gate = self._enter_backward(1 + program.communicator.progress.step - self._announced)
        variant = flow.next_backward(program.ids_program, values)
        backward = program.phase(variant)
        needed = backward.missing.begin(values)
        flow.open_window(gate, backward.absent)
        if gate is not None and backward.missing.on_the_spot:
            # Wait at the barrier now, because launches without a launcher are made immediately.
            self._check_barrier(gate)
        return OpenedBackward(gate, variant, backward, needed)

    def _close_backward(
        self,
        opened: OpenedBackward,
        values: Values,
        tangents: Sequence[Tensor | None],
        used: Sequence[int],
        failure: Exception | None,
    ) -> tuple[tuple[Any, ...], Sequence[OutputRole], tuple[int, ...]]:
        """Runs the backward to its end, and checks that it has succeeded on all ranks.

        Args:
            used: the parameters that the backward reaches, encoded by `UsedParameters.words`.
            failure: an error to report to the other ranks instead of running the backward, or None.

        Returns:
            The backward's outputs, the role of each output, and for each parameter how many ranks' backwards reach it.

        Raises:
            PeerFailure, FloatingPointError, RuntimeError: as for `launch_flags`, on every rank.
        """
        flow, gate, backward = self.program.flow, opened.gate, opened.phase
        finish: Finish | None = None
        written, names = 0, ""
        outputs: tuple[Any, ...] = ()
        try:
            self._begin_backward(opened.variant)
            if failure is not None:
                raise failure  # here, because an error in the backward is reported to the other ranks
            written, names = self._written_tensors()
            if gate is None:  # without a barrier, launch the flags first, so that the backward hides their exchange
                finish = self._launch_flags(used, written)
            arguments = self._arguments(tangents)
            if isinstance(backward.run, StreamingBackward):
                backward.run.run_ready(arguments)
                if gate is not None:
                    self._check_barrier(gate)
                finish = finish or self._launch_flags(used, written)  # while the last buckets are in flight
            outputs = backward.run(self._leaves, values, arguments)
        except Dropped:
            pass
        except Exception as error:
            if gate is not None and finish is None and not is_known_to_all_ranks(error):
                self._fail_backward(opened, gate, used, error)
            raise
        if gate is not None:
            self._check_barrier(gate)
        flow.end_backward()
        try:
            finish = finish or self._launch_flags(used, written)
            told = names, None, partial(self._nonfinite_is_harmless, tangents)
            reached = finish(*told) if gate is None else flow.recorder.timed(ANNOUNCEMENT, finish, *told)
        except PeerFailure:
            flow.give_up_backward()
            raise
        except (FloatingPointError, RuntimeError):
            flow.drop()
            raise
        if self.program.deliver.synchronised:
            self.program.state.reached = reached
        return outputs, backward.run.roles, reached

    def _begin_backward(self, variant: BackwardVariant) -> None:
        """Begins the exchanges of the backward."""
        self.program.flow.begin_backward(self.program.ids_program, variant)

    def _written_tensors(self) -> tuple[int, str]:
        """Returns how many tensors that the backward reads were written since the forward, and their names."""
        written = self._read_again.written()
        self._read_again = _NOTHING_READ  # so that the backward can free values after their last use
        return len(written), self.program.name_written(written, self._leaves) if written else ""

    def _arguments(self, tangents: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Returns the gradients of the results as the program's backward takes them, by index of the result."""
        program = self.program
        return {
            # The graph was traced for contiguous gradients, and autograd omits gradients of unused results.
            index: tangent.contiguous() if tangent is not None else torch.zeros_like(result)
            for index, tangent, result in zip(program.results, tangents, self._results, strict=True)
            if index in program.differentiable
        }

    def _check_barrier(self, gate: BackwardBarrier) -> None:
        """Waits, before anything is sent, until all ranks have come. Raises `PeerFailure` if one runs no backward."""
        if gate.future.done():
            gate.wait()
        else:
            self.program.flow.recorder.timed(ANNOUNCEMENT, gate.wait)
        if not gate.all_are_here():
            self.program.flow.give_up_backward()
            gate.check()

    def _fail_backward(
        self, opened: OpenedBackward, gate: BackwardBarrier, used: Sequence[int], failure: Exception
    ) -> None:
        """Tells the other ranks that this rank's backward has failed, and makes the launches for which they wait."""
        flow = self.program.flow
        self._check_barrier(gate)
        opened.phase.missing.submit(opened.needed)
        flow.end_backward()
        with contextlib.suppress(PeerFailure):
            self._launch_flags(used, FAILED)("", failure, lambda: True)
        flow.give_up_backward()
        failure.add_note(TOLD)

    def _nonfinite_is_harmless(self, tangents: Sequence[Tensor | None]) -> bool:
        """Returns whether gradients are the same as under DDP, although a scalar result may not be finite.

        This is so if the training loop has replaced the result by another tensor, because the result then has no
        gradient. It is also so if the result is a mean over no labels: the mean is nan, but its gradients are zero.
        """
        losses = [
            tangent
            for result, tangent in zip(self._results, tangents, strict=True)
            if isinstance(result, Tensor) and result.dim() == 0 and not bool(result.isfinite())
        ]
        harmful = any(each is not None and bool(each.any()) for each in losses)
        return not harmful or self.program.scores_nothing(self._leaves)

    def _launch_flags(self, used: Sequence[int], written: int) -> Finish:
        """Starts exchanging this backward's flags. Returns the function that waits for them."""
        scalars = [r for r in self._results if isinstance(r, Tensor) and r.dim() == 0 and r.is_floating_point()]
        return launch_flags(scalars, used, written, self.program.communicator)

    def _batch_gradients(self, roles: Sequence[OutputRole], outputs: Sequence[Any]) -> list[Tensor | None]:
        """Returns the gradient, or None, of each of the batch's tensors that require one, in the order of the batch."""
        wanted = [k for k, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not wanted:
            return []
        gradients = [(role.of, value) for role, value in zip(roles, outputs, strict=True) if isinstance(role, Gradient)]
        found = {of.index: value for of, value in gradients if isinstance(of, BatchInput)}
        return [*map(found.get, wanted)]
