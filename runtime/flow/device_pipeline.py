"""The pipeline of a model on a device: in a steady step the host only enqueues work on streams, and never waits for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from embrace_fx.runtime.flow.comm_pipeline import CommPipeline, Kernels
from embrace_fx.runtime.flow.next_batch import DeviceBatch, IdsProgram, NextBatch
from embrace_fx.runtime.kernels import padded_unique_ids, plan_sums, sum_rows
from embrace_fx.runtime.launch.launch_queue import LaunchQueue
from embrace_fx.runtime.launch.recorder import Clock, Recorder
from embrace_fx.runtime.launch.stream_queue import StreamQueue
from embrace_fx.runtime.launch.streams import Event, Streams, choose_streams
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.runtime.tables.table import Member
from embrace_fx.vocabulary.graph import Saved, TrainingGraph, inputs_of
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


_READER_OPS = ("all_gather_ids", "lookup", "coalesce", "all_to_all_rows", "all_to_all_gradients")
_READERS = frozenset(f"embrace::{op}" for op in _READER_OPS)
"""What may read unique rows, or their counts, as long as the batch has ids."""


class SingleProcessRows:
    """Finds the unique rows of batches on a device, in a single process, whose ids go nowhere. The host never waits for
    their number before the backward ends.

    The unique rows are found in tensors as long as the batch has ids, behind the rows zeros, which nothing reads: the
    forward computes with them as they are. Where the gradients of the rows go to the optimizer, their number is needed,
    and has been copied to the host long before. An id outside the table reads some other row; its number of rows is -1,
    and the backward raises.

    Args:
        tables: name of a table -> the table, in which the ids of its gradient are recorded.
    """

    def __init__(self, streams: Streams, tables: Mapping[str, Member]) -> None:
        self._streams, self._tables = streams, tables
        # Unique rows -> their number on the device; once it is being copied to the host, (function that reads the
        # numbers of all tables, index of this table, its name, its number of rows).
        self._counts: Any = WeakTensorKeyDictionary()

    def kernel(self, node: fx.Node) -> Callable[..., Any] | None:
        """Returns the function that replaces the kernel of a graph node's op, or None to run the kernel."""
        match op_name(node):
            case "embrace::unique_ids":
                return self.unique_ids
            case "embrace::all_gather_ids":
                tables: tuple[str, ...] = node.meta["tables"]

                def all_gather_ids(unique: Sequence[Tensor], num_rows: Sequence[int], *_: object) -> list[Tensor]:
                    """Returns the unique ids of the only process. Starts copying their number to the host."""
                    copy = self._streams.to_host(torch.stack([self._counts[rows] for rows in unique]))
                    read = cache(partial(self._streams.read, self._streams.record("rows counted"), copy))
                    for k, (rows, *of_table) in enumerate(zip(unique, tables, num_rows, strict=True)):
                        self._counts[rows] = (read, k, *of_table)
                    return list(unique)

                return all_gather_ids
            case "_c10d_functional::wait_tensor" if op_name(node.all_input_nodes[0]) == "embrace::all_gather_ids":
                return lambda unique: unique
            case "embrace::unpack_ids":
                return lambda unique, *_: [
                    t for rows in unique for t in (rows, torch.tensor([rows.numel()], device="cpu"))
                ]
            case "embrace::coalesce":
                return self.coalesce
        return None

    def unique_ids(self, ids: Sequence[Tensor], num_rows: int, padding_idx: int) -> list[Tensor]:
        """Runs the op `unique_ids`, with padding, so that the host knows the size of the unique ids without waiting."""
        rows, count, where = padded_unique_ids(ids, num_rows, padding_idx)
        self._counts[rows] = count
        return [rows, *where]

    def coalesce(
        self, ids: Tensor, flat: Tensor, columns: int, padding_rows: Sequence[int], scale: float
    ) -> list[Tensor]:
        """Runs the op `coalesce` for padded unique ids: removes the padding, and the padding row, which comes first.

        Raises:
            PeerFailure: the batch has an id outside of the table.
        """
        read_counts, k, table, num_rows = self._counts[ids]  # not removed, because another backward may follow
        if (count := read_counts()[k]) < 0:
            outside = f"a lookup in {table} got an id outside of the table: ids go from 0 to {num_rows - 1}"
            raise PeerFailure({0: f"{outside}. Check the batch, or give the table more rows"})
        first = len(padding_rows)
        read, rows = ids[first:count], flat.view(ids.numel(), columns)[first:count]
        if (found := self._tables.get(table)) is not None:
            found.record(read, ids)
        return [read, rows if scale == 1.0 else rows * scale]


def runs_without_counts(graph: TrainingGraph) -> bool:
    """Returns whether a graph can run before the host knows how many unique rows the batch has."""
    phases = graph.phases
    if "backward" not in phases or not any(op_name(n) == "embrace::unpack_ids" for n in phases["ids"].graph.nodes):
        return False
    names = {n.name for p in ("unique", "ids") for n in phases[p].graph.nodes if _is_rows(n)}
    readers = [
        user
        for module in phases.values()
        for node, role in inputs_of(module)
        if isinstance(role, Saved) and role.name in names
        for user in node.users
    ]
    return all(op_name(user) in _READERS for user in readers)


def _is_rows(node: fx.Node) -> bool:
    """Returns whether a node's value is a table's unique rows, or a result of the op `unpack_ids`."""
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    return op_name(source) == "embrace::unpack_ids" or (
        op_name(source) == "embrace::unique_ids" and node.args[1:] == (0,)
    )


_NO_TABLES = torch.empty(0, device="cpu")


def choose_pipeline(device: torch.device) -> Callable[..., CommPipeline]:
    """Returns the class of pipeline for models on a device."""
    streams = choose_streams(device)
    return CommPipeline if streams is None else partial(DevicePipeline, streams=streams)
