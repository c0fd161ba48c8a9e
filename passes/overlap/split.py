"""Splits each exchange of rows in two (EmbRace's vertical scheduling): what the next step needs first is sent first.

    rewrite:
        forward    updated = update_rows(shard, table, "table gradients"); submit_rows(updated, ..., "table rows")
                   part = await_rows(..., "table rows"); flat = join_rows([part], ...)
        backward   submit_gradients(grad_rows, ids, ..., "table gradients")
    ->  forward    submit_ids([ids], "ids")
                   updated = update_rows(shard, table, "table prior"); submit_rows(updated, ..., "table rows")
                   early = await_rows(..., "table early rows"); late = await_rows(..., "table rows")
                   flat = join_rows([early, late], ...)
        backward   updated = update_rows(shard, table, "table delayed [0]")     # for the previous step, at the head
                   await_ids([ids], "ids"); submit_rows(updated, ..., "table early rows")
                   ...
                   submit_gradients(..., "table prior"); submit_gradients(..., "table delayed [0]")

Contract
    The ops determine, from the data, which rows are in a part. The phases are for a step whose own and next batch are
    known in advance; `variants.py` derives those of all other steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Argument

from embrace_fx.passes.overlap.launches import Phases, call_by_table, calls_of, rewrite_phases, set_launch
from embrace_fx.passes.rewriter import Rewriter, first_after_placeholders
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.operation_id import IDS, gradients_id, rows_id
from embrace_fx.vocabulary.ops import id_of

embrace = torch.ops.embrace


@dataclass(frozen=True)
class SplitRows:
    """The pass that splits each exchange of rows, and of row gradients, in two. Early rows, which the last step has not
    changed, are sent immediately. Late rows are sent after their update. Prior gradients, which belong to rows that the
    next batch reads, are sent before all other gradients, which are delayed.

    Attributes:
        pieces: pairs (table, number of pieces in which the table's delayed gradients are sent).
    """

    pieces: tuple[tuple[str, int], ...]

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        return rewrite_phases(graph, self._rewrite)

    def _rewrite(self, phases: Phases) -> None:
        """Splits each submission of rows into early and late rows, and each submission of gradients into prior and
        delayed gradients.
        """
        forward, backward = phases["forward"], phases["backward"]
        submitted = call_by_table(forward, embrace.submit_rows.default)
        if not submitted:
            return
        trained = call_by_table(backward, embrace.submit_gradients.default)
        pieces = {table: count for table, count in self.pieces if table in trained}
        _split_backward(backward, submitted, pieces)
        _split_forward(forward)


def _split_forward(forward: fx.GraphModule) -> None:
    """Splits the forward's exchanges. Submits the next batch's ids. Waits separately for early rows, which the last
    step has not changed, and for late rows.
    """
    rewriter = Rewriter(forward)
    submitted = call_by_table(forward, embrace.submit_rows.default)
    with rewriter.before(first_after_placeholders(forward.graph)):
        ids = [node.args[1] for node in submitted.values()]
        rewriter.launch(embrace.submit_ids.default, ids, launch=IDS, name="next_ids_sent")
    for node in calls_of(forward, embrace.update_rows.default):
        set_launch(node, gradients_id(id_of(node).what, "prior"))
    for node in submitted.values():
        set_launch(node, rows_id(id_of(node).what, "late"))
    for late in calls_of(forward, embrace.await_rows.default):
        (join,) = late.users
        name = late.name.removesuffix("_part")
        with rewriter.before(late):
            early = rewriter.launch(
                embrace.await_rows.default,
                *late.args[:-1],
                launch=rows_id(id_of(late).what, "early"),
                name=f"{name}_early",
            )
        set_launch(late, rows_id(id_of(late).what, "late"))
        late.name = f"{name}_late"
        join.args = ([early, late], *join.args[1:])


def _split_backward(backward: fx.GraphModule, submitted: dict[str, fx.Node], pieces: dict[str, int]) -> None:
    """Splits the backward's exchanges. Separately submits prior gradients (of rows that the next batch reads) and
    delayed gradients (of all other rows). At the start of the backward, submits the next batch's early rows, which the
    last step has not changed.

    Args:
        submitted: table -> the forward's submission of its rows.
        pieces: table -> number of pieces of its delayed gradients.
    """
    rewriter = Rewriter(backward)
    gradients = call_by_table(backward, embrace.submit_gradients.default)
    for table, prior in gradients.items():
        set_launch(prior, gradients_id(table, "prior"))
        place = prior.next
        for k in range(pieces[table]):
            with rewriter.before(place):
                rewriter.launch(
                    embrace.submit_gradients.default,
                    *prior.args[:-1],
                    launch=gradients_id(table, "delayed", k),
                    name=f"{prior.name}_delayed_{k}",
                )
    _submit_early_rows(rewriter, submitted, pieces)


def _submit_early_rows(rewriter: Rewriter, submitted: dict[str, fx.Node], pieces: dict[str, int]) -> None:
    """Inserts, at the start of the backward, the updates of tables by the previous step's delayed gradients. Then
    inserts the submission of those rows of the next batch that the last step has not changed (early rows).

    Args:
        submitted: table -> the forward's submission of its rows.
        pieces: table -> number of pieces of its delayed gradients.
    """
    shards = {table: _placeholder_in_backward(rewriter, _submitted_shard(node)) for table, node in submitted.items()}
    routes = {
        table: [_placeholder_in_backward(rewriter, each) for each in node.args[1:3]]
        for table, node in submitted.items()
    }
    with rewriter.before(first_after_placeholders(rewriter.graph)):
        for table, shard in shards.items():
            updated = shard
            for k in range(pieces.get(table, 0)):
                updated = rewriter.launch(
                    embrace.update_rows.default,
                    updated,
                    table,
                    launch=gradients_id(table, "delayed", k),
                    name=f"{shard.name}_updated_{k}",
                )
            shards[table] = updated
        ids = [of_table for of_table, _ in routes.values()]
        rewriter.launch(embrace.await_ids.default, ids, launch=IDS, name="next_ids_there")
        for table, node in submitted.items():
            rewriter.launch(
                embrace.submit_rows.default,
                shards[table],
                *routes[table],
                table,
                node.args[4],
                launch=rows_id(table, "early"),
                name=f"{node.name}_early",
            )


def _placeholder_in_backward(rewriter: Rewriter, value: Argument) -> fx.Node:
    """Returns the backward's placeholder for a value that the forward reads too, inserting it if it is missing."""
    assert isinstance(value, fx.Node)
    role = value.meta["role"]
    found = (node for node in rewriter.graph.nodes if node.op == "placeholder" and node.meta["role"] == role)
    return next(found, None) or rewriter.copy_placeholder(value)


def _submitted_shard(submitted: fx.Node) -> fx.Node:
    """Returns the placeholder of the table shard from which a node submits rows."""
    found = submitted.all_input_nodes[0]
    while found.op != "placeholder":
        found = found.all_input_nodes[0]
    return found
