"""Joins several tables into one, with one lookup for all ids and one gradient, so that they share one exchange.

Contract
    Same values. The `embedding` lookups become views of one joint lookup. Bag lookups, and lookups without a gradient,
    read the joined table separately. An id outside its table becomes a number outside the joined table. Gradients of
    padding rows are dropped when gradients are summed.

    rewrite, two tables of a space, V1 x D and V2 x D, one lookup each:
        e1 = aten.embedding(w1, x1); e2 = aten.embedding(w2, x2)
        ...
        g1 = aten.embedding_dense_backward(d1, x1, V1, -1, False); g2 = aten.embedding_dense_backward(d2, x2, V2, ...)
        return (..., g1, g2)                                              # Gradient(w1), Gradient(w2)
    ->
        x = embrace.join_ids([x1, x2], [0, 1], [0, V1], [V1, V2], 2)[0]   # (N,)
        r1, r2 = aten.split_with_sizes(aten.embedding(space, x), [n1, n2])
        e1 = aten.view(r1, [*x1.shape, D]); e2 = aten.view(r2, [*x2.shape, D])
        ...
        d = aten.cat([aten.reshape(d1, [n1, D]), aten.reshape(d2, [n2, D])])
        g = aten.embedding_dense_backward(d, x, V1 + V2, -1, False)
        return (..., g)                                                   # Gradient(space)
    If all lookups are cast to one dtype, or all gradients from one, the joint tensor is cast instead.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from embrace_fx.passes.narrow import is_plain_cast
from embrace_fx.passes.rewriter import Rewriter, move_to_head
from embrace_fx.passes.tables import LOOKUP_BACKWARDS, SAMPLE_WEIGHTS_BACKWARD, find_tables
from embrace_fx.vocabulary.graph import Gradient, Parameter, TableSpec, TrainingGraph, parameters_of, set_outputs
from embrace_fx.vocabulary.joined_table import JoinedTable
from embrace_fx.vocabulary.ops import argument, set_argument

aten = torch.ops.aten
embrace = torch.ops.embrace


@dataclass(frozen=True)
class JoinTables:
    """The pass that replaces groups of tables by joined tables, each of which stacks the rows of one group.

    Attributes:
        spaces: the joined tables of the plan.
    """

    spaces: tuple[JoinedTable, ...]

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        read = {table.parameter for table in graph.tables}
        spaces = [space for space in self.spaces if not read.isdisjoint(space.tables)]
        if not spaces:
            return graph
        result = graph.edit()
        for space in spaces:
            _join_group(result, space)
        result.graph.eliminate_dead_code()
        result = replace(result, spaces={**graph.spaces, **{space.name: space for space in spaces}})
        return replace(result, tables=find_tables(result))


@dataclass(frozen=True)
class _Lookup:
    """One lookup of a table that becomes part of a joined table.

    Attributes:
        number: the table's index in the joined table.
        node: the node of the lookup.
        ids: the node of the ids.
        backward: the nodes that compute the lookup's share of the gradient.
        is_joined: whether one lookup of the joined table replaces this lookup together with others.
        is_bag: whether it is a bag lookup (`nn.EmbeddingBag`), which combines the rows of each bag.
    """

    table: TableSpec
    number: int
    node: fx.Node
    ids: fx.Node
    backward: tuple[fx.Node, ...]
    is_joined: bool
    is_bag: bool


def _join_group(graph: TrainingGraph, space: JoinedTable) -> None:
    """Replaces the tables that `space` stacks, their lookups and their gradients by one joined table, its lookups and
    its gradient.
    """
    rewriter, weights = Rewriter(graph.module), parameters_of(graph.module)
    lookups = _lookups_to_join(graph, space)
    first = min(weights[each.table.parameter] for each in lookups)
    like = first.meta["val"]
    with rewriter.before(first):
        shape = (space.bounds[-1], like.shape[1])
        weight = rewriter.placeholder(space.name, Parameter(space.name), shape, like.dtype, like.device)
    joined = [each for each in lookups if each.is_joined]
    apart = [each for each in lookups if not each.is_joined]
    rows = _join_ids(rewriter, space, joined, apart)
    gradients = list[fx.Node]()
    if joined:
        _replace_lookups(rewriter, space.name, joined, weight, rows[0])
        gradients += _sum_gradients(rewriter, space, joined, rows[0])
    for each, ids in zip(apart, rows[bool(joined) :], strict=True):
        _redirect_lookup(rewriter, each, weights[each.table.parameter], weight, ids)
        gradients += each.backward
    _return_joint_gradient(graph, rewriter, space, gradients)
    graph.graph.eliminate_dead_code()
    for name in {each.table.parameter for each in lookups}:
        graph.graph.erase_node(weights[name])


def _lookups_to_join(graph: TrainingGraph, space: JoinedTable) -> list[_Lookup]:
    """Returns the lookups of the tables that `space` stacks, in the order of the tables in the joined table."""
    by_name = {table.parameter: table for table in graph.tables}
    nodes = {node.name: node for node in graph.graph.nodes}
    is_trained = any(isinstance(role, Gradient) for _, role in graph.outputs())
    found = []
    for number, name in enumerate(space.tables):
        for use in by_name[name].uses if name in by_name else ():
            backward = tuple(nodes[each] for each in use.backward)
            is_joined = use.kind == "embedding" and not use.scale_grad_by_freq and len(backward) == is_trained
            is_bag = use.kind != "embedding"
            found.append(_Lookup(by_name[name], number, nodes[use.lookup], nodes[use.ids], backward, is_joined, is_bag))
    return found


def _join_ids(
    rewriter: Rewriter, space: JoinedTable, joined: Sequence[_Lookup], others: Sequence[_Lookup]
) -> list[fx.Node]:
    """Inserts, at the head of the graph, the conversion of ids to row numbers of the joined table `space`.

    Args:
        joined: the lookups that one lookup of the joined table replaces.
        others: the lookups that are replaced separately.

    Returns:
        One node with the row numbers of all lookups in `joined`, if there are any, then one node for each lookup in
            `others`.
    """
    lookups = [*joined, *others]
    numbers = [each.number for each in lookups]
    first_rows = [space.bounds[number] for number in numbers]
    num_rows = [each.table.num_rows for each in lookups]
    with rewriter.before(move_to_head([each.ids for each in lookups])):
        ids = [each.ids for each in lookups]
        found = rewriter.call(
            embrace.join_ids.default, ids, numbers, first_rows, num_rows, len(joined), name=f"{space.name}_row_ids"
        )
        count = bool(joined) + len(others)
        return [
            rewriter.item(found, k, name=f"{space.name}_ids_{k}" if k else f"{space.name}_ids") for k in range(count)
        ]


def _replace_lookups(rewriter: Rewriter, name: str, joined: Sequence[_Lookup], weight: fx.Node, ids: fx.Node) -> None:
    """Inserts one lookup of the joined table, and replaces the results of the lookups `joined` by views of its result.

    Args:
        name: the name of the joined table.
        joined: the lookups to replace.
        weight: the joined table's placeholder.
        ids: the row numbers, in the joined table, of all lookups to replace.
    """
    narrow = _common_dtype([_cast_dtype(user) for each in joined for user in each.node.users])
    with rewriter.before(min(each.node for each in joined)):
        rows = rewriter.call(aten.embedding.default, weight, ids, name=f"{name}_lookups")
        if narrow is not None:
            rows = rewriter.cast(rows, narrow, name=f"{name}_lookups_cast")
        sizes = [_shape_of_ids(rewriter, each.ids) for each in joined]
        parts = rewriter.call(
            aten.split_with_sizes.default,
            rows,
            [_multiply_sizes(rewriter, size) for size in sizes],
            name=f"{name}_by_lookup",
        )
        views = [rewriter.item(parts, k, name=f"{each.node.name}_flat") for k, each in enumerate(joined)]
        width = weight.meta["val"].shape[1]
        views = [
            view
            if len(size) == 1
            else rewriter.call(aten.view.default, view, [*size, width], name=f"{each.node.name}_rows")
            for each, size, view in zip(joined, sizes, views, strict=True)
        ]
    for each, view in zip(joined, views, strict=True):
        for node in (each.node,) if narrow is None else tuple(each.node.users):
            node.replace_all_uses_with(view)


def _sum_gradients(rewriter: Rewriter, space: JoinedTable, joined: Sequence[_Lookup], ids: fx.Node) -> list[fx.Node]:
    """Inserts one node that computes the gradient of the joined table `space` from the gradients of all lookups
    `joined`. Returns [the node], or [] if there are no gradients.

    Args:
        ids: the row numbers, in the joined table, of all these lookups.
    """
    if not joined[0].backward:
        return []
    backwards = [node for each in joined for node in each.backward]
    given = [argument(node, "grad_output") for node in backwards]
    narrow = _common_dtype([_source_dtype(node) for node in given])
    name, wide = space.name, given[0].meta["val"].dtype
    with rewriter.before(max(backwards).next):
        flat = [
            node
            if len(node.meta["val"].shape) == 2
            else rewriter.call(aten.reshape.default, node, [-1, node.meta["val"].shape[-1]], name=f"{node.name}_flat")
            for node in (given if narrow is None else [node.all_input_nodes[0] for node in given])
        ]
        together = rewriter.call(aten.cat.default, flat, name=f"{name}_gradients")
        if narrow is not None:
            together = rewriter.cast(together, wide, name=f"{name}_gradients_cast")
        target = aten.embedding_dense_backward.default
        return [rewriter.call(target, together, ids, space.bounds[-1], -1, False, name=f"{name}_gradient")]


def _common_dtype(dtypes: Sequence[torch.dtype | None]) -> torch.dtype | None:
    """Returns the common dtype if all of `dtypes` are equal, or None if they differ or one is None."""
    return dtypes[0] if len(set(dtypes)) == 1 else None


def _cast_dtype(node: fx.Node) -> torch.dtype | None:
    """Returns the dtype to which a node casts, or None if the node does anything other than cast."""
    return node.meta["val"].dtype if is_plain_cast(node) else None


def _source_dtype(node: fx.Node) -> torch.dtype | None:
    """Returns the dtype from which a node casts, or None if the node does anything other than cast."""
    found: torch.dtype | None = node.all_input_nodes[0].meta["val"].dtype if is_plain_cast(node) else None
    return found


def _shape_of_ids(rewriter: Rewriter, ids: fx.Node) -> list[int | fx.Node]:
    """Returns the sizes of a tensor of ids. For a size that depends on the batch, inserts and returns a node that
    computes it.
    """
    return [
        size if isinstance(size, int) else rewriter.call(aten.sym_size.int, ids, dim, name=f"{ids.name}_size_{dim}")
        for dim, size in enumerate(ids.meta["val"].shape)
    ]


def _multiply_sizes(rewriter: Rewriter, size: Sequence[int | fx.Node]) -> int | fx.Node:
    """Returns the product of sizes: a number, or a node if a size is a node. Inserts the necessary multiplications."""
    found: int | fx.Node = 1
    for each in size:
        if isinstance(found, int) and isinstance(each, int):
            found *= each
        elif found == 1:
            found = each
        else:
            found = rewriter.call(operator.mul, found, each, name="numel")
    return found


def _redirect_lookup(rewriter: Rewriter, lookup: _Lookup, before: fx.Node, weight: fx.Node, ids: fx.Node) -> None:
    """Makes one lookup and its gradient read the joined table by row numbers, instead of the lookup's own table by ids.

    Args:
        before: the placeholder of the lookup's own table, which `weight` replaces.
        weight: the joined table's placeholder.
        ids: the lookup's row numbers in the joined table.
    """
    readers = [node for node in before.users if node.target is SAMPLE_WEIGHTS_BACKWARD]
    for node in (lookup.node, *lookup.backward, *(n for n in readers if argument(n, "indices") is lookup.ids)):
        set_argument(node, "indices", ids)
        if not lookup.is_bag:
            set_argument(node, "padding_idx", -1)
        node.replace_input_with(before, weight)
        if node.target in LOOKUP_BACKWARDS:
            set_argument(node, "num_weights", weight.meta["val"].shape[0])
            rewriter.refresh(node)


def _return_joint_gradient(
    graph: TrainingGraph, rewriter: Rewriter, space: JoinedTable, gradients: Sequence[fx.Node]
) -> None:
    """Replaces, among the graph's outputs, the gradients of the tables that `space` stacks by one gradient of the
    joined table, the sum of `gradients`.
    """
    of_tables = {Gradient(Parameter(name)) for name in space.tables}
    outputs = [(value, role) for value, role in graph.outputs() if role not in of_tables]
    total: fx.Node | None = None
    for each in gradients:
        if total is None:
            total = each
            continue
        with rewriter.before(max(total, each).next):
            total = rewriter.call(aten.add.Tensor, total, each, name=f"{space.name}_sum")
    if total is not None:
        outputs.append((total, Gradient(Parameter(space.name))))
    set_outputs(graph.module, outputs)
