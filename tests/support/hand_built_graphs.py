"""Small graphs built by hand, node by node, for tests of the verifier and of what a graph launches.

Shape legend
    B batch; D columns of the table, d = D / 2 of them this rank's; V its rows; U, R, K as in
    `embrace_fx.vocabulary.ops`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import embrace_fx.vocabulary.again_ops
import embrace_fx.vocabulary.ops  # noqa: F401  (declares the ops)
from embrace_fx.passes.overlap.rows import SubmitRows
from embrace_fx.vocabulary.copy_ops import offload_id, reload_id
from embrace_fx.vocabulary.graph import (
    BatchInput,
    Buffer,
    Gradient,
    GradientOfRows,
    InputRole,
    Mutation,
    OutputRole,
    Parameter,
    Result,
    Saved,
    Shard,
    Tangent,
    TrainingGraph,
)
from embrace_fx.vocabulary.operation_id import OperationId

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
        """Adds an input with symbolic sizes."""
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(shape))
        return self._placeholder(name, role, self.mode.from_tensor(torch.empty(shape), symbolic_context=context))

    def saved(self, node: fx.Node) -> fx.Node:
        """Adds an input for a value that an earlier phase saves."""
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

    def again(self, node: fx.Node, *args: Any) -> fx.Node:
        """Adds a node that computes another one again."""
        assert callable(node.target)
        copied = self.call(node.target, *args, name=f"{node.name}_again")
        copied.meta["again"] = node.name
        return copied

    def copy(self, op: Callable[..., object], value: fx.Node, of: OperationId, name: str) -> fx.Node:
        """Adds a node that begins or awaits the copy `of`."""
        node = self.call(op, value, str(of), name=name)
        node.meta["launch"] = of
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
    update = b.call(embrace.coalesce.default, ids, received, d, [], 0.5, name="update")
    parts = [b.call(operator.getitem, update, k, name=f"update_{k}") for k in range(2)]
    return [(parts[0], GradientOfRows(table, "ids")), (parts[1], GradientOfRows(table, "rows"))]


def two_tables_graph() -> TrainingGraph:
    """One exchange of ids for the tables "t0" and "t1"."""
    b = Builder()
    shards = [b.input(f"shard_{k}", Shard(f"t{k}"), V, d) for k in range(2)]
    unique = [b.input(f"unique_{k}", BatchInput(k), B, dtype=torch.int64) for k in range(2)]
    launch = b.call(embrace.all_gather_ids.default, unique, [V, V], "ids", 2, name="gathered")
    packed = b.call(c10d.wait_tensor.default, launch, name="packed")
    unpacked = b.call(embrace.unpack_ids.default, packed, 2, 2, name="unpacked")
    ids = {k: b.call(operator.getitem, unpacked, 2 * k) for k in range(2)}
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


def overlapped_graph() -> TrainingGraph:
    """`partitioned_graph`, its row gradient handed over to the launcher."""
    return SubmitRows()(partitioned_graph())


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


def memory_graph() -> TrainingGraph:
    """What the backward computes again: two draws, and a sum with a buffer that the forward writes. The sum leaves
    memory meanwhile.
    """
    b = Builder()
    cpu, total, x = torch.device("cpu"), b.input("total", Buffer("total"), B, D), b.input("x", BatchInput(0), B, D)
    tangent, unwritten = b.input("tangent", Tangent(0), B, D), b.call(embrace.copy_unwritten.default, total, name="old")
    states, draws = [], []
    for k in range(2):
        states.append(b.call(embrace.random_state.default, cpu, name=f"state_{k}"))
        draws.append(b.call(aten.bernoulli.p, x, 0.5, name=f"draw_{k}"))
    h = b.call(aten.add.Tensor, total, b.call(aten.mul.Tensor, *draws, name="mask"), name="h")
    view = b.call(aten.view.default, h, [B, D], name="view")
    result = b.call(aten.relu.default, view, name="result")
    out, back = offload_id("h"), reload_id("h")
    stored = b.copy(embrace.await_offload.default, b.copy(embrace.offload.default, h, out, "leaving"), out, "stored")
    new_total = b.call(aten.add.Tensor, total, x, name="new_total")
    now = b.call(embrace.begin_replay.default, states[0], cpu, name="now")
    again = [b.again(draw, x, 0.5) for draw in draws]
    b.call(embrace.end_replay.default, now, cpu, name="end")
    b.again(h, unwritten, b.again(*named(b, "mask"), *again))
    returned = b.copy(
        embrace.await_reload.default, b.copy(embrace.reload.default, stored, back, "coming"), back, "back"
    )
    scaled = b.call(aten.mul.Tensor, tangent, named(b, "h_again")[0], name="scaled")
    gradient = b.call(aten.mul.Tensor, scaled, returned, name="gradient")
    results = (new_total, Mutation(Buffer("total"))), (result, Result(0))
    return b.done(*results, (gradient, Gradient(BatchInput(0))))


def widen_z(graph: TrainingGraph) -> None:
    """Breaks a `dense_graph`: its second result's fake value is of another dtype than the op yields."""
    graph.node("z").meta["val"] = graph.node("z").meta["val"].double()
