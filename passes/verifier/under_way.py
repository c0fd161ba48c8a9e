"""Verifies which collectives are in flight at the start and end of a window (a backward and the next forward), or of a
phase.

Contract
    A steady window, a backward and the next forward, starts and ends with the launches that overlap the next step. A
    variant defines the launches in flight at its start and end. Each variant is checked separately, and consecutive
    phases agree on the launches in flight. Thus, in any sequence of steps, each launch has one submission followed by
    one await, no row is looked up before its last update, and no update is lost or applied twice.

    | phase    | variant         | in flight at its start               | in flight at its end            |
    |----------|-----------------|--------------------------------------|---------------------------------|
    | both     | steady          | delayed, ids                         | delayed, ids                    |
    | forward  | arrives cut     | prior, delayed, early rows, chunks   | delayed; ids, if one is coming  |
    |          | arrives whole   | prior, chunks                        | ids, if one is coming           |
    |          | another batch   | prior, delayed, chunks               | ids, if one is coming           |
    | backward | left, coming    | delayed if left; ids if coming       | prior, chunks                   |
    |          | cut             |                                      | delayed and early rows, besides |
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from embrace_fx.passes.verifier.violation import Violation
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.operation_id import IDS, OperationId, rows_id
from embrace_fx.vocabulary.ops import launch_of, op_name
from embrace_fx.vocabulary.step_variant import ForwardVariant, VariedPhase
from embrace_fx.vocabulary.submissions import awaited, is_submission, submitted

Launches = frozenset[OperationId]


def window_nodes(graph: TrainingGraph) -> list[fx.Node]:
    """Returns the nodes of the backward, followed by those of the next forward."""
    return [node for phase in ("backward", "forward") for node in graph.phases[phase].graph.nodes]


def crosses_windows(launch: OperationId) -> bool:
    """Returns whether a collective is submitted in one window (a backward and the next forward) and awaited in the next
    one.
    """
    return launch == IDS or launch.part == "delayed"


def launches_in_flight_agree(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks the collectives of a window (a backward and the next forward), or of the phase of a step variant.

    The collectives in flight at the start are given. Each collective must be submitted once before it is awaited. No
    row may be looked up while its update is in flight. At the end, exactly the collectives that a later phase awaits
    must be in flight.
    """
    varied = graph.varied
    if varied is not None:
        where, nodes = str(varied.variant), list(graph.phases[varied.variant.phase].graph.nodes)
        before, after = in_flight_at_ends(varied)
    else:
        where, nodes = "window", window_nodes(graph)
        before = after = frozenset(
            filter(crosses_windows, submitted(graph.phases["backward"], graph.phases["forward"]))
        )
    under_way = set(before)
    for node in nodes:
        launch = launch_of(node)
        if op_name(node) == "embrace::submit_rows" and launch is not None:
            yield from _check_lookup(node, launch, under_way)
        if is_submission(node) and launch is not None:
            if launch in under_way:
                yield Violation(node, f"one submission of '{launch}' until it is awaited", "another", "submit it once")
            under_way.add(launch)
        if (awaits := awaited(node)) is not None:
            if awaits not in under_way:
                expected = f"an await in the {where} of what is under way"
                yield Violation(node, expected, f"'{awaits}', which is not", "await what has been submitted, once")
            under_way.discard(awaits)
    if under_way != after:
        names = [", ".join(sorted(map(str, each))) or "nothing" for each in (after, under_way)]
        remedy = "submit what later phases await, and await what earlier ones have left"
        yield Violation(None, f"{names[0]} under way at the end of the {where}", names[1], remedy)


def in_flight_at_ends(varied: VariedPhase) -> tuple[Launches, Launches]:
    """Returns (the collectives that must be in flight at the start of a step variant's phase, the collectives that must
    be in flight at its end).
    """
    steady, variant = varied.steady, varied.variant
    prior = frozenset(each for each in steady if each.part == "prior")
    delayed = frozenset(each for each in steady if each.part == "delayed")
    early = frozenset(each for each in steady if each.part == "early")
    chunks = frozenset(each for each in steady if each.kind == "all_reduce" and varied.into_forward)
    ids, none = frozenset({IDS}), Launches()
    if isinstance(variant, ForwardVariant):
        left = {"cut": delayed | early, "whole": none, "other": delayed}[variant.arrives]
        kept = delayed if variant.arrives == "cut" else none
        return prior | chunks | left, kept | (ids if variant.coming else none)
    before = (delayed if variant.left else none) | (ids if variant.coming else none)
    return before, prior | chunks | (delayed | early if variant.cut else none)


def _check_lookup(node: fx.Node, launch: OperationId, under_way: set[OperationId]) -> Iterator[Violation]:
    """Yields a violation if rows are looked up while one of their updates is in flight. A delayed update does not count
    for rows that are exchanged late, in the forward that reads them.

    Args:
        node: the lookup.
        launch: the id of the exchange of the rows.
        under_way: the ids of the collectives in flight.
    """
    gradients = {each for each in under_way if each.what == launch.what and each.kind in ("gradients", "delayed")}
    if launch.part == "late" and rows_id(launch.what, "early") in under_way:
        gradients = {each for each in gradients if each.part != "delayed"}
    if gradients:
        expected = f"'{launch}' to be looked up after the update by {', '.join(sorted(map(str, gradients)))}"
        yield Violation(node, expected, "it is still under way", "move the update before the lookup")
