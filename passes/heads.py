"""Finds the output layer (head) over an embedding table: the nodes from its product with hidden states to the loss.

Contract
    Analysis only. A head is a product of hidden states with the whole table, transposed: `mm`, or `addmm` with a bias;
    then element-wise ops (`vocabulary/head.py`) and changes of the leading shape; then results of the model, and a
    log-softmax with its negative log-likelihood. Its backward is known from its forward: where each of its nodes is one
    of a head's, the gradients of hidden states, table and bias are those of the loss, and of the results.
    If something does not match, `Unmatched` names the node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from embrace_fx.passes.tables import LOOKUPS, gradient_terms
from embrace_fx.vocabulary.graph import (
    BatchInput,
    Mutation,
    Parameter,
    Result,
    Tangent,
    TrainingGraph,
    ancestors,
    gradients_of,
    parameters_of,
    reached,
    source_of,
)
from embrace_fx.vocabulary.head import Step
from embrace_fx.vocabulary.ops import argument, draws_random_numbers

aten = torch.ops.aten

_TRANSPOSE = aten.t.default
_MEANS = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_CAST = aten._to_copy.default
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SAME = (aten.clone.default, aten.alias.default, aten.detach.default)
_NUMBERS = {aten.mul.Tensor: "mul", aten.div.Tensor: "div"}
_BACKWARD = frozenset(
    {
        *VIEWS,
        *_SAME,
        *_NUMBERS,
        *(_CAST, _TRANSPOSE, aten.expand.default, aten.slice_backward.default, aten.tanh_backward.default),
        aten._log_softmax_backward_data.default,
    }
)
"""Ops of a backward between the loss and the products."""


class Unmatched(Exception):
    """Raised if an output layer cannot be sharded. The message is the reason, in one line."""


@dataclass(frozen=True)
class Loss:
    """A negative log-likelihood of an output layer's logits, as nodes of the graph.

    Attributes:
        node: the `nll_loss_forward`.
        steps: the element-wise ops between the matrix product and the log-softmax.
        shapes: the nodes before the loss that change only the logits' leading shape, such as views.
        backward: the `nll_loss_backward` of `node`, or None if no gradient is taken.
        sums: the node of the log-softmax summed over the table's rows, or None if labels are not smoothed.
        of_sums: the gradient (L,) with respect to `sums`, or None.
    """

    node: fx.Node
    steps: tuple[Step, ...]
    shapes: tuple[fx.Node, ...]
    backward: fx.Node | None
    sums: fx.Node | None = None
    of_sums: fx.Node | None = None


@dataclass(frozen=True)
class ResultLogits:
    """A result of the model that consists of an output layer's logits.

    Attributes:
        index: the index among the model's flattened results.
        node: the node of the logits.
        steps: the element-wise ops between the product and the result.
        is_cut: whether the result leaves out some positions, such as the last one of each sequence.
    """

    index: int
    node: fx.Node
    steps: tuple[Step, ...]
    is_cut: bool


@dataclass
class Head:
    """An output layer whose weight is an embedding table, as nodes of the graph.

    Attributes:
        weight: the table's placeholder.
        as_read: the (V, D) node whose transpose is multiplied with the hidden states: the table or a cast of it.
        product: the matrix product (`mm` or `addmm`) that computes the logits.
        hidden: the hidden states (M, D), which are the other factor.
        bias: the added bias (V,), or None.
        sizes: nodes that read a leading size of the logits.
        results: the model's results that are logits.
        loss: the loss of the logits, or None if the graph has no loss.
        of_hidden, of_weight, of_bias: the backward's nodes that compute the gradients of hidden states, table and bias.
        of_table: the term that the output layer adds to the table's gradient.
    """

    weight: fx.Node
    as_read: fx.Node
    product: fx.Node
    hidden: fx.Node
    bias: fx.Node | None
    sizes: list[fx.Node] = field(default_factory=list)
    results: list[ResultLogits] = field(default_factory=list)
    loss: Loss | None = None
    of_hidden: fx.Node | None = None
    of_weight: fx.Node | None = None
    of_table: fx.Node | None = None
    of_bias: fx.Node | None = None


def forward_nodes(graph: TrainingGraph) -> set[fx.Node]:
    """Returns the nodes of the forward: those that the model's results and mutations depend on."""
    return ancestors(v for v, role in graph.outputs() if v is not None and isinstance(role, Result | Mutation))


