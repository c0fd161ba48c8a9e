"""Runs a program: one call of the model, and its backward.

Contract
    The ids' phases run first, then the forward; autograd calls the backward when the user's `loss.backward()` reaches
    the results. Gradients are delivered at its very end, together: a step either leaves all of its gradients or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.flow.ahead import Ahead
from embrace_fx.runtime.launch import streams
from embrace_fx.runtime.ranks.announcement import unreadable
from embrace_fx.runtime.step.backward_flags import Finish, launch_flags
from embrace_fx.runtime.step.delivery import deliver
from embrace_fx.runtime.step.phases import Values, autocast_is_in_the_graph, keep
from embrace_fx.runtime.step.program import Program
from embrace_fx.vocabulary.graph import BatchInput, Gradient, OutputRole, Result


def run_step(program: Program, leaves: Sequence[Any], *, train: bool, following: Ahead | None = None) -> list[Any]:
    """Runs the model on a flattened batch; returns its flattened results.

    Args:
        train: whether a backward will follow, from results that require grad.
        following: the next batch, where it is known and the program has a flow.
    """
    step = Step(program, leaves, following)
    with autocast_is_in_the_graph():
        tensors = _tensors(program, step, leaves, train)
    results: list[Any] = [None] * program.result_count
    for index, value in program.constants.items():
        results[index] = value
    for index, value in zip(program.results, tensors, strict=True):
        results[index] = value
    return results


def _tensors(program: Program, step: Step, leaves: Sequence[Any], train: bool) -> tuple[Tensor, ...]:
    if train and program.backward is not None:
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        anchor = torch.empty((), requires_grad=True)
        tensors: tuple[Tensor, ...] = _Run.apply(step, anchor, *inputs)  # type: ignore[no-untyped-call]
        return tensors
    with torch.no_grad():
        return tuple(step.forward())


class Step:
    """One call of the model: what its backward needs."""

    def __init__(self, program: Program, leaves: Sequence[Any], following: Ahead | None) -> None:
        self.program = program
        self._leaves = leaves
        self._following = following
        self._values: Values | None = None
        self._results: list[Any] = []  # tensors, and sizes the model returns
        self._read_again: list[tuple[Tensor, int]] = []

    def forward(self) -> list[Any]:
        program = self.program
        program.announcements.failure = program.check(self._leaves)
        program.announcements.program = program.launched
        program.tell_buffers()
        values = self._begin_forward()
        program.share_buffers()
        if program.regions is not None:
            program.regions.begin_step()
        forward = program.forward
        outputs = forward(self._leaves, values, {})
        results = [value for role, value in zip(forward.roles, outputs, strict=True) if isinstance(role, Result)]
        keep(forward.roles, outputs, values)
        if program.flow is not None:
            program.flow.end_forward()
        self._values = values
        self._results = [r.detach() if isinstance(r, Tensor) else r for r in results]
        self._read_again = program.read_again(self._leaves, values)
        return results

    def _begin_forward(self) -> Values:
        """The values of the ids' phases."""
        program = self.program
        if program.flow is not None and program.is_relaxed:
            assert program.ids_program is not None
            following, self._following = self._following, None
            return program.flow.begin_forward(program.ids_program, self._leaves, following)
        values: Values = {}
        try:
            keep(program.unique.roles, program.unique(self._leaves, values, {}), values)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            program.announcements.announce((), unreadable(error))
            raise
        if not program.announces:
            program.announcements.announce(())
        keep(program.ids.roles, program.ids(self._leaves, values, {}), values)
        if program.flow is not None:
            program.flow.begin_plain_forward()
        return values

    def backward(self, tangents: Sequence[Tensor | None], *, for_parameters: bool) -> list[Tensor | None]:
        """Runs the backward, delivers the parameters' gradients, and returns the batch tensors' ones.

        Args:
            for_parameters: whether parameters are to get gradients; `torch.autograd.grad` of inputs wants none.
        """
        program = self.program
        if self._values is None:
            raise RuntimeError(
                "expected one backward for each call of the compiled model, in backward(), found a second one for the "
                "same results; what it needs has been freed and its gradients have been reduced. Call the model again, "
                "or add the losses and call backward once."
            )
        program.state.awaiting_backward.discard(self)
        values, self._values = self._values, None
        backward = program.backward
        assert backward is not None
        if program.flow is not None:
            assert program.ids_program is not None
            program.flow.begin_backward(program.ids_program, values)
        given = tuple(index for index, t in zip(program.results, tangents, strict=True) if t is not None)
        written = [tensor for tensor, version in self._read_again if tensor._version != version]
        self._read_again = []  # values die with their last use
        names = program.name_written(written, self._leaves)
        used = program.used.words(given, program.state.unreduced)
        finish = self._launch_flags(used, len(written))
        dense = {
            # The graph was traced for contiguous gradients, and autograd leaves out those of unused results.
            index: tangent.contiguous() if tangent is not None else torch.zeros_like(result)
            for index, tangent, result in zip(program.results, tangents, self._results, strict=True)
            if index in program.differentiable
        }
        outputs = backward(self._leaves, values, dense)
        if program.flow is not None:
            program.flow.end_backward()
        try:
            counts = finish(names)
        except (FloatingPointError, RuntimeError):
            if program.flow is not None:
                program.flow.discard()
            raise
        if not for_parameters:
            if program.flow is not None:
                program.flow.discard()
            return self._of_batch(backward.roles, outputs)
        absent, absent_here = program.used.absent(counts), program.used.absent(used)
        given_away = [tangent for tangent in tangents if tangent is not None]
        # One process has nothing to reduce later: what it accumulates is a sum from the first backward on.
        whole = program.synchronised or program.communicator.world_size == 1
        deliver(program.state, program.flow, whole, backward.roles, outputs, absent, absent_here, given_away)
        return self._of_batch(backward.roles, outputs)

    def tell_nothing(self) -> None:
        """In place of a backward that has nothing to compute nor to send, while the other ranks run theirs."""
        self._launch_flags(self.program.used.words(()), 0)("")

    def _launch_flags(self, used: Sequence[int], written: int) -> Finish:
        """Tells the ranks of this backward; the result tells of theirs."""
        scalars = [r for r in self._results if isinstance(r, Tensor) and r.dim() == 0 and r.is_floating_point()]
        flow = self.program.flow
        on = flow.streams if flow is not None else streams.streams_of(scalars[0].device) if scalars else None
        return launch_flags(scalars, used, written, self.program.communicator, on)

    def _of_batch(self, roles: Sequence[OutputRole], outputs: Sequence[Any]) -> list[Tensor | None]:
        """The gradients of the batch's tensors that require one."""
        found = {
            role.of.index: value
            for role, value in zip(roles, outputs, strict=True)
            if isinstance(role, Gradient) and isinstance(role.of, BatchInput)
        }
        return [found.get(k) for k, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]


class _Run(torch.autograd.Function):
    """One call of the model as one node of the user's autograd graph."""

    @staticmethod
    def forward(ctx: Any, step: Step, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        results = step.forward()
        program = step.program
        program.state.awaiting_backward.add(step)
        fixed = [r for i, r in zip(program.results, results, strict=True) if i not in program.differentiable]
        ctx.mark_non_differentiable(*(r for r in fixed if isinstance(r, Tensor)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "expected a backward of the compiled model without create_graph=True, in backward(), found one with "
                "it: its gradients cannot be differentiated again. Train such a loss with the plain model."
            )
        anchor, _ = ctx.next_functions[0]  # not reached by `torch.autograd.grad` or `backward(inputs=...)`
        with torch.no_grad(), autocast_is_in_the_graph():
            wanted = torch._C._will_engine_execute_node(anchor)
            return (None, None, *ctx.step.backward(tangents, for_parameters=wanted))
