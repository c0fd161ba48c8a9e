"""The exchanges of sharded output layers: how many labels each rank scores, and hidden states and gradients between
ranks.

Contract
    Collectives leave where they are called, on the group of their class, in the same order on all ranks. A rank that
    cannot go on makes those that are left of its phase by the counts that it remembers, with zeros for values.

Shape legend: as in `embrace_fx/vocabulary/head_ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.runtime.kernels.head import chunk_bounds
from embrace_fx.runtime.launch.recorder import Moment, Recorder, Transfer
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.ops import id_of, op_name
from embrace_fx.vocabulary.submissions import compute_up_to


class HeadExchange:
    """Runs the exchanges of a program's sharded output layers, for the ops of the same names.

    Args:
        recorder: records the exchanges that nodes of the program start. None for a loss outside of the model.
    """

    def __init__(self, communicator: Communicator, recorder: Recorder | None = None) -> None:
        self._communicator, self._recorder = communicator, recorder
        self._counting: dict[str, InFlight] = {}  # table -> the last exchange of how many labels each rank scores
        self._began: dict[OperationId, tuple[int, Moment]] = {}  # recorded launch in flight -> (its window, its start)

    def begin_function(self, node: fx.Node) -> Callable[..., InFlight]:
        """Returns the function that starts the exchange of a graph node."""
        launch, until, recorder = id_of(node), compute_up_to(node), self._recorder
        exchange = getattr(self, op_name(node).removeprefix("embrace::"))
        assert recorder is not None

        def begun(*arguments: Any) -> InFlight:
            """Starts the exchange."""
            recorder.mark(until)
            if recorder.recording is not None:
                self._began[launch] = recorder.recording.window, recorder.clock.now()
            found: InFlight = exchange(*arguments)
            return found

        return begun

    def end_function(self, node: fx.Node) -> Callable[[InFlight], Tensor]:
        """Returns the function that waits for the exchange of a graph node, and returns its result."""
        launch, until, recorder = id_of(node.all_input_nodes[0]), compute_up_to(node), self._recorder
        assert recorder is not None

        def ended(exchange: InFlight) -> Tensor:
            """Waits for the exchange, and returns its result."""
            recorder.mark(until)
            value: Tensor = recorder.timed(launch, self._communicator.wait, exchange)
            if (began := self._began.pop(launch, None)) is not None and exchange.measured is not None:
                window, start = began
                recorder.record_transfer(Transfer(launch, window, exchange.measured(), start, recorder.clock.now()))
            return value

        return ended

    def gather_counts(self, labels: Tensor | None, table: str, group: str, *_: object) -> InFlight:
        """Starts gathering how many labels each of N ranks scores: (N,). A failed rank passes None for its own."""
        own = torch.tensor([0 if labels is None else len(labels)], device="cpu")
        self._counting[table] = found = self._communicator.gather_equal(own, group)
        sent_bytes = own.nbytes * (self._communicator.world_size - 1)
        return replace(found, value=found.value.view(-1), measured=lambda: sent_bytes)

    def gather_positions(
        self, rows: Tensor, counts: Tensor | None, chunk: int, chunks: int, table: str, group: str, *_: object
    ) -> InFlight:
        """Starts gathering one chunk of `rows` from all ranks. The result has all ranks' rows, in rank order.

        Args:
            rows: the rows of this rank, one for each labelled position.
            counts: for each rank, its number of labelled positions. None after a failure; zeros are then sent for the
                positions that ranks have announced.
        """
        sizes, shape = self._chunk_sizes(counts, chunk, chunks, table), rows.shape[1:]
        if counts is None:
            rows = rows.new_zeros((sizes[self._communicator.rank], *shape))
        elif chunks > 1:
            rows = rows[slice(*chunk_bounds(len(rows), chunk, chunks))]
        sent_bytes = rows.nbytes * (self._communicator.world_size - 1)
        found = self._communicator.gather_unequal(rows.reshape(-1), [size * shape.numel() for size in sizes], group)
        return replace(found, value=found.value.view(sum(sizes), *shape), measured=lambda: sent_bytes)

    def scatter_positions(
        self, rows: Tensor, counts: Tensor | None, chunk: int, chunks: int, table: str, group: str, *_: object
    ) -> InFlight:
        """Starts sending the `rows` of one chunk to the ranks that have their labelled positions. The result has, from
        each rank in order, one row for each of this rank's positions in the chunk.

        Args:
            rows: one row for each position of the chunk, of all ranks, in rank order.
            counts: as for `gather_positions`.
        """
        sizes, shape = self._chunk_sizes(counts, chunk, chunks, table), rows.shape[1:]
        if counts is None:
            rows = rows.new_zeros((sum(sizes), *shape))
        rank, ranks = self._communicator.rank, self._communicator.world_size
        if ranks == 1:
            return InFlight(rows, None)
        of_ranks = [size * shape.numel() for size in sizes]
        own = [of_ranks[rank]] * ranks
        sent_bytes = (rows.numel() - own[0]) * rows.element_size()
        arrived = rows.new_empty((sum(own),))
        found = self._communicator.all_to_all(arrived, rows.reshape(-1), own, of_ranks, group)
        return replace(found, value=found.value.view(ranks * sizes[rank], *shape), measured=lambda: sent_bytes)

    def _chunk_sizes(self, counts: Tensor | None, chunk: int, chunks: int, table: str) -> list[int]:
        """Returns how many positions of a chunk each rank has. If `counts` is None, uses the counts last gathered."""
        if counts is None:
            counts = self._communicator.wait(self._counting[table]).view(-1)
        bounds = [chunk_bounds(size, chunk, chunks) for size in counts.tolist()]
        return [end - start for start, end in bounds]
