"""Splits each exchange of a sharded table's rows and gradients into a submission and a wait, so that it overlaps
compute.

rewrite:
    forward    flat = wait(all_to_all_rows(lookup(shard, ids), counts, D, ...)); rows = join_columns(flat, D, N)
    backward   flat = wait(all_to_all_gradients(split_columns(grad_rows), counts, ...)); coalesce(ids, flat, ...)
->  forward    updated = update_rows(shard, table, "table gradients")           # at the head
               sent = submit_rows(updated, ids, counts, table, "table rows")    # at the head
               part = await_rows(ids, counts, table, "table rows"); flat = join_rows([part], ids, counts, table)
               rows = join_columns(flat, D, 1)
    backward   submit_gradients(grad_rows, ids, counts, table, ..., "table gradients")
On a grid, the rewrite is the same and removes `route_grid`, because the exchange routes each part of the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from embrace_fx.passes.narrow import JOINS
from embrace_fx.passes.overlap.launches import Phases, calls_of, erase_chain, rewrite_phases
from embrace_fx.passes.rewriter import Rewriter, first_after_placeholders
from embrace_fx.vocabulary.graph import (
    GradientOfRows,
    OutputRole,
    PendingRows,
    Saved,
    TrainingGraph,
    inputs_of,
    outputs_of,
    set_outputs,
)
from embrace_fx.vocabulary.operation_id import gradients_id, rows_id

embrace = torch.ops.embrace


@dataclass(frozen=True)
class SubmitRows:
    """The pass that lets exchanges of row gradients, and updates of sharded tables, overlap the next step.

    Attributes:
        within_step: names of tables that are exchanged and updated within one step, because an output layer reads all
            of their rows.
    """

    within_step: tuple[str, ...] = ()

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        return rewrite_phases(graph, lambda phases: _split_exchanges(phases, self.within_step))


@dataclass(frozen=True)
class _GridRoute:
    """The inputs and results of a `route_grid` node, which finds the ids whose rows are in this rank's shard.

    Attributes:
        ids, counts: the nodes of its inputs.
        saved: names of its results, which are saved for the backward.
    """

    ids: fx.Node
    counts: fx.Node
    saved: list[str]


def _split_exchanges(phases: Phases, within_step: Collection[str]) -> None:
    """Replaces the exchange of each table, except those in `within_step`, by a submission and a wait, in place."""
    forward, backward = phases["forward"], phases["backward"]
    routes: dict[str, _GridRoute] = {}  # name of the ids that `coalesce` reads -> the node that routes them
    head = first_after_placeholders(forward.graph).prev  # updates and submissions are inserted after this node
    outputs = list(outputs_of(backward))
    trained = {role.table for _, role in outputs if isinstance(role, GradientOfRows)}
    for join in [node for node in forward.graph.nodes if node.target in JOINS and _table_of(node) not in within_step]:
        head = _await_rows(forward, join, head, routes, trained)
    tables = {node: _role_of_gradient(node, outputs).table for node in calls_of(backward, embrace.coalesce.default)}
    summed = [node for node, table in tables.items() if table not in within_step]
    for coalesced in summed:
        outputs = _submit_gradients(Rewriter(backward), coalesced, outputs, routes)
    set_outputs(backward, outputs)
    for coalesced in summed:
        for item in list(coalesced.users):
            erase_chain(backward.graph, item, keep=set())
    _drop_routes(forward, backward, [name for route in routes.values() for name in route.saved])


def _lookup_of(join: fx.Node) -> fx.Node:
    """Returns the node that looks up the columns that are exchanged and then assembled to full rows by `join`."""
    columns: Any = join.all_input_nodes[0].all_input_nodes[0].args[0]
    found: fx.Node = columns if columns.target is embrace.lookup.default else columns.all_input_nodes[0]
    return found


def _table_of(join: fx.Node) -> str:
    """Returns the name of the table whose rows the node `join` assembles from received columns."""
    return str(_lookup_of(join).all_input_nodes[0].meta["role"].table)


def _role_of_gradient(coalesce: fx.Node, outputs: Sequence[tuple[fx.Node | None, OutputRole]]) -> GradientOfRows:
    """Returns the role of the graph output that a `coalesce` node, the sum of a table's row gradients, computes."""
    return next(role for value, role in outputs if value in coalesce.users and isinstance(role, GradientOfRows))


