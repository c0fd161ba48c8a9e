"""Hybrid communication: tables in column shards, rows by AlltoAll (EmbRace, ICPP 2022, section 3).

Contract
    For each table of `tables`, the parameter becomes this rank's columns, every lookup reads the batch's unique rows,
    and the gradient becomes coalesced rows of this rank's columns. The loss and all other gradients are unchanged. One
    exchange at the head of the graph sends the ids of all tables.

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
        ids_K, rows_Kd = embrace.coalesce(ids, flat, d, [pad], 1 / N)
        return (..., ids_K, rows_Kd)                                  # GradientOfRows(weight, "ids" / "rows")

    on a grid of r x c ranks, with V' x d on this rank:
        own_ids, own_counts, order = embrace.route_grid(ids, counts, rank, r, c)
        .. lookup(weight_shard, own_ids) .. all_to_all_rows(columns, own_counts, D, "embedding", N, r)
        .. join_grid(flat, order, own_counts, D, rank) .. split_grid(grad_rows, order, own_counts, rank)
        .. all_to_all_gradients(flat, own_counts, D, "embedding", N, r) .. coalesce(own_ids, flat, d, [pad'], 1 / N)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
from torch import fx

from embrace_fx.passes.rewriter import Rewriter, move_to_head
from embrace_fx.passes.tables import LOOKUP_BACKWARDS, RENORM, SAMPLE_WEIGHTS_BACKWARD
from embrace_fx.vocabulary.graph import (
    Gradient,
    GradientOfRows,
    OutputRole,
    Parameter,
    Shard,
    TableSpec,
    TrainingGraph,
    parameters_of,
    set_outputs,
)
from embrace_fx.vocabulary.operation_id import IDS, gradients_id, rows_id
from embrace_fx.vocabulary.ops import argument, own_columns, set_argument
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.sizes import ExpectedSizes, RowCounts

aten = torch.ops.aten
embrace = torch.ops.embrace


@dataclass(frozen=True)
class ShardTables:
    """The pass that shards tables: it replaces each table by this rank's shard, and the table's lookups by exchanges of
    rows.

    Attributes:
        tables: parameter names, in the order of their exchange; equal on all ranks.
        renormed: unsharded tables with `max_norm`. Each rank rescales the rows that any rank reads, so that replicas
            stay equal.
        rank, world_size: this rank and the number of ranks, which determine this rank's columns.
        grids: maps each table whose grid of ranks has more than one row to this grid.
        in_order: whether the graph itself must launch gradients in the order of `tables`, because no schedule orders
            them.
        rows: maps each table to the number of rows that a step is expected to read, if known.
    """

    tables: tuple[str, ...]
    renormed: tuple[str, ...]
    rank: int
    world_size: int
    grids: Mapping[str, Grid] = field(default_factory=dict)
    in_order: bool = False
    rows: Mapping[str, RowCounts] = field(default_factory=dict)

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        if not self.tables and not self.renormed:
            return graph
        result = graph.edit()
        expected = _Sharding(result, self).run()
        return replace(result, expected=replace(expected, by_symbol={**graph.expected.by_symbol, **expected.by_symbol}))

    def expected_rows(self, table: TableSpec) -> RowCounts:
        """Returns how many rows of a table each step is expected to read."""
        return self.rows.get(table.parameter) or RowCounts.unknown(table.num_rows, self.world_size)


@dataclass(frozen=True)
class _ExchangedIds:
    """The nodes of the ids of one table, which all ranks have exchanged.

    Attributes:
        where: maps the node of a lookup's ids to the node of their positions among the unique ids that this rank reads.
        all_ids: the ids (R,) that all ranks read, rank after rank.
        counts: the number of ids that each rank reads (N,).
    """

    where: dict[fx.Node, fx.Node]
    all_ids: fx.Node
    counts: fx.Node


class _Sharding:
    """Shards the tables of one graph in place, and collects how large the exchanged values are expected to be."""

    def __init__(self, graph: TrainingGraph, options: ShardTables) -> None:
        self._graph, self._options, self._rewriter = graph, options, Rewriter(graph.module)
        self._by_symbol: dict[str, int] = {}  # sizes that depend on data -> their expected values

    def run(self) -> ExpectedSizes:
        """Shards the tables. Returns the expected sizes of exchanged rows and gradients."""
        graph, options = self._graph, self._options
        by_name = {table.parameter: table for table in graph.tables}
        ids = self._exchange_ids([by_name[name] for name in (*options.tables, *options.renormed)])
        for name in options.tables:
            self._shard_table(by_name[name], ids[name])
        for name in options.renormed:
            _renorm_everywhere(graph, by_name[name], ids[name])
        if options.in_order:
            _order_gradient_launches(graph, options.tables)
        graph.graph.eliminate_dead_code()
        return ExpectedSizes(self._by_symbol)

    def _expect(self, node: fx.Node, count: int) -> None:
        """Records that the data-dependent first dimension of a node's tensor is expected to be `count`."""
        self._by_symbol[str(node.meta["val"].shape[0].node.expr)] = count

    def _exchange_ids(self, tables: list[TableSpec]) -> dict[str, _ExchangedIds]:
        """Inserts one exchange of the ids of all tables, as early in the graph as the batch's inputs allow. Returns the
        exchanged ids of each table.
        """
        graph, options, rewriter = self._graph, self._options, self._rewriter
        id_nodes = {table.parameter: list(dict.fromkeys(graph.node(use.ids) for use in table.uses)) for table in tables}
        head, world_size = move_to_head([node for nodes in id_nodes.values() for node in nodes]), options.world_size
        uniques: list[fx.Node] = []
        wheres: dict[str, dict[fx.Node, fx.Node]] = {}
        with rewriter.before(head):
            for table in tables:
                nodes = id_nodes[table.parameter]
                short = table.parameter.removesuffix(".weight")
                found = rewriter.call(
                    embrace.unique_ids.default, nodes, table.num_rows, table.uses[0].padding_idx, name=f"{short}_unique"
                )
                uniques.append(rewriter.item(found, 0, f"{short}_rows_of_batch"))
                self._expect(uniques[-1], options.expected_rows(table).own)
                wheres[table.parameter] = {
                    node: rewriter.item(found, k + 1, f"{short}_where") for k, node in enumerate(nodes)
                }
            all_rows = [table.num_rows for table in tables]
            launch = rewriter.call(embrace.all_gather_ids.default, uniques, all_rows, "ids", world_size, name="ids")
            # Each rank sends its counts, then its padded ids.
            widest = sum(options.expected_rows(table).own for table in tables)
            self._expect(launch, world_size * (len(tables) + widest))
            launch.meta["tables"] = tuple(table.parameter for table in tables)
            launch.meta["launch"] = IDS
            packed = rewriter.wait(launch)
            unpacked = rewriter.call(embrace.unpack_ids.default, packed, len(tables), world_size, name="ids_by_table")
            found_ids = {}
            for k, table in enumerate(tables):
                short = table.parameter.removesuffix(".weight")
                all_ids = rewriter.item(unpacked, 2 * k, f"{short}_ids")
                self._expect(all_ids, options.expected_rows(table).all)
                counts = rewriter.item(unpacked, 2 * k + 1, f"{short}_counts")
                found_ids[table.parameter] = _ExchangedIds(wheres[table.parameter], all_ids, counts)
        return found_ids

    def _shard_table(self, table: TableSpec, ids: _ExchangedIds) -> None:
        """Replaces a table with this rank's shard, and its lookups and gradient with exchanges.

        Args:
            ids: the exchanged ids of the table.
        """
        graph, options, rewriter = self._graph, self._options, self._rewriter
        read = options.expected_rows(table)
        short = table.parameter.removesuffix(".weight")
        weight = parameters_of(graph.module)[table.parameter]
        grid = options.grids.get(table.parameter, Grid(1, options.world_size))
        first, last = own_columns(table.embedding_dim, grid.columns, grid.place(options.rank)[1])
        num_rows = len(range(table.num_rows)[grid.own_rows(table.num_rows, options.rank)])
        with rewriter.before(weight):
            shape, like = (num_rows, last - first), weight.meta["val"]
            # If the table is also an output layer, its shard exists already.
            shard = next((node for node, role in graph.inputs() if role == Shard(table.parameter)), None)
            shard = shard or rewriter.placeholder(
                f"{weight.name}_shard", Shard(table.parameter), shape, like.dtype, like.device
            )
        with rewriter.before(ids.counts.next):
            route = _route_ids(rewriter, short, ids, grid, options.rank)
            columns = rewriter.call(embrace.lookup.default, shard, route.ids, name=f"{short}_columns")
            sent = route.exchange_call(embrace.all_to_all_rows.default, columns, table.embedding_dim)
            launch = rewriter.call(*sent, name=f"{short}_rows")
            launch.meta["launch"] = rows_id(table.parameter, "whole")
        self._expect(launch, read.own * table.embedding_dim)
        if route.order is not None:
            self._expect(route.ids, ceil(read.all / grid.rows))
            self._expect(route.order, read.own)
        with rewriter.before(min(weight.users)):
            flat = rewriter.wait(launch)
            rows = rewriter.call(*route.join_call(flat, table.embedding_dim), name=f"{short}_table")
        _read_rows(rewriter, weight, rows, ids, table)
        kept = [(value, role) for value, role in graph.outputs() if role != Gradient(Parameter(table.parameter))]
        set_outputs(graph.module, kept + self._exchange_gradient(table, route, last - first))
        graph.graph.erase_node(weight)

    def _exchange_gradient(self, table: TableSpec, route: _Route, own: int) -> list[tuple[fx.Node | None, OutputRole]]:
        """Replaces a table's gradient with the exchanged gradient of this rank's shard. Returns two graph outputs, the
        ids and the rows of that gradient, or an empty list if the table has no gradient.

        Args:
            route: the ids of the rows in this rank's shard.
            own: the number of columns in this rank's shard.
        """
        graph, rewriter, read = self._graph, self._rewriter, self._options.expected_rows(table)
        gradient = next((v for v, r in graph.outputs() if r == Gradient(Parameter(table.parameter))), None)
        if gradient is None:
            return []
        _refresh_sum(rewriter, gradient)
        short = table.parameter.removesuffix(".weight")
        with rewriter.before(gradient.next):
            flat = rewriter.call(*route.split_call(gradient), name=f"{short}_gradient_columns")
            sent = route.exchange_call(embrace.all_to_all_gradients.default, flat, table.embedding_dim)
            launch = rewriter.call(*sent, name=f"{short}_gradient")
            launch.meta["launch"] = gradients_id(table.parameter, "whole")
        self._expect(launch, ceil(read.all / route.grid.rows) * own)
        with rewriter.before(graph.graph.output_node()):
            received = rewriter.wait(launch)
            space, padding_idx = graph.spaces.get(table.parameter), table.uses[0].padding_idx
            paddings = space.padding_rows if space is not None else [padding_idx] if padding_idx >= 0 else []
            how = own, route.own_padding_rows(paddings), 1.0 / (route.grid.rows * route.grid.columns)
            coalesced = rewriter.call(embrace.coalesce.default, route.ids, received, *how, name=f"{short}_update")
            ids_K = rewriter.item(coalesced, 0, f"{short}_update_ids")
            self._expect(ids_K, ceil(read.together / route.grid.rows))
            rows_Kd = rewriter.item(coalesced, 1, f"{short}_update_rows")
        parts = ((ids_K, "ids"), (rows_Kd, "rows"))
        members = graph.members(table.parameter)
        return [(value, GradientOfRows(table.parameter, part, members)) for value, part in parts]


