"""Whole plans, with every number: one model of all kinds of parameters, on many clusters and with many options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import embrace_fx
from embrace_fx import what_if
from embrace_fx.cost.devices import DEVICES, NVME
from embrace_fx.cost.links import Cluster, Handling, Link
from embrace_fx.cost.storage import StorageTier
from embrace_fx.planning import findings
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Decision, Grid, Plan
from embrace_fx.vocabulary.schedule import SCHEDULES
from embrace_fx.what_if import Forecast
from tests.support.golden import brief, check_golden
from tests.support.windows import story


class Everything(nn.Module):
    """Tables of all kinds, two hidden layers, and an output layer that shares its weight with a table."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(60_000, 32), nn.Embedding(40_000, 32, padding_idx=0)
        self.shops, self.tags = nn.Embedding(50, 32), nn.EmbeddingBag(30_000, 48, mode="mean")
        self.normed, self.rare = nn.Embedding(2000, 16, max_norm=1.0), nn.Embedding(90_000, 16, sparse=True)
        self.words, self.places = nn.Embedding(6000, 64), nn.Embedding(8, 64)
        self.hidden = nn.ModuleList([nn.Linear(240, 512), nn.Linear(512, 64)])
        self.head, self.spare = nn.Linear(64, 6000), nn.Linear(2, 2)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, ids: Tensor, words: Tensor) -> Tensor:
        read = self.users(ids), self.items(ids[:, :1]), self.shops(ids % 50), self.normed(ids % 2000), self.rare(ids)
        pooled = [each.mean(1) for each in read] + [self.tags(ids % 30_000)]
        every = torch.cat([*pooled, self.words(words).mean(1)], 1)
        found = torch.tanh(self.hidden[1](torch.relu(self.hidden[0](every)))) * self.scale
        return F.cross_entropy(self.head(found[:, None] + self.places(torch.arange(8))).flatten(0, 1), words.flatten())


@cache
def batch(rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rank)
    ids = (torch.rand(96, 8, generator=random) ** (3 + rank) * 40_000).long()
    return ids, (ids % 6000).where(ids % 3 > 0, -100).clamp(min=0)


SLOW, TWO, FOUR = Cluster(12.5e3, 0.1), [batch(0), batch(1)], [*map(batch, range(4))]
MACHINES = Cluster(1e5, 0.2, (("all_gather", Link(5e4, 0.1, 0.3)),), 4, Link(2e6, 0.01), pace=2.0, busy=0.5)
QUICK = Cluster(1e7, 1e-3, handling=Handling(round_ms=1e-3, unit_ms=1e-6))
H100 = DEVICES["H100"]
SHARDED = dict.fromkeys(("users*", "items*", "tags*", "rare*"), "alltoall") | {"words*": "allreduce"}
CASES: dict[str, dict[str, Any]] = {
    "alone": {"batch": batch(0)},
    "two ranks, assumed links": {},
    "two ranks, slow": {"cluster": SLOW},
    "two ranks, quick": {"cluster": QUICK},
    "a third rank like the first two": {"cluster": SLOW, "world_size": 3},
    **{f"schedule {name}": {"cluster": SLOW, "schedule": name} for name in SCHEDULES if name != "2d"},
    "four in a machine": {"cluster": MACHINES, "world_size": 16},
    "H100": {"cluster": H100.cluster(5e7, devices_per_machine=8), "world_size": 64},
    "100 ranks": {"batch": batch(1), "cluster": QUICK, "world_size": 100},
    "Adam": {"optimizer": Adam, "cluster": SLOW},
    "Adam, lazy": {"optimizer": Adam, "row_updates": "lazy"},
    "Adam, replayed": {"optimizer": Adam, "row_updates": "replay"},
    "Adam, swept, quick": {"optimizer": Adam, "row_updates": "sweep", "cluster": QUICK},
    "row-wise": {"optimizer": embrace_fx.RowWiseAdagrad, "cluster": SLOW},
    "row-wise on many": {"optimizer": embrace_fx.RowWiseAdagrad, "world_size": 32},
    "bf16": {"rows": "bf16", "cluster": SLOW},
    "int8": {"rows": "int8", "cluster": SLOW, "world_size": 4, "strategy": {"*": "allreduce", "u*": "alltoall"}},
    "all tables sharded": {"strategy": "alltoall"},
    "on grids": {"strategy": {"*": "vocabulary", "users*": Grid(2, 2), "t*": Grid(4, 1)}, "batch": FOUR},
    **{f"asked for {way}": {"strategy": way, "world_size": 4} for way in ("allgather", "zen")},
    "blocks": {"strategy": {"*.weight": "omnireduce"}, "world_size": 6, "cluster": MACHINES},
    "beyond memory": {"strategy": SHARDED, "table_memory": 0.1, "optimizer": Adagrad, "cluster": SLOW},
    "beyond memory, in bytes": {
        "strategy": SHARDED,
        "table_memory": {"users*": 3e6, "r*": 0.2},
        "optimizer": Adam,
        "storage": (StorageTier("host memory", 1e-3, 2e-3, 1e-7, 1e6), NVME),
        "world_size": 8,
    },
}
SHOWN = ("alone", "two ranks, slow", "schedule none", "on grids", "beyond memory, in bytes")
WEIGHED = ("two ranks, slow", "H100", "int8", "too many ids to gather from one rank")
with torch.device("meta"):
    MODEL = Everything()


