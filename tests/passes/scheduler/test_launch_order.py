"""Launch orders: what they lead to on paper and by simulation, always legal, never slower than the naive one."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embrace_fx.passes.scheduler import launch_order
from embrace_fx.passes.scheduler.launch_order import Key, Ready, embrace_key, readiness_key, schedule
from embrace_fx.passes.scheduler.link_machine import LinkMachine
from embrace_fx.vocabulary.schedule import SCHEDULES, Dependence, StepGraph
from tests.support.timelines import dependence_graph
from tests.support.windows import EMBEDDING, TWO_BLOCKS, check_order, compute, large_step, launch, simulate, step, steps

EXACT = 1e-9


def order(steps: StepGraph, key: Key = readiness_key) -> tuple[str, ...]:
    machine = LinkMachine(steps)
    return machine.names(launch_order.priority_order(machine, key))


def test_the_head_of_the_line_blocks() -> None:
    """
    compute  backward 1 .. 2, backward 0 .. 4,         forward 0 8 .. 9, forward 1 .. 12
    link                 bucket 1 2 .. 6, bucket 0 .. 8
    """
    found = simulate(TWO_BLOCKS, ("bucket 1", "bucket 0"))

    spans = {(s.window, s.operation.name): (s.start_ms, s.end_ms) for s in found.timeline.spans}
    assert found.step_ms == 12.0
    assert spans[0, "bucket 1"] == (2.0, 6.0)
    assert spans[0, "bucket 0"] == (6.0, 8.0)
    assert spans[0, "forward 0"] == (8.0, 9.0)
    assert spans[1, "bucket 1"] == (14.0, 18.0)
    waits = [(w.launch, w.lane, w.window, w.start_ms, w.end_ms) for w in found.timeline.waits]
    assert waits == [("bucket 0", "dense", 0, 4.0, 8.0), ("bucket 0", "dense", 1, 16.0, 20.0)]


def test_a_launch_that_is_not_ready_keeps_the_link_from_those_behind_it() -> None:
    """bucket 0 leaves at 4, when it is ready; bucket 1 after it, though ready at 2."""
    found = simulate(TWO_BLOCKS, ("bucket 0", "bucket 1"))
    assert found.step_ms == 13.0
    assert {(w.launch, w.end_ms - w.start_ms) for w in found.timeline.waits} == {("bucket 0", 2.0), ("bucket 1", 3.0)}


def test_the_critical_path_is_what_determined_each_start() -> None:
    window = ("backward 1", "bucket 1", "bucket 0", "forward 0", "forward 1")
    found = simulate(TWO_BLOCKS, ("bucket 1", "bucket 0")).critical_path
    assert found == (*((0, name) for name in window), *((1, name) for name in window))


def test_windows_overlap_where_only_the_next_one_needs_it() -> None:
    """The link carries `delayed` during the next window's compute, but no longer than until its reader."""
    hidden = step([compute("a", 4), compute("b", 4), launch("delayed", 3)], ["b -> delayed", "delayed -> next b"])
    longer = step([compute("a", 4), compute("b", 4), launch("delayed", 6)], ["b -> delayed", "delayed -> next b"])
    assert simulate(hidden, ("delayed",)).step_ms == 8.0
    assert simulate(longer, ("delayed",)).step_ms == 10.0
    assert {w.end_ms - w.start_ms for w in simulate(longer, ("delayed",)).timeline.waits} == {2.0}


def test_steps_without_compute_or_without_communication() -> None:
    assert simulate(step([launch("x", 5)], []), ("x",)).step_ms == 5.0
    assert simulate(step([compute("a", 5)], []), ()).step_ms == 5.0
    assert schedule(step([compute("a", 5)], []), "2d").launch_order == ()


def test_one_window_has_no_steady_state() -> None:
    with pytest.raises(ValueError, match="at least 2 windows"):
        simulate(TWO_BLOCKS, ("bucket 1", "bucket 0"), windows=1)


