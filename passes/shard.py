"""Hybrid communication: tables in column shards, their rows by AlltoAll (EmbRace, ICPP 2022, section 3).

Contract
    For each table of `tables`: the parameter becomes this rank's columns, every lookup reads the batch's unique rows,
    and the gradient leaves as coalesced rows of the own columns. The loss and every other gradient are unchanged.
    The ids of all tables travel in one exchange, at the head of the graph.

    rewrite, one table, lookup ids `x`:
        embedding = aten.embedding(weight, x, pad)
        ...
        grad_w = aten.embedding_dense_backward(g, x, V, pad, False)
        return (..., grad_w)                                          # Gradient(weight), V x D
    ->
        rows_of_batch, where = embrace.unique_ids([x], V, pad)
        ids, counts = embrace.unpack_ids(wait(embrace.all_gather_ids([rows_of_batch], [V], "ids", N)), 1, N)
        columns = embrace.lookup(weight_shard, ids)                   # R x d
        rows = embrace.join_columns(wait(embrace.all_to_all_rows(columns, counts, D, "embedding", N)), D, N)   # U x D
        embedding = aten.embedding(rows, where, 0)
        ...
        grad_rows = aten.embedding_dense_backward(g, where, U, 0, False)
        flat = wait(embrace.all_to_all_gradients(embrace.split_columns(grad_rows, N), counts, D, "embedding", N))
        ids_K, rows_Kd = embrace.coalesce(ids, flat, d, pad, 1 / N)
        return (..., ids_K, rows_Kd)                                  # RowGradient(weight, "ids" / "rows")
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

import embrace_fx.ops  # noqa: F401  (declares the ops)
from embrace_fx.graph import Gradient, OutputRole, Parameter, RowGradient, Shard, Table, TrainingGraph, set_outputs
from embrace_fx.ops import own_columns
from embrace_fx.passes.rewriter import Rewriter, first_after_placeholders, first_user
from embrace_fx.passes.tables import (
    LOOKUP_BACKWARDS,
    RENORM,
    SAMPLE_WEIGHTS_BACKWARD,
    argument,
    ids_cone,
    set_argument,
)

aten = torch.ops.aten
embrace = torch.ops.embrace


@dataclass(frozen=True)
class ShardTables:
    """Spreads the columns of `tables` over the ranks; gathers the ids of `renormed` ones, which stay whole.

    Attributes:
        tables: parameter names, in the order of their exchange; equal on all ranks.
        renormed: data-parallel tables with `max_norm`: each rank rescales the rows that any rank reads, so that the
            replicas stay equal.
        rank, world_size: which columns are this rank's.
    """

    tables: tuple[str, ...]
    renormed: tuple[str, ...]
    rank: int
    world_size: int

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        if not self.tables and not self.renormed:
            return graph
        result = graph.edit()
        shard_tables(result, self)
        return result


@dataclass(frozen=True)
class _Ids:
    """The nodes one table's exchange of ids yields."""

    where: dict[fx.Node, fx.Node]
    all_ids: fx.Node
    counts: fx.Node


def shard_tables(graph: TrainingGraph, options: ShardTables) -> None:
    by_name = {table.parameter: table for table in graph.tables}
    rewriter = Rewriter(graph.module)
    exchanged = [by_name[name] for name in (*options.tables, *options.renormed)]
    ids = _exchange_ids(graph, rewriter, exchanged, options.world_size)
    outputs = list(graph.outputs())
    for name in options.tables:
        outputs = _shard(graph, rewriter, by_name[name], ids[name], outputs, options)
    for name in options.renormed:
        _renorm_everywhere(graph, by_name[name], ids[name])
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.module.recompile()


