"""A table that is read in many ways, and plans for it."""

from __future__ import annotations

from torch import Tensor

from embrace_fx.vocabulary.plan import Decision, Plan
from tests.support.graphs import Tables

TABLE, OTHER = "table.weight", "other.weight"


def plan_of(
    *sharded: str, world_size: int = 1, buckets: tuple[tuple[str, ...], ...] = (), renormed: tuple[str, ...] = ()
) -> Plan:
    decisions = tuple(Decision(name, (10, 4), True, "alltoall", "requested", 0, 0, 0.0) for name in sharded)
    return Plan(world_size, decisions, buckets, renormed)


def many_uses(model: Tables, ids: Tensor) -> Tensor:
    vectors: Tensor = model.linear(model.table(ids) * model.table((ids + 1) % 10)) + model.other(ids)
    return vectors.sum() * model.vector.sum()
