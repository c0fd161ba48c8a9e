"""Calls of a program's nodes into the flow: submissions, awaits, updates, and launches their phase waits for.

Contract
    Each call is of one launch, whose typed id says of which table or bucket, and which part. The recorder is told what
    the calling thread has computed up to there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.ranks.communicator import InFlight, by_row
from embrace_fx.vocabulary.operation_id import EARLY, OperationId, bucket_name, compute_id


class NodeCalls:
    """The calls of the nodes of all programs of a flow."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._recorder = flow.recorder
        self._segments = flow.segments

    # -- communication that runs from one step into the next -----------------------------------------------------------

    def submit_ids(self) -> None:
        """Submits the exchange of the next batch's ids, if it is known on all ranks."""
        self._flow.submit_ids()

    def await_ids(self) -> None:
        """Has the next batch's routing, and cuts its rows and this one's; or sees that nothing is to be cut."""
        self._flow.await_ids()

    def update_rows(self, launch: OperationId) -> None:
        """Applies a part of a table's gradients."""
        self._flow.exchanges[launch.what].update(launch)
        if not self._segments.runs:
            self._recorder.mark(EARLY)

    def submit_rows(self, launch: OperationId, ids: Tensor, counts: Tensor, dtype: torch.dtype) -> None:
        self._flow.exchanges[launch.what].submit_rows(launch, ids, counts, dtype)
        self._recorder.mark(compute_id("update", launch.what) if self._segments.runs else EARLY)

    def await_rows(self, launch: OperationId, like: Tensor, dtype: torch.dtype) -> Tensor:
        self._segments.stand()
        return self._flow.exchanges[launch.what].await_rows(launch, like, dtype)

    def join_rows(self, table: str) -> Tensor:
        rows = self._flow.exchanges[table].rows()
        self._recorder.mark(compute_id("rows", table))
        self._segments.begin(compute_id("forward", table))
        return rows

    def submit_gradients(
        self,
        launch: OperationId,
        rows: Tensor,
        ids: Tensor,
        counts: Tensor,
        padding_idx: int,
        scale: float,
    ) -> None:
        self._recorder.mark(compute_id("backward", launch.what))
        self._flow.exchanges[launch.what].submit_gradient(launch, rows, ids, counts, padding_idx, scale)

    def submit_chunk(self, launch: OperationId, flat: Tensor, start: int, length: int) -> None:
        self._recorder.mark(compute_id("backward", launch.what))
        self._flow.buckets.submit_chunk(launch, flat, start, length)

    def await_chunk(self, launch: OperationId) -> None:
        self._segments.stand()
        self._flow.buckets.await_chunk(launch)

    def hand_over(self, bucket: int, flat: Tensor) -> None:
        """Leaves a bucket in flight to the optimizer."""
        self._flow.buckets.take_over(bucket, flat)

    def update_bucket(self, bucket: int) -> None:
        self._flow.buckets.await_update(bucket)
        self._recorder.mark(compute_id("update", bucket_name(bucket)))
        self._segments.begin(compute_id("forward", bucket_name(bucket)))

    # -- exchanges that are waited for in the phase that launches them -------------------------------------------------

    def launch_rows(self, launch: OperationId, columns: Tensor, counts: Tensor, *_: object) -> Ticket:
        """Launches the rows of a table: `all_to_all_rows`."""
        ticket = self._flow.exchanges[launch.what].send_rows(launch, columns, by_row(counts))
        self._recorder.mark(compute_id("update", launch.what))
        return ticket

    def launch_gradients(
        self, launch: OperationId, flat: Tensor, counts: Tensor, embedding_dim: int, *_: object
    ) -> Ticket:
        """Launches the gradients of a table: `all_to_all_gradients`."""
        self._recorder.mark(compute_id("backward", launch.what))
        return self._flow.exchanges[launch.what].send_gradients(launch, flat, by_row(counts), embedding_dim)

    def launch_bucket(self, launch: OperationId, flat: Tensor, *_: object) -> Ticket:
        """Launches a bucket: `all_reduce_` or `exchange_gradient_`."""
        self._recorder.mark(compute_id("backward", launch.what))
        return self._flow.buckets.launch(launch, flat, 0, flat.numel())

    def wait_for(self, launch: Ticket | InFlight) -> Tensor:
        """The value of a launch: one that goes through the launcher, or one of the thread's own."""
        if isinstance(launch, InFlight):
            return self._flow.communicator.wait(launch)
        self._segments.stand()
        value = self._flow.wait(launch)
        if self._segments.runs:
            self._recorder.mark(compute_id("rows", launch.id.what))
            self._segments.begin(compute_id("forward", launch.id.what))
        return value
