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
from torch import Tensor, fx
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
    copy_module,
    set_outputs,
)
from embrace_fx.passes.collectives import collective_sequence, sequence_hash
from embrace_fx.passes.relax import RelaxDependences
from embrace_fx.passes.verify import _OF_A_MODULE, _OF_THE_GRAPH, VerificationError, verify

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
    shard = b.input("shard", Shard(table), V, d)
    ids_phase(b, batch)
    tangent = b.input("tangent", Tangent(0), batch, D)
    return b.done(*table_forward(b, shard, group_size), *table_backward(b, tangent, table))


def ids_phase(b: Builder, batch: int) -> list[fx.Node]:
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
    saved = ids_phase(ids, B)
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


def relaxed_graph() -> TrainingGraph:
    """`partitioned_graph`, its row gradient handed over to the launcher."""
    return RelaxDependences((), horizontal=True)(partitioned_graph())


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
    "relaxed": relaxed_graph,
    "symbolic sizes, constants": dynamic_graph,
}


def complaint(graph: TrainingGraph, after: str, **given: TrainingGraph) -> str | None:
    """What the verifier says; None of a graph that it finds legal."""
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


# ---- graphs broken by hand ----

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
    """A new node with the value of another one."""
    with graph.graph.inserting_before(graph.node(before)):
        node = graph.graph.call_function(op, args)
    node.meta["val"] = like.meta["val"]
    return node


def widen_z(graph: TrainingGraph) -> None:
    graph.node("z").meta["val"] = graph.node("z").meta["val"].double()


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
    """Its role stays, what submits it does not."""
    backward = copy_module(graph.phases["backward"])
    (submitted,) = backward.graph.find_nodes(op="call_function", target=embrace.submit_rows.default)
    (role,) = backward.graph.output_node().meta["roles"]
    set_outputs(backward, [(submitted.args[0], role)])
    backward.graph.erase_node(submitted)
    return TrainingGraph(graph.module, phases={**graph.phases, "backward": backward})


def rows_awaited_twice(graph: TrainingGraph) -> TrainingGraph:
    forward = copy_module(graph.phases["forward"])
    (awaited,) = forward.graph.find_nodes(op="call_function", target=embrace.await_rows.default)
    with forward.graph.inserting_after(awaited):
        again = forward.graph.node_copy(awaited)
    again.meta["val"] = awaited.meta["val"]
    return TrainingGraph(graph.module, phases={**graph.phases, "forward": forward})


def launch_lost_in_partition(graph: TrainingGraph) -> TrainingGraph:
    b = Builder(graph.node("x").meta["val"].fake_mode)
    parts = [b.input("i", BatchInput(1), 3, dtype=torch.int64), b.input("r", BatchInput(2), 3, d)]
    gradients = b.done((parts[0], RowGradient("t", "ids")), (parts[1], RowGradient("t", "rows"))).module
    return TrainingGraph(graph.module, phases={**graph.phases, "backward": gradients})


BROKEN: dict[str, dict[str, tuple[Callable[[], TrainingGraph], Break]]] = {
    "definitions_before_uses": {
        "use before definition": (dense_graph, lambda graph: graph.node("y").append(graph.node("mm"))),
        "use of another graph": (dense_graph, lambda g: g.node("y").update_arg(0, dense_graph().node("mm"))),
        "no output": (dense_graph, lambda graph: graph.graph.erase_node(graph.graph.output_node())),
    },
    "known_targets": {
        "opaque Python": (dense_graph, calls("z", torch.relu)),
        "arithmetic on tensors": (dense_graph, calls("y", operator.add)),
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
        "another dtype": (dense_graph, widen_z),
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
        "rows without ids": (table_graph, without(RowGradient("t", "ids"))),
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
    "handed_over_once": {
        "a row gradient that is not submitted": (relaxed_graph, lost_row_gradient),
        "rows awaited twice": (relaxed_graph, rows_awaited_twice),
    },
}


@pytest.mark.parametrize(
    ("invariant", "name"),
    [pytest.param(invariant, name, id=name) for invariant, broken in BROKEN.items() for name in broken],
)
def test_broken_graph_names_its_invariant(invariant: str, name: str) -> None:
    make, break_it = BROKEN[invariant][name]
    captured = make()
    broken = captured.edit()
    broken = break_it(broken) or broken
    told = rf"^{invariant}: expected .*; in pass Breaking.*; found .*\. To mend it: "
    with pytest.raises(VerificationError, match=told):
        verify(broken, after="Breaking", captured=captured)


def test_every_invariant_has_a_broken_graph() -> None:
    assert list(BROKEN) == [check.__name__ for check in (*_OF_A_MODULE, *_OF_THE_GRAPH)]


def test_message_says_where() -> None:
    graph = dense_graph()
    graph.node("z").meta["stack_trace"] = '  File "model.py", line 12, in forward\n    return y.relu()\n'
    widen_z(graph)
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
    widen_z(before)
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
    widen_z(graph)
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


def two_reductions(names: tuple[str, str] = ("v", "w"), group: str = "dense", rows: int = D) -> TrainingGraph:
    b = Builder()
    tangents = [b.input(f"tangent_{k}", Tangent(k), rows, D) for k in range(2)]
    launches = [b.call(c10d.all_reduce.default, tangent, "sum", group) for tangent in tangents]
    waits = [b.call(c10d.wait_tensor.default, launch) for launch in launches]
    return b.done(*((wait, Gradient(Parameter(name))) for wait, name in zip(waits, names, strict=True)))


def test_hash_tells_other_launches_apart() -> None:
    swapped = two_reductions()
    first, second = swapped.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    first.prepend(second)
    verify(swapped, after="Swap")
    others = [
        two_reductions(),
        swapped,
        two_reductions(names=("v", "u")),
        two_reductions(group="delayed"),
        two_reductions(rows=D + 1),
    ]
    assert len({sequence_hash(graph) for graph in others}) == len(others)
