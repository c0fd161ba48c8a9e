"""The tables of a stack share one update, one submission and one await of rows, and one submission of gradients.

    rewrite, two tables in a stack, after `SubmitRows`:
        ids        ids, counts = stack_ids([ids1, ids2], [counts1, counts2], first_rows)
        forward    updated = update_rows(shard1, stack, "stack gradients")
                   submit_rows(updated, ids, counts, stack, "stack rows")
                   flat = join_rows([await_rows(ids, counts, stack, "stack rows")], ids, counts, stack)
                   flat1, flat2 = unstack_rows(flat, [counts1, counts2], rank)
        backward   submit_gradients(cat([grad_rows1, grad_rows2]), ids, counts, stack, ..., "stack gradients")

Contract
    Same values: a table's rows and its gradient are parts of the stack's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import fx

from embrace_fx.passes.overlap.launches import Phases, by_table, drop_unread, rewrite_phases
from embrace_fx.passes.overlap.rows import await_rows, submit_gradients, submit_rows
from embrace_fx.passes.rewriter import Rewriter
from embrace_fx.vocabulary.graph import PendingRows, Saved, TrainingGraph, outputs_of, set_outputs
from embrace_fx.vocabulary.plan import Stack

aten = torch.ops.aten
embrace = torch.ops.embrace


@dataclass(frozen=True)
class StackRows:
    """Joins the exchanges of each stack's tables.

    Attributes:
        stacks: the tables whose rows travel together.
        rank: this rank.
    """

    stacks: tuple[Stack, ...]
    rank: int

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        return rewrite_phases(graph, self._rewrite) if self.stacks else graph

    def _rewrite(self, phases: Phases) -> None:
        for stack in self.stacks:
            _stack(phases, stack, self.rank)


@dataclass(frozen=True)
class _Member:
    """A table's nodes in the forward."""

    update: fx.Node
    submit: fx.Node
    part: fx.Node
    join: fx.Node

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.submit.args[4]
        assert isinstance(dtype, torch.dtype)
        return dtype


def _stack(phases: Phases, stack: Stack, rank: int) -> None:
    """Joins the awaits and submissions of those of a stack's tables that the graph reads."""
    forward, backward = phases["forward"], phases["backward"]
    members = _members(forward, stack)
    gradients = by_table(backward, embrace.submit_gradients.default)
    submissions = {table: gradients[table] for table in stack.tables if table in gradients}
    if not members:
        return
    assert list(members) == list(submissions)  # stacked tables get gradients from the same results
    firsts = dict(zip(stack.tables, stack.first_rows, strict=True))
    ids, counts = ([_role(node.submit, k) for node in members.values()] for k in (1, 2))
    stacked = _stack_ids(phases["ids"], stack.name, ids, counts, [firsts[table] for table in members])
    _rows_together(Rewriter(forward), list(members.values()), stack.name, stacked, rank)
    _submit_together(backward, submissions, stack.name, stacked)
    for module in (forward, backward):
        drop_unread(module, Saved)


def _members(forward: fx.GraphModule, stack: Stack) -> dict[str, _Member]:
    """Finds the forward's nodes for each table of a stack, in its order."""
    updates, submits, parts = (
        by_table(forward, target)
        for target in (embrace.update_rows.default, embrace.submit_rows.default, embrace.await_rows.default)
    )
    return {
        table: _Member(updates[table], submits[table], parts[table], next(iter(parts[table].users)))
        for table in stack.tables
        if table in parts
    }


def _role(node: fx.Node, k: int) -> str:
    """Returns the name of the saved value that is argument `k` of a call."""
    value = node.args[k]
    assert isinstance(value, fx.Node)
    name: str = value.meta["role"].name
    return name


def _stack_ids(
    module: fx.GraphModule, stack: str, ids: list[str], counts: list[str], first_rows: list[int]
) -> list[fx.Node]:
    """Makes the ids phase save a stack's ids and counts in place of its tables' ones; returns both."""
    rewriter, outputs = Rewriter(module), list(outputs_of(module))
    saved = {role.name: node for node, role in outputs if isinstance(role, Saved) and node is not None}
    with rewriter.before(module.graph.output_node()):
        stacked = rewriter.call(
            embrace.stack_ids.default,
            [saved[each] for each in ids],
            [saved[each] for each in counts],
            first_rows,
            name=f"{stack}_stacked",
        )
        items = [rewriter.item(stacked, k, f"{stack}_{what}") for k, what in enumerate(("ids", "counts"))]
    kept = [(value, role) for value, role in outputs if not (isinstance(role, Saved) and role.name in ids)]
    set_outputs(module, [*kept, *((item, Saved(item.name)) for item in items)])
    return items


def _saved(rewriter: Rewriter, values: list[fx.Node]) -> list[fx.Node]:
    """Inserts placeholders for values that the ids phase saves."""
    found = []
    for value in reversed(values):  # each is inserted as the first node
        placeholder = rewriter.copy_of(value)
        placeholder.meta["role"] = Saved(value.name)
        found.append(placeholder)
    return found[::-1]


def _rows_together(rewriter: Rewriter, members: list[_Member], stack: str, stacked: list[fx.Node], rank: int) -> None:
    ids, counts = _saved(rewriter, stacked)
    dtype = reduce(torch.promote_types, (each.dtype for each in members))
    with rewriter.before(min(each.update for each in members)):
        submit_rows(rewriter, stack, (members[0].update.args[0], ids, counts), dtype, trained=True)
    with rewriter.before(min(each.part for each in members)):
        flat = await_rows(rewriter, stack, (ids, counts), dtype)
        parts = rewriter.call(
            embrace.unstack_rows.default, flat, [each.submit.args[2] for each in members], rank, name=f"{stack}_rows"
        )
        # Later nodes read these values' symbols for unknown sizes.
        parts.meta["val"] = [_as(each.join.meta["val"], dtype, rewriter) for each in members]
        items = [rewriter.item(parts, k, f"{each.join.name}_in_stack") for k, each in enumerate(members)]
        items = [
            item if each.dtype == dtype else rewriter.cast(item, each.dtype, name=f"{item.name}_narrow")
            for each, item in zip(members, items, strict=True)
        ]
    for each, item in zip(members, items, strict=True):
        each.join.replace_all_uses_with(item)
        for node in (each.join, each.part, each.submit, each.update):
            rewriter.graph.erase_node(node)


def _as(value: torch.Tensor, dtype: torch.dtype, rewriter: Rewriter) -> torch.Tensor:
    if value.dtype == dtype:
        return value
    with rewriter.fake_mode:
        return torch.empty_like(value, dtype=dtype)


def _submit_together(
    module: fx.GraphModule, submissions: dict[str, fx.Node], stack: str, stacked: list[fx.Node]
) -> None:
    rewriter = Rewriter(module)
    ids, counts = _saved(rewriter, stacked)
    nodes = list(submissions.values())
    *_, padding_idx, scale, _ = nodes[0].args
    with rewriter.before(max(nodes).next):
        rows = rewriter.call(aten.cat.default, [each.args[0] for each in nodes], name=f"{stack}_gradients")
        token = submit_gradients(rewriter, stack, (rows, ids, counts), padding_idx, scale)
    kept = [(value, role) for value, role in outputs_of(module) if value not in nodes]
    set_outputs(module, [*kept, (token, PendingRows(stack, tuple(submissions)))])
    for each in nodes:
        module.graph.erase_node(each)
