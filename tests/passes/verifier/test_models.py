"""What runs is proved for whole models, published ones among them: every pass, every variant of a step, the launches.

The graphs are those of rank 0 of four ranks that are not there, made by the passes that `compile` runs and in the
pieces that it would cut; `run_passes` verifies them after each pass, as it always does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad

import embrace_fx
from embrace_fx.passes.overlap.variants import splits_rows
from embrace_fx.passes.pipeline import overlap_passes, run_passes, training_passes
from embrace_fx.passes.step_graphs import StepGraphs
from embrace_fx.planning.scheduling import cuts
from embrace_fx.vocabulary.schedule import SCHEDULES, ScheduleName
from embrace_fx.vocabulary.step_variant import VARIANTS
from embrace_fx.vocabulary.submissions import submitted
from tests.support.cases import long_but
from tests.support.hugging_face import LONG, TRAININGS
from tests.support.inside import captured_graph_of, context_of
from tests.support.models import MODELS

RANKS = 4
Made = tuple[nn.Module, Any]
"""A model, and a batch of its."""


def _own(name: str) -> Made:
    workload = dict(MODELS)[name]
    return workload.make(torch.float32, 0), workload.batches(0, 0, 0)


def _published(name: str) -> Made:
    training = (TRAININGS | LONG)[name]
    return training.make_model(torch.float32), training.batch(0, 0)


MAKE: dict[str, Callable[[], Made]] = {name: partial(_own, name) for name, _ in MODELS}
MAKE |= {name: partial(_published, name) for name in (*TRAININGS, *LONG)}
CASES = {f"{model}, {schedule}": (model, schedule) for model, schedule in product(MAKE, SCHEDULES)}
QUICK = ("two_table_lm, none", "two_table_lm, 2d")


@pytest.mark.parametrize(("model", "schedule"), long_but(QUICK, CASES))
def test_all_that_a_model_runs_is_sound(model: str, schedule: ScheduleName) -> None:
    module, batch = MAKE[model]()
    optimizer = Adagrad(module.parameters(), lr=0.1)
    planned = embrace_fx.plan(
        module, batch, world_size=RANKS, optimizer=optimizer, strategy="alltoall", schedule=schedule
    )
    graph, found = captured_graph_of(planned), cuts(context_of(planned), planned)

    compiled = run_passes(graph, training_passes(planned, {table.parameter for table in graph.tables}, 0))
    compiled = run_passes(graph, overlap_passes(planned, schedule, 0, found), compiled)

    cut = schedule in ("vertical", "2d") and bool(planned.sharded)
    assert splits_rows(compiled.graph) == cut
    steps = StepGraphs(compiled, graph)
    for variant in VARIANTS if cut else ():
        assert variant.phase in steps.graph(variant).phases
    if schedule != "none":  # the order of launches is proved as it is made
        assert {*submitted(*compiled.graph.phases.values())} <= set(planned.schedule.launches)