def head_blocker(graph: TrainingGraph, parameter: str, forward: set[fx.Node] | None = None) -> str | None:
    """Returns the reason why the output layer over the table `parameter` cannot be sharded, or None if it can.
    `forward` is the result of `forward_nodes`, if known.
    """
    try:
        find_head(graph, parameter, forward)
    except Unmatched as found:
        return str(found)
    return None


def head_losses(graph: TrainingGraph) -> dict[str, Loss]:
    """Maps the name of each table that is an output layer's weight to the loss of that layer. Only losses that the
    model's forward computes, rather than the training loop, are in the graph.
    """
    if all(node.target is not aten.nll_loss_forward.default for node in graph.graph.nodes):
        return {}
    found, forward = {}, forward_nodes(graph)
    for name, value in parameters_of(graph.module).items():
        with contextlib.suppress(Unmatched):
            if value.meta["val"].dim() == 2 and (loss := head_over(graph, value, forward).loss) is not None:
                found[name] = loss
    return found


def labels_in_batch(graph: TrainingGraph) -> dict[str, tuple[fx.Node, int]]:
    """Finds the labels of output layers whose loss is in the graph, if the labels depend on the batch alone.

    Returns:
        name of the layer's table -> (node of the labels (L,), the label that the loss ignores).
    """
    losses = {name: loss for name, loss in head_losses(graph).items() if labels_from_batch(loss)}
    return {name: (argument(o.node, "target"), argument(o.node, "ignore_index")) for name, o in losses.items()}


def mean_loss_labels(graph: TrainingGraph) -> list[tuple[fx.Node, int]]:
    """Returns (node of the labels, ignored label) of every mean loss whose labels depend on the batch alone."""
    losses = [n for n in graph.graph.nodes if n.target in _MEANS and argument(n, "reduction") == 1]
    found = [(argument(node, "target"), argument(node, "ignore_index")) for node in losses]
    return [(labels, ignored) for labels, ignored in found if _depends_on_batch_only(labels)]


def find_head(graph: TrainingGraph, parameter: str, forward: set[fx.Node] | None = None) -> Head:
    """Finds the output layer over the table with the name `parameter`.

    Args:
        forward: the result of `forward_nodes`, if known.

    Raises:
        Unmatched: the table has no output layer, or one of an unsupported form.
    """
    return head_over(
        graph, parameters_of(graph.module)[parameter], forward_nodes(graph) if forward is None else forward
    )


def head_over(graph: TrainingGraph, weight: fx.Node, forward: set[fx.Node]) -> Head:
    """Returns the output layer whose weight is the table with the placeholder `weight`. `forward` are the nodes of the
    forward. Raises `Unmatched` like `find_head`.
    """
    product, as_read = _find_product(weight, forward)
    hidden, added = product.args[-2], product.args[0] if product.target is aten.addmm.default else None
    assert isinstance(hidden, fx.Node)
    assert isinstance(added, fx.Node | None)
    if product.kwargs:
        raise Unmatched(f"the output layer scales its product or its bias ({_describe_node(product)})")
    head = Head(weight, as_read, product, hidden, added)
    if added is not None and tuple(added.meta["val"].shape) != tuple(weight.meta["val"].shape[:1]):
        raise Unmatched(f"the output layer adds a tensor that is not a bias ({_describe_node(product)})")
    if any("region" in node.meta for node in (product, *product.users)):
        raise Unmatched(f"the output layer is in a checkpointed region ({_describe_node(product)})")
    _follow_logits(graph, head, forward)
    _find_gradients(graph, head, forward)
    return head


def _last_dim_sizes(node: fx.Node) -> list[Any]:
    """Returns [the size of the last dimension] of a node's value, or [] if the value is no tensor."""
    return [*node.meta["val"].shape[-1:]]


def _find_product(weight: fx.Node, forward: set[fx.Node]) -> tuple[fx.Node, fx.Node]:
    """Returns the matrix product that reads a table in the forward, and the (V, D) node whose transpose it reads."""
    found: list[tuple[fx.Node, fx.Node]] = []
    for reader in _dense_readers(weight, forward):
        as_read = weight
        if reader.target is _CAST:
            as_read, (reader, *others) = reader, _forward_users(reader, forward) or [reader]
            if others:
                raise Unmatched(f"several operations read a cast of the table ({_describe_node(as_read)})")
        if reader.target is not _TRANSPOSE:
            raise Unmatched(f"the table is read by {_describe_node(reader)}, which is no lookup and no output layer")
        for product in _forward_users(reader, forward):
            if product.target not in (aten.mm.default, aten.addmm.default) or product.args[-1] is not reader:
                raise Unmatched(f"the table is read by {_describe_node(product)}, which is not an output layer")
            found.append((product, as_read))
    if len(found) != 1:
        raise Unmatched(f"{len(found)} output layers read the table" if found else "no output layer reads the table")
    return found[0]


