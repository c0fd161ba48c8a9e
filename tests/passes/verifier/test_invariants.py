"""The verifier: legal graphs pass, and each invariant has hand-broken graphs that it names."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from embrace_fx.passes.partition import Partition
from embrace_fx.passes.verifier.invariants import INVARIANTS, VerificationError, verify
from embrace_fx.passes.verifier.windows import INVARIANTS as WINDOW_INVARIANTS
from embrace_fx.vocabulary.copy_ops import offload_id
from embrace_fx.vocabulary.graph import (
    BatchInput,
    Buffer,
    Gradient,
    GradientOfRows,
    Mutation,
    OutputRole,
    Parameter,
    Result,
    Tangent,
    TrainingGraph,
    copy_module,
    set_outputs,
)
from embrace_fx.vocabulary.operation_id import OperationId
from tests.support.golden import check_golden
from tests.support.hand_built_graphs import (
    B,
    Builder,
    D,
    d,
    dense_graph,
    dynamic_graph,
    memory_graph,
    overlapped_graph,
    partitioned_graph,
    table_graph,
    two_tables_graph,
    widen_z,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
embrace = torch.ops.embrace

PEAK_BYTES = 10688

LEGAL = {
    "reduced in place": dense_graph,
    "reduced": lambda: dense_graph(c10d.all_reduce.default),
    "sharded table": table_graph,
    "two tables": two_tables_graph,
    "partitioned": partitioned_graph,
    "overlapped": overlapped_graph,
    "again, and out of memory": lambda: replace(memory_graph(), memory_limit=PEAK_BYTES),
    "symbolic sizes, constants": dynamic_graph,
}


def complaint(graph: TrainingGraph, after: str, **given: TrainingGraph) -> str | None:
    """Returns the verifier's message, or None if the graph is legal."""
    try:
        verify(graph, after=after, **given)
    except VerificationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("make", LEGAL.values(), ids=LEGAL.keys())
def test_legal_graph_passes(make: Callable[[], TrainingGraph]) -> None:
    graph = make()
    assert complaint(graph, "captured") is None
    assert complaint(graph.edit(), "Nothing", captured=graph, previous=graph) is None


Break = Callable[[TrainingGraph], TrainingGraph | None]
"""Breaks a graph in place, or returns a broken one."""


def reads(reader: str, new: str, instead_of: str) -> Break:
    return lambda graph: graph.node(reader).replace_input_with(graph.node(instead_of), graph.node(new))


def calls(name: str, target: Callable[..., object]) -> Break:
    return lambda graph: setattr(graph.node(name), "target", target)


def has_value(name: str, value: Callable[[TrainingGraph], Any]) -> Break:
    return lambda graph: graph.node(name).meta.update(val=value(graph))


def forgets(name: str, key: str) -> Break:
    def forget(graph: TrainingGraph) -> None:
        del graph.node(name).meta[key]

    return forget


Outputs = list[tuple[fx.Node | None, OutputRole]]


def yields(change: Callable[[Outputs, TrainingGraph], Outputs]) -> Break:
    return lambda graph: set_outputs(graph.module, change(list(graph.outputs()), graph))


def without(lost: OutputRole) -> Break:
    return yields(lambda outputs, _: [(value, role) for value, role in outputs if role != lost])


def inserted(graph: TrainingGraph, before: str, op: Callable[..., object], *args: Any, like: fx.Node) -> fx.Node:
    """Inserts a node whose fake value is that of `like`."""
    with graph.graph.inserting_before(graph.node(before)):
        node = graph.graph.call_function(op, args)
    node.meta["val"] = like.meta["val"]
    return node


def output_without_role(graph: TrainingGraph) -> None:
    output = graph.graph.output_node()
    output.meta["roles"] = output.meta["roles"][:-1]


def saved_by_nobody(graph: TrainingGraph) -> TrainingGraph:
    return TrainingGraph(graph.module, phases={name: graph.phases[name] for name in ("ids", "backward")})


def no_wait(graph: TrainingGraph) -> None:
    graph.node("done").replace_all_uses_with(graph.node("bucket"))
    graph.graph.erase_node(graph.node("done"))


def two_waits(graph: TrainingGraph) -> None:
    done = graph.node("done")
    again = inserted(graph, "parts", c10d.wait_tensor.default, *done.args, like=done)
    graph.node("parts").replace_input_with(done, again)


