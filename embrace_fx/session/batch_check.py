"""Checks each batch before ranks announce the step: refuses ids outside of their tables, and counts the rows that are
read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from embrace_fx.passes.partition import extract_ids
from embrace_fx.passes.planner.replanning import SAMPLED_EVERY
from embrace_fx.runtime.kernels import unique_ids
from embrace_fx.runtime.ranks.bad_batches import describe_bad_id, unreadable_batch
from embrace_fx.runtime.step.runnable_phase import make_reader
from embrace_fx.session.program_cache import StepCounters
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.graph import TableSpec, TrainingGraph
from embrace_fx.vocabulary.ops import draws_random_numbers
from embrace_fx.vocabulary.plan import Plan


def make_batch_check(
    context: Context, plan: Plan, graph: TrainingGraph, counters: StepCounters, *, train: bool
) -> Callable[[Sequence[Any]], str | None]:
    """Returns a function that checks a batch. It takes the flattened batch, and returns an error text if an id is
    outside of its table, else None.

    It checks tables that are whole on each rank. Ids of sharded tables are checked when they are exchanged.

    Args:
        counters: stores the numbers of rows read. The function counts them every few training calls, for the tables in
            `Plan.watched`, whose best strategy depends on these numbers.
        train: whether the batches are for training.
    """
    exchanged = (*plan.sharded, *plan.renormed)
    tables = [t for t in graph.tables if t.parameter not in exchanged and all(u.ids_from_batch for u in t.uses)]
    tables = [t for t in tables if not any(map(draws_random_numbers, extract_ids(graph, [t]).graph.nodes))]
    if not tables or context.communicator.world_size == 1:
        return lambda leaves: None
    read_ids = make_reader(extract_ids(graph, tables), context.state)
    names, num_rows = zip(*((t.parameter, t.num_rows) for t in tables for _ in t.uses), strict=True)
    watched = [t for t in tables if t.parameter in plan.watched] if train else []

    def count_rows(table: TableSpec, ids: Sequence[Tensor]) -> int:
        """Returns how many different rows of a table are read by `ids`, the ids of all lookups."""
        own = [each for each, name in zip(ids, names, strict=True) if name == table.parameter]
        return unique_ids(own, table.num_rows, table.uses[0].padding_idx)[0].numel()

    def check_and_count(leaves: Sequence[Any]) -> str | None:
        """Checks the ids in the flattened arguments `leaves`, and counts the rows read of tables in `Plan.watched`.
        Returns an error text for a bad id, else None.
        """
        with torch.no_grad():
            try:
                ids = read_ids(leaves)
            except Exception as error:  # the announcement reports any failure to the other ranks
                return unreadable_batch(error)
            failure = describe_bad_id(ids, names, num_rows)
            if failure is None and counters.calls % SAMPLED_EVERY == 0:
                counters.rows_seen = {table.parameter: count_rows(table, ids) for table in watched}
            return failure

    return check_and_count
