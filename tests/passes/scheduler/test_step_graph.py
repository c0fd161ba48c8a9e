"""A window as operations and dependences: what each schedule lets overlap, and the story that becomes of it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from embrace_fx import cost
from embrace_fx.passes.relax import RelaxDependences
from embrace_fx.passes.scheduler.launch_order import check_order, schedule, story
from embrace_fx.passes.scheduler.step_graph import Event, Sizes, build, compute_durations, events
from embrace_fx.session.pipeline import run_passes, training_passes
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Decision, Plan
from embrace_fx.vocabulary.schedule import BETWEEN, EARLY, END, SCHEDULES, START, StepGraph
from tests.support.golden import check_golden
from tests.support.graphs import analysed

TABLES = ("source", "target")
BACKWARD = [Event("bucket 2", False), Event("target", True), Event("bucket 1", False), Event("bucket 0", False)]
BACKWARD.append(Event("source", True))
FORWARD = [Event("source", True), Event("bucket 0", False), Event("bucket 1", False), Event("target", True)]
FORWARD.append(Event("bucket 2", False))
SIZES = Sizes(
    bucket_chunks=((1000,), (2000, 1000), (500,)),
    sent={"source prior": 77},
    row_bytes=dict.fromkeys(TABLES, 4000),
    delayed_chunks=dict.fromkeys(TABLES, 2),
    ids_bytes=50,
)
BUCKETS = ["bucket 0 [0]", "bucket 1 [0]", "bucket 1 [1]", "bucket 2 [0]"]


def window(name: str) -> StepGraph:
    durations = {"backward source": 3.0, "forward bucket 1": 2.0}
    return build(name, BACKWARD, FORWARD, SIZES, durations, cost.Cluster(), 4)


def before(steps: StepGraph, after: str, distance: int = 0) -> set[str]:
    return {d.before for d in steps.dependences if d.after == after and d.distance == distance}


@pytest.mark.parametrize("name", SCHEDULES)
def test_compute_is_the_same_under_every_schedule(name: str) -> None:
    steps = window(name)

    assert steps.compute_order == (
        *(EARLY, "backward bucket 2", "backward target", "backward bucket 1", "backward bucket 0", "backward source"),
        *(END, BETWEEN, "update source", "update target", START),
        *("rows source", "forward source", "update bucket 0", "forward bucket 0", "update bucket 1"),
        *("forward bucket 1", "rows target", "forward target", "update bucket 2", "forward bucket 2"),
    )
    assert {o.name for o in steps.operations if not o.is_communication} == set(steps.compute_order)
    assert (steps["backward source"].duration_ms, steps["forward source"].duration_ms) == (3.0, 0.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_sent_leaves_where_it_is_made_and_is_there_where_it_is_read(name: str) -> None:
    steps = window(name)

    for bucket in BUCKETS:
        assert before(steps, bucket) == {f"backward {bucket[:8]}"}
    for table in TABLES:
        assert before(steps, f"{table} prior") == {f"backward {table}"}
        assert before(steps, f"{table} rows") == {f"update {table}"}
        assert f"{table} rows" in before(steps, f"rows {table}")
    assert before(steps, "ids") == {BETWEEN}


def test_none_ends_every_exchange_before_the_step() -> None:
    steps = window("none")

    assert before(steps, BETWEEN) == {*BUCKETS, "source prior", "target prior"}
    assert before(steps, "update source") == {"ids"}
    assert all(d.distance == 0 for d in steps.dependences)
    assert {o.lane for o in steps.communications} == {"ids", "embedding", "dense"}


def test_horizontal_waits_for_a_bucket_before_the_forward_that_reads_it() -> None:
    steps = window("horizontal")

    assert before(steps, BETWEEN) == set()
    assert before(steps, "update bucket 1") == {"bucket 1 [0]", "bucket 1 [1]"}
    assert before(steps, "update source") == {"source prior", "ids"}
    assert not any("delayed" in o.name or "early" in o.name for o in steps.communications)


@pytest.mark.parametrize("name", ["vertical", "2d"])
def test_vertical_cuts_rows_in_two(name: str) -> None:
    steps = window(name)

    for table in TABLES:
        assert before(steps, f"{table} early rows") == {EARLY}
        assert before(steps, f"update {table}") == {f"{table} prior"}
        assert before(steps, f"rows {table}") == {f"{table} rows", f"{table} early rows"}
        for chunk in (f"{table} delayed [0]", f"{table} delayed [1]"):
            assert before(steps, chunk) == {f"backward {table}"}
            assert chunk in before(steps, EARLY, distance=1)
    assert "ids" in before(steps, EARLY, distance=1)
    assert before(steps, BETWEEN) == (set() if name == "2d" else set(BUCKETS))
    assert before(steps, "update bucket 0") == ({"bucket 0 [0]"} if name == "2d" else set())


def test_what_was_measured_takes_the_place_of_what_was_estimated() -> None:
    steps = window("2d")

    assert (steps["source prior"].sent_bytes, steps["target prior"].sent_bytes) == (77, 4000)
    assert steps["source prior"].duration_ms < steps["target prior"].duration_ms
    assert steps["ids"].sent_bytes == 3 * 50
    assert steps["bucket 1 [0]"].sent_bytes == cost.all_reduce(2000, 4).sent_bytes


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_window_can_be_scheduled(name: str) -> None:
    steps = window(name)

    found = schedule(steps, name)

    check_order(steps, found.launch_order)
    assert sorted(found.launch_order) == sorted(o.name for o in steps.communications)


# -- a real model ------------------------------------------------------------------------------------------------------

WORDS, DIM, BATCH, LENGTH = 2000, 128, 16, 32


class Translator(nn.Module):
    """Two tables and three blocks, the second table read between the last two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(WORDS, DIM)
        self.target = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.blocks[0](self.source(source)).relu()
        x = self.blocks[1](x).relu()
        scores: Tensor = self.blocks[2](x * self.target(target))
        return scores.square().mean()