def _dense_readers(weight: fx.Node, forward: set[fx.Node]) -> Iterator[fx.Node]:
    """Yields the forward's nodes that use a table for anything but looking up rows or reading its shape."""
    for user in _forward_users(weight, forward):
        if user.target in LOOKUPS and argument(user, "weight") is weight:
            continue
        if user.target not in (aten.sym_size.int, aten.sym_numel.default):
            yield user


def _forward_users(node: fx.Node, forward: set[fx.Node]) -> list[fx.Node]:
    """Returns the users of a node that belong to the forward."""
    return [user for user in node.users if user in forward]


def _follow_logits(graph: TrainingGraph, head: Head, forward: set[fx.Node]) -> None:
    """Finds the model's results and the loss that are computed from the logits of `head`, and stores them in `head`."""
    results: dict[fx.Node, list[int]] = {}
    for value, role in graph.outputs():
        if value is not None and isinstance(role, Result):
            results.setdefault(value, []).append(role.index)
    waiting: list[tuple[fx.Node, tuple[Step, ...], tuple[fx.Node, ...]]] = [(head.product, (), ())]
    while waiting:
        node, steps, shapes = waiting.pop()
        is_cut = any(shape.target is aten.slice.Tensor for shape in shapes)
        head.results += [ResultLogits(index, node, steps, is_cut) for index in results.get(node, ())]
        head.sizes += [user for user in node.users if user.target is aten.sym_size.int]
        for user in _forward_users(node, forward):
            if user in head.sizes:
                continue
            if user.target is aten._log_softmax.default:
                _find_loss(head, user, steps, shapes, forward)
            else:
                step, reshapes = _classify_step(user, node)
                waiting.append((user, (*steps, *step), (*shapes, user) if reshapes else shapes))
    if not head.results and head.loss is None:
        raise Unmatched(f"the logits are neither returned nor used by a loss ({_describe_node(head.product)})")
    if len({made.node for made in head.results}) < len(head.results):
        raise Unmatched("the model returns the same logits twice")
    if any(made.is_cut for made in head.results):
        raise Unmatched("the model returns only a part of the logits")


def _classify_step(node: fx.Node, logits: fx.Node) -> tuple[tuple[Step, ...], bool]:
    """Classifies a node that reads logits. Returns (a tuple of the node as an element-wise op, or () if it is not one;
    whether it changes the logits' leading shape). Raises `Unmatched` if the node is not supported.
    """
    target = node.target
    keeps = isinstance(node.meta.get("val"), torch.Tensor) and _last_dim_sizes(node) == _last_dim_sizes(logits)
    if target in _SAME:
        return (), False
    if keeps and target in VIEWS:
        return (), True
    if keeps and target is aten.slice.Tensor and argument(node, "dim") not in (-1, logits.meta["val"].dim() - 1):
        return (), True
    if target is _CAST and set(node.kwargs) == {"dtype"}:
        return (("to", 0.0, node.meta["val"].dtype),), False
    if target in _NUMBERS and node.args[0] is logits and isinstance(node.args[1], int | float):
        return ((_NUMBERS[target], float(node.args[1]), None),), False
    if target is aten.tanh.default:
        return (("tanh", 0.0, None),), False
    raise Unmatched(
        f"the logits are read by {_describe_node(node)}, which is not supported between output layer and loss"
    )


