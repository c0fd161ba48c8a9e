"""Lets ranks that have run out of batches take part in the other ranks' collectives (`join`), as under DDP.

Contract
    For every call of the other ranks, such a rank runs a program without a batch, whose gradients are zeros. It takes
    no optimizer steps, and so could not update its shards. When the first rank has run out of batches, tables therefore
    become whole on all ranks until the end of `join`. All ranks then get the parameters and buffers of the last rank
    that had a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.distributed.algorithms.join import JoinHook

from embrace_fx.capture.gradient_graph import ROUTE as EAGER
from embrace_fx.passes.join_exchanges import idle_graph
from embrace_fx.passes.planner.plan_fit import PlanViolation, fit_plan
from embrace_fx.runtime.ranks.failure import PlanDoesNotFit
from embrace_fx.runtime.ranks.step_handshake import ACCUMULATING, EVALUATING, JOINED
from embrace_fx.runtime.step.runnable_phase import call_without_autograd
from embrace_fx.runtime.step.step import Step
from embrace_fx.runtime.tables.placement import broadcast_state
from embrace_fx.session.program_cache import Entry
from embrace_fx.session.programs import Programs
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.plan import Plan

_WHOLE = "a rank has run out of batches and cannot update shards"
_OVER = "the end of join()"

_NO_BATCH = (
    "join(): rank(s) {} have no batch at all, but the first call compiles the model and needs a batch on every rank. "
    "Give every rank at least one batch, or leave these ranks out of the process group."
)

_ADDS_UP = (
    "join(): rank(s) {} left the loop with gradients of the sharded {} that were accumulated under no_sync() and never "
    "reduced. DDP drops such gradients, but embrace_fx has already sent these to the other ranks. End each epoch "
    "with a backward outside of no_sync(), or do not shard the tables: strategy='allreduce'."
)


class ShadowRank(JoinHook):
    """The hook that torch's `Join` calls on a rank without batches, which then takes part in the steps of other ranks.

    Args:
        fit: a collective function that changes the plan to what all ranks' batches need.

    Attributes:
        divides_by_all: whether gradients are divided by the number of all ranks, instead of the number of ranks that
            still have batches.
    """

    def __init__(self, context: Context, programs: Programs, fit: Callable[[], None]) -> None:
        self._context = context
        self._programs = programs
        self._fit = fit
        self._sharded: Plan | None = None  # the plan in use before the tables were unsharded
        self._left: set[str] = set()  # parameters whose gradient sum this rank has left unreduced
        self.divides_by_all = True

    def begin(self, *, divides_by_all: bool) -> ShadowRank:
        """Prepares the hook for a loop under `join`, and returns it.

        Args:
            divides_by_all: whether gradients are divided by the number of all ranks.

        Raises:
            ValueError: the model was compiled with `table_memory`.
        """
        if self._context.options.table_memory is not None:
            raise ValueError(
                "join() does not work with table_memory: once a rank has no batches left, tables become whole on all "
                "ranks. Give all ranks the same number of batches, or leave out table_memory."
            )
        self.divides_by_all = divides_by_all
        return self

    def gather_activities(self, activity: int | None = None) -> int:
        """Exchanges the modes of all ranks' next calls. Returns the mode of the first rank that has a batch.
        Collective.

        Args:
            activity: `JOINED` on a rank without batches, or None for the mode of this rank's call.

        Raises:
            RuntimeError: a rank ran out of batches before the first step, or while gradients of sharded tables were
                accumulated. Raised on every rank.
        """
        programs, counters = self._programs, self._programs.counters
        activity = self._context.activity(train=torch.is_grad_enabled()) if activity is None else activity
        everyone = self._context.announcements.gather_activities(activity)
        active = [rank for rank, each in enumerate(everyone) if each != JOINED]
        joined = [rank for rank, each in enumerate(everyone) if each == JOINED]
        counters.authority, counters.uneven = active[-1], bool(joined)
        self._context.state.gradient_scale = 1.0 if self.divides_by_all else len(everyone) / len(active)
        plan = programs.plan
        if joined and plan is None:
            raise RuntimeError(_NO_BATCH.format(", ".join(map(str, joined))))
        if joined and plan is not None and plan.sharded:
            self._agree_on_gradients(active)
            self._sharded = plan
            programs.use_plan(fit_plan(plan, [PlanViolation((), plan.sharded)], _WHOLE), _WHOLE)
        return everyone[active[0]]

    def _agree_on_gradients(self, active: Sequence[int]) -> None:
        """Makes all ranks agree on which tables have a gradient: those with a gradient on some rank that has batches. A
        rank without the gradient of such a table gets an empty one, and gradients of other tables are dropped.

        Args:
            active: the ranks that have batches.

        Raises:
            RuntimeError: a rank without batches has accumulated gradients of tables and not reduced them.
        """
        tables = self._context.state.tables
        own = tuple(name for name, table in tables.items() if table.parameter.grad is not None)
        adds_up = any(held.unreduced for held in self._context.state.gradients())
        everyone = self._context.communicator.gather((own, adds_up), tuple[tuple[str, ...], bool])
        if left := [rank for rank, (_, adds_up) in enumerate(everyone) if adds_up and rank not in active]:
            raise RuntimeError(_ADDS_UP.format(", ".join(map(str, left)), ", ".join(tables)))
        kept = {name for rank in active for name in everyone[rank][0]}
        for name, table in tables.items():
            if name not in kept:
                table.parameter.grad = None
            elif name not in own:
                none = table.local.new_empty((0,), dtype=torch.int64)
                table.add_gradient(none, table.local.new_empty((0, table.local.shape[1])))

    def main_hook(self) -> None:
        """Takes part, without a batch, in the collectives of one call of the other ranks. Collective."""
        activity = self.gather_activities(JOINED)
        unreduced = self._context.state.unreduced
        self._left |= unreduced  # as under DDP, the sums stay until this rank has a batch again
        unreduced.clear()
        while True:
            try:
                return self._run_without_batch(activity)
            except PlanDoesNotFit:
                self._fit()

    def _run_without_batch(self, activity: int) -> None:
        """Takes part, without a batch, in the step that other ranks run. `activity` is the mode of their call."""
        state, programs = self._context.state, self._programs
        kind = programs.cache["no batch", activity != EVALUATING]
        if not kind.found:
            graph = idle_graph(state.names[0], state.parameter(state.names[0]))
            like = replace(next(programs.cache.entries()).captured, graph=graph, result_constants={}, replay=None)
            kind.found.append(Entry(like, graph, activity != EVALUATING))
        program = programs.build(kind.found[0], accumulates=activity == ACCUMULATING)
        step = Step(program, (), None)
        with self._context.state.pending.closed():
            call_without_autograd(step.forward)
            # As under DDP, parameters used since this rank's last step get a gradient, to which this rank adds zeros.
            step.unreduced = program.used.reached_by_any(self._context.state.reached)
            if program.has_backward:
                call_without_autograd(step.backward, [None], for_parameters=False)
            elif activity != EVALUATING:
                call_without_autograd(step.join_backward)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Ends `join` once no rank has batches. The last rank that had a batch broadcasts its parameters and buffers.
        Collective.

        Args:
            is_last_joiner: whether this rank had a batch until the end.
        """
        context = self._context
        self._programs.counters.authority, self._programs.counters.uneven = 0, False
        context.state.gradient_scale = 1.0
        context.state.unreduced |= self._left
        self._left.clear()
        ranks = [rank for rank, each in enumerate(context.communicator.gather(is_last_joiner, bool)) if each]
        if (plan := self._programs.plan) is None:
            return
        self._programs.apply_pending()
        apart, buffers = context.state.ignored.union(plan.sharded), context.options.shares_buffers
        broadcast_state(context.model, apart, context.communicator, buffers=buffers, source=ranks[-1])
        context.communicator.progress.optimizer_steps = 0  # counts from zero, because ranks are equal again
        sharded, self._sharded = self._sharded, None
        if sharded is not None and next(self._programs.cache.entries()).captured.route != EAGER:
            self._programs.use_plan(sharded, _OVER)