def wait_for_a_value(graph: TrainingGraph) -> None:
    inserted(graph, "bucket", c10d.wait_tensor.default, graph.node("grad_w"), like=graph.node("grad_w"))


def read_a_view_of_it(graph: TrainingGraph) -> None:
    bucket = graph.node("bucket")
    view = inserted(graph, "reduced", aten.view.default, bucket, [-1], like=bucket)
    graph.node("reduced").replace_input_with(bucket, view)
    graph.node("parts").replace_input_with(graph.node("done"), bucket)


def widen_a_line_of_the_user(graph: TrainingGraph) -> None:
    graph.node("z").meta["stack_trace"] = '  File "model.py", line 12, in forward\n    return y.relu()\n'
    widen_z(graph)


def mutation_from_tangent(graph: TrainingGraph) -> None:
    graph.node("new_total").update_arg(1, graph.node("grad_bias"))
    graph.node("reduced").prepend(graph.node("new_total"))


def tangent_in_the_forward(graph: TrainingGraph) -> None:
    b = Builder(graph.node("x").meta["val"].fake_mode)
    b.input("tangent", Tangent(0), B, D)
    graph.phases["ids"] = b.done().module


def size_not_known_in_truth(graph: TrainingGraph) -> None:
    ids = graph.node("gathered").meta["val"]
    for name in ("gathered", "packed"):
        graph.node(name).meta["val"] = ids.new_empty((B,))


def one_size_for_two(graph: TrainingGraph) -> None:
    first, counts, *_ = graph.node("unpacked").meta["val"]
    graph.node("unpacked").meta["val"] = [first, counts, first, counts]
    for node in graph.node("unpacked").users:
        node.meta["val"] = first
    graph.node("rows_1").meta["val"] = graph.node("rows_0").meta["val"]


def other_symbol(graph: TrainingGraph) -> Tensor:
    x: Tensor = graph.node("x").meta["val"]
    return x.new_empty((x.shape[0] * x.shape[0],))


def all_reduce_of_the_batch(graph: TrainingGraph) -> None:
    flat = graph.node("flat")
    launch = inserted(graph, "found", c10d.all_reduce.default, flat, "sum", "dense", like=flat)
    wait = inserted(graph, "found", c10d.wait_tensor.default, launch, like=flat)
    graph.node("found").replace_input_with(flat, wait)


def option_from_the_batch(graph: TrainingGraph) -> None:
    x = graph.node("x")
    size = inserted(graph, "columns", aten.sym_size.int, x, 0, like=x)
    size.meta["val"] = x.meta["val"].shape[0]
    graph.node("sent_rows").update_arg(2, size)


def lost_row_gradient(graph: TrainingGraph) -> TrainingGraph:
    """Removes the submission of a row gradient, but keeps its role."""
    backward = copy_module(graph.phases["backward"])
    (submitted,) = backward.graph.find_nodes(op="call_function", target=embrace.submit_gradients.default)
    (role,) = backward.graph.output_node().meta["roles"]
    set_outputs(backward, [(submitted.args[0], role)])
    backward.graph.erase_node(submitted)
    return TrainingGraph(graph.module, phases={**graph.phases, "backward": backward})


def rows_awaited_twice(graph: TrainingGraph) -> TrainingGraph:
    forward = copy_module(graph.phases["forward"])
    (awaited,) = forward.graph.find_nodes(op="call_function", target=embrace.join_rows.default)
    with forward.graph.inserting_after(awaited):
        again = forward.graph.node_copy(awaited)
    again.meta["val"] = awaited.meta["val"]
    return TrainingGraph(graph.module, phases={**graph.phases, "forward": forward})


def launch_lost_in_partition(graph: TrainingGraph) -> TrainingGraph:
    b = Builder(graph.node("x").meta["val"].fake_mode)
    parts = [b.input("i", BatchInput(1), 3, dtype=torch.int64), b.input("r", BatchInput(2), 3, d)]
    gradients = b.done((parts[0], GradientOfRows("t", "ids")), (parts[1], GradientOfRows("t", "rows"))).module
    return TrainingGraph(graph.module, phases={**graph.phases, "backward": gradients})


def argument(name: str, place: int, new: Any) -> Break:
    """Gives a node another argument: the value of the node of that name, or else `new` itself."""

    def change(graph: TrainingGraph) -> None:
        nodes = {node.name: node for node in graph.graph.nodes}
        nodes[name].update_arg(place, nodes.get(new, new))

    return change


