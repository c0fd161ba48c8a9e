"""A step of a language model as its schedule and its timeline look: six blocks, two tables, any number of ranks.

The schedule is the scheduler's. The timeline is simulated: each rank computes in the program's order, one link carries
the launches in the schedule's order, a collective begins when its last rank is ready, and durations are longer than
predicted by a seeded factor.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import networkx as nx

from embrace_fx.passes.scheduler.launch_order import schedule as schedule_steps
from embrace_fx.vocabulary.operation_id import Kind, Lane
from embrace_fx.vocabulary.schedule import Dependence, Operation, Schedule, Span, StepGraph, Timeline, Wait

BLOCKS = tuple(f"encoder.{i}" for i in range(6))
KIB, MIB = 2**10, 2**20
T = TypeVar("T", Span, Wait)


class _Step:
    """Collects operations and their dependences."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.dependences: list[Dependence] = []

    def compute(self, name: str, kind: Kind, duration_ms: float, serves: str, *after: str) -> str:
        return self._add(Operation(name, kind, "compute", duration_ms, 0, (serves,)), after)

    def send(
        self, name: str, kind: Kind, lane: Lane, duration_ms: float, sent_bytes: int, serves: str, *after: str
    ) -> str:
        return self._add(Operation(name, kind, lane, duration_ms, sent_bytes, (serves,), 2 * sent_bytes), after)

    def _add(self, operation: Operation, after: tuple[str, ...]) -> str:
        self.operations.append(operation)
        self.dependences += [Dependence(name, operation.name) for name in after]
        return operation.name


def language_model(blocks: tuple[str, ...] = BLOCKS, chunks: int = 2) -> StepGraph:
    """A window: the table `softmax` is read next to the loss, `embedding` at the input."""
    step = _Step()
    ids = step.send("next ids", "ids", "ids", 0.4, 48 * KIB, "embedding")
    backward = {b: step.compute(f"backward {b}", "backward", 3.0, b) for b in reversed(blocks)}
    looked_up = {}
    for table, block, delayed_ms in (("softmax", blocks[-1], 2.5), ("embedding", blocks[0], 5.5)):
        prior = step.send(
            f"{table} prior gradients", "gradients", "embedding", 0.8, 512 * KIB, table, backward[block], ids
        )
        delayed = step.send(
            f"{table} delayed gradients", "delayed", "delayed", delayed_ms, 2816 * KIB, table, backward[block]
        )
        update = step.compute(f"update {table} prior", "update", 0.3, table, prior)
        step.dependences.append(Dependence(delayed, update, distance=1))
        rows = step.compute(f"look up {table}", "rows", 0.25, table, update, ids)
        looked_up[block] = step.send(f"{table} lookups", "lookups", "embedding", 0.9, 640 * KIB, table, rows)
    for i, block in enumerate(blocks):
        buckets = [
            step.send(
                f"bucket {i} [{k}]", "all_reduce", "dense", 2.2 / chunks, 4 * MIB // chunks, block, backward[block]
            )
            for k in range(chunks)
        ]
        update = step.compute(f"update {block}", "update", 0.2, block, *buckets)
        needed = (looked_up[block],) if block in looked_up else ()
        step.compute(f"forward {block}", "forward", 1.5, block, update, *needed)
    order = tuple(o.name for o in step.operations if o.lane == "compute")
    return StepGraph(tuple(step.operations), tuple(step.dependences), order)


def schedule(name: str = "2d", blocks: tuple[str, ...] = BLOCKS, chunks: int = 2) -> Schedule:
    """Returns a schedule of two steady windows."""
    return schedule_steps(language_model(blocks, chunks), name)


def dependence_graph(steps: StepGraph, windows: int) -> nx.DiGraph[tuple[int, str]]:
    """Makes the graph of several windows in a row; one processor runs the compute, a chain, in the program's order."""
    graph: nx.DiGraph[tuple[int, str]] = nx.DiGraph()
    graph.add_nodes_from((number, each.name) for number in range(windows) for each in steps.operations)
    graph.add_edges_from(pairwise((number, name) for number in range(windows) for name in steps.compute_order))
    for number in range(windows):
        graph.add_edges_from(
            ((number - d.distance, d.before), (number, d.after)) for d in steps.dependences if number >= d.distance
        )
    return graph


def timeline(schedule: Schedule, world_size: int = 4, windows: int = 2, slower: float = 0.25) -> Timeline:
    """What a run of the schedule looks like, durations up to 1 + `slower` times as long."""
    noise = random.Random(7)
    warm_up = 2
    graph = dependence_graph(schedule.steps, windows + warm_up)
    ends: dict[tuple[int, tuple[int, str]], float] = {}
    free: defaultdict[tuple[int, bool], float] = defaultdict(float)
    spans: list[Span] = []
    waits: list[Wait] = []
    for window in range(windows + warm_up):
        heads = [list(schedule.steps.compute_order), list(schedule.launch_order)]
        while any(heads):
            line = next(h for h in heads if h and all((0, b) in ends for b in graph.predecessors((window, h[0]))))
            operation = schedule.steps[line.pop(0)]
            is_sent = operation.is_communication
            before = list(graph.predecessors((window, operation.name)))
            ready = [max((ends[r, b] for b in before), default=0.0) for r in range(world_size)]
            starts = [max(ready[r], free[r, is_sent]) for r in range(world_size)]
            common = 1 + slower * noise.random()
            for rank in range(world_size):
                start = max(starts) if is_sent else starts[rank]
                idle = free[rank, is_sent]
                if not is_sent and start > idle and window > 0:
                    late = schedule.steps[max(before, key=lambda b: ends[rank, b])[1]]
                    waits.append(Wait(late.name, late.lane, window, rank, idle, start))
                end = start + operation.duration_ms * (common if is_sent else 1 + slower * noise.random())
                spans.append(Span(operation, window, rank, start, end))
                ends[rank, (window, operation.name)] = free[rank, is_sent] = end
    origin = min(s.start_ms for s in spans if s.window == warm_up and s.operation.kind == "backward")
    return Timeline(
        tuple(_moved(s, warm_up, origin) for s in spans if s.window >= warm_up),
        tuple(_moved(w, warm_up, origin) for w in waits if w.window >= warm_up),
        world_size,
        schedule.steps.dependences,
    )


def _moved(item: T, windows: int, origin_ms: float) -> T:
    return replace(
        item, window=item.window - windows, start_ms=item.start_ms - origin_ms, end_ms=item.end_ms - origin_ms
    )