def _find_loss(
    head: Head, softmax: fx.Node, steps: tuple[Step, ...], shapes: tuple[fx.Node, ...], forward: set[fx.Node]
) -> None:
    """Finds the loss that reads `softmax`, the log-softmax of the logits, among the nodes of the forward. Stores it in
    `head`.

    Args:
        steps, shapes: the element-wise ops, and the changes of the leading shape, before the log-softmax.
    """
    if argument(softmax, "dim") not in (-1, softmax.meta["val"].dim() - 1):
        raise Unmatched(f"the softmax is not over the table's rows ({_describe_node(softmax)})")
    if argument(softmax, "half_to_float"):
        steps = (*steps, ("to", 0.0, torch.float32))
    readers, likelihoods, sums = [softmax], list[fx.Node](), list[fx.Node]()
    for reader in readers:
        for user in _forward_users(reader, forward):
            if user.target is aten.nll_loss_forward.default:
                likelihoods.append(user)
            elif user.target is aten.sym_size.int:
                head.sizes.append(user)
            elif user.target is aten.sum.dim_IntList and reader is softmax:
                sums.append(user)
            elif user.target in VIEWS and _last_dim_sizes(user) == _last_dim_sizes(softmax):
                readers.append(user)
                shapes = (*shapes, user)
            else:
                raise Unmatched(
                    f"the log-softmax of the logits is read by {_describe_node(user)}, which is not a supported loss"
                )
    if len(likelihoods) != 1 or len(sums) > 1 or head.loss is not None:
        raise Unmatched("several losses read the logits")
    _check_loss(likelihoods[0], forward)
    for node in sums:
        _check_smoothing(node, likelihoods[0], forward)
    head.loss = Loss(likelihoods[0], steps, shapes, _loss_backward(readers), *sums)


def _check_loss(node: fx.Node, forward: set[fx.Node]) -> None:
    """Raises `Unmatched` if an `nll_loss_forward` has an unsupported shape, if its weights or labels are drawn at
    random, or if the forward reads its second result, the total weight.
    """
    weight = argument(node, "weight")
    if weight is not None and any(map(draws_random_numbers, _with_ancestors(weight))):
        raise Unmatched("the class weights of the loss are drawn at random")
    if node.meta["val"][0].dim() > 1 or node.args[0].meta["val"].dim() != 2:  # type: ignore[union-attr]
        raise Unmatched(f"the loss is not over logits (N, V) and labels (N,) ({_describe_node(node)})")
    if any(_forward_users(item, forward) for item in node.users if item.args[1] == 1):
        raise Unmatched(
            f"the forward uses the second output of nll_loss, the total weight of the labels ({_describe_node(node)})"
        )
    if any(map(draws_random_numbers, _with_ancestors(argument(node, "target")))):
        raise Unmatched("the labels of the loss are drawn at random")


def _check_smoothing(node: fx.Node, likelihood: fx.Node, forward: set[fx.Node]) -> None:
    """Raises `Unmatched` if the sum of a log-softmax (`node`) is used for anything but the label smoothing of
    `F.cross_entropy`. `likelihood` is the negative log-likelihood of the same logits.
    """
    is_plain = node.args[1] in ([1], [-1]) and len(node.args) == 2 and not node.kwargs
    readers = _forward_users(node, forward)
    masked = [user for reader in readers for user in _forward_users(reader, forward)]
    if (
        not is_plain
        or node < likelihood
        or [reader.target for reader in readers] != [aten.neg.default]
        or len(masked) != 1
    ):
        raise Unmatched(
            f"the log-softmax of the logits is read by {_describe_node(node)}, which is not a supported loss"
        )
    mask = masked[0].args[1] if masked[0].target is aten.masked_fill.Scalar else None
    ignored = argument(likelihood, "target"), argument(likelihood, "ignore_index")
    if not isinstance(mask, fx.Node) or mask.target is not aten.eq.Scalar or mask.args != ignored:
        raise Unmatched(
            f"the sum of the log-softmax is read by {_describe_node(masked[0])}, which is not label smoothing"
        )
    if argument(likelihood, "weight") is not None:
        raise Unmatched(f"the loss has both class weights and label smoothing ({_describe_node(likelihood)})")


def _loss_backward(readers: Sequence[fx.Node]) -> fx.Node | None:
    """Returns the `nll_loss_backward` node that reads one of `readers`, which are a log-softmax and its views. Returns
    None if no gradient is taken.
    """
    found = [user for reader in readers for user in reader.users if user.target is aten.nll_loss_backward.default]
    if len(found) > 1:
        raise Unmatched("the model computes the gradient of the loss twice. Compute it only once")
    return found[0] if found else None


def _with_ancestors(node: fx.Node) -> set[fx.Node]:
    """Returns a node and all nodes that it depends on."""
    return reached([node], lambda each: each.all_input_nodes)


def labels_from_batch(loss: Loss) -> bool:
    """Returns whether a loss's labels depend on the batch alone, so that they are known before the forward."""
    return _depends_on_batch_only(argument(loss.node, "target"))