def erased(name: str, instead: str = "") -> Break:
    def erase(graph: TrainingGraph) -> None:
        if instead:
            graph.node(name).replace_all_uses_with(graph.node(instead))
        graph.graph.erase_node(graph.node(name))

    return erase


def moved(name: str, before: str) -> Break:
    return lambda graph: graph.node(before).prepend(graph.node(name))


def launched_again(graph: TrainingGraph) -> None:
    x = graph.node("x")
    launch = inserted(graph, "now", c10d.all_reduce.default, x, "sum", "dense", like=x)
    inserted(graph, "now", c10d.wait_tensor.default, launch, like=x)
    launch.meta["again"] = "x"


def replayed(op: Callable[..., object], before: str, of: str, like: str) -> Break:
    """Begins or ends a replay once more."""

    def insert(graph: TrainingGraph) -> None:
        inserted(graph, before, op, graph.node(of), torch.device("cpu"), like=graph.node(like))

    return insert


def state_of_nothing(graph: TrainingGraph) -> None:
    state = graph.node("state_0")
    graph.node("now").update_arg(0, inserted(graph, "now", aten.clone.default, state, like=state))


def copy_named(name: str, of: OperationId) -> Break:
    def rename(graph: TrainingGraph) -> None:
        graph.node(name).update_arg(1, str(of))
        graph.node(name).meta["launch"] = of

    return rename


def not_reloaded(graph: TrainingGraph) -> None:
    erased("back", instead="scaled")(graph)
    erased("coming")(graph)


def saved_although_offloaded(graph: TrainingGraph) -> TrainingGraph:
    set_outputs(
        graph.module,
        [(graph.node("h") if isinstance(role, Gradient) else value, role) for value, role in graph.outputs()],
    )
    return Partition()(graph)


def limited_to(limit: int) -> Break:
    return lambda graph: replace(graph, memory_limit=limit)


