"""Relaxed dependences: a step leaves its communication to the next one (EmbRace, ICPP 2022, section 4).

Contract
    Same nodes otherwise, same values: a parameter is read after its last update, a row after its last one.
    The backward submits gradients and returns; the forward awaits an update just before it reads what was updated.
    Works on the phases of a partitioned graph; the joint module stays as it was.

    rewrite, tables:
        forward    flat = wait(all_to_all_rows(lookup(shard, ids), counts, D, ...)); rows = join_columns(flat, D, N)
        backward   flat = wait(all_to_all_gradients(split_columns(grad_rows), counts, ...)); coalesce(ids, flat, ...)
    ->  forward    flat = await_rows(shard, ids, counts, table); rows = join_columns(flat, D, 1)
        backward   submit_rows(grad_rows, ids, counts, table)
    On a grid likewise: what `route_grid` yields is found by the exchange itself, of the parts that it cuts.
    A stack of tables then has one of each, in place of the first await and of the last submission:
        ids        ids, counts = stack_ids([ids1, ids2], [counts1, counts2], first_rows)
        forward    flat1, flat2 = unstack_rows(await_rows(shard1, ids, counts, stack), [counts1, counts2], rank)
        backward   submit_rows(cat([grad_rows1, grad_rows2]), ids, counts, stack)

    rewrite, dense gradients (`horizontal`):
        backward   m1, m2 = unpack_bucket(wait(all_reduce_(bucket)), [p1, p2])  or exchange_gradient_
        forward    ... p1 ... p2 ...
    ->  backward   submit_bucket(bucket, k)
        forward    p1', p2' = await_update([p1, p2], k); ... p1' ... p2' ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_not

import torch
from torch import fx

from embrace_fx.passes.narrow import JOINS
from embrace_fx.passes.reduce import ALL_REDUCE, EXCHANGE
from embrace_fx.passes.rewriter import Rewriter, first_user
from embrace_fx.passes.shard import short_name
from embrace_fx.passes.stack_rows import stack_rows
from embrace_fx.vocabulary.graph import (
    Gradient,
    OutputRole,
    Parameter,
    PendingGradients,
    PendingRows,
    RowGradient,
    Saved,
    Shard,
    TrainingGraph,
    copy_module,
    inputs_of,
    outputs_of,
    set_outputs,
)
from embrace_fx.vocabulary.plan import Stack

embrace = torch.ops.embrace


@dataclass(frozen=True)
class RelaxDependences:
    """Lets the updates of tables, and with `horizontal` those of dense parameters, run into the next forward.

    Attributes:
        buckets: what the graph reduces, in launch order.
        horizontal: relax the dense buckets too; otherwise their gradients are waited for at the end of the backward.
        stacks: tables whose rows travel together.
        rank: whose rows the stacks' are.
    """

    buckets: tuple[tuple[str, ...], ...]
    horizontal: bool
    stacks: tuple[Stack, ...] = ()
    rank: int = 0

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        if "backward" not in graph.phases:
            return graph
        phases = {name: copy_module(module) for name, module in graph.phases.items()}
        _relax_rows(phases["forward"], phases["backward"])
        for stack in self.stacks:
            stack_rows(phases, stack, self.rank)
        if self.horizontal:
            _submit_buckets(phases["backward"], self.buckets)
            _await_updates(phases["forward"], self.buckets)
        for module in phases.values():
            _drop_unread(module)
            module.graph.lint()
            module.recompile()
        return replace(graph, phases=phases)


def _relax_rows(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    rewriter = Rewriter(forward)
    routes: dict[str, _Route] = {}  # by the name of the ids that `coalesce` reads
    for join in [node for node in forward.graph.nodes if node.target in JOINS]:
        wait = join.all_input_nodes[0]
        launch = wait.all_input_nodes[0]
        columns = launch.args[0]
        lookup = columns if columns.target is embrace.lookup.default else columns.all_input_nodes[0]
        shard, ids = lookup.args
        counts = launch.args[1]
        if ids.op != "placeholder":  # an item of `route_grid`
            saved = [ids.name, counts.name, join.args[1].name]
            ids, counts, *_ = ids.all_input_nodes[0].args
            routes[saved[0]] = _Route(ids, counts, saved)
        table = shard.meta["role"].table
        with rewriter.before(join):
            rows = rewriter.call(
                embrace.await_rows.default,
                shard,
                ids,
                counts,
                table,
                launch.meta["val"].dtype,
                name=f"{short_name(table)}_arrived",
            )
        rows.meta["val"] = wait.meta["val"]  # what later nodes know its unknown size by
        join.target = embrace.join_columns.default
        join.args = (rows, join.meta["val"].shape[1], 1)
        _erase_chain(forward.graph, wait, keep={shard, ids})
    outputs = list(outputs_of(backward))
    rewriter = Rewriter(backward) if outputs else rewriter
    for coalesced in list(backward.graph.find_nodes(op="call_function", target=embrace.coalesce.default)):
        outputs = _submit_rows(rewriter, coalesced, outputs, routes)
    set_outputs(backward, outputs)
    for coalesced in list(backward.graph.find_nodes(op="call_function", target=embrace.coalesce.default)):
        for item in list(coalesced.users):
            _erase_chain(backward.graph, item, keep=set())
    _drop_routes(forward, backward, [name for route in routes.values() for name in route.saved])


@dataclass(frozen=True)
class _Route:
    """A `route_grid` of the forward: the ids and counts that it takes, and the values it saves for the backward."""

    ids: fx.Node
    counts: fx.Node
    saved: list[str]


def _drop_routes(forward: fx.GraphModule, backward: fx.GraphModule, saved: list[str]) -> None:
    """Erases what a forward saved of `route_grid`, and the op: the exchange finds it by itself."""
    for node, role in list(inputs_of(backward)):
        if isinstance(role, Saved) and role.name in saved:
            backward.graph.erase_node(node)
    outputs = list(outputs_of(forward))
    set_outputs(forward, [(v, r) for v, r in outputs if not (isinstance(r, Saved) and r.name in saved)])
    for node in [node for node in forward.graph.nodes if node.name in saved]:
        _erase_chain(forward.graph, node, keep=set())


def _submit_rows(
    rewriter: Rewriter,
    coalesced: fx.Node,
    outputs: list[tuple[fx.Node | None, OutputRole]],
    routes: Mapping[str, _Route],
) -> list[tuple[fx.Node | None, OutputRole]]:
    ids, received, _, padding_idx, scale = coalesced.args
    wait = received if isinstance(received, fx.Node) else None
    assert wait is not None
    while wait.target is not torch.ops._c10d_functional.wait_tensor.default:
        wait = wait.all_input_nodes[0]
    launch = wait.all_input_nodes[0]
    split, counts = launch.args[:2]
    assert isinstance(split, fx.Node)
    assert isinstance(ids, fx.Node)
    table = next(role.table for value, role in outputs if value in coalesced.users and isinstance(role, RowGradient))
    if (route := routes.get(ids.meta["role"].name)) is not None:
        ids, counts = rewriter.copy_of(route.ids), rewriter.copy_of(route.counts)
    with rewriter.before(launch):
        token = rewriter.call(
            embrace.submit_rows.default,
            split.all_input_nodes[0],
            ids,
            counts,
            table,
            padding_idx,
            scale,
            name=f"{short_name(table)}_submitted",
        )
    kept = [(value, role) for value, role in outputs if value not in coalesced.users]
    return [*kept, (token, PendingRows(table))]


def _submit_buckets(backward: fx.GraphModule, buckets: Sequence[tuple[str, ...]]) -> None:
    rewriter = Rewriter(backward)
    outputs = list(outputs_of(backward))
    launches = [
        node
        for node in backward.graph.nodes
        if node.target in (ALL_REDUCE, EXCHANGE)
        and node.all_input_nodes[0].target is embrace.pack_bucket.default  # other passes reduce counts
    ]
    submitted: list[tuple[fx.Node | None, OutputRole]] = []
    for k, launch in enumerate(launches):
        (wait,) = launch.users
        (unpacked,) = wait.users
        means = set(unpacked.users)
        names = tuple(
            role.of.name
            for value, role in outputs
            if value in means and isinstance(role, Gradient) and isinstance(role.of, Parameter)
        )
        assert set(names) <= set(buckets[k])
        with rewriter.before(launch):
            token = rewriter.call(embrace.submit_bucket.default, launch.args[0], k, name=f"bucket_{k}_submitted")
        outputs = [(value, role) for value, role in outputs if value not in means]
        submitted.append((token, PendingGradients(k, tuple(n for n in buckets[k] if n in names))))
        set_outputs(backward, outputs)
        for mean in list(means):
            _erase_chain(backward.graph, mean, keep={token, launch.args[0]})
    set_outputs(backward, outputs + submitted)


def _await_updates(forward: fx.GraphModule, buckets: Sequence[tuple[str, ...]]) -> None:
    rewriter = Rewriter(forward)
    parameters = {role.name: node for node, role in inputs_of(forward) if isinstance(role, Parameter)}
    for k, bucket in enumerate(buckets):
        read = [parameters[name] for name in bucket if name in parameters and parameters[name].users]
        if not read:
            continue
        position = {node: n for n, node in enumerate(forward.graph.nodes)}
        with rewriter.before(min((first_user(node) for node in read), key=position.__getitem__)):
            updated = rewriter.call(embrace.await_update.default, read, k, name=f"bucket_{k}_updated")
            items = [rewriter.item(updated, i, f"{node.name}_updated") for i, node in enumerate(read)]
        for node, item in zip(read, items, strict=True):
            item.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(item, delete_user_cb=partial(is_not, updated))


def _erase_chain(graph: fx.Graph, node: fx.Node, keep: set[fx.Node]) -> None:
    """Erases a node that nothing reads, and what was computed for it alone."""
    if node.users or node.op == "placeholder" or node in keep:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for value in inputs:
        _erase_chain(graph, value, keep)


def _drop_unread(module: fx.GraphModule) -> None:
    """Placeholders of state that was read only by what is gone."""
    for node, role in list(inputs_of(module)):
        if not node.users and isinstance(role, Parameter | Shard):
            module.graph.erase_node(node)