@functools.cache
def translator() -> tuple[TrainingGraph, Plan]:
    """Its relaxed graph, as one of four ranks has it, each block a bucket."""
    torch.manual_seed(0)
    sent = 2 * BATCH * LENGTH * DIM * 4 * 3 // 4
    tables = ("source.weight", "target.weight")
    decisions = tuple(Decision(t, (WORDS, DIM), True, "alltoall", "asked for", sent, 0, 0.0) for t in tables)
    plan = Plan(4, decisions, tuple((f"blocks.{k}.weight", f"blocks.{k}.bias") for k in (2, 1, 0)))
    ids = torch.randint(WORDS, (BATCH, LENGTH))
    graph = run_passes(analysed(Translator(), ids, ids + 0), training_passes(plan, tables, 0)).graph
    return RelaxDependences(plan.buckets, horizontal=True)(graph), plan


def steps_of_translator(name: str) -> StepGraph:
    graph, plan = translator()
    bytes_of_block = (DIM + 1) * DIM * 4
    sizes = Sizes(
        ((bytes_of_block // 2,) * 2,) * 3,
        {},
        {table: plan[table].sent_bytes_per_step // 2 for table in plan.sharded},
        dict.fromkeys(plan.sharded, 2),
        BATCH * LENGTH * 4,
    )
    backward, forward = (events(graph.phases[phase]) for phase in ("backward", "forward"))
    durations = compute_durations(graph, cost.Cluster())
    return build(name, backward, forward, sizes, durations, cost.Cluster(), plan.world_size)


def test_events_are_those_of_the_program() -> None:
    graph, _ = translator()

    backward, forward = (events(graph.phases[phase]) for phase in ("backward", "forward"))

    assert sorted(e.what for e in backward) == sorted(e.what for e in forward)
    assert [e.what for e in backward if not e.is_table] == ["bucket 0", "bucket 1", "bucket 2"]
    assert [e.what for e in forward if not e.is_table] == ["bucket 2", "bucket 1", "bucket 0"]
    assert forward[0] == Event("source.weight", True)


def test_every_segment_of_compute_has_a_duration() -> None:
    graph, _ = translator()

    durations = compute_durations(graph, cost.Cluster())

    steps = steps_of_translator("2d")
    assert durations.keys() <= set(steps.compute_order)
    blocks = [name for name in steps.compute_order if name.startswith(("backward bucket", "forward bucket"))]
    assert len(blocks) == 6
    assert all(durations[name] > 0 for name in blocks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_story(name: str) -> None:
    found = schedule(steps_of_translator(name), name)

    check_golden(f"story_{name}", story(found, times=False))


def test_no_gradient_leaves_behind_what_the_forward_submits_in_its_class() -> None:
    """One that did could not be had before the forward has begun, to clip it, say."""
    steps = steps_of_translator("2d")
    order = list(schedule(steps, "2d").launch_order)
    check_order(steps, order)

    prior = order.pop(order.index("target.weight prior"))
    order.insert(order.index("source.weight rows") + 1, prior)

    with pytest.raises(ValueError, match=r"expected .target\.weight prior. before .source\.weight rows. in"):
        check_order(steps, order)