@given(steps())
def test_compute_and_waits_fill_the_step(drawn: StepGraph) -> None:
    """Where the compute lane is what repeats, nothing but waits lies between its operations."""
    found = simulate(drawn, order(drawn))
    compute_spans = [s for s in found.timeline.spans if s.operation.lane == "compute"]
    covered = sum(s.end_ms - s.start_ms for s in compute_spans)
    covered += sum(w.end_ms - w.start_ms for w in found.timeline.waits)
    first = min([s.start_ms for s in compute_spans] + [w.start_ms for w in found.timeline.waits])
    assert covered == pytest.approx(max(s.end_ms for s in compute_spans) - first)


@given(steps())
def test_nothing_starts_before_what_it_depends_on_and_the_link_carries_one_at_a_time(drawn: StepGraph) -> None:
    launched = order(drawn)
    found = simulate(drawn, launched)
    spans = {(s.window, s.operation.name): s for s in found.timeline.spans}
    for d in drawn.dependences:
        for window in range(d.distance, 2):
            assert spans[window, d.after].start_ms >= spans[window - d.distance, d.before].end_ms
    for lane in (launched, drawn.compute_order):
        line = [spans[window, name] for window in (0, 1) for name in lane]
        assert all(one.end_ms <= other.start_ms for one, other in itertools.pairwise(line))


@given(steps())
def test_a_critical_path_has_no_gap(drawn: StepGraph) -> None:
    found = simulate(drawn, order(drawn))
    spans = {(s.window, s.operation.name): s for s in found.timeline.spans}
    path = [spans[node] for node in found.critical_path]
    assert path[-1].operation.name == drawn.compute_order[-1]
    assert all(one.end_ms == pytest.approx(other.start_ms) for one, other in itertools.pairwise(path))


@pytest.mark.parametrize(
    ("launch_order", "expected"),
    [
        (("lookups", "ids", "prior", "bucket 0", "bucket 1", "a delayed"), "has 'lookups' before 'ids'"),
        # Lookups wait for the update of the table, which waits for the prior gradients.
        (("ids", "lookups", "prior", "bucket 0", "bucket 1", "a delayed"), "has 'lookups' before 'prior'"),
    ],
)
def test_orders_that_cannot_be_executed_are_refused(launch_order: tuple[str, ...], expected: str) -> None:
    for function in (check_order, simulate):
        with pytest.raises(ValueError, match=expected):
            function(EMBEDDING, launch_order)


def test_a_launch_waits_for_compute_that_comes_later_in_the_program() -> None:
    """`b` stands after `a` in the program, `a` needs x: y, which needs b, can only leave after x."""
    steps = step([compute("a", 1), compute("b", 1), launch("x", 1), launch("y", 1)], ["x -> a", "b -> y"])
    check_order(steps, ("x", "y"))
    with pytest.raises(ValueError, match="has 'y' before 'x'"):
        check_order(steps, ("y", "x"))


def test_the_next_window_never_blocks_this_one() -> None:
    check_order(step([launch("x", 1), launch("y", 1)], ["x -> next y", "y -> next x"]), ("x", "y"))


@pytest.mark.parametrize(
    ("impossible", "expected"),
    [
        (step([compute("a", 1), launch("x", 1)], ["a -> x", "x -> a"]), "'x' waits for a compute"),
        (step([launch("x", 1), launch("y", 1)], ["x -> y", "y -> x"]), "has '[xy]' before '[xy]'"),
        (step([compute("a", 1), compute("b", 1)], ["b -> a"]), "compute order has 'a' before 'b'"),
        (step([compute("a", 1)], ["a -> x"]), "'x', which is not an operation"),
        (replace(TWO_BLOCKS, compute_order=("backward 1",)), "compute_order must contain"),
        (replace(TWO_BLOCKS, operations=TWO_BLOCKS.operations * 2), "several operations named"),
        (replace(TWO_BLOCKS, dependences=(Dependence("forward 0", "bucket 0", -1),)), "must not be negative"),
    ],
)
def test_steps_that_no_order_can_run_are_refused(impossible: StepGraph, expected: str) -> None:
    for function in (order, lambda steps: schedule(steps, "2d")):
        with pytest.raises(ValueError, match=expected):
            function(impossible)