def _exchange_ids(graph: TrainingGraph, rewriter: Rewriter, tables: list[Table], world_size: int) -> dict[str, _Ids]:
    """One exchange for all tables, as early as the batch allows."""
    id_nodes = {table.parameter: list(dict.fromkeys(graph.node(use.ids) for use in table.uses)) for table in tables}
    head = _hoist([node for nodes in id_nodes.values() for node in nodes])
    uniques: list[fx.Node] = []
    wheres: dict[str, dict[fx.Node, fx.Node]] = {}
    with rewriter.before(head):
        for table in tables:
            nodes = id_nodes[table.parameter]
            short = short_name(table.parameter)
            found = rewriter.call(
                embrace.unique_ids.default, nodes, table.num_rows, table.uses[0].padding_idx, name=f"{short}_unique"
            )
            uniques.append(rewriter.item(found, 0, f"{short}_rows_of_batch"))
            wheres[table.parameter] = {
                node: rewriter.item(found, k + 1, f"{short}_where") for k, node in enumerate(nodes)
            }
        sizes = [table.num_rows for table in tables]
        launch = rewriter.call(embrace.all_gather_ids.default, uniques, sizes, "ids", world_size, name="ids")
        launch.meta["tables"] = tuple(table.parameter for table in tables)  # for messages
        packed = rewriter.wait(launch)
        unpacked = rewriter.call(embrace.unpack_ids.default, packed, len(tables), world_size, name="ids_by_table")
        found_ids = {}
        for k, table in enumerate(tables):
            short = short_name(table.parameter)
            all_ids = rewriter.item(unpacked, 2 * k, f"{short}_ids")
            counts = rewriter.item(unpacked, 2 * k + 1, f"{short}_counts")
            found_ids[table.parameter] = _Ids(wheres[table.parameter], all_ids, counts)
    return found_ids


def _hoist(nodes: list[fx.Node]) -> fx.Node:
    """Moves what computes `nodes` to the head of the graph; returns the node before which the exchange goes."""
    head = first_after_placeholders(nodes[0].graph)
    cones = (needed for node in nodes for needed in ids_cone(node))
    for needed in dict.fromkeys(cones):  # once each: a second move would put what they share behind its first users
        if needed is head:
            head = head.next
        else:
            head.prepend(needed)
    return head


def _shard(
    graph: TrainingGraph,
    rewriter: Rewriter,
    table: Table,
    ids: _Ids,
    outputs: list[tuple[fx.Node | None, OutputRole]],
    options: ShardTables,
) -> list[tuple[fx.Node | None, OutputRole]]:
    size = options.world_size
    short = short_name(table.parameter)
    weight = next(node for node, role in graph.inputs() if role == Parameter(table.parameter))
    first, last = own_columns(table.embedding_dim, size, options.rank)
    with rewriter.before(weight):
        shard = rewriter.placeholder(
            f"{weight.name}_shard", Shard(table.parameter), (table.num_rows, last - first), weight
        )
    with rewriter.before(latest_of(ids).next):
        columns = rewriter.call(embrace.lookup.default, shard, ids.all_ids, name=f"{short}_columns")
        launch = rewriter.call(
            embrace.all_to_all_rows.default,
            columns,
            ids.counts,
            table.embedding_dim,
            "embedding",
            size,
            name=f"{short}_rows",
        )
    with rewriter.before(first_user(weight)):
        flat = rewriter.wait(launch)
        rows = rewriter.call(embrace.join_columns.default, flat, table.embedding_dim, size, name=f"{short}_table")
    _read_rows(rewriter, weight, rows, ids, table)
    outputs = [(v, r) for v, r in outputs if r != Gradient(Parameter(table.parameter))] + _row_gradient(
        graph, rewriter, table, ids, rows, outputs, last - first, options
    )
    set_outputs(graph.module, outputs)
    graph.graph.erase_node(weight)
    return outputs


def latest_of(ids: _Ids) -> fx.Node:
    """The last node of the ids' exchange that a lookup needs."""
    return ids.counts


