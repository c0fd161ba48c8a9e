"""Calls of a program's nodes into the flow: submissions, awaits, updates, and launches their phase waits for.

Contract
    Each call takes what its op takes, behind the launch that it is of, whose typed id says of which table or bucket,
    and which part. The recorder is told what the calling thread has computed up to there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.flow.row_gradient import RowGradient
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.ranks.communicator import InFlight, by_row
from embrace_fx.vocabulary.operation_id import EARLY, OperationId, bucket_name, compute_id
from embrace_fx.vocabulary.ops import launch_of, op_name


class NodeCalls:
    """The calls of the nodes of all programs of a flow."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._recorder = flow.recorder
        self._segments = flow.segments
        self._of_op: dict[str, Callable[..., Any]] = {
            "embrace::join_rows": self.join_rows,
            "embrace::hand_over": self.hand_over,
            "embrace::update_bucket": self.update_bucket,
        }
        self._of_launch: dict[str, Callable[..., Any]] = {
            "embrace::submit_ids": self.submit_ids,
            "embrace::await_ids": self.await_ids,
            "embrace::update_rows": self.update_rows,
            "embrace::submit_rows": self.submit_rows,
            "embrace::await_rows": self.await_rows,
            "embrace::submit_gradients": self.submit_gradients,
            "embrace::submit_chunk": self.submit_chunk,
            "embrace::await_chunk": self.await_chunk,
            "embrace::all_to_all_rows": self.launch_rows,
            "embrace::all_to_all_gradients": self.launch_gradients,
            "_c10d_functional::all_reduce_": self.launch_bucket,
            "embrace::exchange_gradient_": self.launch_bucket,
        }

    def kernel(self, node: fx.Node) -> Callable[..., Any] | None:
        """Finds the function that a node calls whose communication is the flow's; None: another node."""
        op, launch = op_name(node), launch_of(node)
        if op in self._of_op:
            return partial(self._of_op[op])
        return partial(self._of_launch[op], launch) if launch is not None and op in self._of_launch else None

    # -- communication that runs from one step into the next -----------------------------------------------------------

    def submit_ids(self, launch: OperationId, *_: object) -> None:
        """Submits the exchange of the next batch's ids, if it is known on all ranks."""
        self._flow.submit_ids()

    def await_ids(self, launch: OperationId, *_: object) -> None:
        """Has the next batch's routing, and cuts its rows and this one's; or sees that nothing is to be cut."""
        self._flow.await_ids()

    def update_rows(self, launch: OperationId, shard: Tensor, *_: object) -> Tensor:
        """Applies a part of a table's gradients."""
        self._flow.exchanges[launch.what].update(launch)
        if not self._segments.runs:
            self._recorder.mark(EARLY)
        return shard

    def submit_rows(
        self, launch: OperationId, shard: Tensor, ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype, name: str
    ) -> None:
        self._flow.exchanges[launch.what].submit_rows(launch, ids, counts, dtype)
        self._recorder.mark(compute_id("update", launch.what) if self._segments.runs else EARLY)

    def await_rows(
        self, launch: OperationId, ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype, name: str
    ) -> Tensor:
        self._segments.stand()
        return self._flow.exchanges[launch.what].await_rows(launch, ids, dtype)

    def join_rows(self, parts: object, ids: Tensor, counts: Tensor, table: str) -> Tensor:
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
        table: str,
        padding_idx: int,
        scale: float,
        name: str,
    ) -> RowGradient:
        self._recorder.mark(compute_id("backward", launch.what))
        return self._flow.exchanges[launch.what].submit_gradient(launch, rows, ids, counts, padding_idx, scale)

    def submit_chunk(self, launch: OperationId, flat: Tensor, start: int, length: int, name: str) -> Tensor:
        self._recorder.mark(compute_id("backward", launch.what))
        self._flow.buckets.submit_chunk(launch, flat, start, length)
        return flat

    def await_chunk(self, launch: OperationId, value: Any, name: str) -> Any:
        self._segments.stand()
        self._flow.buckets.await_chunk(launch)
        return value

    def hand_over(self, flat: Tensor, bucket: int) -> None:
        """Leaves a bucket in flight to the optimizer."""
        self._flow.buckets.take_over(bucket, flat)

    def update_bucket(self, parameters: Any, bucket: int) -> Any:
        self._flow.buckets.await_update(bucket)
        self._recorder.mark(compute_id("update", bucket_name(bucket)))
        self._segments.begin(compute_id("forward", bucket_name(bucket)))
        return parameters

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
        value = self._flow.launcher.wait(launch)
        if self._segments.runs:
            self._recorder.mark(compute_id("rows", launch.id.what))
            self._segments.begin(compute_id("forward", launch.id.what))
        return value