@cache
def graph() -> TrainingGraph:
    """Returns the graph of every batch, captured once."""
    return what_if._capture_batch(MODEL, ModelState(MODEL), batch(0))[0]


def planned(options: dict[str, Any]) -> Forecast:
    optimizer, own = options.get("optimizer", SGD), list(MODEL.parameters())
    return embrace_fx.plan(MODEL, **{"batch": TWO, **options, "optimizer": optimizer(own)})


def of_decision(of: Decision) -> Iterator[str]:
    """A line, and one for each strategy that was compared: bytes (those of DDP), time, and what speaks against it."""
    sent = f"{of.sent_bytes_per_step} B ({of.ddp_bytes_per_step} B), {of.predicted_ms:.6g} ms"
    told = ("sent_bytes_per_step", "ddp_bytes_per_step", "predicted_ms", "strategy", "grid", "is_table")
    besides = brief(of, "parameter", "shape", "candidates", "measured", *told)
    yield f"{of.parameter} {of.shape}: {of.name}, {sent}, {besides}"
    for each in of.candidates:
        sent = f"{each.sent_bytes_per_step} B, {each.predicted_ms:.6g} ms, {each.memory_bytes} B held"
        yield f"  {of.parameter} as {each.name}: {sent}; {each.rejected}"


def of_case(name: str, plan: Forecast) -> Iterator[str]:
    besides = brief(plan, "world_size", "decisions", "buckets", "renormed", "links")
    yield f"\n== {name}: {plan.world_size} ranks, {plan.sent_bytes_per_step} B; {besides}"
    yield from (f"buckets {brief(plan.buckets)}", f"renormed {brief(plan.renormed)}")
    for decision in plan:
        yield from of_decision(decision if name in WEIGHED else replace(decision, candidates=()))
    if name in SHOWN:
        facts = plan.schedule.background
        assert facts is not None
        yield from (story(plan.schedule), brief(plan.schedule.diagnostics()))
        yield from map(brief, (facts().ddp_exposed_ms, *facts().steps, *facts().tables))


