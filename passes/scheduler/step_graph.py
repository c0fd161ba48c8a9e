"""One window of a model's training as a `StepGraph`: its compute, its communication, and what depends on what.

Contract
    Reads the relaxed phases of a graph: where gradients are submitted in the backward and awaited in the forward cuts
    compute into operations, under the names that the runtime's recorder uses. The four schedules differ in
    communications and dependences, not in compute.

    none        every exchange ends before the optimizer's step; rows are looked up when ids are known
    horizontal  a bucket's update waits for its AllReduce, just before the forward that reads its parameters
    vertical    early rows leave under the backward, delayed gradients end before the next batch's early rows
    2d          both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx import cost
from embrace_fx.passes.collectives import op_name
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import AWAITS, SUBMISSIONS
from embrace_fx.vocabulary.schedule import BETWEEN, EARLY, END, START, Dependence, Kind, Lane, Operation, StepGraph


@dataclass(frozen=True)
class Event:
    """A place where compute meets communication: `what` is a table's name, or "bucket k"."""

    what: str
    is_table: bool


@dataclass(frozen=True)
class Sizes:
    """What travels in a window.

    Attributes:
        bucket_chunks: bytes of each chunk, by bucket.
        sent: communication's name -> bytes one rank sends, where they have been measured.
        row_bytes: table -> bytes one rank sends for all rows of a batch, one way.
        delayed_chunks: table -> pieces of its delayed gradients.
        ids_bytes: of the AllGather of ids, on each rank.
    """

    bucket_chunks: tuple[tuple[int, ...], ...]
    sent: Mapping[str, int]
    row_bytes: Mapping[str, int]
    delayed_chunks: Mapping[str, int]
    ids_bytes: int


def events(module: fx.GraphModule) -> list[Event]:
    """Submissions of a backward, or awaits of a forward, in the order of the program."""
    found = []
    for node in module.graph.nodes:
        name = op_name(node)
        if name in SUBMISSIONS | AWAITS:
            is_table = name.endswith("rows")
            found.append(Event(str(node.args[3]) if is_table else f"bucket {node.args[1]}", is_table))
    return found


def compute_durations(graph: TrainingGraph, cluster: cost.Cluster) -> dict[str, float]:
    """Estimated milliseconds of each compute operation, from the sizes of what it reads and writes."""
    durations: dict[str, float] = {}
    spent = 0.0
    for node in graph.phases["backward"].graph.nodes:
        spent += node_ms(node, cluster.compute)
        if op_name(node) in SUBMISSIONS:
            what = node.args[3] if op_name(node).endswith("rows") else f"bucket {node.args[1]}"
            durations[f"backward {what}"] = spent
            spent = 0.0
    durations[END] = spent
    segment, spent = START, 0.0
    for node in graph.phases["forward"].graph.nodes:
        if op_name(node) in AWAITS:
            durations[segment] = spent
            what = node.args[3] if op_name(node).endswith("rows") else f"bucket {node.args[1]}"
            segment, spent = f"forward {what}", 0.0
        spent += node_ms(node, cluster.compute)
    durations[segment] = spent
    return durations


def node_ms(node: fx.Node, compute: cost.Compute) -> float:
    """Estimated milliseconds of one node."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    inputs = [_shape(n.meta.get("val")) for n in node.all_input_nodes]
    outputs = [_shape(v) for v in torch.utils._pytree.tree_leaves(node.meta.get("val"))]
    moved = sum(map(_elements, (*inputs, *outputs))) * 4
    flops = 0.0
    if node.target.name().split("::")[-1].split(".")[0] in ("mm", "addmm", "bmm", "baddbmm") and len(inputs) >= 2:
        flops = 2.0 * _elements(outputs[0]) * (inputs[-2] or [1])[-1]
    elif "rnn" in node.target.name() or "conv" in node.target.name() or "attention" in node.target.name():
        flops = 2.0 * max(map(_elements, inputs), default=0) * max((s[-1] for s in inputs if s), default=1)
    return compute.time_ms(flops, moved)


def _shape(value: Any) -> list[int]:
    if not isinstance(value, Tensor):
        return []
    sizes: tuple[int | torch.SymInt, ...] = tuple(value.shape)
    return [_hint(size) if isinstance(size, torch.SymInt) else size for size in sizes]


def _hint(size: torch.SymInt) -> int:
    """A size's value at capture; of one that only the data knows, something small."""
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else 64


def _elements(shape: Sequence[int]) -> int:
    total = 1 if shape else 0
    for size in shape:
        total *= size
    return total


