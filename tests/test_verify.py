"""The verifier: legal graphs pass, and each invariant has hand-broken graphs that it names.

Shape legend
    B batch; D columns of the table, d = D / 2 of them this rank's; V its rows; U, R, K as in `embrace_fx.ops`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import embrace_fx.ops  # noqa: F401  (declares the ops)
from embrace_fx.graph import (
    BatchInput,
    Buffer,
    Gradient,
    InputRole,
    Mutation,
    OutputRole,
    Parameter,
    Result,
    RowGradient,
    Saved,
    Shard,
    Tangent,
    TrainingGraph,
    set_outputs,
)
from embrace_fx.passes.collectives import collective_sequence, sequence_hash
from embrace_fx.passes.verify import VerificationError, verify

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
embrace = torch.ops.embrace

V, D, d, B = 100, 8, 4, 6


class Builder:
    """A graph by hand: every call is run under the builder's fake mode, which gives its `meta["val"]`."""

    def __init__(self, mode: FakeTensorMode | None = None, root: dict[str, Any] | None = None) -> None:
        self.graph = fx.Graph()
        self.mode = mode or FakeTensorMode(shape_env=ShapeEnv())
        self.root = root or {}

    def input(self, name: str, role: InputRole, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        with self.mode:
            return self._placeholder(name, role, torch.empty(shape, dtype=dtype))

    def dynamic_input(self, name: str, role: InputRole, *shape: int) -> fx.Node:
        """All of its sizes are symbols."""
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(shape))
        return self._placeholder(name, role, self.mode.from_tensor(torch.empty(shape), symbolic_context=context))

    def saved(self, node: fx.Node) -> fx.Node:
        """A value that an earlier phase, with the same fake mode, saves."""
        return self._placeholder(node.name, Saved(node.name), node.meta["val"])

    def _placeholder(self, name: str, role: InputRole, value: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta.update(role=role, val=value)
        return node

    def constant(self, name: str) -> fx.Node:
        return self.graph.get_attr(name)

    def call(self, op: Callable[..., object], *args: Any, name: str | None = None) -> fx.Node:
        node = self.graph.create_node("call_function", op, args, name=name)
        with self.mode, torch.no_grad():
            node.meta["val"] = op(*fx.map_arg(args, self._value))
        return node

    def _value(self, node: fx.Node) -> Any:
        if "val" in node.meta:
            return node.meta["val"]
        return self.mode.from_tensor(self.root[str(node.target)], static_shapes=True)

    def done(self, *outputs: tuple[fx.Node | None, OutputRole]) -> TrainingGraph:
        node = self.graph.output(tuple(value for value, _ in outputs))
        node.meta["roles"] = tuple(role for _, role in outputs)
        module = fx.GraphModule(self.root, self.graph)
        for name, value in self.root.items():
            setattr(module, name, value)
        return TrainingGraph(module)


def dense_graph(reduce: Any = c10d.all_reduce_.default, batch: int = B) -> TrainingGraph:
    """Results x @ w and bias; the two gradients in one bucket; a running sum mutated."""
    b = Builder()
    w, bias = b.input("w", Parameter("w"), D, D), b.input("bias", Parameter("bias"), D)
    total = b.input("total", Buffer("total"), D)
    x, tangent = b.input("x", BatchInput(0), batch, D), b.input("tangent", Tangent(0), batch, D)
    y = b.call(aten.add.Tensor, b.call(aten.mm.default, x, w, name="mm"), bias, name="y")
    new_total = b.call(aten.add.Tensor, total, b.call(aten.sum.dim_IntList, y, [0]), name="new_total")
    grad_w = b.call(aten.mm.default, b.call(aten.t.default, x), tangent, name="grad_w")
    grad_bias = b.call(aten.sum.dim_IntList, tangent, [0], name="grad_bias")
    bucket = b.call(embrace.pack_bucket.default, [grad_w, grad_bias], 0.5, name="bucket")
    reduced = b.call(reduce, bucket, "sum", "dense", name="reduced")
    done = b.call(c10d.wait_tensor.default, reduced, name="done")
    parts = b.call(embrace.unpack_bucket.default, done, [w, bias], name="parts")
    mean_w, mean_bias = (b.call(operator.getitem, parts, k, name=f"mean_{k}") for k in range(2))
    return b.done(
        (new_total, Mutation(Buffer("total"))),
        (y, Result(0)),
        (b.call(aten.relu.default, y, name="z"), Result(1)),
        (mean_w, Gradient(Parameter("w"))),
        (mean_bias, Gradient(Parameter("bias"))),
    )


def table_graph(table: str = "t", batch: int = B, group_size: int = 2) -> TrainingGraph:
    """One sharded table: ids, rows and gradients travel."""
    b = Builder()
    ids_phase(b, shard := b.input("shard", Shard(table), V, d), batch)
    tangent = b.input("tangent", Tangent(0), batch, D)
    return b.done(*table_forward(b, shard, group_size), *table_backward(b, tangent, table))


def ids_phase(b: Builder, before: fx.Node | None, batch: int) -> list[fx.Node]:
    x = b.input("x", BatchInput(0), batch, dtype=torch.int64)
    found = b.call(embrace.unique_ids.default, [x], V, -1, name="found")
    unique, where = (b.call(operator.getitem, found, k, name=("unique", "where")[k]) for k in range(2))
    launch = b.call(embrace.all_gather_ids.default, [unique], [V], "ids", 2, name="gathered")
    packed = b.call(c10d.wait_tensor.default, launch, name="packed")
    unpacked = b.call(embrace.unpack_ids.default, packed, 1, 2, name="unpacked")
    ids, counts = (b.call(operator.getitem, unpacked, k, name=("ids", "counts")[k]) for k in range(2))
    return [where, ids, counts]


def named(b: Builder, *names: str) -> list[fx.Node]:
    by_name = {node.name: node for node in b.graph.nodes}
    return [by_name[name] for name in names]


def table_forward(b: Builder, shard: fx.Node, group_size: int = 2) -> list[tuple[fx.Node, OutputRole]]:
    where, ids, counts = named(b, "where", "ids", "counts")
    columns = b.call(embrace.lookup.default, shard, ids, name="columns")
    # The embedding chain is the only one whose group size a test varies.
    launch = b.call(embrace.all_to_all_rows.default, columns, counts, D, "embedding", group_size, name="sent_rows")
    rows = b.call(embrace.join_columns.default, b.call(c10d.wait_tensor.default, launch), D, 2, name="rows")
    return [(b.call(aten.embedding.default, rows, where, name="embedding"), Result(0))]


def table_backward(b: Builder, tangent: fx.Node, table: str) -> list[tuple[fx.Node, OutputRole]]:
    where, ids, counts, rows = named(b, "where", "ids", "counts", "rows")
    num_rows = b.call(aten.sym_size.int, rows, 0, name="num_rows")
    grad = b.call(aten.embedding_dense_backward.default, tangent, where, num_rows, -1, False, name="grad")
    flat = b.call(embrace.split_columns.default, grad, 2, name="flat")
    launch = b.call(embrace.all_to_all_gradients.default, flat, counts, D, "embedding", 2, name="sent_gradients")
    received = b.call(c10d.wait_tensor.default, launch, name="received")
    update = b.call(embrace.coalesce.default, ids, received, d, -1, 0.5, name="update")
    parts = [b.call(operator.getitem, update, k, name=f"update_{k}") for k in range(2)]
    return [(parts[0], RowGradient(table, "ids")), (parts[1], RowGradient(table, "rows"))]


def two_tables_graph(order: tuple[int, int] = (0, 1)) -> TrainingGraph:
    """One exchange of ids for the tables "t0" and "t1", unpacked in the given order."""
    b = Builder()
    shards = [b.input(f"shard_{k}", Shard(f"t{k}"), V, d) for k in range(2)]
    unique = [b.input(f"unique_{k}", BatchInput(k), B, dtype=torch.int64) for k in range(2)]
    launch = b.call(embrace.all_gather_ids.default, unique, [V, V], "ids", 2, name="gathered")
    packed = b.call(c10d.wait_tensor.default, launch, name="packed")
    unpacked = b.call(embrace.unpack_ids.default, packed, 2, 2, name="unpacked")
    ids = {k: b.call(operator.getitem, unpacked, 2 * k) for k in order}
    rows = [b.call(embrace.lookup.default, shards[k], ids[k], name=f"rows_{k}") for k in range(2)]
    return b.done((rows[0], Result(0)), (rows[1], Result(1)))


def partitioned_graph() -> TrainingGraph:
    """`table_graph`, and its phases: each begins with what the ones before it save."""
    joint = table_graph()
    mode = joint.node("x").meta["val"].fake_mode
    ids = Builder(mode)
    saved = ids_phase(ids, None, B)
    ids_module = ids.done(*((node, Saved(node.name)) for node in saved))
    forward = Builder(mode)
    shard = forward.input("shard", Shard("t"), V, d)
    for node in saved:
        forward.saved(node)
    results = table_forward(forward, shard)
    (rows,) = named(forward, "rows")
    forward_module = forward.done(*results, (rows, Saved("rows")))
    backward = Builder(mode)
    tangent = backward.input("tangent", Tangent(0), B, D)
    for node in (*saved, rows):
        backward.saved(node)
    backward_module = backward.done(*table_backward(backward, tangent, "t"))
    phases = {"ids": ids_module.module, "forward": forward_module.module, "backward": backward_module.module}
    return TrainingGraph(joint.module, phases=phases)


def dynamic_graph() -> TrainingGraph:
    """The batch's size is a symbol, arithmetic on it reaches an op; a constant is read; a gradient does not exist."""
    b = Builder(root={"scale": torch.ones(D)})
    x = b.dynamic_input("x", BatchInput(0), B, D)
    rows = b.call(aten.sym_size.int, x, 0, name="rows")
    columns = b.call(aten.sym_size.int, x, 1, name="columns")
    elements = b.call(operator.mul, rows, columns, name="elements")
    flat = b.call(aten.view.default, x, [elements], name="flat")
    found = b.call(aten.nonzero.default, flat, name="found")
    scaled = b.call(aten.mul.Tensor, b.constant("scale"), 2.0, name="scaled")
    return b.done((found, Result(0)), (scaled, Result(1)), (None, Gradient(BatchInput(0))))


LEGAL = {
    "reduced in place": dense_graph,
    "reduced": lambda: dense_graph(c10d.all_reduce.default),
    "sharded table": table_graph,
    "two tables": two_tables_graph,
    "partitioned": partitioned_graph,
    "symbolic sizes, constants": dynamic_graph,
}


@pytest.mark.parametrize("make", LEGAL.values(), ids=LEGAL.keys())
def test_legal_graph_passes(make: Callable[[], TrainingGraph]) -> None:
    graph = make()
    verify(graph, after="captured")
    verify(graph.edit(), after="Nothing", captured=graph, previous=graph)


# ---- graphs broken by hand ----

Break = Callable[[TrainingGraph], TrainingGraph | None]


def use_before_definition(graph: TrainingGraph) -> None:
    graph.node("y").append(graph.node("mm"))


def use_of_another_graph(graph: TrainingGraph) -> None:
    graph.node("y").update_arg(0, dense_graph().node("mm"))


def no_output(graph: TrainingGraph) -> None:
    graph.graph.erase_node(graph.graph.output_node())


def opaque_python(graph: TrainingGraph) -> None:
    graph.node("z").target = torch.relu


def arithmetic_on_tensors(graph: TrainingGraph) -> None:
    graph.node("y").target = operator.add


def placeholder_without_role(graph: TrainingGraph) -> None:
    del graph.node("w").meta["role"]


def untied(graph: TrainingGraph) -> None:
    graph.node("bias").meta["role"] = Parameter("w")


def output_without_role(graph: TrainingGraph) -> None:
    graph.graph.output_node().meta["roles"] = graph.graph.output_node().meta["roles"][:-1]


def result_without_value(graph: TrainingGraph) -> None:
    set_outputs(graph.module, [(None if role == Result(0) else value, role) for value, role in graph.outputs()])


def saved_by_nobody(graph: TrainingGraph) -> TrainingGraph:
    return TrainingGraph(graph.module, phases={name: graph.phases[name] for name in ("ids", "backward")})


def no_wait(graph: TrainingGraph) -> None:
    graph.node("done").replace_all_uses_with(graph.node("bucket"))
    graph.graph.erase_node(graph.node("done"))


def two_waits(graph: TrainingGraph) -> None:
    done = graph.node("done")
    with graph.graph.inserting_after(done):
        graph.graph.node_copy(done)
    again = done.next
    again.args = done.args
    graph.node("parts").replace_input_with(done, again)


def wait_for_a_value(graph: TrainingGraph) -> None:
    with graph.graph.inserting_before(graph.node("bucket")):
        wait = graph.graph.call_function(c10d.wait_tensor.default, (graph.node("grad_w"),))
    wait.meta["val"] = graph.node("grad_w").meta["val"]


def read_in_flight(graph: TrainingGraph) -> None:
    graph.node("parts").replace_input_with(graph.node("done"), graph.node("reduced"))


def read_what_is_reduced_in_place(graph: TrainingGraph) -> None:
    graph.node("parts").replace_input_with(graph.node("done"), graph.node("bucket"))


def read_a_view_of_it(graph: TrainingGraph) -> None:
    bucket = graph.node("bucket")
    with graph.graph.inserting_after(bucket):
        view = graph.graph.call_function(aten.view.default, (bucket, [-1]))
    view.meta["val"] = bucket.meta["val"]
    graph.node("reduced").replace_input_with(bucket, view)
    graph.node("parts").replace_input_with(graph.node("done"), bucket)


def reduce_an_input_in_place(graph: TrainingGraph) -> None:
    graph.node("reduced").replace_input_with(graph.node("bucket"), graph.node("w"))


def result_from_tangent(graph: TrainingGraph) -> None:
    graph.node("z").replace_input_with(graph.node("y"), graph.node("tangent"))


def mutation_from_tangent(graph: TrainingGraph) -> None:
    graph.node("new_total").update_arg(1, graph.node("grad_bias"))
    graph.node("reduced").prepend(graph.node("new_total"))


def tangent_in_the_forward(graph: TrainingGraph) -> None:
    b = Builder(graph.node("x").meta["val"].fake_mode)
    b.input("tangent", Tangent(0), B, D)
    graph.phases["ids"] = b.done().module


def wrong_shape(graph: TrainingGraph) -> None:
    graph.node("z").meta["val"] = graph.node("grad_w").meta["val"]


def wrong_dtype(graph: TrainingGraph) -> None:
    graph.node("z").meta["val"] = graph.node("z").meta["val"].double()


def no_value(graph: TrainingGraph) -> None:
    del graph.node("z").meta["val"]


def inputs_that_do_not_fit(graph: TrainingGraph) -> None:
    graph.node("mm").update_arg(1, graph.node("bias"))


def size_not_known_in_truth(graph: TrainingGraph) -> None:
    ids = graph.node("gathered").meta["val"]
    for name in ("gathered", "packed"):
        graph.node(name).meta["val"] = ids.new_empty((B,))


def two_sizes_for_one(graph: TrainingGraph) -> None:
    graph.node("update").meta["val"] = [graph.node("ids").meta["val"], *graph.node("update").meta["val"][1:]]


def one_size_for_two(graph: TrainingGraph) -> None:
    first, counts, *_ = graph.node("unpacked").meta["val"]
    graph.node("unpacked").meta["val"] = [first, counts, first, counts]
    for node in graph.node("unpacked").users:
        node.meta["val"] = first
    graph.node("rows_1").meta["val"] = graph.node("rows_0").meta["val"]


def other_symbol(graph: TrainingGraph) -> None:
    x = graph.node("x").meta["val"]
    graph.node("flat").meta["val"] = x.new_empty((x.shape[0] * x.shape[0],))


def no_gradient(graph: TrainingGraph) -> None:
    set_outputs(graph.module, [(v, r) for v, r in graph.outputs() if r != Gradient(Parameter("w"))])


def two_gradients(graph: TrainingGraph) -> None:
    set_outputs(graph.module, [*graph.outputs(), (graph.node("mean_0"), Gradient(Parameter("w")))])


def dense_and_rows(graph: TrainingGraph) -> None:
    set_outputs(graph.module, [*graph.outputs(), (graph.node("grad"), Gradient(Parameter("t")))])


def rows_without_ids(graph: TrainingGraph) -> None:
    set_outputs(graph.module, [(v, r) for v, r in graph.outputs() if r != RowGradient("t", "ids")])


def mutation_lost(graph: TrainingGraph) -> None:
    set_outputs(graph.module, [(v, r) for v, r in graph.outputs() if not isinstance(r, Mutation)])


def results_swapped(graph: TrainingGraph) -> None:
    outputs = list(graph.outputs())
    set_outputs(graph.module, [outputs[0], outputs[2], outputs[1], *outputs[3:]])


def groups_of_two_sizes(graph: TrainingGraph) -> TrainingGraph:
    return table_graph(group_size=3)


def all_reduce_of_the_batch(graph: TrainingGraph) -> None:
    flat, found = graph.node("flat"), graph.node("found")
    with graph.graph.inserting_before(found):
        launch = graph.graph.call_function(c10d.all_reduce.default, (flat, "sum", "dense"))
        wait = graph.graph.call_function(c10d.wait_tensor.default, (launch,))
    launch.meta["val"] = wait.meta["val"] = flat.meta["val"]
    found.replace_input_with(flat, wait)


def option_from_the_batch(graph: TrainingGraph) -> None:
    with graph.graph.inserting_before(graph.node("columns")):
        size = graph.graph.call_function(aten.sym_size.int, (graph.node("x"), 0))
    size.meta["val"] = graph.node("x").meta["val"].shape[0]
    graph.node("sent_rows").update_arg(2, size)


def launch_lost_in_partition(graph: TrainingGraph) -> TrainingGraph:
    b = Builder(graph.node("x").meta["val"].fake_mode)
    parts = [b.input("i", BatchInput(1), 3, dtype=torch.int64), b.input("r", BatchInput(2), 3, d)]
    gradients = b.done((parts[0], RowGradient("t", "ids")), (parts[1], RowGradient("t", "rows"))).module
    return TrainingGraph(graph.module, phases={**graph.phases, "backward": gradients})


BROKEN: list[tuple[str, Callable[[], TrainingGraph], Break]] = [
    ("definitions_before_uses", dense_graph, use_before_definition),
    ("definitions_before_uses", dense_graph, use_of_another_graph),
    ("definitions_before_uses", dense_graph, no_output),
    ("known_targets", dense_graph, opaque_python),
    ("known_targets", dense_graph, arithmetic_on_tensors),
    ("values_have_roles", dense_graph, placeholder_without_role),
    ("values_have_roles", dense_graph, untied),
    ("values_have_roles", dense_graph, output_without_role),
    ("values_have_roles", dense_graph, result_without_value),
    ("values_have_roles", partitioned_graph, saved_by_nobody),
    ("launches_and_waits_paired", dense_graph, no_wait),
    ("launches_and_waits_paired", dense_graph, two_waits),
    ("launches_and_waits_paired", dense_graph, wait_for_a_value),
    ("in_flight_values_unread", dense_graph, read_in_flight),
    ("in_flight_values_unread", dense_graph, read_what_is_reduced_in_place),
    ("in_flight_values_unread", dense_graph, read_a_view_of_it),
    ("in_flight_values_unread", dense_graph, reduce_an_input_in_place),
    ("forward_free_of_tangents", dense_graph, result_from_tangent),
    ("forward_free_of_tangents", dense_graph, mutation_from_tangent),
    ("forward_free_of_tangents", partitioned_graph, tangent_in_the_forward),
    ("values_agree", dense_graph, wrong_shape),
    ("values_agree", dense_graph, wrong_dtype),
    ("values_agree", dense_graph, no_value),
    ("values_agree", dense_graph, inputs_that_do_not_fit),
    ("values_agree", table_graph, size_not_known_in_truth),
    ("values_agree", table_graph, two_sizes_for_one),
    ("values_agree", two_tables_graph, one_size_for_two),
    ("values_agree", dynamic_graph, other_symbol),
    ("parameters_updated_once", dense_graph, no_gradient),
    ("parameters_updated_once", dense_graph, two_gradients),
    ("parameters_updated_once", table_graph, dense_and_rows),
    ("parameters_updated_once", table_graph, rows_without_ids),
    ("forward_kept", dense_graph, mutation_lost),
    ("forward_kept", dense_graph, results_swapped),
    ("collectives_in_one_order", table_graph, groups_of_two_sizes),
    ("collectives_in_one_order", dynamic_graph, all_reduce_of_the_batch),
    ("collectives_in_one_order", table_graph, option_from_the_batch),
    ("collectives_in_one_order", partitioned_graph, launch_lost_in_partition),
]


@pytest.mark.parametrize(("invariant", "make", "break_it"), BROKEN, ids=[b.__name__ for _, _, b in BROKEN])
def test_broken_graph_names_its_invariant(invariant: str, make: Callable[[], TrainingGraph], break_it: Break) -> None:
    captured = make()
    broken = captured.edit()
    broken = break_it(broken) or broken
    told = rf"^{invariant}: expected .*; in pass Breaking.*; found .*\. To mend it: "
    with pytest.raises(VerificationError, match=told):
        verify(broken, after="Breaking", captured=captured)


def test_ten_invariants_have_a_broken_graph() -> None:
    assert len({invariant for invariant, _, _ in BROKEN}) == 10


def test_message_says_where() -> None:
    graph = dense_graph()
    graph.node("z").meta["stack_trace"] = '  File "model.py", line 12, in forward\n    return y.relu()\n'
    wrong_dtype(graph)
    with pytest.raises(VerificationError) as raised:
        verify(graph, after="Cast")
    assert str(raised.value) == (
        "values_agree: expected float32[6, 8] on cpu; in pass Cast, joint graph, node z, model.py:12 in forward; "
        "found float64[6, 8] on cpu. To mend it: compute the value by running the op on its inputs' values under the "
        "graph's fake mode."
    )


# ---- what is derived again, and what is left behind ----


def test_values_shared_with_a_verified_graph_are_not_derived_again() -> None:
    before = dense_graph()
    wrong_dtype(before)
    after = before.edit()
    verify(after, after="Pass", previous=before)  # trusted: it says that `before` was verified
    after.node("z").target = aten.neg.default
    with pytest.raises(VerificationError, match=r"^values_agree: .* node z"):
        verify(after, after="Pass", previous=before)


def test_nodes_that_read_other_values_are_derived_again() -> None:
    before = dense_graph()
    verify(before, after="captured")
    after = before.edit()
    after.node("z").replace_input_with(after.node("y"), after.node("w"))
    with pytest.raises(VerificationError, match=r"^values_agree: .* node z"):
        verify(after, after="Pass", previous=before)


def shape_env_state(graph: TrainingGraph) -> tuple[int, int, int, str]:
    env = graph.node("x").meta["val"].fake_mode.shape_env
    pending = len(env.pending_fresh_unbacked_symbols)
    return len(env.guards), pending, env.num_deferred_runtime_asserts, str(env.replacements)


def test_no_symbols_are_left_behind() -> None:
    graph = table_graph()
    before = shape_env_state(graph)
    verify(graph, after="captured")
    assert shape_env_state(graph) == before


def test_no_guards_are_left_behind() -> None:
    graph = dynamic_graph()
    graph.node("flat").update_arg(1, [2, B * D // 2])  # holds only where the batch has this many elements
    before = shape_env_state(graph)
    with pytest.raises(VerificationError, match=r"^values_agree: .* node flat"):
        verify(graph, after="View")
    assert shape_env_state(graph) == before


def test_no_fake_mode_stays_on_after_a_violation() -> None:
    graph = dense_graph()
    wrong_dtype(graph)
    with pytest.raises(VerificationError) as raised:
        verify(graph, after="Cast")
    assert raised.tb is not None  # the frames of the verifier are still alive
    assert not isinstance(torch.ones(1), FakeTensor)


# ---- the order of collectives ----


def test_sequence_tells_group_op_table_and_bucket() -> None:
    told = [(c.group, c.op.partition("::")[2], c.serves, c.shape) for c in collective_sequence(table_graph())]
    assert told == [
        ("ids", "all_gather_ids", ("t",), None),
        ("embedding", "all_to_all_rows", ("t",), None),
        ("embedding", "all_to_all_gradients", ("t",), None),
    ]
    (bucket,) = collective_sequence(dense_graph())
    assert (bucket.group, bucket.serves, bucket.shape) == ("dense", ("w", "bias"), (str(D * D + D),))


def test_tables_are_told_in_the_order_of_packing() -> None:
    sequence = collective_sequence(two_tables_graph())
    assert sequence[0].serves == ("t0", "t1")
    assert collective_sequence(two_tables_graph(order=(1, 0))) == sequence


def test_sequence_of_the_phases_is_that_of_the_joint_graph() -> None:
    graph = partitioned_graph()
    assert collective_sequence(graph) == collective_sequence(TrainingGraph(graph.module))


@pytest.mark.parametrize("make", [dense_graph, table_graph])
def test_hash_depends_neither_on_names_nor_on_the_batch(make: Callable[..., TrainingGraph]) -> None:
    graph = make()
    renamed = graph.edit()
    for k, node in enumerate(renamed.graph.nodes):
        node._rename(f"n{k}")
    assert sequence_hash(graph) == sequence_hash(renamed) == sequence_hash(make(batch=2 * B))


def swap_launches(graph: TrainingGraph) -> None:
    first, second = (node for node in graph.graph.nodes if node.target is c10d.all_reduce.default)
    first.prepend(second)


def two_reductions(names: tuple[str, str] = ("v", "w"), group: str = "dense", rows: int = D) -> TrainingGraph:
    b = Builder()
    tangents = [b.input(f"tangent_{k}", Tangent(k), rows, D) for k in range(2)]
    launches = [b.call(c10d.all_reduce.default, tangent, "sum", group) for tangent in tangents]
    waits = [b.call(c10d.wait_tensor.default, launch) for launch in launches]
    return b.done(*((wait, Gradient(Parameter(name))) for wait, name in zip(waits, names, strict=True)))


def test_hash_tells_other_launches_apart() -> None:
    swapped = two_reductions()
    swap_launches(swapped)
    verify(swapped, after="Swap")
    others = [
        two_reductions(),
        swapped,
        two_reductions(names=("v", "u")),
        two_reductions(group="delayed"),
        two_reductions(rows=D + 1),
    ]
    assert len({sequence_hash(graph) for graph in others}) == len(others)
