"""Exchanges rows in the dtype to which autocast casts them, by moving the exchange behind the casts.

Contract
    If every lookup of a sharded table is cast to one narrower dtype, and every gradient is cast from it, rows and
    gradients are exchanged in that dtype: half the bytes under bfloat16. Forward values are the same, because a cast
    commutes with a lookup. Gradients of equal ids are still summed in the wide dtype, before and after the exchange.
    Under float16, in which such sums can overflow, only rows are exchanged in the narrow dtype.

    rewrite:  rows = wait(all_to_all_rows(columns, ...)); e = aten.embedding(join(rows), where); c = _to_copy(e, bf16)
              g = _to_copy(g_bf16, f32); grad_rows = embedding_dense_backward(g, ...); split_columns(grad_rows)
    ->        rows = wait(all_to_all_rows(_to_copy(columns, bf16), ...)); c = aten.embedding(join(rows), where)
              g = _to_copy(g_bf16, f32); grad_rows = embedding_dense_backward(g, ...)
              split_columns(_to_copy(grad_rows, bf16)); coalesce(..., _to_copy(wait(...), f32))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from embrace_fx.passes.rewriter import Rewriter
from embrace_fx.passes.tables import LOOKUP_BACKWARDS, gradient_terms
from embrace_fx.vocabulary.graph import TableSpec, TrainingGraph

aten = torch.ops.aten
embrace = torch.ops.embrace
_CAST = aten._to_copy.default
JOINS = (embrace.join_columns.default, embrace.join_grid.default)
"""Ops that convert received columns to rows."""
_SPLITS = (embrace.split_columns.default, embrace.split_grid.default)
_EXCHANGED = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The dtypes that the AlltoAll of every back end supports."""
_SUMMED = _EXCHANGED - {torch.float16}
"""Dtypes in which sums of gradients do not overflow. float16 ends at 65,504."""


@dataclass(frozen=True)
class NarrowExchange:
    """The pass that exchanges embedding rows in the narrower dtype to which the forward casts them, for example by
    autocast.
    """

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        joins = [node for node in graph.graph.nodes if node.target in JOINS]
        if not any(user.target is _CAST for join in joins for lookup in join.users for user in lookup.users):
            return graph
        result = graph.edit()
        narrowed = [narrow_exchange(result, result.node(join.name)) for join in joins]
        if not any(narrowed):
            return graph
        result.graph.eliminate_dead_code()
        return result


def exchange_dtypes(graph: TrainingGraph) -> dict[str, torch.dtype]:
    """Returns, for each table, the dtype in which its rows are exchanged if it is sharded. This is the narrower dtype
    to which the forward casts the rows, or the table's own dtype if there is no such cast.

    Args:
        graph: the captured graph.
    """
    nodes = {node.name: node for node in graph.graph.nodes}
    return {table.parameter: _exchange_dtype(nodes, table) for table in graph.tables}


def _exchange_dtype(nodes: Mapping[str, fx.Node], table: TableSpec) -> torch.dtype:
    """Returns the dtype in which the rows of a table are exchanged. `nodes` maps names to the graph's nodes."""
    if any(use.kind != "embedding" for use in table.uses):
        return table.dtype
    lookups = [nodes[use.lookup] for use in table.uses]
    gradients = [nodes[name] for use in table.uses for name in use.backward]
    return _common_narrow_dtype(lookups, gradients, table.dtype) or table.dtype


def narrow_exchange(graph: TrainingGraph, join: fx.Node) -> bool:
    """Makes the exchange of one table's rows send a narrower dtype, in place, by casting rows before they are sent
    rather than after. Returns False if they must be sent in the table's own dtype.

    Args:
        join: the node that assembles full rows from the columns received from each rank.
    """
    lookups = [user for user in join.users if user.target is aten.embedding.default]
    if any(user not in lookups and user.target is not aten.sym_size.int for user in join.users):
        return False
    wide = join.meta["val"].dtype
    split = _gradient_split(graph, join)
    dtype = _common_narrow_dtype(lookups, gradient_terms(split.all_input_nodes[0]) if split is not None else [], wide)
    if dtype is None:
        return False
    rewriter = Rewriter(graph.module)
    casts = [user for lookup in lookups for user in lookup.users]
    _narrow_forward(rewriter, join, lookups, casts, dtype)
    if split is not None and dtype in _SUMMED:
        _narrow_backward(rewriter, split, dtype, wide)
    return True


