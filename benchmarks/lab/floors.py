"""What no system can go below: the bytes of the cheapest exchange known for each parameter, and the time they take.

A dense parameter: a ring AllReduce, 2 (N - 1) / N of its bytes. A table: the least of
    AlltoAll    each rank sends the columns it owns of the rows that others read, and the gradients of its own rows'
                other columns; a row that a rank reads twice travels once, and its id goes to every other rank
    AllGather   each rank sends its row gradients, ids included, to every other rank
    AllReduce   of the table as a dense parameter
None of them counts headers. The exchanges are those of EmbRace (Li et al. 2022, section 4.1); N ranks, fp32, int64 ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import networkx as nx
import torch

from benchmarks.models.base import Lookups, Workload, on_meta, sizes
from embrace_fx.vocabulary.schedule import Dependence, Operation, StepGraph
from tests.support.timelines import dependence_graph

FLOOR_BATCHES = 8
"""Batches of each rank whose rows are counted."""
FLOAT_BYTES = 4
ID_BYTES = 8


@dataclass(frozen=True)
class Floor:
    """The cheapest exchange of a model's gradients in a step.

    Attributes:
        bytes_per_rank: the bytes per step that the busiest rank sends, averaged over steps.
        dense_bytes: how many of them are of dense parameters.
        exchanges: table -> the exchange that is cheapest.
    """

    bytes_per_rank: float
    dense_bytes: float
    exchanges: dict[str, str]

    def time_ms(self, rate_mbit: float) -> float:
        """Returns the time of the exchange at the rate of a bare transfer."""
        return transfer_ms(self.bytes_per_rank, rate_mbit)


def floor(workload: Workload, ranks: int, steps: range, seed: int) -> Floor:
    """Counts the rows that the ranks' batches of these steps read. The model is created on the meta device."""
    model = on_meta(workload)
    counted = sizes(model)
    dense = ring_bytes(counted.total_bytes - counted.table_bytes, ranks)
    batches = [[workload.batch(step, rank, seed) for rank in range(ranks)] for step in steps]
    read = [[unique_rows(model.lookups(*batch)) for batch in of_step] for of_step in batches]
    total, exchanges = dense, {}
    for name, table in model.embeddings().items():
        rows, width = table.weight.shape
        options = {
            "AlltoAll": mean(all_to_all_bytes([of_rank[name] for of_rank in of_step], width) for of_step in read),
            "AllGather": mean(all_gather_bytes([of_rank[name] for of_rank in of_step], width) for of_step in read),
            "AllReduce": ring_bytes(rows * width * FLOAT_BYTES, ranks),
        }
        exchanges[name] = min(options, key=options.__getitem__)
        total += options[exchanges[name]]
    return Floor(total, dense, exchanges)


def unique_rows(lookups: Lookups) -> dict[str, int]:
    """Returns table -> how many of its rows a batch reads."""
    ids: dict[str, list[torch.Tensor]] = {}
    for table, read in lookups.values():
        ids.setdefault(table, []).append(read.flatten())
    return {table: torch.cat(read).unique().numel() for table, read in ids.items()}


def ring_bytes(payload_bytes: float, ranks: int) -> float:
    """Returns the bytes that each rank of a ring AllReduce sends."""
    return 2 * (ranks - 1) / ranks * payload_bytes


def all_to_all_bytes(rows: list[int], width: int) -> float:
    """Returns the bytes that the busiest rank sends in forward and backward, given the number of rows that each rank
    reads.
    """
    ranks, total = len(rows), sum(rows)
    column_bytes = width / ranks * FLOAT_BYTES
    # A rank sends its columns of other ranks' rows in the forward, other ranks' columns of its rows in the backward,
    # and its ids to all other ranks.
    return max(((total - own) + own * (ranks - 1)) * column_bytes + own * (ranks - 1) * ID_BYTES for own in rows)


def all_gather_bytes(rows: list[int], width: int) -> float:
    """Returns the bytes that the busiest rank sends, given the number of rows that each rank reads."""
    return max(rows) * (len(rows) - 1) * (width * FLOAT_BYTES + ID_BYTES)


def ideal(steps: StepGraph, compute_ms: float, rate_mbit: float) -> StepGraph:
    """Returns the same step as if its compute took `compute_ms`, and each transfer only the time of its bytes at this
    rate.
    """
    profiled_ms = sum(o.duration_ms for o in steps.operations if not o.is_communication)
    operations = tuple(
        replace(o, duration_ms=transfer_ms(o.sent_bytes, rate_mbit))
        if o.is_communication
        else replace(o, duration_ms=o.duration_ms * compute_ms / profiled_ms)
        for o in steps.operations
    )
    return replace(steps, operations=operations)


def step_graph(data: Mapping[str, Any]) -> StepGraph:
    """Creates a step graph from the result of `dataclasses.asdict`, read from JSON."""
    return StepGraph(
        tuple(Operation(**{**each, "serves": tuple(each["serves"])}) for each in data["operations"]),
        tuple(Dependence(**each) for each in data["dependences"]),
        tuple(data["compute_order"]),
    )


def transfer_ms(sent_bytes: float, rate_mbit: float) -> float:
    return sent_bytes * 8 / (rate_mbit * 1e3)


def dependences_ms(steps: StepGraph, windows: int = 8) -> float:
    """Returns the milliseconds by which the longest path of dependences grows with each window, if links and processors
    are never shared.
    """
    graph, durations_ms = dependence_graph(steps, windows), {each.name: each.duration_ms for each in steps.operations}
    # Compute operations form one chain, because the program's order is a dependence, too.
    ends: dict[tuple[int, str], float] = {}
    for node in nx.topological_sort(graph):
        start = max((ends[before] for before in graph.predecessors(node)), default=0.0)
        ends[node] = start + durations_ms[node[1]]
    by_window = [max(end for (number, _), end in ends.items() if number == w) for w in range(windows)]
    return by_window[-1] - by_window[-2]