BROKEN: dict[str, dict[str, tuple[Callable[[], TrainingGraph], Break]]] = {
    "definitions_before_uses": {
        "use before definition": (dense_graph, lambda graph: graph.node("y").append(graph.node("mm"))),
        "use of another graph": (dense_graph, lambda g: g.node("y").update_arg(0, dense_graph().node("mm"))),
        "no output": (dense_graph, lambda graph: graph.graph.erase_node(graph.graph.output_node())),
        "two nodes of one name": (dense_graph, lambda graph: setattr(graph.node("y"), "name", "mm")),
    },
    "known_targets": {
        "opaque Python": (dense_graph, calls("z", torch.relu)),
        "arithmetic on tensors": (dense_graph, calls("y", operator.add)),
        "a call of a method": (dense_graph, lambda graph: setattr(graph.node("z"), "op", "call_method")),
    },
    "values_have_roles": {
        "an input without role": (dense_graph, forgets("w", "role")),
        "two inputs of one role": (dense_graph, lambda graph: graph.node("bias").meta.update(role=Parameter("w"))),
        "an output without role": (dense_graph, output_without_role),
        "a result without value": (
            dense_graph,
            yields(lambda outputs, _: [(None if role == Result(0) else value, role) for value, role in outputs]),
        ),
        "saved by nobody": (partitioned_graph, saved_by_nobody),
    },
    "launches_and_waits_paired": {
        "no wait": (dense_graph, no_wait),
        "two waits": (dense_graph, two_waits),
        "a wait for a value": (dense_graph, wait_for_a_value),
    },
    "in_flight_values_unread": {
        "read in flight": (dense_graph, reads("parts", "reduced", instead_of="done")),
        "read what is reduced in place": (dense_graph, reads("parts", "bucket", instead_of="done")),
        "read a view of it": (dense_graph, read_a_view_of_it),
        "an input reduced in place": (dense_graph, reads("reduced", "w", instead_of="bucket")),
    },
    "forward_free_of_tangents": {
        "a result from a tangent": (dense_graph, reads("z", "tangent", instead_of="y")),
        "a mutation from a tangent": (dense_graph, mutation_from_tangent),
        "a tangent in the forward": (partitioned_graph, tangent_in_the_forward),
    },
    "values_agree": {
        "another shape": (dense_graph, has_value("z", lambda graph: graph.node("grad_w").meta["val"])),
        "another dtype, with the user's line": (dense_graph, widen_a_line_of_the_user),
        "no value": (dense_graph, forgets("z", "val")),
        "inputs that do not fit": (dense_graph, lambda graph: graph.node("mm").update_arg(1, graph.node("bias"))),
        "a size that is not known in truth": (table_graph, size_not_known_in_truth),
        "two sizes for one": (
            table_graph,
            has_value("update", lambda g: [g.node("ids").meta["val"], *g.node("update").meta["val"][1:]]),
        ),
        "one size for two": (two_tables_graph, one_size_for_two),
        "another symbol": (dynamic_graph, has_value("flat", other_symbol)),
    },
    "parameters_updated_once": {
        "no gradient": (dense_graph, without(Gradient(Parameter("w")))),
        "two gradients": (dense_graph, yields(lambda o, g: [*o, (g.node("mean_0"), Gradient(Parameter("w")))])),
        "dense and rows": (table_graph, yields(lambda o, g: [*o, (g.node("grad"), Gradient(Parameter("t")))])),
        "rows without ids": (table_graph, without(GradientOfRows("t", "ids"))),
    },
    "forward_kept": {
        "a mutation lost": (dense_graph, without(Mutation(Buffer("total")))),
        "results swapped": (dense_graph, yields(lambda o, _: [o[0], o[2], o[1], *o[3:]])),
    },
    "collectives_in_one_order": {
        "groups of two sizes": (table_graph, lambda _: table_graph(group_size=3)),
        "an AllReduce of the batch": (dynamic_graph, all_reduce_of_the_batch),
        "an option from the batch": (table_graph, option_from_the_batch),
        "a launch lost in partition": (partitioned_graph, launch_lost_in_partition),
    },
    "copies_equal_originals": {
        "other inputs": (memory_graph, argument("h_again", 1, "draw_0_again")),
        "another op": (memory_graph, calls("mask_again", aten.add.Tensor)),
        "a copy of nothing": (memory_graph, lambda graph: graph.node("h_again").meta.update(again="nothing")),
        "what the forward has written": (memory_graph, argument("h_again", 0, "total")),
        "communication again": (memory_graph, launched_again),
    },
    "replays_draw_equally": {
        "a replay within a replay": (
            memory_graph,
            replayed(embrace.begin_replay.default, "draw_0_again", "state_0", "now"),
        ),
        "no state": (memory_graph, state_of_nothing),
        "ended twice": (memory_graph, replayed(embrace.end_replay.default, "mask_again", "now", "end")),
        "from another state": (memory_graph, argument("now", 0, "state_1")),
        "the first draw left out": (memory_graph, erased("draw_0_again", instead="draw_0")),
        "a draw after the replay": (memory_graph, moved("end", before="draw_1_again")),
        "no end": (memory_graph, erased("end")),
    },
    "copies_in_pairs": {
        "begun twice": (memory_graph, copy_named("coming", offload_id("h"))),
        "another copy in the text": (memory_graph, argument("coming", 1, "another")),
        "read on its way": (memory_graph, reads("gradient", "coming", instead_of="back")),
        "read by nobody": (memory_graph, not_reloaded),
        "an await of another copy": (memory_graph, copy_named("back", offload_id("h"))),
    },
    "freed_values_unread": {
        "read after it has left": (memory_graph, reads("gradient", "h", instead_of="back")),
        "a view of it": (memory_graph, reads("gradient", "view", instead_of="back")),
        "saved all the same": (memory_graph, saved_although_offloaded),
    },
    "within_memory_limit": {"one byte too many": (memory_graph, limited_to(PEAK_BYTES - 1))},
    "exchanged_once": {
        "a row gradient that is not submitted": (overlapped_graph, lost_row_gradient),
        "rows awaited twice": (overlapped_graph, rows_awaited_twice),
    },
}


def test_broken_graphs_name_their_invariants() -> None:
    lines = []
    for invariant, name in [(invariant, name) for invariant, broken in BROKEN.items() for name in broken]:
        make, break_it = BROKEN[invariant][name]
        captured = make()
        broken = captured.edit()
        broken = break_it(broken) or broken
        told = str(complaint(broken, "Breaking", captured=captured))
        assert told.startswith(f"{invariant}: expected "), name
        lines += [f"# {name}", told]
    check_golden("refused", "\n".join(lines))


def test_every_invariant_has_a_broken_graph() -> None:
    """Those of two windows are in test_windows.py, those of what phases leave each other in test_step_variants.py."""
    every = (*INVARIANTS, WINDOW_INVARIANTS[0])
    assert list(BROKEN) == [c.__name__ for c in every if not c.__module__.endswith(".under_way")]