def _common_narrow_dtype(lookups: list[fx.Node], gradients: list[fx.Node], wide: torch.dtype) -> torch.dtype | None:
    """Returns the dtype that all lookups are cast to and all gradients are cast from. Returns None if there is no
    common dtype, or if it is not narrower than the table's dtype `wide`.
    """
    casts = [user for lookup in lookups for user in lookup.users]
    dtypes = {user.kwargs.get("dtype") if is_plain_cast(user) else None for user in casts}
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    if not isinstance(dtype, torch.dtype) or dtype not in _EXCHANGED or dtype.itemsize >= wide.itemsize:
        return None
    return dtype if all(_gradient_was_cast_from(gradient, dtype) for gradient in gradients) else None


def is_plain_cast(node: fx.Node) -> bool:
    """Returns whether a node casts only the dtype, not device or layout."""
    return node.target is _CAST and node.meta["val"].device == node.all_input_nodes[0].meta["val"].device


def _gradient_split(graph: TrainingGraph, join: fx.Node) -> fx.Node | None:
    """Returns the node that splits the row gradient of a table by columns, or None if there is none.

    Args:
        join: the node that assembles the table's full rows from the columns received from each rank.
    """
    launch = join.all_input_nodes[0].all_input_nodes[0]
    counts = launch.args[1]
    for split in graph.graph.nodes:
        if split.target in _SPLITS and next(iter(split.users)).args[1] is counts:
            found: fx.Node = split
            return found
    return None


def _gradient_was_cast_from(backward: fx.Node, dtype: torch.dtype) -> bool:
    """Returns whether the gradient that a lookup's backward reads was cast from `dtype`."""
    gradient = backward.args[0]
    return (
        backward.target in LOOKUP_BACKWARDS
        and isinstance(gradient, fx.Node)
        and gradient.target is _CAST
        and gradient.all_input_nodes[0].meta["val"].dtype == dtype
    )


def _narrow_forward(
    rewriter: Rewriter, join: fx.Node, lookups: list[fx.Node], casts: list[fx.Node], dtype: torch.dtype
) -> None:
    """Casts looked-up columns to `dtype` before they are sent, and removes the later casts of the received rows.

    Args:
        join: the node that assembles full rows from the columns received from each rank.
        lookups: the lookups of the received rows.
        casts: the casts to remove.
    """
    wait = join.all_input_nodes[0]
    launch = wait.all_input_nodes[0]
    columns = launch.args[0]
    assert isinstance(columns, fx.Node)
    with rewriter.before(launch):
        cast = rewriter.cast(columns, dtype, name=f"{columns.name}_narrow")
    launch.replace_input_with(columns, cast)
    for node in (launch, wait, join, *lookups):
        rewriter.retype(node, dtype)
    for node in casts:
        node.replace_all_uses_with(node.all_input_nodes[0])
        rewriter.graph.erase_node(node)


def _narrow_backward(rewriter: Rewriter, split: fx.Node, dtype: torch.dtype, wide: torch.dtype) -> None:
    """Casts a row gradient to `dtype` before it is sent, and back to `wide` after it is received.

    Args:
        split: the node that splits the gradient by columns.
    """
    gradient = split.all_input_nodes[0]
    launch = next(iter(split.users))
    wait = next(iter(launch.users))
    with rewriter.before(split):
        cast = rewriter.cast(gradient, dtype, name=f"{gradient.name}_narrow")
    split.replace_input_with(gradient, cast)
    for node in (split, launch, wait):
        rewriter.retype(node, dtype)
    readers = list(wait.users)
    with rewriter.before(wait.next):
        widened = rewriter.cast(wait, wide, name=f"{wait.name}_wide")
    for reader in readers:
        reader.replace_input_with(wait, widened)