def build(
    schedule: str,
    backward: Sequence[Event],
    forward: Sequence[Event],
    sizes: Sizes,
    durations: Mapping[str, float],
    cluster: cost.Cluster,
    world_size: int,
) -> StepGraph:
    """The window of a schedule.

    Args:
        schedule: one of `embrace_fx.vocabulary.schedule.SCHEDULES`.
        backward, forward: `events` of the relaxed phases.
        durations: compute operation -> milliseconds; those that are missing take no time.
    """
    window = _Window(schedule, sizes, durations, cluster, world_size)
    window.compute(EARLY, "rows")
    for event in backward:
        window.compute(f"backward {event.what}", "backward", event.what)
        window.submit(event)
    window.compute(END, "backward")
    window.compute(BETWEEN, "update")
    window.next_ids([event.what for event in forward if event.is_table])
    for event in forward:
        if event.is_table:
            window.request(event.what)
    window.compute(START, "forward")
    for event in forward:
        window.await_(event)
        window.compute(f"forward {event.what}", "forward", event.what)
    return window.finish()


class _Window:
    def __init__(
        self, schedule: str, sizes: Sizes, durations: Mapping[str, float], cluster: cost.Cluster, world_size: int
    ) -> None:
        self._schedule = schedule
        self._horizontal = schedule in ("horizontal", "2d")
        self._vertical = schedule in ("vertical", "2d")
        self._sizes = sizes
        self._durations = durations
        self._cluster = cluster
        self._world_size = world_size
        self._operations: list[Operation] = []
        self._dependences: list[Dependence] = []
        self._order: list[str] = []
        self._before_step: list[str] = []  # communications that a naive program waits for after its backward

    def compute(self, name: str, kind: Kind, serves: str = "") -> None:
        served = (serves,) if serves else ()
        self._operations.append(Operation(name, kind, "compute", self._durations.get(name, 0.0), serves=served))
        self._order.append(name)
        if name == BETWEEN:
            self._dependences += [Dependence(launch, BETWEEN) for launch in self._before_step]

    def _communicate(self, name: str, kind: Kind, lane: Lane, sent: int, collective: Any, serves: str) -> str:
        sent = self._sizes.sent.get(name, sent)
        messages = (self._world_size - 1) * (2 if collective == "all_reduce" else 1)
        duration = self._cluster.transfer_ms(sent, messages, collective)
        self._operations.append(Operation(name, kind, lane, duration, sent, (serves,), held_bytes=sent))
        return name

    def _after(self, name: str, before: str, distance: int = 0) -> None:
        self._dependences.append(Dependence(before, name, distance))

    def submit(self, event: Event) -> None:
        source, n = f"backward {event.what}", self._world_size
        if not event.is_table:
            for i, size in enumerate(self._sizes.bucket_chunks[int(event.what.removeprefix("bucket "))]):
                sent = cost.all_reduce(size, n).sent_bytes
                name = f"{event.what} [{i}]"
                self._communicate(name, "all_reduce", "dense", sent, "all_reduce", event.what)
                self._after(name, source)
                if not self._horizontal:
                    self._before_step.append(name)
            return
        table, rows = event.what, self._sizes.row_bytes.get(event.what, 0)
        prior = self._communicate(f"{table} prior", "gradients", "embedding", rows, "all_to_all", table)
        self._after(prior, source)
        if self._schedule == "none":
            self._before_step.append(prior)
        if self._vertical:
            early = self._communicate(f"{table} early rows", "lookups", "embedding", rows // 2, "all_to_all", table)
            self._after(early, EARLY)
            chunks = self._sizes.delayed_chunks[table]
            for k in range(chunks):
                name = f"{table} delayed [{k}]"
                self._communicate(name, "delayed", "delayed", rows // 2 // chunks, "all_to_all", table)
                self._after(name, source)
                self._after(EARLY, name, 1)

    def next_ids(self, tables: Sequence[str]) -> None:
        if not tables:
            return
        sent = self._sizes.ids_bytes * (self._world_size - 1)
        ids = self._communicate("ids", "ids", "ids", sent, "all_gather", ", ".join(tables))
        self._after(ids, BETWEEN)
        if self._vertical:
            self._after(EARLY, ids, 1)
        else:
            for table in tables:
                self._after(f"update {table}", ids)

    def request(self, table: str) -> None:
        update = f"update {table}"
        self.compute(update, "update", table)
        if self._schedule != "none":
            self._after(update, f"{table} prior")
        rows = self._sizes.row_bytes.get(table, 0)
        name = self._communicate(f"{table} rows", "lookups", "embedding", rows, "all_to_all", table)
        self._after(name, update)

    def await_(self, event: Event) -> None:
        if event.is_table:
            name = f"rows {event.what}"
            self.compute(name, "rows", event.what)
            self._after(name, f"{event.what} rows")
            if self._vertical:
                self._after(name, f"{event.what} early rows")
            return
        name = f"update {event.what}"
        self.compute(name, "update", event.what)
        if self._horizontal:
            chunks = self._sizes.bucket_chunks[int(event.what.removeprefix("bucket "))]
            for i in range(len(chunks)):
                self._after(name, f"{event.what} [{i}]")

    def finish(self) -> StepGraph:
        return StepGraph(tuple(self._operations), tuple(self._dependences), tuple(self._order))
