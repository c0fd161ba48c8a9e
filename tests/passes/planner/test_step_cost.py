"""What communication adds to a step under each schedule, and which schedule is chosen for it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.capture.gradient_graph import gradient_graph
from embrace_fx.cost.links import CORE, Cluster, Handling
from embrace_fx.passes.node_cost import node_ms
from embrace_fx.passes.planner import decide as deciding
from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.pricing import Findings
from embrace_fx.passes.planner.step_cost import (
    StepTime,
    has_compute,
    step_times,
)
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import SCHEDULES
from tests.support.beside import take_steps
from tests.support.inside import captured_graph_of
from tests.support.planned import FACTS, OTHER, TABLE, graph_of
from tests.support.ranks import run_ranks

ROWS, WIDTH = 20_000, 256
OWN_CORES = Handling()
SHORT = Cluster(25e3, 0.2, handling=OWN_CORES, pace=0.1)
"""200 Mb/s between ranks with a core each, which compute twice as long as they send."""
SHARED = Cluster(2.5e6, 0.02, handling=replace(OWN_CORES, round_ms=0.4), pace=0.25, busy=0.9)
"""20 Gb/s between ranks that share a core: whatever is hidden takes as long."""


class Deep(nn.Module):
    """A table under layers of a quarter MiB each."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.layers(self.table(ids))).square().mean()


def batch(rank: int) -> Tensor:
    return torch.randint(ROWS, (16, 20), generator=torch.Generator().manual_seed(rank))


@cache
def planned(cluster: Cluster, **options: Any) -> Plan:
    """Returns a plan. Tests that pass the same arguments share a capture."""
    model = Deep()
    optimizer = SGD(model.parameters(), 0.1)
    return embrace_fx.plan(model, [batch(0), batch(1)], optimizer=optimizer, cluster=cluster, **options)


def test_where_autograd_gives_all_gradients_nothing_is_weighed() -> None:
    given = gradient_graph(dict(Deep().named_parameters()), ["table.weight"], {}, frozenset())
    captured: Any = planned(SHORT)
    assert not has_compute(given)
    assert has_compute(captured_graph_of(captured))


@pytest.mark.parametrize(("ms", "chosen"), [(9.95, "none"), (9.6, "2d")])
def test_a_schedule_in_use_stays_unless_another_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, ms: float, chosen: str
) -> None:
    """The other schedules take 10 ms."""
    facts = tuple(replace(FACTS, name=name, shape=(10, 4)) for name in (TABLE, OTHER))
    auto = Findings(graph_of(1_000_000), facts, {TABLE: (120, 120)}, 2, schedule="auto")
    found = {name: StepTime(ms if name == "2d" else 10.0, 0.0, 0.0) for name in SCHEDULES}
    monkeypatch.setattr(deciding, "step_times", lambda *_: found)
    in_use = decide(replace(auto, schedule="none"))
    assert decide(auto, SHARED, in_use, "given").schedule_name == chosen


def priced(**facts: Any) -> dict[str, StepTime]:
    """Returns the step times of the plans, under the links of SHORT with these `facts` replaced."""
    plans = {name: planned(SHORT, schedule=name) for name in SCHEDULES}
    links = replace(SHORT, **facts)
    return step_times(
        captured_graph_of(plans["none"]), {name: replace(plan, links=links) for name, plan in plans.items()}
    )


def test_what_is_hidden_is_not_waited_for() -> None:
    found = priced()
    assert found["2d"].waits_ms < found["horizontal"].waits_ms < found["none"].waits_ms
    assert found["2d"].waits_ms < found["vertical"].waits_ms < found["none"].waits_ms


def test_shared_processors_pay_for_what_is_hidden() -> None:
    idle, busy, busiest = (priced(busy=share) for share in (0.0, 0.5, 1.0))
    beside = {name: busiest[name].work_ms - idle[name].work_ms for name in SCHEDULES}
    assert beside["2d"] > beside["none"]
    for name in SCHEDULES:
        assert busy[name].work_ms == pytest.approx(idle[name].work_ms + 0.5 * beside[name])
        assert busy[name].waits_ms == idle[name].waits_ms


def test_a_slow_processor_hides_more() -> None:
    assert priced()["2d"].waits_ms < priced(pace=1.0)["2d"].waits_ms


def test_updates_of_buckets_in_the_forward_cost_a_processor() -> None:
    found = priced(busy=0.0)
    assert found["horizontal"].work_ms > found["none"].work_ms


def test_a_lookup_moves_the_rows_that_it_reads() -> None:
    nodes = captured_graph_of(planned(SHORT)).graph.nodes
    lookup = next(node for node in nodes if node.target is torch.ops.aten.embedding.default)
    read = batch(0).numel()
    assert node_ms(lookup, CORE) == pytest.approx(CORE.time_ms(0, 4 * (2 * read * WIDTH + read)))


def decided(rank: int, world_size: int) -> tuple[str, str]:
    """Returns the schedule's name when the ranks have measured different links: all ranks must use those of rank 0."""
    from embrace_fx.planning import findings  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(findings, "measure_links", lambda *_: SHARED if rank == 0 else SHORT)
        torch.manual_seed(0)
        model = Deep()
        compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1))
        take_steps(compiled, compiled.optimizer, [(batch(rank),)] * 2)
    return compiled.plan.schedule_name, compiled.schedule.name


def test_rank_0_decides() -> None:
    assert run_ranks(2, decided) == [("none", "none")] * 2