def _read_rows(rewriter: Rewriter, weight: fx.Node, rows: fx.Node, ids: _Ids, table: Table) -> None:
    """Every lookup reads the batch's rows instead of the table; ids become positions among them."""
    num_rows: fx.Node | None = None
    names = {name for use in table.uses for name in (use.lookup, *use.backward)}
    touched = [n for n in weight.graph.nodes if n.name in names]
    touched += [user for user in weight.users if user.target is SAMPLE_WEIGHTS_BACKWARD]
    for node in touched:
        indices = argument(node, "indices")
        set_argument(node, "indices", ids.where[indices])
        padding = argument(node, "padding_idx")
        if padding >= 0:
            set_argument(node, "padding_idx", 0)  # unique_ids puts the padding row first
        if node.target in LOOKUP_BACKWARDS:
            if num_rows is None:
                with rewriter.before(rows.next):
                    num_rows = rewriter.call(aten.sym_size.int, rows, 0, name=f"{rows.name}_rows")
            set_argument(node, "num_weights", num_rows)
    weight.replace_all_uses_with(rows, delete_user_cb=lambda user: user.op != "output")
    for node in touched:
        rewriter.refresh(node)


def _row_gradient(
    graph: TrainingGraph,
    rewriter: Rewriter,
    table: Table,
    ids: _Ids,
    rows: fx.Node,
    outputs: list[tuple[fx.Node | None, OutputRole]],
    own: int,
    options: ShardTables,
) -> list[tuple[fx.Node | None, OutputRole]]:
    gradient = next((v for v, r in outputs if r == Gradient(Parameter(table.parameter))), None)
    if gradient is None:
        return []
    _refresh_sum(rewriter, gradient)
    size = options.world_size
    short = short_name(table.parameter)
    with rewriter.before(gradient.next):
        flat = rewriter.call(embrace.split_columns.default, gradient, size, name=f"{short}_gradient_columns")
        launch = rewriter.call(
            embrace.all_to_all_gradients.default,
            flat,
            ids.counts,
            table.embedding_dim,
            "embedding",
            size,
            name=f"{short}_gradient",
        )
    with rewriter.before(graph.graph.output_node()):
        received = rewriter.wait(launch)
        coalesced = rewriter.call(
            embrace.coalesce.default,
            ids.all_ids,
            received,
            own,
            table.uses[0].padding_idx,
            1.0 / size,
            name=f"{short}_update",
        )
        ids_K = rewriter.item(coalesced, 0, f"{short}_update_ids")
        rows_Kd = rewriter.item(coalesced, 1, f"{short}_update_rows")
    return [(ids_K, RowGradient(table.parameter, "ids")), (rows_Kd, RowGradient(table.parameter, "rows"))]


def _refresh_sum(rewriter: Rewriter, gradient: fx.Node) -> None:
    """The sums over a table's lookups now have the batch's rows, not the table's."""
    if gradient.target is aten.add.Tensor:
        for term in gradient.all_input_nodes:
            _refresh_sum(rewriter, term)
        rewriter.refresh(gradient)


def _renorm_everywhere(graph: TrainingGraph, table: Table, ids: _Ids) -> None:
    """`max_norm` rescales, on every replica, the rows that any rank reads: each rank alone would rescale other ones."""
    for node in graph.graph.nodes:
        if node.target is RENORM and argument(node, "indices") in ids.where:
            weight = next(n for n, role in graph.inputs() if role == Parameter(table.parameter))
            if weight in _sources(node):
                set_argument(node, "indices", ids.all_ids)


def _sources(node: fx.Node) -> list[fx.Node]:
    """The chain of copies and earlier renorms a renorm reads, up to the parameter."""
    chain = [node]
    while chain[-1].op == "call_function" and chain[-1].all_input_nodes:
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def short_name(parameter: str) -> str:
    """A node name for a table: its parameter's name without the trailing `.weight`.

    >>> short_name("encoder.embedding.weight")
    'encoder_embedding'
    """
    return parameter.removesuffix(".weight").replace(".", "_")
