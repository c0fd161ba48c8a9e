"""Finds the embedding tables of a graph, and the lookups that read them.

Contract
    Analysis only: the result becomes `TrainingGraph.tables`.
    A table is a parameter that at least one lookup (`embedding`, `_embedding_bag`) reads. Its `TableUse`s are the
    lookups, each with the backward nodes that compute its share of the table's gradient. All other nodes that read the
    weight, or add to its gradient, are dense users. The gradient of an EmbeddingBag's per-sample weights is not a dense
    user, because it reads only the looked-up rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from embrace_fx.vocabulary.graph import (
    SPARSE_LOOKUP,
    BatchInput,
    InputRole,
    Parameter,
    TableSpec,
    TableUse,
    Tangent,
    TrainingGraph,
    gradients_of,
    reached,
    source_of,
    written_by,
)
from embrace_fx.vocabulary.ops import argument, draws_before, draws_random_numbers

aten = torch.ops.aten

LOOKUPS = (aten.embedding.default, aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
LOOKUP_BACKWARDS = (aten.embedding_dense_backward.default, aten._embedding_bag_backward.default)
SAMPLE_WEIGHTS_BACKWARD = aten._embedding_bag_per_sample_weights_backward.default
RENORM = aten.embedding_renorm.default
_BAG_KINDS = {0: "bag:sum", 1: "bag:mean", 2: "bag:max"}


def find_tables(graph: TrainingGraph) -> tuple[TableSpec, ...]:
    """Returns every embedding table of a graph, in the order of the graph's parameters.

    Two lookups of `weight` -> TableSpec("weight", uses=(TableUse(...), TableUse(...)))
    """
    gradients = gradients_of(graph.module)
    mutated = written_by(graph.module)
    tables = []
    for node, role in graph.inputs():
        if isinstance(role, Parameter):
            table = _describe_table(node, role, gradients.get(role.name), mutated)
            if table is not None:
                tables.append(table)
    return tuple(tables)


def _describe_table(
    weight: fx.Node, role: Parameter, gradient: fx.Node | None, mutated: frozenset[Any]
) -> TableSpec | None:
    """Describes a parameter as a table, or returns None if no lookup reads it.

    Args:
        weight: the parameter's placeholder.
        role: its role.
        gradient: the node of its gradient, or None.
        mutated: the values that the forward writes.
    """
    readers, copies = _table_readers(weight)
    lookups = [n for n in readers if n.target in LOOKUPS and argument(n, "weight") in copies]
    if not lookups:
        return None
    terms = [] if gradient is None else gradient_terms(gradient)
    backwards = [n for n in terms if n.target in LOOKUP_BACKWARDS]
    shares = _backwards_by_lookup(lookups, backwards)
    uses = tuple(_describe_use(lookup, share, mutated) for lookup, share in zip(lookups, shares, strict=True))
    claimed = {name for use in uses for name in use.backward}
    of_rows = [*lookups, *(n for n in readers if n.target is SAMPLE_WEIGHTS_BACKWARD)]
    dense = [n.name for n in readers if n not in of_rows and not _reads_only_shape(n)]
    dense += [n.name for n in backwards if n.name not in claimed]
    dense += [n.name for n in terms if n not in backwards and n.name not in dense]
    value = weight.meta["val"]
    max_norm = copies != [weight]
    return TableSpec(role.name, value.shape[0], value.shape[1], value.dtype, uses, tuple(dense), max_norm)


def _table_readers(weight: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Returns (the nodes that read a table or a rescaled copy of the table, the table followed by its copies that
    `max_norm` rescales).
    """
    readers: list[fx.Node] = []
    copies = [weight]
    for node in copies:
        for user in node.users:
            if user.op == "output":
                continue
            if user.target is RENORM or (user.target is aten.clone.default and _feeds_renorm(user)):
                copies.append(user)
            else:
                readers.append(user)
    return readers, copies


def _feeds_renorm(node: fx.Node) -> bool:
    """Returns whether a node has readers and all of them are `max_norm` rescalings."""
    return bool(node.users) and all(user.target is RENORM for user in node.users)


