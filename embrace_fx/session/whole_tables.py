"""Makes tables whole within a context, like FSDP's `summon_full_params`, so that submodules can be called in it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from math import prod

import torch

from embrace_fx.passes.planner.plan_fit import PlanViolation, fit_plan
from embrace_fx.runtime.memory.resident import available_bytes
from embrace_fx.session.programs import Programs
from embrace_fx.setup.context import Context

COPIES = 2
"""Number of copies of a table in a rank's memory while the table is gathered: the whole table, and the received parts.
"""

_WHOLE = "assembled under whole()"


@contextlib.contextmanager
def whole_tables(context: Context, programs: Programs) -> Iterator[None]:
    """Opens a context in which sharded tables are whole on every rank, with their optimizer state and gradients.
    Collective.
    """
    programs.apply_pending()
    plan = programs.plan
    if plan is None or not plan.divided:
        yield
        return
    _check_can_gather(context, plan.divided)
    programs.use_plan(fit_plan(plan, [PlanViolation((), plan.divided)], _WHOLE), "whole()")
    try:
        yield
    finally:
        programs.apply_pending()
        programs.use_plan(plan, "the end of whole()")


def _check_can_gather(context: Context, names: Sequence[str]) -> None:
    """Raises RuntimeError on every rank if some rank cannot make tables whole now, or has too little memory.
    Collective.

    Args:
        names: the names of the tables.
    """
    state, own = context.state, ""
    if state.awaiting_backward or state.unreduced:
        own = "a call waits for its backward, or gradients accumulated under no_sync() are not reduced yet"
    needed = COPIES * sum(_missing_bytes(context, name) for name in names)
    on_device = state.parameter(names[0]).is_cuda
    where = f"{socket.gethostname()} {context.communicator.rank if on_device else 0}"
    report = own, needed, int(torch.cuda.mem_get_info()[0]) if on_device else available_bytes(), where
    everyone = context.communicator.gather(report, tuple[str, int, int, str])
    for rank, (refusal, _, free, where) in enumerate(everyone):
        wanted = sum(each for _, each, _, other in everyone if other == where)
        if wanted > free:
            refusal = refusal or f"{free / 2**20:,.0f} MiB are free, but {wanted / 2**20:,.0f} MiB are needed"
        if refusal:
            raise RuntimeError(
                f"whole(): tables cannot be gathered on rank {rank}: {refusal}. Call optimizer.step() and zero_grad() "
                "first. If memory is short, call full_tensor() of one table at a time, or save full_state_dict()."
            )


def _missing_bytes(context: Context, name: str) -> int:
    """Returns the number of bytes that a rank needs for a whole copy of a table and of its optimizer state."""
    table, parameter = context.state.tables[name], context.state.parameter(name)
    held = [
        o.state.get(parameter) or {}
        for o in context.optimizer_hooks.known_optimizers.optimizers
        if parameter in o.state
    ]
    copies = 1 + sum(torch.is_tensor(v) and v.dim() == 2 for each in held for v in each.values())
    return copies * prod(table.shape) * parameter.element_size()