def _order_gradient_launches(graph: TrainingGraph, tables: Sequence[str]) -> None:
    """Moves the launches of tables' gradients, where needed, so that they run in the order of `tables`."""
    gradients = embrace.all_to_all_gradients.default
    launches = {n.meta["launch"].what: n for n in graph.graph.find_nodes(op="call_function", target=gradients)}
    before: fx.Node | None = None
    for table in tables:
        launch = launches.get(table)
        if launch is not None and before is not None and launch < before:
            before.append(launch)
        before = launch or before


@dataclass(frozen=True)
class _Route:
    """The ids whose rows this rank looks up for all ranks. For a table sharded by columns, these are all ids that any
    rank reads. On a grid, they are the ids whose rows are in this rank's shard.

    Attributes:
        ids: node of these ids; on a grid, node of their row numbers in the shard.
        counts: node of the number of ids that each rank reads (N,); on a grid, separately for each row of the grid (N,
            grid rows).
        order: node of the positions of this rank's ids, sorted by row of the grid, or None if the grid has one row.
    """

    ids: fx.Node
    counts: fx.Node
    order: fx.Node | None
    grid: Grid
    rank: int

    def exchange_call(self, launch: Any, sent: fx.Node, embedding_dim: int) -> tuple[Any, ...]:
        """Returns the target and arguments of the call that launches an exchange of rows or gradients.

        Args:
            launch: the op to call.
            sent: the node of the values to send.
            embedding_dim: the number of columns of the whole table.
        """
        ranks, on_grid = self.grid.rows * self.grid.columns, () if self.order is None else (self.grid.rows,)
        return launch, sent, self.counts, embedding_dim, "embedding", ranks, *on_grid

    def join_call(self, flat: fx.Node, embedding_dim: int) -> tuple[Any, ...]:
        """Returns the target and arguments of the call that assembles full rows from the columns received from each
        rank.

        Args:
            flat: the node of the received columns.
            embedding_dim: the number of columns of the whole table.
        """
        if self.order is None:
            return embrace.join_columns.default, flat, embedding_dim, self.grid.columns
        return embrace.join_grid.default, flat, self.order, self.counts, embedding_dim, self.rank

    def split_call(self, gradient: fx.Node) -> tuple[Any, ...]:
        """Returns the target and arguments of the call that splits row gradients by columns before they are sent."""
        if self.order is None:
            return embrace.split_columns.default, gradient, self.grid.columns
        return embrace.split_grid.default, gradient, self.order, self.counts, self.rank

    def own_padding_rows(self, rows: Sequence[int]) -> list[int]:
        """Selects the padding rows in this rank's shard, and returns their row numbers in the shard.

        Args:
            rows: all padding rows of the table.
        """
        of_grid = self.grid.place(self.rank)[0]
        return [row // self.grid.rows for row in rows if row % self.grid.rows == of_grid]


def _route_ids(rewriter: Rewriter, short: str, ids: _ExchangedIds, grid: Grid, rank: int) -> _Route:
    """Returns the ids whose rows this rank looks up for all ranks. On a grid of several rows, inserts the op that
    selects these ids.

    Args:
        short: the table's name, from which names of nodes are derived.
        ids: the exchanged ids of the table.
        grid: the table's grid of ranks.
        rank: this rank.
    """
    if grid.rows == 1:
        return _Route(ids.all_ids, ids.counts, None, grid, rank)
    routed = rewriter.call(
        embrace.route_grid.default, ids.all_ids, ids.counts, rank, grid.rows, grid.columns, name=f"{short}_route"
    )
    names = ("own_ids", "own_counts", "order")
    own_ids, counts, order = (rewriter.item(routed, k, f"{short}_{name}") for k, name in enumerate(names))
    return _Route(own_ids, counts, order, grid, rank)


def _read_rows(rewriter: Rewriter, weight: fx.Node, rows: fx.Node, ids: _ExchangedIds, table: TableSpec) -> None:
    """Makes each lookup read the exchanged rows, by position, instead of the table by id.

    Args:
        weight: the placeholder of the table's weight.
        rows: the node of the rows (U, D) that this rank reads.
        ids: the exchanged ids of the table.
    """
    num_rows: fx.Node | None = None
    names = {name for use in table.uses for name in (use.lookup, *use.backward)}
    touched = [n for n in weight.graph.nodes if n.name in names]
    touched += [user for user in weight.users if user.target is SAMPLE_WEIGHTS_BACKWARD]
    for node in touched:
        indices = argument(node, "indices")
        set_argument(node, "indices", ids.where[indices])
        padding = argument(node, "padding_idx")
        if padding >= 0:
            set_argument(node, "padding_idx", 0)  # `unique_rows` puts the padding row first
        if node.target in LOOKUP_BACKWARDS:
            if num_rows is None:
                with rewriter.before(rows.next):
                    num_rows = rewriter.call(aten.sym_size.int, rows, 0, name=f"{rows.name}_rows")
            set_argument(node, "num_weights", num_rows)
    weight.replace_all_uses_with(rows, delete_user_cb=lambda user: user.op != "output")
    for node in touched:
        rewriter.refresh(node)


def _refresh_sum(rewriter: Rewriter, gradient: fx.Node) -> None:
    """Recomputes the fake values of a table's gradient if it is a sum over lookups. The terms now have the shape of the
    exchanged rows rather than the shape of the table.
    """
    if gradient.target is aten.add.Tensor:
        for term in gradient.all_input_nodes:
            _refresh_sum(rewriter, term)
        rewriter.refresh(gradient)


def _renorm_everywhere(graph: TrainingGraph, table: TableSpec, ids: _ExchangedIds) -> None:
    """Makes each rank rescale, for a table with `max_norm`, the rows that any rank reads, so that replicas stay equal.

    Args:
        ids: the exchanged ids of the table.
    """
    weight = parameters_of(graph.module)[table.parameter]
    for node in graph.graph.nodes:
        if node.target is RENORM and argument(node, "indices") in ids.where and weight in _renorm_chain(node):
            set_argument(node, "indices", ids.all_ids)


def _renorm_chain(node: fx.Node) -> list[fx.Node]:
    """Returns a `max_norm` rescaling, followed by the nodes from which it gets its weight: earlier rescalings, copies,
    and finally the parameter.
    """
    chain = [node]
    while chain[-1].op == "call_function" and chain[-1].all_input_nodes:
        chain.append(chain[-1].all_input_nodes[0])
    return chain
