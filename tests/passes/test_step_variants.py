"""Graphs of steps that are not steady: what each awaits and submits, and that any run of them is sound."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from embrace_fx.passes.overlap.launches import Phases
from embrace_fx.passes.overlap.variants import DerivePhase, splits_rows
from embrace_fx.passes.verifier.invariants import verify
from embrace_fx.passes.verifier.under_way import launches_in_flight_agree
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.ops import launch_of, op_name
from embrace_fx.vocabulary.step_variant import VARIANTS, Arrival, BackwardVariant, ForwardVariant, StepVariant
from embrace_fx.vocabulary.submissions import awaited, is_submission
from tests.support.golden import check_golden
from tests.support.translators import translator

SPLIT = ("vertical", "2d")


@functools.cache
def graph_of(variant: StepVariant, schedule: str = "2d") -> TrainingGraph:
    return DerivePhase(variant)(translator(schedule)[0])


@functools.cache
def launches_of(variant: StepVariant, schedule: str) -> list[tuple[fx.Node, OperationId | None, OperationId | None]]:
    """Returns a phase's nodes that submit or await launches, with the launch of each and the one it awaits."""
    nodes = graph_of(variant, schedule).phases[variant.phase].graph.nodes
    found = [(node, launch_of(node), awaited(node)) for node in nodes]
    return [each for each in found if each[1:] != (None, None)]


def told(module: fx.GraphModule) -> list[str]:
    """Returns the submissions and waits of a phase, in order."""
    found = []
    for node in module.graph.nodes:
        if is_submission(node):
            found.append(f"submit {launch_of(node)}")
        elif awaited(node) is not None:
            found.append(f"{op_name(node).removeprefix('embrace::').split('_')[0]} {awaited(node)}")
    return found


def test_golden() -> None:
    lines = [line for v in VARIANTS for line in (f"# {v}", *told(graph_of(v).phases[v.phase]), "")]
    check_golden("step_variants", "\n".join(lines))


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_each_variant_is_verified(variant: StepVariant, schedule: str) -> None:
    steady, _ = translator(schedule)
    found = graph_of(variant, schedule)
    verify(found, after="the test", previous=steady)
    assert (told(found.phases[variant.phase]) == told(steady.phases[variant.phase])) == variant.is_steady


def test_only_graphs_that_cut_rows_have_variants() -> None:
    assert [name for name in ("horizontal", *SPLIT) if splits_rows(translator(name)[0])] == list(SPLIT)


@st.composite
def runs(draw: st.DrawFn) -> list[StepVariant]:
    """Steps as they may follow each other, told by what users do: nothing of the verifier's table is used."""
    cut = left = False
    found: list[StepVariant] = []
    for _ in range(draw(st.integers(1, 8))):
        as_expected, known, summed = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
        arrives: Arrival = "cut" if cut and as_expected else "other" if left else "whole"
        left = left and arrives == "cut"
        found.append(ForwardVariant(arrives, known))
        cut = known and not summed
        found.append(BackwardVariant(left, known, cut))
        left = cut
    return found


@pytest.mark.parametrize("schedule", SPLIT)
@given(run=runs())
def test_in_any_run_what_is_submitted_is_awaited_once_and_rows_are_current(
    schedule: str, run: list[StepVariant]
) -> None:
    """Walks through all steps, launch by launch."""
    under_way: Counter[OperationId] = Counter()
    first = True
    for variant in run:
        unread = {each for each in under_way if each.part == "early"}
        as_expected = isinstance(variant, ForwardVariant) and variant.arrives == "cut"
        if isinstance(variant, ForwardVariant) and variant.arrives == "other":
            for each in unread:  # drop early rows that were sent for another batch
                del under_way[each]
        for node, launch, awaits in launches_of(variant, schedule):
            if op_name(node) == "embrace::submit_rows" and launch is not None:
                late = launch.part == "late" and unread and as_expected
                kinds = ("gradients",) if late else ("gradients", "delayed")
                assert not [each for each in under_way if each.what == launch.what and each.kind in kinds], (run, node)
            if is_submission(node) and launch is not None:
                under_way[launch] += 1
                assert under_way[launch] == 1, (run, node)
            if awaits is not None:
                assert first or awaits in under_way, (run, node)  # a first phase may await launches of earlier steps
                del under_way[awaits]
        first = False


def erase(op: str, part: str) -> Callable[[fx.GraphModule], None]:
    def broken(module: fx.GraphModule) -> None:
        found = [n for n in module.graph.nodes if op_name(n) == f"embrace::{op}" and launch_of(n).part == part]  # type: ignore[union-attr]
        node = found[0]
        node.replace_all_uses_with(node.all_input_nodes[0])
        module.graph.erase_node(node)

    return broken


def repeat(op: str) -> Callable[[fx.GraphModule], None]:
    def broken(module: fx.GraphModule) -> None:
        node = next(n for n in module.graph.nodes if op_name(n) == f"embrace::{op}")
        with module.graph.inserting_after(node):
            module.graph.node_copy(node)

    return broken


def look_up_first(module: fx.GraphModule) -> None:
    """Moves the submission of rows before the update by another batch's delayed gradients."""
    sent = next(n for n in module.graph.nodes if op_name(n) == "embrace::submit_rows")
    updates = [n for n in module.graph.nodes if op_name(n) == "embrace::update_rows"]
    updates[0].append(sent)


LAST, OTHER = ForwardVariant("cut", coming=False), ForwardVariant("other", coming=True)
FIRST_BACK, LAST_BACK = BackwardVariant(False, True, True), BackwardVariant(True, False, False)


@pytest.mark.parametrize(
    ("variant", "broken", "reason"),
    [
        (LAST, erase("await_rows", "early"), "at the end"),
        (OTHER, erase("update_rows", "delayed"), "still under way"),
        (OTHER, look_up_first, "still under way"),
        (OTHER, erase("submit_ids", "whole"), "at the end"),
        (FIRST_BACK, erase("submit_gradients", "delayed"), "at the end"),
        (FIRST_BACK, erase("submit_rows", "early"), "at the end"),
        (LAST_BACK, erase("update_rows", "delayed"), "at the end"),
        (LAST_BACK, repeat("submit_gradients"), "one submission"),
        (ForwardVariant("whole", coming=True), repeat("await_rows"), "what is under way"),
    ],
)
def test_broken_variants_are_refused(
    variant: StepVariant, broken: Callable[[fx.GraphModule], None], reason: str
) -> None:
    graph = graph_of(variant)
    phases = Phases(graph.phases)
    broken(phases[variant.phase])
    found = list(launches_in_flight_agree(replace(graph, phases={**graph.phases, **phases.copied})))
    assert any(reason in f"{each.expected} {each.found}" for each in found), found
    assert list(launches_in_flight_agree(graph)) == []