def _await_rows(
    forward: fx.GraphModule, join: fx.Node, head: fx.Node, routes: dict[str, _GridRoute], trained: set[str]
) -> fx.Node:
    """Replaces a table's lookup by a submission at the start of the forward, and a wait where the rows are needed.
    Returns the submission. The submission of the next table is to be inserted after it.

    Args:
        join: the node that assembles the table's full rows from received columns.
        head: the node after which to insert the submission.
        routes: name of the ids that `coalesce` reads -> the node that routes them. Gets an entry for a table on a grid.
        trained: names of the tables with a gradient.
    """
    rewriter = Rewriter(forward)
    wait = join.all_input_nodes[0]
    launch = wait.all_input_nodes[0]
    shard: Any
    ids: Any
    shard, ids = _lookup_of(join).args
    counts: Any = launch.args[1]
    places: Any = join.args[1]
    if ids.op != "placeholder":  # the ids are an item of the result of `route_grid`
        saved = [ids.name, counts.name, places.name]
        ids, counts, *_ = ids.all_input_nodes[0].args
        routes[saved[0]] = _GridRoute(ids, counts, saved)
    table, dtype = shard.meta["role"].table, launch.meta["val"].dtype
    with rewriter.before(head.next):
        sent = submit_rows(rewriter, table, (shard, ids, counts), dtype, trained=table in trained)
    with rewriter.before(join):
        flat = await_rows(rewriter, table, (ids, counts), dtype)
    flat.meta["val"] = wait.meta["val"]  # keep the symbol of the unknown size, because later nodes refer to it
    join.target = embrace.join_columns.default
    join.args = (flat, join.meta["val"].shape[1], 1)
    erase_chain(forward.graph, wait, keep={shard, ids})
    return sent


def submit_rows(
    rewriter: Rewriter, table: str, inputs: tuple[Any, Any, Any], dtype: torch.dtype, *, trained: bool
) -> fx.Node:
    """Inserts the update of a table, if it is trained, and the submission of its rows. Returns the submission.

    Args:
        inputs: the nodes of the shard, the ids, and each rank's number of ids.
    """
    name, (shard, *read) = table.removesuffix(".weight"), inputs
    if trained:
        launch = gradients_id(table, "whole")
        shard = rewriter.launch(embrace.update_rows.default, shard, table, launch=launch, name=f"{name}_updated")
    launch = rows_id(table, "whole")
    return rewriter.launch(embrace.submit_rows.default, shard, *read, table, dtype, launch=launch, name=f"{name}_sent")


def await_rows(rewriter: Rewriter, table: str, ids_and_counts: tuple[Any, Any], dtype: torch.dtype) -> fx.Node:
    """Inserts the wait for a table's rows, and a node that assembles the rows from received columns. Returns that node.

    Args:
        ids_and_counts: the nodes of the rows' ids, and of the number of ids of each rank.
    """
    name, launch = table.removesuffix(".weight"), rows_id(table, "whole")
    part = rewriter.launch(
        embrace.await_rows.default, *ids_and_counts, table, dtype, launch=launch, name=f"{name}_part"
    )
    return rewriter.call(embrace.join_rows.default, [part], *ids_and_counts, table, name=f"{name}_arrived")


def submit_gradients(
    rewriter: Rewriter, table: str, inputs: tuple[Any, Any, Any], padding_rows: Any, scale: Any
) -> fx.Node:
    """Inserts and returns the submission of a table's row gradients.

    Args:
        inputs: the nodes of the gradients, their ids, and each rank's number of ids.
        padding_rows: ids of padding rows, which get no gradient.
        scale: the factor on the summed gradients.
    """
    name, launch = f"{table.removesuffix('.weight')}_submitted", gradients_id(table, "whole")
    target = embrace.submit_gradients.default
    return rewriter.launch(target, *inputs, table, padding_rows, scale, launch=launch, name=name)


def _drop_routes(forward: fx.GraphModule, backward: fx.GraphModule, saved: list[str]) -> None:
    """Erases the `route_grid` nodes and their saved results, because the runtime routes the ids when it exchanges
    rows.
    """
    for node, role in list(inputs_of(backward)):
        if isinstance(role, Saved) and role.name in saved:
            backward.graph.erase_node(node)
    outputs = list(outputs_of(forward))
    set_outputs(forward, [(v, r) for v, r in outputs if not (isinstance(r, Saved) and r.name in saved)])
    for node in [node for node in forward.graph.nodes if node.name in saved]:
        erase_chain(forward.graph, node, keep=set())


def _submit_gradients(
    rewriter: Rewriter,
    coalesce: fx.Node,
    outputs: list[tuple[fx.Node | None, OutputRole]],
    routes: Mapping[str, _GridRoute],
) -> list[tuple[fx.Node | None, OutputRole]]:
    """Replaces the exchange and sum of a row gradient with its submission. Returns the new outputs of the backward,
    with the submission in place of the summed gradient.

    Args:
        coalesce: the node of the sum.
        outputs: the outputs of the backward.
        routes: name of the ids that `coalesce` reads -> the node that routes them, for tables on a grid.
    """
    ids, received, _, padding_rows, scale = coalesce.args
    wait = received if isinstance(received, fx.Node) else None
    assert wait is not None
    while wait.target is not torch.ops._c10d_functional.wait_tensor.default:
        wait = wait.all_input_nodes[0]
    launch = wait.all_input_nodes[0]
    split, counts = launch.args[:2]
    assert isinstance(split, fx.Node)
    assert isinstance(ids, fx.Node)
    role = _role_of_gradient(coalesce, outputs)
    if (route := routes.get(ids.meta["role"].name)) is not None:
        ids, counts = rewriter.copy_placeholder(route.ids), rewriter.copy_placeholder(route.counts)
    with rewriter.before(launch):
        token = submit_gradients(rewriter, role.table, (split.all_input_nodes[0], ids, counts), padding_rows, scale)
    kept = [(value, role) for value, role in outputs if value not in coalesce.users]
    return [*kept, (token, PendingRows(role.table, role.members))]
