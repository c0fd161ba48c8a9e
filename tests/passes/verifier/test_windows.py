"""What runs from one step into the next, proved under every schedule; graphs broken by hand, each of them refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.passes.verifier.windows import INVARIANTS, check_launches, find_deadlock
from embrace_fx.vocabulary.graph import TrainingGraph, copy_module
from embrace_fx.vocabulary.operation_id import IDS, OperationId, chunk_id, gradients_id, rows_id
from embrace_fx.vocabulary.ops import launch_of, op_name
from embrace_fx.vocabulary.schedule import SCHEDULES
from tests.support.golden import check_golden
from tests.support.translators import TABLES, steps_of_translator, translator

embrace = torch.ops.embrace
FIRST = TABLES[0]


def violations(graph: TrainingGraph) -> list[str]:
    """Returns the name of the first violated invariant, with its message for each place."""
    for invariant in INVARIANTS:
        found = list(invariant(graph))
        if found:
            return [f"{invariant.__name__}: {v.node}: expected {v.expected}; found {v.found}" for v in found]
    return []


def order_of(name: str) -> tuple[OperationId, ...]:
    looks_ahead = name in ("vertical", "2d")
    found = schedule(steps_of_translator(name), name).launches
    return tuple(launch for launch in found if looks_ahead or launch != IDS)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_runs_under_each_schedule_is_sound(name: str) -> None:
    graph, _ = translator(name)
    assert violations(graph) == []
    assert find_deadlock(graph, order_of(name)) is None
    check_launches(graph, order_of(name))


Phases = dict[str, fx.GraphModule]


def of(phases: Phases, phase: str, op: str, launch: OperationId | None = None) -> fx.Node:
    """Returns the first node of an op in a phase, for a given launch if several nodes have that op."""
    found = [n for n in phases[phase].graph.nodes if op_name(n) == f"embrace::{op}" and launch in (None, launch_of(n))]
    return found[0]


def erase(node: fx.Node) -> None:
    """Erases a node. Its users read its first input instead."""
    if node.users:
        node.replace_all_uses_with(node.all_input_nodes[0])
    node.graph.erase_node(node)


def again(node: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        return node.graph.node_copy(node)


def last(phases: Phases, phase: str) -> fx.Node:
    return phases[phase].graph.output_node().prev


def rows_submitted_after_their_await(phases: Phases) -> None:
    """Moves a submission after its await, so that all ranks would wait forever."""
    sent = of(phases, "forward", "submit_rows", rows_id(FIRST, "late"))
    of(phases, "forward", "await_rows", rows_id(FIRST, "late")).append(sent)


def ids_awaited_in_their_window(phases: Phases) -> None:
    erase(of(phases, "backward", "await_ids"))
    sent = of(phases, "forward", "submit_ids")
    with sent.graph.inserting_after(sent):
        there = sent.graph.call_function(embrace.await_ids.default, sent.args)
    there.meta = dict(sent.meta)


def delayed_awaited_where_they_are_sent(phases: Phases) -> None:
    update = of(phases, "backward", "update_rows", gradients_id(FIRST, "delayed", 0))
    update.replace_all_uses_with(update.args[0])  # type: ignore[arg-type]
    last(phases, "backward").append(update)


def looked_up_before(phase: str, part: str, update: OperationId) -> Callable[[Phases], None]:
    """Returns a change that looks rows up in the shard as it was before an update."""

    def change(phases: Phases) -> None:
        sent = of(phases, phase, "submit_rows", rows_id(FIRST, part))
        sent.update_arg(0, of(phases, phase, "update_rows", update).args[0])

    return change


def updated_while_read(phases: Phases) -> None:
    """Updates rows between their lookup and the node that reads them."""
    update = of(phases, "forward", "update_rows", gradients_id(FIRST, "prior"))
    sent = of(phases, "forward", "submit_rows", rows_id(FIRST, "late"))
    sent.update_arg(0, update.args[0])
    sent.append(update)


def early_rows_left_out(phases: Phases) -> None:
    join = of(phases, "forward", "join_rows")
    _, late = join.args[0]  # type: ignore[misc, str-unpack]
    join.update_arg(0, [late])


def whole_and_delayed(phases: Phases) -> None:
    for phase, op in (("backward", "submit_gradients"), ("forward", "update_rows")):
        node = of(phases, phase, op, gradients_id(FIRST, "prior"))
        node.meta["launch"] = gradients_id(FIRST, "whole")
        node.args = (*node.args[:-1], str(gradients_id(FIRST, "whole")))


def piece_left_out(phases: Phases) -> None:
    for op in ("submit_gradients", "update_rows"):
        erase(of(phases, "backward", op, gradients_id(FIRST, "delayed", 0)))


def elements_left_out(phases: Phases) -> None:
    node = of(phases, "backward", "submit_chunk", chunk_id(0, 1))
    node.update_arg(2, int(str(node.args[2])) - 1)


def bucket_read_in_flight(phases: Phases) -> None:
    sent = of(phases, "backward", "submit_chunk", chunk_id(0, 1))
    with sent.graph.inserting_after(sent):
        sent.graph.call_function(torch.ops.aten.sum.default, (sent,))


def handed_over_too_early(phases: Phases) -> None:
    over = of(phases, "backward", "defer_bucket")
    over.update_arg(0, of(phases, "backward", "submit_chunk", chunk_id(0, 0)))


def parameter_read_before_its_update(phases: Phases) -> None:
    placeholder = next(n for n in phases["forward"].graph.nodes if n.name == "blocks_0_weight")
    with placeholder.graph.inserting_before(last(phases, "forward")):
        placeholder.graph.call_function(torch.ops.aten.sum.default, (placeholder,))


def updated_before_a_chunk_has_arrived(phases: Phases) -> None:
    update = of(phases, "forward", "update_bucket")
    (there, *rest) = update.args[0]  # type: ignore[misc, str-unpack]
    update.update_arg(0, [there.args[0], *rest])  # type: ignore[union-attr]


def another_name_is_printed(phases: Phases) -> None:
    node = of(phases, "forward", "submit_ids")
    node.args = (*node.args[:-1], "source.weight rows")


BROKEN: dict[str, Callable[[Phases], object]] = {
    "launch_lost": lambda phases: erase(of(phases, "backward", "submit_gradients", gradients_id(FIRST, "delayed", 1))),
    "await_lost": lambda phases: erase(of(phases, "backward", "await_ids")),
    "submitted_twice": lambda phases: again(of(phases, "forward", "submit_rows", rows_id(FIRST, "late"))),
    "updated_twice": lambda phases: again(of(phases, "forward", "update_rows", gradients_id(FIRST, "prior"))),
    "rows_submitted_after_their_await": rows_submitted_after_their_await,
    "ids_awaited_in_their_window": ids_awaited_in_their_window,
    "delayed_awaited_where_they_are_sent": delayed_awaited_where_they_are_sent,
    "late_rows_without_their_update": looked_up_before("forward", "late", gradients_id(FIRST, "prior")),
    "early_rows_before_a_delayed_update": looked_up_before("backward", "early", gradients_id(FIRST, "delayed", 1)),
    "early_rows_of_a_stale_shard": looked_up_before("backward", "early", gradients_id(FIRST, "delayed", 0)),
    "updated_while_read": updated_while_read,
    "early_rows_left_out": early_rows_left_out,
    "rows_of_another_table": lambda phases: of(phases, "forward", "join_rows").update_arg(3, TABLES[1]),
    "whole_and_delayed": whole_and_delayed,
    "piece_left_out": piece_left_out,
    "chunk_reduced_twice": lambda phases: of(phases, "backward", "submit_chunk", chunk_id(0, 1)).update_arg(1, 0),
    "elements_left_out": elements_left_out,
    "bucket_read_in_flight": bucket_read_in_flight,
    "handed_over_too_early": handed_over_too_early,
    "parameter_read_before_its_update": parameter_read_before_its_update,
    "updated_before_a_chunk_has_arrived": updated_before_a_chunk_has_arrived,
    "bucket_updated_twice": lambda phases: again(of(phases, "forward", "update_bucket")),
    "another_name_is_printed": another_name_is_printed,
}


def broken(graph: TrainingGraph, how: Callable[[Phases], object]) -> TrainingGraph:
    phases = {name: copy_module(module) for name, module in graph.phases.items()}
    how(phases)
    return replace(graph, phases=phases)


def test_graphs_broken_by_hand_are_refused_and_every_invariant_refuses_one() -> None:
    graph, _ = translator("2d")
    found = {name: violations(broken(graph, how)) for name, how in BROKEN.items()}
    check_golden("refused_windows", "\n".join(f"# {name}\n" + "\n".join(found[name]) for name in found))
    refusing = {each[0].partition(":")[0] for each in found.values()}
    assert refusing | {"exchanged_once"} == {invariant.__name__ for invariant in INVARIANTS}


def test_a_bucket_that_is_awaited_in_the_backward_is_read_behind_its_await() -> None:
    graph, _ = translator("vertical")

    def unpacked_too_early(phases: Phases) -> None:
        unpack = of(phases, "backward", "unpack_bucket")
        unpack.update_arg(0, of(phases, "backward", "submit_chunk", chunk_id(0, 1)))

    (found, *_) = violations(broken(graph, unpacked_too_early))
    assert "no reader before the await of bucket 0 [0], bucket 0 [1]" in found


def test_an_order_under_which_all_ranks_wait_for_ever_is_refused() -> None:
    graph, _ = translator("2d")
    order = list(order_of("2d"))
    prior, rows = gradients_id(FIRST, "prior"), rows_id(FIRST, "late")
    order.remove(rows)
    order.insert(order.index(prior), rows)  # rows are looked up after an update that waits for the prior gradients
    reason = find_deadlock(graph, order)
    assert reason is not None
    assert "node source_updated waits for 'source.weight prior'" in reason
    assert "cannot leave before 'source.weight rows'" in reason
    with pytest.raises(ValueError, match="all ranks would deadlock"):
        check_launches(graph, order)


def test_an_order_is_of_what_the_graph_submits() -> None:
    graph, _ = translator("2d")
    order = order_of("2d")
    assert "differs from what the graph submits in ids" in str(
        find_deadlock(graph, [launch for launch in order if launch != IDS])
    )
    assert "one of them twice" in str(find_deadlock(graph, (*order, order[0])))