def _reads_only_shape(node: fx.Node) -> bool:
    """Returns whether a node reads only the shape of its input."""
    return node.target in (aten.sym_size.int, aten.sym_numel.default)


def gradient_terms(gradient: fx.Node) -> list[fx.Node]:
    """Returns the nodes whose sum is a table's gradient."""
    terms, waiting = [], [gradient]
    while waiting:
        node = waiting.pop(0)
        if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
            waiting += [a for a in node.args if isinstance(a, fx.Node)]
        else:
            terms.append(node)
    return terms


def _backwards_by_lookup(lookups: list[fx.Node], backwards: list[fx.Node]) -> list[list[fx.Node]]:
    """Returns, for each lookup of a table, the backward nodes that compute its contribution to the table's gradient."""
    shares: list[list[fx.Node]] = [[] for _ in lookups]
    for backward in sorted(backwards, reverse=True):  # autograd visits the lookups in reverse order
        able = [k for k, lookup in enumerate(lookups) if _is_backward_of(backward, lookup)]
        if able:
            shares[min(able, key=lambda k: len(shares[k]))].append(backward)
    return shares


def _describe_use(lookup: fx.Node, share: list[fx.Node], mutated: frozenset[Any]) -> TableUse:
    """Describes one lookup of a table.

    Args:
        share: the backward nodes that compute the lookup's contribution to the table's gradient.
        mutated: the values that the forward writes.
    """
    ids = argument(lookup, "indices")
    assert isinstance(ids, fx.Node)
    bag = lookup.target is not aten.embedding.default
    cone = _values_read([ids])
    roles = _roles_in(cone)
    random = any(map(draws_random_numbers, cone))
    from_batch = _all_known_ahead(roles, mutated)
    late = from_batch and not _all_known_ahead(_roles_in(_values_read(draws_before(cone))), mutated)
    return TableUse(
        lookup=lookup.name,
        backward=tuple(backward.name for backward in share),
        ids=ids.name,
        padding_idx=argument(lookup, "padding_idx"),
        kind=_BAG_KINDS[argument(lookup, "mode")] if bag else "embedding",
        constant_ids=not random and not any(isinstance(role, BatchInput) for role in roles),
        ids_from_batch=from_batch and not late,
        scale_grad_by_freq=argument(lookup, "scale_grad_by_freq"),
        source=source_of(lookup),
        sparse=SPARSE_LOOKUP in (lookup.meta.get("custom") or {}),
        drawn_late=late,
    )


def _values_read(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the given nodes and all nodes whose values, not only their shapes, they depend on."""
    return reached(nodes, lambda node: () if _reads_only_shape(node) else node.all_input_nodes)


def _roles_in(nodes: Iterable[fx.Node]) -> set[InputRole]:
    """Returns the roles of the graph's inputs among `nodes`."""
    return {node.meta["role"] for node in nodes if node.op == "placeholder"}


def _all_known_ahead(roles: Iterable[InputRole], mutated: frozenset[Any]) -> bool:
    """Returns whether the values of all inputs are known before the forward: none is a parameter, or is written by the
    forward.

    Args:
        roles: the inputs' roles.
        mutated: the roles of the inputs that the forward writes.
    """
    return not any(isinstance(role, Parameter | Tangent) or role in mutated for role in roles)


def _is_backward_of(backward: fx.Node, lookup: fx.Node) -> bool:
    """Returns whether `backward` computes the gradient of the embedding lookup `lookup`."""
    same_kind = (backward.target is aten.embedding_dense_backward.default) == (lookup.target is aten.embedding.default)
    if not same_kind or argument(backward, "indices") is not argument(lookup, "indices"):
        return False
    if lookup.target is aten.embedding.default:
        return all(argument(backward, each) == argument(lookup, each) for each in ("padding_idx", "scale_grad_by_freq"))
    # Two bags may read the same ids, so compare the outputs of the forward that the backward reads.
    offset2bag = argument(backward, "offset2bag")
    return isinstance(offset2bag, fx.Node) and offset2bag.args[0] is lookup
