"""A stack's tables share one await and one submission: of relaxed phases, what `passes/relax.py` does after the tables.

Contract
    Same values: what a table's lookups read, and the gradient it gets, are parts of the stack's.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import fx
from torch._ops import OpOverload

from embrace_fx.passes.rewriter import Rewriter, latest
from embrace_fx.vocabulary.graph import PendingRows, Saved, inputs_of, outputs_of, set_outputs
from embrace_fx.vocabulary.plan import Stack

aten = torch.ops.aten
embrace = torch.ops.embrace


def stack_rows(phases: dict[str, fx.GraphModule], stack: Stack, rank: int) -> None:
    """Joins what the phases await and submit of the stack's tables; of those of them that are read."""
    forward, backward = phases["forward"], phases["backward"]
    awaits = _of_tables(forward, embrace.await_rows.default, stack)
    submissions = _of_tables(backward, embrace.submit_rows.default, stack)
    if not awaits:
        return
    assert list(awaits) == list(submissions)  # the planner stacks what has gradients from the same results
    name = stack.name.replace(" ", "_").replace(".", "_")
    firsts = dict(zip(stack.tables, stack.first_rows, strict=True))
    ids, counts = ([_role(node, k) for node in awaits.values()] for k in (1, 2))
    stacked = _stack_ids(phases["ids"], name, ids, counts, [firsts[table] for table in awaits])
    _await_together(Rewriter(forward), list(awaits.values()), stack.name, name, stacked, rank)
    _submit_together(backward, submissions, stack.name, name, stacked)
    for module in (forward, backward):
        for node, role in list(inputs_of(module)):
            if isinstance(role, Saved) and not node.users:
                module.graph.erase_node(node)


def _role(node: fx.Node, k: int) -> str:
    """The name of what an earlier phase saves for argument `k` of a call."""
    value = node.args[k]
    assert isinstance(value, fx.Node)
    name: str = value.meta["role"].name
    return name


def _dtype(awaited: fx.Node) -> torch.dtype:
    dtype = awaited.args[4]
    assert isinstance(dtype, torch.dtype)
    return dtype


def _of_tables(module: fx.GraphModule, target: OpOverload, stack: Stack) -> dict[str, fx.Node]:
    """The calls that serve tables of a stack, in its order."""
    found = {str(n.args[3]): n for n in module.graph.find_nodes(op="call_function", target=target)}
    return {table: found[table] for table in stack.tables if table in found}


def _stack_ids(
    module: fx.GraphModule, name: str, ids: list[str], counts: list[str], first_rows: list[int]
) -> list[fx.Node]:
    """The stack's ids and counts, which the ids phase saves in place of its tables' ids."""
    rewriter, outputs = Rewriter(module), list(outputs_of(module))
    saved = {role.name: node for node, role in outputs if isinstance(role, Saved) and node is not None}
    with rewriter.before(module.graph.output_node()):
        stacked = rewriter.call(
            embrace.stack_ids.default,
            [saved[each] for each in ids],
            [saved[each] for each in counts],
            first_rows,
            name=f"{name}_stacked",
        )
        items = [rewriter.item(stacked, k, f"{name}_{what}") for k, what in enumerate(("ids", "counts"))]
    kept = [(value, role) for value, role in outputs if not (isinstance(role, Saved) and role.name in ids)]
    set_outputs(module, [*kept, *((item, Saved(item.name)) for item in items)])
    return items


def _saved(rewriter: Rewriter, values: list[fx.Node]) -> list[fx.Node]:
    """Placeholders for what the ids phase saves."""
    found = []
    for value in reversed(values):  # each comes first
        placeholder = rewriter.copy_of(value)
        placeholder.meta["role"] = Saved(value.name)
        found.append(placeholder)
    return found[::-1]


def _await_together(
    rewriter: Rewriter, awaits: list[fx.Node], stack: str, name: str, stacked: list[fx.Node], rank: int
) -> None:
    ids, counts = _saved(rewriter, stacked)
    position = {node: k for k, node in enumerate(rewriter.graph.nodes)}
    with rewriter.before(min(awaits, key=position.__getitem__)):
        shard, dtype = awaits[0].args[0], reduce(torch.promote_types, map(_dtype, awaits))
        flat = rewriter.call(embrace.await_rows.default, shard, ids, counts, stack, dtype, name=f"{name}_arrived")
        parts = rewriter.call(
            embrace.unstack_rows.default, flat, [each.args[2] for each in awaits], rank, name=f"{name}_rows"
        )
        # What later nodes know unknown sizes by.
        parts.meta["val"] = [_as(each.meta["val"], dtype, rewriter) for each in awaits]
        items = [rewriter.item(parts, k, f"{each.name}_in_stack") for k, each in enumerate(awaits)]
        items = [
            item if _dtype(each) == dtype else rewriter.cast(item, _dtype(each), name=f"{item.name}_narrow")
            for each, item in zip(awaits, items, strict=True)
        ]
    for each, item in zip(awaits, items, strict=True):
        each.replace_all_uses_with(item)
        rewriter.graph.erase_node(each)


def _as(value: torch.Tensor, dtype: torch.dtype, rewriter: Rewriter) -> torch.Tensor:
    if value.dtype == dtype:
        return value
    with rewriter.fake_mode:
        return torch.empty_like(value, dtype=dtype)


def _submit_together(
    module: fx.GraphModule, submissions: dict[str, fx.Node], stack: str, name: str, stacked: list[fx.Node]
) -> None:
    rewriter = Rewriter(module)
    ids, counts = _saved(rewriter, stacked)
    nodes = list(submissions.values())
    *_, padding_idx, scale = nodes[0].args
    with rewriter.before(latest(nodes).next):
        rows = rewriter.call(aten.cat.default, [each.args[0] for each in nodes], name=f"{name}_gradients")
        token = rewriter.call(
            embrace.submit_rows.default, rows, ids, counts, stack, padding_idx, scale, name=f"{name}_submitted"
        )
    kept = [(value, role) for value, role in outputs_of(module) if value not in nodes]
    set_outputs(module, [*kept, (token, PendingRows(stack, tuple(submissions)))])
    for each in nodes:
        module.graph.erase_node(each)
