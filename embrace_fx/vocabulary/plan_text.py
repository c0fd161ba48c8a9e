"""Formats plans as text: the table of a report, and the strategies compared for each parameter."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from html import escape
from math import prod
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as TextTable

from embrace_fx.cost.links import COLLECTIVES

if TYPE_CHECKING:
    from embrace_fx.vocabulary.plan import Decision, Plan

_ALONE = (
    "ms alone: time to exchange a parameter, and to update a table's rows, if nothing else runs; the sum is not a "
    "step's time"
)


LEAST_FOLDED = 3
"""Minimum number of dense parameters with the same strategy and reason to fold into one row."""


def render(plan: Plan, *, folded: bool = False) -> str:
    """Returns the plan as a text table: embedding tables first, then other parameters, then the total bytes sent with
    this plan and with DDP.

    Args:
        folded: whether dense parameters with the same strategy and reason share a row.
    """
    text = TextTable(title=f"embrace_fx plan, {plan.world_size} rank(s); bytes sent by one rank per step")
    for column in ("parameter", "shape", "strategy", "predicted", "DDP", "ms alone", "reason"):
        right = column in ("predicted", "DDP", "ms alone")
        text.add_column(column, justify="right" if right else "left", overflow="fold")
    groups: dict[tuple[str, ...], list[Decision]] = {}
    for decision in sorted(plan.decisions, key=lambda d: not d.is_table):
        has_own_row = decision.is_table or not folded
        key = (decision.parameter,) if has_own_row else (decision.strategy, decision.reason)
        groups.setdefault(key, []).append(decision)
    for found in groups.values():
        if len(found) < LEAST_FOLDED:
            for decision in found:
                text.add_row(*_cells(decision))
        else:
            text.add_row(*_folded_cells(found))
    ddp = sum(d.ddp_bytes_per_step for d in plan.decisions)
    text.add_section()
    text.add_row(
        "total",
        "",
        "",
        readable_bytes(plan.sent_bytes_per_step),
        readable_bytes(ddp),
        "",
        f"{len(plan.buckets)} bucket(s)",
    )
    notes = [f"one joined table: {', '.join(space.tables)}" for space in plan.spaces]
    notes += [f"schedule {plan.chosen_because}"] if plan.chosen_because else []
    notes += _formats(plan)
    if not any(d.is_table for d in plan.decisions):
        notes.append("no tables: every gradient is reduced densely")
    if plan.world_size > 1:
        notes.append(_ALONE)
    text.caption = "\n".join(notes)
    return fit_to_terminal(text)


def _formats(plan: Plan) -> list[str]:
    """Returns lines that list which parameters are sent rounded and which exactly, or [] if none is rounded."""
    rounded: dict[str, list[str]] = {}
    for decision in plan.decisions:
        if decision.travels_as != "exact":
            rounded.setdefault(f"{decision.strategy} sends {decision.travels_as}", []).append(decision.parameter)
    if not rounded:
        return []
    exact = [d.parameter for d in plan.decisions if d.travels_as == "exact" and d.sent_bytes_per_step]
    lines = [f"{how}, rounded: {len(of)} parameter(s)" for how, of in rounded.items()]
    return [*lines, *([f"sent exactly: {', '.join(exact[:5])}"] if exact else []), "ids are exact"]


def _cells(decision: Decision) -> tuple[str, ...]:
    """Returns the texts of the columns in one decision's row of the plan's table."""
    return (
        decision.parameter,
        " x ".join(map(str, decision.shape)) or "scalar",
        decision.strategy,
        readable_bytes(decision.sent_bytes_per_step),
        readable_bytes(decision.ddp_bytes_per_step),
        f"{decision.predicted_ms:.3f}",
        decision.reason,
    )


def _folded_cells(decisions: Sequence[Decision]) -> tuple[str, ...]:
    """Returns the texts of the columns in one row of the plan's table, for several decisions with the same strategy and
    reason.
    """
    return (
        f"{len(decisions)} others",
        f"{sum(prod(d.shape) for d in decisions):,} in all",
        decisions[0].strategy,
        readable_bytes(sum(d.sent_bytes_per_step for d in decisions)),
        readable_bytes(sum(d.ddp_bytes_per_step for d in decisions)),
        "",
        f"{decisions[0].reason}; each: print(model.plan)",
    )


def explain(plan: Plan) -> str:
    """Returns a text table of the strategies compared for each parameter. The table marks the chosen strategy, and
    gives the reason against each of the others.

    The measured sparsity of a table's gradients (`embrace_fx.cost.sparsity.Sparsity`) is below its strategies.
    Parameters for which no strategies were compared are left out.
    """
    text = TextTable(title=f"embrace_fx plan, {plan.world_size} rank(s): candidates, per rank and step")
    for column in ("parameter", "strategy", "sent", "ms alone", "memory", "", "reason against it"):
        right = column in ("sent", "ms alone", "memory")
        text.add_column(column, justify="right" if right else "left", overflow="fold")
    for decision in plan.decisions:
        for k, candidate in enumerate(decision.candidates):
            text.add_row(
                "" if k else decision.parameter,
                candidate.name,
                readable_bytes(candidate.sent_bytes_per_step),
                f"{candidate.predicted_ms:.3f}",
                readable_bytes(candidate.memory_bytes),
                "" if candidate.rejected else "chosen",
                candidate.rejected,
            )
        if decision.candidates and decision.measured:
            text.add_row("", "measured", "", "", "", "", decision.measured)
        if decision.candidates:
            text.add_section()
    if plan.world_size == 1:
        notes = ["a single rank exchanges nothing; embrace_fx.plan(model, batch, world_size=8) plans for more"]
    else:
        notes = [] if any(d.candidates for d in plan.decisions) else ["no parameter had a choice"]
        notes += [_ALONE, _links_text(plan), _handling_text(plan), *plan.history]
    text.caption = "\n".join(notes)
    return fit_to_terminal(text)


def _links_text(plan: Plan) -> str:
    """Returns a line about the links that the predicted times assume."""
    reached = []
    for name in (None, *COLLECTIVES):
        link = plan.links.link(name)
        if name is None or link != plan.links.link():
            rate = readable_bytes(link.bandwidth_bytes_per_ms * 1e3)
            reached.append(f"{name or 'a rank'} {rate}/s, {link.start_up_ms:.3f} ms per message")
    if plan.links.inside is not None:
        inside = plan.links.inside
        rate = readable_bytes(inside.bandwidth_bytes_per_ms * 1e3)
        reached.append(
            f"{plan.links.ranks_per_machine} ranks per machine, inside {rate}/s, {inside.start_up_ms:.3f} ms"
        )
    return f"links {plan.links_are}: {'; '.join(reached)}"


def _handling_text(plan: Plan) -> str:
    """Returns a line about the processor speed that the predictions assume."""
    rates = plan.links.handling
    searched, passed = (readable_bytes(each * 1e3) for each in (rates.scan_bytes_per_ms, rates.pass_bytes_per_ms))
    units, round_ms = f"{rates.unit_ms * 1e6:.0f} ns per unit", f"{rates.round_ms:.3f} ms per round"
    return f"a rank's processor searches {searched}/s and passes over {passed}/s; {units}, {round_ms}"


NARROWEST, WIDEST, NO_TERMINAL = 80, 200, 160
"""Characters per line: minimum, maximum, and without a terminal."""


def terminal_width() -> int:
    """Returns the width of the terminal in characters, clamped to [`NARROWEST`, `WIDEST`], or `NO_TERMINAL` if there is
    no terminal.
    """
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except (AttributeError, OSError, ValueError):  # standard output is closed, not a file, or not a terminal
        return NO_TERMINAL
    return min(max(columns, NARROWEST), WIDEST)


def fit_to_terminal(*parts: str | TextTable, widest: int = WIDEST) -> str:
    """Joins texts and text tables into one text that fits the width of the terminal.

    Args:
        widest: the maximum number of characters per line.
    """
    out = io.StringIO()
    console = Console(file=out, width=min(widest, terminal_width()), no_color=True)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return out.getvalue()


def readable_bytes(count: float) -> str:
    """Formats `count` bytes with a binary unit.

    >>> readable_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def preformatted(text: str) -> str:
    """Returns text as HTML that keeps its lines, for a notebook."""
    return f'<pre style="line-height:1.2;overflow-x:auto">{escape(text)}</pre>'
