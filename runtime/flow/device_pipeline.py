"""The pipeline of a model on a device: in a steady step the host only enqueues work on streams, and never waits for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.flow.comm_pipeline import CommPipeline, Kernels
from embrace_fx.runtime.flow.next_batch import DeviceBatch, IdsProgram, NextBatch
from embrace_fx.runtime.flow.single_process import SingleProcessRows, runs_without_counts
from embrace_fx.runtime.kernels import plan_sums, sum_rows
from embrace_fx.runtime.launch.launch_queue import LaunchQueue
from embrace_fx.runtime.launch.recorder import Clock, Recorder
from embrace_fx.runtime.launch.stream_queue import StreamQueue
from embrace_fx.runtime.launch.streams import Event, Streams, choose_streams
from embrace_fx.runtime.tables.table import Member
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import op_name


class DevicePipeline(CommPipeline):
    """Runs the communication of a model's steps on the CUDA streams of a device."""

    exchanges_at_once = True

    def __init__(self, *arguments: Any, streams: Streams, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shares_failures = False  # a host that fails does not know which launches its device has reached
        self._streams = streams
        self._ids_known: Event = None  # recorded once the last forward's ids are computed

    def make_clock(self) -> Clock:
        """Returns a new clock that times compute with events on CUDA streams, for recordings."""
        return self._streams.clock()

    def make_queue(self, recorder: Recorder, device: torch.device, at_once: int) -> LaunchQueue:
        """Returns a new queue on CUDA streams. Ranks agree when one has to launch out of the order. Collective."""
        queue = StreamQueue(recorder, self._streams, self.communicator.channels(device))
        self.communicator.run_periodically(queue.agree_on_order)
        return queue

    def look_ahead(self, program: IdsProgram, leaves: Sequence[Any]) -> NextBatch:
        """Finds the rows of each table that the next batch reads, as in the base class, on the CUDA stream for ids."""
        streams = self._streams
        there = streams.record("batch ready")
        with streams.on("ids", "unique rows"):
            streams.wait(there)
            streams.keep(*[leaf for leaf in leaves if isinstance(leaf, Tensor)])
            values, counts = program.unique_on_device(leaves)
            of_tables = counts[0].view(1) if len(counts) == 1 else torch.stack(counts) if counts else _NO_TABLES
            return DeviceBatch(program, leaves, values, of_tables, streams)

    def kernels(self, graph: TrainingGraph, tables: Mapping[str, Member]) -> Kernels:
        """Returns a function that maps a graph node to a replacement for its op's kernel, or to None."""
        if self.communicator.world_size == 1 and runs_without_counts(graph):
            return SingleProcessRows(self._streams, tables).kernel
        return lambda node: self._coalesce if op_name(node) == "embrace::coalesce" else None

    def _coalesce(
        self, ids: Tensor, flat: Tensor, columns: int, padding_rows: Sequence[int], scale: float
    ) -> list[Tensor]:
        """Runs the op `coalesce`. The host waits until the number of sums is known, but not for the backward."""
        streams = self._streams
        with streams.on("ids", "places of sums"):
            streams.wait(self._ids_known)
            streams.keep(ids)
            places = plan_sums(ids, flat, padding_rows)
            known = streams.record("places known")
        streams.wait(known)
        streams.keep(*places)
        return sum_rows(flat, places, columns, scale)

    def _begin_compute(self) -> None:
        """Records, for time measurements, that the forward's compute begins. By now, the ids of the batch are known."""
        self._ids_known = self._streams.record("ids known")
        super()._begin_compute()

    def before_writes(self) -> None:
        """Has rows that were sent early sent again, because comparing them with the table would block the host."""
        self.resend_rows()


_NO_TABLES = torch.empty(0, device="cpu")


def choose_pipeline(device: torch.device) -> Callable[..., CommPipeline]:
    """Returns the class of pipeline for models on a device."""
    streams = choose_streams(device)
    return CommPipeline if streams is None else partial(DevicePipeline, streams=streams)