def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that an earlier case has as well are left out."""
    found = graph()
    monkeypatch.setattr(what_if, "_capture_batch", lambda model, state, batch: (found, [*batch]))
    lines = [line for name, options in CASES.items() for line in of_case(name, planned(options))]
    monkeypatch.setattr(findings, "MOST_GATHERED_IDS", 2 * batch(0)[0].unique().numel() - 1)
    lines += of_case("too many ids to gather from one rank", planned({"cluster": SLOW, "schedule": "none"}))
    check_golden("plans", _without_lines_of_this_file("\n".join(dict.fromkeys(lines))))


def _without_lines_of_this_file(text: str) -> str:
    return re.sub(r"\S*/test_plans\.py:\d+", "this file", text)


def two_of(kind: Callable[[Any], Optimizer]) -> Callable[[Any], list[Optimizer]]:
    return lambda parameters: [kind(parameters), kind(parameters)]


REFUSED: dict[str, dict[str, Any]] = {
    "no table is sharded": {"strategy": "allreduce", "table_memory": 0.5},
    "no such table": {"table_memory": {"users*": 0.5, "nothing*": 0.5}},
    "on a grid": {"strategy": {"users*": Grid(2, 1)}, "table_memory": {"users*": 0.5}},
    "whole": {"table_memory": {"shops*": 0.5}},
    "without an optimizer": {"optimizer": lambda parameters: [], "table_memory": {"tags*": 0.5}},
    "two optimizers": {"optimizer": two_of(SGD), "table_memory": {"users*": 0.5, "tags*": 0.5}},
    "swept": {"optimizer": Adam, "row_updates": "sweep", "table_memory": 0.5},
    "one step reads more": {"table_memory": {"users*": 1e4}},
    "a row too few": {"table_memory": {"users*": 40.0}},
    "a grid of other ranks": {"strategy": Grid(2, 2), "world_size": 8},
    "a grid of more columns than there are": {"strategy": {"normed*": Grid(1, 32)}, "world_size": 32},
    "a grid without rows": {"strategy": {"users*": Grid(0, 8)}, "world_size": 8},
    "a grid for no table": {"strategy": {"user.*": Grid(1, 2)}},
}
Change = Callable[[Plan], Plan]


def decided(name: str, **new: Any) -> Change:
    return lambda plan: replace(
        plan, decisions=tuple(replace(each, **new) if each.parameter == name else each for each in plan)
    )


GIVEN: dict[str, Change] = {
    "as it was": lambda plan: plan,
    "of other ranks": lambda plan: replace(plan, world_size=3),
    "of fewer parameters": lambda plan: replace(plan, decisions=plan.decisions[2:]),
    "of another shape": decided("users.weight", shape=(60_000, 31)),
    "frozen": decided("users.weight", strategy="frozen"),
    "trained, though frozen": decided("scale", strategy="allreduce"),
    "unused": decided("hidden.0.bias", strategy="unused"),
    "used, though unused": decided("spare.bias", strategy="allreduce"),
    "no table": decided("hidden.0.weight", strategy="alltoall"),
    "no output layer": decided("hidden.0.weight", strategy="vocabulary"),
    "read by another op": decided("places.weight", strategy="alltoall"),
    "shared with a table": decided("words.weight", strategy="vocabulary"),
    "sharded by columns": decided("shops.weight", strategy="alltoall"),
    "rounded": decided("users.weight", travels_as="bf16"),
    "not rounded": lambda plan: replace(plan, decisions=tuple(replace(each, travels_as="int8") for each in plan)),
}


def test_refused_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit one model, for each change of a plan, and why tables cannot leave memory."""
    found = graph()
    monkeypatch.setattr(what_if, "_capture_batch", lambda model, state, batch: (found, [*batch]))
    lines = []
    for name, options in REFUSED.items():
        with pytest.raises(ValueError, match=r"table_memory|Grid|strategy") as refused:
            planned({"strategy": SHARDED} | options)
        lines.append(f"{name}: {refused.value}")
    forecast = planned({"strategy": SHARDED, "cluster": SLOW, "schedule": "vertical"})
    given = Plan(**{field.name: getattr(forecast, field.name) for field in fields(Plan)})
    context: Any = forecast._context
    for name, change in GIVEN.items():
        changed = change(given)
        told = list(findings._disagreements(context, found, changed))
        lines += [f"{name}: {each}" for each in told]
        with pytest.raises(ValueError, match=re.escape(told[0])) if told else nullcontext():
            assert findings.reuse_plan(context, found, changed) is changed
    for asked in ("auto", "none"):
        again = findings.reuse_plan(replace(context, options=replace(context.options, schedule=asked)), found, given)
        lines.append(f"schedule {asked}: {again.schedule_name}, because {again.chosen_because}")
    check_golden("plans_refused", _without_lines_of_this_file("\n".join(lines)))
