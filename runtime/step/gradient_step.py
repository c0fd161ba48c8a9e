"""One call of a model whose forward runs eagerly: ranks only announce the call and exchange its gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.step.program import Program
from embrace_fx.runtime.step.runnable_phase import call_without_autograd
from embrace_fx.runtime.step.step import SECOND, OpenedBackward, Step
from embrace_fx.runtime.step.streaming_backward import StreamingBackward
from embrace_fx.vocabulary.graph import Values
from embrace_fx.vocabulary.step_variant import BackwardVariant, ForwardVariant
from embrace_fx.vocabulary.version_snapshot import VersionSnapshot


class GradientStep(Step):
    """One call of a model on the eager route: forward and backward run eagerly, and a program exchanges the gradients.

    Args:
        names: the parameters whose gradients the program exchanges, in the program's order.
        rows: for each table, the ids of the rows in a recent gradient. They serve as the program's batch.
        in_rows: names of parameters whose gradients stay sparse (COO). All other gradients become dense.
    """

    def __init__(
        self, program: Program, names: Sequence[str], rows: Sequence[Tensor], in_rows: Collection[str]
    ) -> None:
        super().__init__(program, rows, None)
        self._names = tuple(names)
        self._places = {name: k for k, name in enumerate(names)}
        self._in_rows = in_rows
        self._reduced: set[str] = set()  # parameters whose gradients earlier backwards of the results have reduced
        self._opened: OpenedBackward | None = None
        self._sent: StreamingBackward | None = None  # sends gradients as they arrive, or None to send them at the end
        self._taken: dict[int, Tensor] = {}  # index of a parameter -> gradient in the layout of its exchange

    def announce(self) -> None:
        """Announces the call, and begins the program. Collective. Raises `PeerFailure` if a rank has failed."""
        call_without_autograd(self.forward)
        self._results = []

    def _snapshot_reads(self, values: Values, results: Sequence[Any], made: Sequence[int]) -> VersionSnapshot:
        """Returns an empty snapshot, because autograd itself detects writes to tensors that the backward reads."""
        return VersionSnapshot()

    def _begin_forward(self) -> tuple[Values, ForwardVariant]:
        """Announces the step, and usually does not wait for the other ranks: all ranks meet at the start of the
        backward, before anything is sent. Waits here if ranks broadcast buffers before the forward.
        """
        flow = self.program.flow
        if flow.is_within_steps or not flow.shares_failures or self.program.share_buffers is not None:
            return super()._begin_forward()
        self.program.announcements.announce_ahead(flow.after_announcement)
        flow.begin_plain_forward()
        return {}, ForwardVariant()

    def end_forward(self, results: Sequence[Any]) -> None:
        """Ends the forward, and keeps its results, to check later that its scalars are finite."""
        self.program.flow.mark_forward()
        self._results = [each.detach() for each in results if isinstance(each, Tensor)]

    def begin_backward(self, *, of_results: bool) -> None:
        """Tells the other ranks that this rank begins its backward.

        Args:
            of_results: whether the backward begins at the call's results, rather than at a parameter that a loss reads
                directly.

        Raises:
            PeerFailure: another rank will not run this backward, or has failed. Raised on every rank.
        """
        self.program.state.awaiting_backward.discard(self)
        self.program.announcements.wait()
        self._opened = self._open_backward({})
        self._sent, self._taken, self._of_results = None, {}, of_results
        if isinstance(run := self._opened.phase.run, StreamingBackward):
            run.begin()
            may_leave = not self.program.state.unreduced and self.program.flow.shares_failures
            self._sent = run if may_leave else None
        super()._begin_backward(BackwardVariant())

    def add(self, name: str, gradient: Tensor) -> None:
        """Stores a parameter's accumulated gradient, and sends the parameter's bucket once it is complete.

        Raises:
            RuntimeError: the gradient has already been sent, or an earlier backward has reduced it.
        """
        if self._sent is None:
            return
        if self._of_results and name in self._reduced:
            raise RuntimeError(SECOND)
        k = self._places[name]
        if (completes := self._sent.record(k)) is None:
            raise RuntimeError(_AGAIN.format(name))
        self._taken[k] = gradient if gradient.layout is torch.strided else self._to_exchange_layout(name, gradient)
        if completes:
            call_without_autograd(self._sent.run_ready, self._taken)

    def exchange(self, gradients: Mapping[str, Tensor], failure: Exception | None = None) -> None:
        """Reduces the accumulated gradients over ranks, and stores the means in `.grad`. Collective.

        Args:
            gradients: parameter -> gradient, for parameters that this rank's backward has reached.
            failure: the error that ended this rank's backward, or None.

        Raises:
            RuntimeError: an earlier backward of this call has already reduced one of these gradients.
            PeerFailure, FloatingPointError: as for `launch_flags`, on every rank.
        """
        program, opened = self.program, self._opened
        assert opened is not None
        if self._of_results and not self._reduced.isdisjoint(gradients):
            failure = RuntimeError(SECOND)  # under DDP, each rank would add its own gradients to the mean gradients
        self._opened = self._sent = None
        given = tuple([k for k, name in enumerate(self._names) if name in gradients])
        used = program.used.words(given, program.state.unreduced)
        tangents = [gradients.get(name) for name in self._names]
        close = self._close_backward
        outputs, roles, counts = call_without_autograd(close, opened, {}, tangents, used, failure)
        absent_here = program.used.absent(used) | program.used.local_unreached(given)
        call_without_autograd(program.deliver, roles, outputs, program.used.absent(counts), absent_here, ())
        program.flow.mark_end()
        self._results = []  # free the results, which have been checked and may be large
        if self._of_results and not program.deliver.own:
            self._reduced.update(gradients)

    def _nonfinite_is_harmless(self, tangents: Sequence[Tensor | None]) -> bool:
        """Returns whether all gradients (`tangents`) are finite. A loss that is not finite then does no harm."""
        values = [each._values() if each.is_sparse else each for each in tangents if each is not None]
        return all(bool(each.isfinite().all()) for each in values)

    def _begin_backward(self, variant: BackwardVariant) -> None:
        """Does nothing, because `begin_backward` has already begun the exchanges."""

    def _arguments(self, tangents: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Returns the gradients of the parameters, by index, in the layouts in which ranks exchange them."""
        taken, self._taken = self._taken, {}
        for k, (name, tangent) in enumerate(zip(self._names, tangents, strict=True)):
            if k in taken:
                continue
            if tangent is not None and tangent.layout is torch.strided:
                taken[k] = tangent
            else:
                taken[k] = self._to_exchange_layout(name, tangent)
        return taken

    def _to_exchange_layout(self, name: str, gradient: Tensor | None) -> Tensor:
        """Converts a gradient to the layout (sparse or dense) in which ranks exchange it; None becomes zeros."""
        in_rows = name in self._in_rows
        if gradient is None:
            parameter = self.program.state.parameter(name)
            return _empty_sparse_gradient(parameter) if in_rows else torch.zeros_like(parameter)
        return gradient if in_rows or gradient.layout == torch.strided else gradient.to_dense()


_AGAIN = (
    "backward(): a backward that runs inside this one changed the gradient of {} after the gradient had been sent. "
    "Repeat the step: from now on, gradients are sent only after all of them are complete"
)


def _empty_sparse_gradient(table: Tensor) -> Tensor:
    """Returns a sparse gradient of a table in which no row has a value."""
    ids = torch.empty((1, 0), dtype=torch.int64, device=table.device)
    return torch.sparse_coo_tensor(ids, table.new_empty((0, *table.shape[1:])), table.shape, is_coalesced=True)