@given(steps(most_launches=5), st.randoms(use_true_random=False))
def test_an_order_is_legal_exactly_if_two_windows_of_it_have_no_cycle(drawn: StepGraph, chance: random.Random) -> None:
    """Compares with the dependence graph, to which the order adds a chain of launches."""
    import networkx as nx  # noqa: PLC0415

    names = [o.name for o in drawn.communications]
    chance.shuffle(names)
    graph = dependence_graph(drawn, 3)
    graph.add_edges_from(itertools.pairwise((window, name) for window in range(3) for name in names))
    if nx.is_directed_acyclic_graph(graph):
        check_order(drawn, names)
    else:
        with pytest.raises(ValueError, match="The launch order has"):
            check_order(drawn, names)


def test_a_policy_of_ones_own() -> None:
    def longest_first(candidate: Ready) -> float:
        return -candidate.operation.duration_ms

    three = step([launch("a", 1), launch("b", 3), launch("c", 2), compute("f", 1)], ["a -> f", "b -> f", "c -> f"])
    assert order(three, longest_first) == ("b", "c", "a")


@given(steps(), st.sampled_from([readiness_key, embrace_key]))
def test_every_policy_yields_a_legal_order(drawn: StepGraph, policy: Key) -> None:
    check_order(drawn, order(drawn, policy))


@given(steps(), st.sampled_from(SCHEDULES))
def test_a_schedule_is_legal_and_never_slower_than_the_naive_order(drawn: StepGraph, name: str) -> None:
    found = schedule(drawn, name)
    check_order(drawn, found.launch_order)
    naive_ms = simulate(drawn, order(drawn, readiness_key)).step_ms
    assert simulate(drawn, found.launch_order).step_ms <= naive_ms * (1 + EXACT)
    if name == "none":
        assert found.launch_order == order(drawn, readiness_key)


@settings(max_examples=60, deadline=None)
@given(steps(most_launches=5))
def test_a_small_step_is_within_5_percent_of_the_best_order(drawn: StepGraph) -> None:
    check_against_all_orders(drawn)


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@given(steps(most_launches=6))
def test_small_steps_are_within_5_percent_of_the_best_order(drawn: StepGraph) -> None:
    check_against_all_orders(drawn)


def check_against_all_orders(steps: StepGraph) -> None:
    found_ms = simulate(steps, schedule(steps, "2d").launch_order).step_ms
    lanes = ("compute", "link")
    busy_ms = [sum(o.duration_ms for o in steps.operations if o.is_communication == (lane == "link")) for lane in lanes]
    if found_ms <= max(busy_ms) * (1 + EXACT):
        return  # no order can be faster than the busiest lane
    best_ms = found_ms
    for names in itertools.permutations(o.name for o in steps.communications):
        try:
            best_ms = min(best_ms, simulate(steps, names).step_ms)
        except ValueError:
            continue
    assert found_ms <= 1.05 * best_ms


@given(steps(), st.randoms(use_true_random=False))
def test_the_order_of_operations_and_dependences_does_not_matter(drawn: StepGraph, chance: random.Random) -> None:
    operations, dependences = list(drawn.operations), list(drawn.dependences)
    chance.shuffle(operations)
    chance.shuffle(dependences)
    shuffled = StepGraph(tuple(operations), tuple(dependences), drawn.compute_order)
    assert schedule(shuffled, "2d").launch_order == schedule(drawn, "2d").launch_order


@pytest.mark.long
def test_200_communications_are_ordered_in_well_under_2_seconds() -> None:
    """Measures CPU time, because other processes may occupy the cores."""
    large = large_step(blocks=20, chunks=9)
    assert len(large.communications) == 200
    start_s = time.process_time()
    found = schedule(large, "2d")
    assert time.process_time() - start_s < 2.0
    assert found.diagnostics().step_ms < simulate(large, order(large)).step_ms


def test_a_schedule_says_what_it_is_and_from_where() -> None:
    found = schedule(EMBEDDING, "vertical", source="profile")
    assert (found.name, found.source, found.steps) == ("vertical", "profile", EMBEDDING)
    assert found.predicted.dependences == EMBEDDING.dependences
    assert found.diagnostics().step_ms == simulate(EMBEDDING, found.launch_order).step_ms
    assert found.critical_path == simulate(EMBEDDING, found.launch_order).critical_path


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="no schedule 'fastest'"):
        schedule(EMBEDDING, "fastest")