def _depends_on_batch_only(value: fx.Node) -> bool:
    """Returns whether a value depends only on inputs of the batch."""
    inputs = [node.meta["role"] for node in _with_ancestors(value) if node.op == "placeholder"]
    return all(isinstance(role, BatchInput) for role in inputs)


def _find_gradients(graph: TrainingGraph, head: Head, forward: set[fx.Node]) -> None:
    """Finds the nodes that compute the gradients of hidden states, table and bias, and stores them in `head`."""
    indices = {made.index for made in head.results}
    tangents = [node for node, role in graph.inputs() if isinstance(role, Tangent) and role.index in indices]
    starts = [*tangents, *([head.loss.backward] if head.loss is not None and head.loss.backward is not None else [])]
    chain, waiting = set(starts), list(starts)
    ends: list[fx.Node] = []
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user in chain:
                continue
            if user.target in (aten.mm.default, aten.sum.dim_IntList):
                ends.append(user)
            elif user.target in _BACKWARD or user.target is aten.add.Tensor:
                chain.add(user)
                waiting.append(user)
            else:
                raise Unmatched(
                    f"{_describe_node(user)} uses the gradient of the logits, which only the output layer may use. "
                    "Remove hooks and other computations on this gradient"
                )
    for node in chain:
        if node.target is aten.add.Tensor and (others := [n for n in node.all_input_nodes if n not in chain]):
            _store_smoothing(head, node, others)
    for end in dict.fromkeys(ends):
        _store_gradient(head, end, chain)
    if head.of_weight is not None:
        gradient = gradients_of(graph.module)[head.weight.meta["role"].name]
        assert gradient is not None
        of_product = reached([head.of_weight], lambda node: node.users)
        terms = [term for term in gradient_terms(gradient) if term in of_product]
        if len(terms) != 1:
            raise Unmatched("the gradient is not a sum over lookups and output layer. Remove other uses of the table")
        head.of_table = terms[0]


def _store_smoothing(head: Head, node: fx.Node, others: Sequence[fx.Node]) -> None:
    """Stores in `head` the gradient with respect to the sum of the log-softmax, for a loss with smoothed labels. `node`
    adds this gradient, which must be the only node in `others`, to the gradient of the loss.
    """
    loss, (other, *more) = head.loss, others
    narrow = other.all_input_nodes[0] if other.target is aten.expand.default else other
    is_of_sums = loss is not None and loss.sums is not None and loss.backward in node.all_input_nodes
    if not is_of_sums or more or narrow.target is not aten.unsqueeze.default or argument(narrow, "dim") not in (1, -1):
        raise Unmatched(f"the logits also receive a gradient that does not come from the loss ({_describe_node(node)})")
    assert loss is not None
    head.loss = replace(loss, of_sums=narrow.all_input_nodes[0])


def _store_gradient(head: Head, end: fx.Node, chain: set[fx.Node]) -> None:
    """Stores the node `end` in `head` as the gradient that it computes: of hidden states, table or bias.

    Args:
        end: a matrix product or sum that reads the gradient of the logits.
        chain: the nodes between the start of the backward and `end`.

    Raises:
        Unmatched: `end` computes another gradient, or one that is already stored.
    """
    if end.target is aten.sum.dim_IntList:
        kind = "of_bias" if head.bias is not None and argument(end, "dim") == [0] else ""
    elif end.args[0] in chain and _is_table(head, end.args[1]):
        kind = "of_hidden"
    elif end.args[0] in chain and end.args[1] is head.hidden:
        kind = "of_weight"
    else:
        kind = ""
    if not kind or getattr(head, kind) is not None:
        raise Unmatched(f"{_describe_node(end)} uses the gradient of the logits. Remove hooks on this gradient")
    setattr(head, kind, end)


def _is_table(head: Head, node: Any) -> bool:
    """Returns whether a node is `head.as_read`, or `head.as_read` transposed an even number of times."""
    turned = 0
    while isinstance(node, fx.Node) and node.target is _TRANSPOSE:
        node, turned = node.args[0], turned + 1
    return node is head.as_read and turned % 2 == 0


def _describe_node(node: fx.Node) -> str:
    """Returns a node's name and the user's source line, for an error message."""
    return f"{node.name}, {source_of(node)}"


def parameter_read(node: fx.Node) -> str:
    """Returns the name of the parameter if a node is a parameter or a cast of one, otherwise ""."""
    while node.op != "placeholder":
        node = node.all_input_nodes[0]
    role = node.meta["role"]
    return role.name if isinstance(role, Parameter) else ""
