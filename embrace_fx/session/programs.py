"""The programs of one model's calls, and the plan under which they run.

    call -> key -> entry (a capture) -> program under the current plan

The first plan is made for the first training batch. Another plan, with new programs, replaces it if `replan` is
requested, or if a batch, an optimizer or the user needs whole tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.capture.gc_pause import pause_garbage_collection
from embrace_fx.capture.gradient_graph import ROUTE as EAGER
from embrace_fx.capture.structured_trace import log_text
from embrace_fx.cost.links import Cluster
from embrace_fx.passes.planner.grouping import with_buckets
from embrace_fx.passes.planner.plan_fit import (
    NO_MOMENT,
    RENAMED,
    WHOLE,
    PlanViolation,
    find_violation,
    fit_plan,
    rename_parameters,
)
from embrace_fx.passes.planner.pricing import Findings
from embrace_fx.passes.planner.replanning import SAMPLED_EVERY, describe_replan, names_with_new_strategy
from embrace_fx.planning.findings import gather_findings, plan_on_links, reuse_plan
from embrace_fx.planning.placing import gather_tables, move_parameters, place_parameters
from embrace_fx.planning.tiering import add_working_sets
from embrace_fx.runtime.flow.comm_pipeline import CommPipeline, within_steps
from embrace_fx.runtime.launch.streams import choose_streams
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.runtime.ranks.step_handshake import HandshakeMessage, activity_code
from embrace_fx.runtime.step.program import Program
from embrace_fx.runtime.tables.pending_parameters import UpdateGroup
from embrace_fx.session.buffer_sharing import BufferSharing
from embrace_fx.session.program_cache import Entry, ProgramCache, StepCounters
from embrace_fx.session.step_pipeline import StepPipeline
from embrace_fx.setup.context import Context
from embrace_fx.setup.log import log, stage
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.modes import outside_of_modes
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.plan_summary import summarize

ONCE_IN = 100
"""Number of calls within which no second plan is made for the same reason."""
USER = "model.replan()"
DRIFT = "the number of rows that batches read has changed"
MODULE = "a module has changed"
ORDER = "the first backward showed the order of its gradients"
"""Reasons to plan again; after `ORDER`, only buckets change."""


class Programs:
    """The compiled programs of a model's calls, and the plan under which they run.

    Args:
        on_other_batch: called when the model is called with a batch other than the one that was prepared as the next.
        on_placed: called after a plan has placed the tables; its argument is whether this is the first plan.

    Attributes:
        cache: the cache entries of the calls so far.
        pipeline: the current plan with its programs and the communication of its steps, or None before the first
            training call.
        counters: counters that all calls share.
        buffers: makes the model's buffers equal on all ranks.
        links: the measured links, or None.
        records: whether steps are to be recorded, because a `record()` context is open.
    """

    def __init__(self, context: Context, on_other_batch: Callable[[], None], on_placed: Callable[[bool], None]) -> None:
        self.cache = ProgramCache()
        self.pipeline: StepPipeline | None = None
        self.counters, self.records = StepCounters(), False
        self.links: Cluster | None = None
        self.buffers = BufferSharing(context, self.counters)
        self._context = context
        self._on_other_batch = on_other_batch
        self._on_placed = on_placed
        self._violation = PlanViolation()  # the last batch's needs that the plan does not meet
        self._whole: set[str] = set()  # tables that ops other than lookups have read, and that therefore stay whole
        self._replanned: dict[str, int] = {}  # reason -> number of the call that last requested a new plan for it
        self._logged_reads = False
        self._no_steps = within_steps(context.announcements)
        if (streams := choose_streams(context.device)) is not None:
            # Register the model before the first call of any model in the training loop.
            streams.models.add(context.communicator)

    @property
    def plan(self) -> Plan | None:
        """The current plan, or None before the first training call."""
        return None if self.pipeline is None else self.pipeline.plan

    @property
    def flow(self) -> CommPipeline:
        """The communication of the current plan, which continues from one step to the next."""
        return self._no_steps if self.pipeline is None else self.pipeline.flow

    @property
    def in_use(self) -> StepPipeline:
        """The current plan with its programs. Raises RuntimeError before the first training call."""
        if self.pipeline is None:
            raise RuntimeError(
                "There is no plan, report or graph yet: the graph is captured with the first batch. Call the model "
                "once with gradients enabled."
            )
        return self.pipeline

    # -- programs ------------------------------------------------------------------------------------------------------

    def build(self, entry: Entry, *, accumulates: bool = False) -> Program:
        """Returns a cache entry's program under the current plan. Compiles it at the first call.

        Args:
            accumulates: whether the program accumulates gradients instead of reducing them (`no_sync`).

        Raises:
            PlanDoesNotFit: the plan must be changed first; raised on every rank.
        """
        pipeline = self.in_use
        if not entry.programs:
            state = self._context.state
            found = find_violation(pipeline.plan, entry.analysed, state.hooked, state.ignored)
            # All ranks build a program at this point, so a failure of one must be announced to all.
            begins = entry.train and not pipeline.built
            self.check_fit(found, activity_code(train=entry.train, reduces=not accumulates), meets=begins)
        for each in (False, accumulates):  # build the reducing program first, because it sets up the flow
            if each not in entry.programs:
                with stage("compiling", self._context.communicator.rank), pause_garbage_collection():
                    pipeline.build(entry, accumulates=each)
                self.start_recording()
        return entry.programs[accumulates]

    def start_recording(self) -> None:
        """Starts to record steps if `records` is set, there is a recorder, and no recording is in progress."""
        recorder = None if self.pipeline is None else self.pipeline.recorder
        if self.records and recorder is not None and recorder.recording is None:
            recorder.start()

    # -- the plan ------------------------------------------------------------------------------------------------------

    def make_first_plan(self, entry: Entry, leaves: Sequence[Any]) -> None:
        """Makes the plan, places parameters accordingly, and builds the first program. Collective.

        Args:
            entry: the cache entry of the first training call.
            leaves: the inputs of its graph.

        Raises:
            PeerFailure: some rank's batch is bad; raised on every rank.
            ValueError: the options do not fit the model; raised on every rank.
        """
        context, analysed, given, findings = self._context, entry.analysed, self._context.options.given_plan, None
        rank = context.communicator.rank
        if given is None:
            with stage("planning", rank):
                # A forward that runs eagerly has no schedule to choose, so a short measurement of the links is enough.
                roughly = entry.captured.route == EAGER
                findings = gather_findings(context, analysed, leaves, frozenset(), "none" if roughly else "")
                plan = plan_on_links(context, findings, None, known=self.links, roughly=roughly)
        else:
            plan = reuse_plan(context, analysed, given)
        self._adopt(add_working_sets(context, plan, findings.sparsity if findings else {}), findings)
        with stage("placing parameters", rank):
            place_parameters(context, analysed, self.in_use.plan)
        self._on_placed(True)
        self.build(entry)
        if rank == 0:
            log("%s", summarize(self.in_use.plan))

    def _adopt(self, plan: Plan, findings: Findings | None) -> None:
        """Replaces the current plan by `plan`. If this raises an error, the old plan stays in use.

        Args:
            findings: the planner's input from which the plan was decided, or None.
        """
        self.pipeline = StepPipeline(self._context, plan, findings, self.counters, self.buffers, self._on_other_batch)
        log_text("plan", lambda: str(plan))

    def ask_to_replan(self, reason: str) -> bool:
        """Requests another plan in this rank's next announcement.

        Returns False, without a request, if the options fix the plan, or if another plan was requested for the same
        reason within the last `ONCE_IN` calls. Otherwise returns True.
        """
        calls, last, options = self.counters.calls, self._replanned.get(reason), self._context.options
        fixed = options.given_plan is not None or options.table_memory is not None  # a working set cannot be replanned
        if fixed or (last is not None and calls - last < ONCE_IN):
            return False
        self._replanned[reason] = calls
        self.counters.replan_for = reason
        return True

    def observe(self) -> None:
        """Checks, at every `SAMPLED_EVERY`-th call, how many rows batches read. Requests a new plan if this number has
        changed.
        """
        monitor = self.in_use.monitor
        if monitor is not None and self.counters.calls % SAMPLED_EVERY == 0:
            monitor.observe(self._context.announcements.rows_read)
            if monitor.wants_plan:
                self.ask_to_replan(DRIFT)

    def replan(self, entry: Entry, leaves: Sequence[Any], reason: str = "") -> None:
        """Makes a new plan from the current batches of all ranks. Collective. If this fails, an error is raised on
        every rank, and the old plan stays in use.

        Args:
            entry: the cache entry of this rank's call.
            leaves: the flattened arguments of the call, or, if it runs eagerly, the row ids of each table.
            reason: why the plan must change now. With "", the reason is that of the rank that requested a plan in its
                announcement. In this case, the old plan stays in use if a rank has unfinished work or has run out of
                batches (`join`), because a plan is made from the batches of all ranks.
        """
        context, pipeline, forced = self._context, self.in_use, bool(reason)
        old, communicator, asked = pipeline.plan, context.communicator, self.counters
        used, schedule = set[str](), ""
        if not forced:
            own = HandshakeMessage(activity=context.activity(train=entry.train), sizes=(self._may_change_plan(entry),))
            if asked.uneven or not all(may for (may,) in context.announcements.announce(own)):
                return
            reason = next(filter(None, communicator.gather(asked.replan_for, str)), ORDER)
            asked.replan_for = ""
            if reason == ORDER:
                own_buckets = with_buckets(old, entry.analysed).buckets
                buckets = communicator.gather(own_buckets, tuple[tuple[str, ...], ...])[0]
                if buckets != old.buckets:
                    self._replace_plan(entry.analysed, replace(old, buckets=buckets), pipeline.findings)
                return
            used = {d.parameter for d in old if d.strategy not in ("frozen", "unused")}
            schedule = old.schedule_name
        with stage("planning again", communicator.rank):
            findings = gather_findings(context, entry.analysed, entry.captured.inputs(leaves), used, schedule)
        if findings is not None:
            findings = findings.with_whole(self._whole, WHOLE)
            # If the drift monitor has requested this plan, use its running means of rows per step.
            if (monitor := pipeline.monitor) is not None and monitor.wants_plan:
                findings = findings.with_rows(monitor.rows)
        new = plan_on_links(context, findings, old, known=self.links)
        if (
            forced
            or names_with_new_strategy(old, new)
            or (new.buckets, new.schedule_name) != (old.buckets, old.schedule_name)
        ):
            self._replace_plan(entry.analysed, new, findings, reason)
            return
        pipeline.findings = findings
        pipeline.monitor_rows()
        if reason == USER and communicator.rank == 0:
            log("planned again %s", describe_replan(self.counters.calls, reason, old, new))

    def use_plan(self, new: Plan, reason: str) -> None:
        """Replaces the current plan by `new`, a modified copy of it, and logs the reason. Collective."""
        analysed = next(self.cache.entries()).analysed
        self._replace_plan(analysed, new, self.in_use.findings, reason)

    def check_fit(self, violation: PlanViolation, activity: int, *, meets: bool = False) -> None:
        """Raises PlanDoesNotFit on all ranks if some rank's batch needs another plan, so that all ranks change the plan
        together.

        Args:
            violation: what this rank's batch needs and the plan does not provide.
            activity: the mode of the call, as returned by `Context.activity`.
            meets: whether all ranks call this method at this point, including ranks whose batches fit the plan.
        """
        self._violation = violation
        if violation or meets:
            self._context.announcements.announce(HandshakeMessage(activity=activity, does_not_fit=bool(violation)))

    def extend_plan(self) -> str:
        """Changes the plan to what all ranks' batches need, before the step of these batches. Collective.

        Returns, on every rank, the reason why forwards run eagerly from now on, or "" if they do not.

        Raises:
            PeerFailure: some rank cannot change its plan now; raised on every rank.
        """
        own, self._violation = self._violation, PlanViolation()
        state, communicator = self._context.state, self._context.communicator
        blocked = "an earlier call still waits for its backward" if state.awaiting_backward else None
        if state.unreduced and (own.renamed or any(name in state.tables for name in own.whole)):
            blocked = "gradients accumulated under no_sync() are not reduced yet"
        everyone = communicator.gather((own, blocked), tuple[PlanViolation, str | None])
        needed = [needs for needs, _ in everyone]
        names = ", ".join(sorted({name for each in needed for name in each.names()})) or "parameters"
        if len({each.renamed for each in needed}) > 1:
            raise PeerFailure(dict.fromkeys(range(len(needed)), RENAMED.format(names)))
        if reasons := {rank: reason for rank, (_, reason) in enumerate(everyone) if reason is not None}:
            raise PeerFailure({rank: NO_MOMENT.format(names, reason) for rank, reason in reasons.items()})
        if eager := next((each.eager for each in needed if each.eager), ""):
            return eager
        self._whole |= {name for each in needed for name in each.whole}
        self.use_plan(fit_plan(self.in_use.plan, needed), f"a batch uses {names} differently from earlier batches")
        if own.renamed:
            self._adopt(rename_parameters(self.in_use.plan, dict(own.renamed)), None)
        return ""

    def unshard(self, names: Sequence[str], reason: str) -> None:
        """Makes some tables whole on every rank before an optimizer's step, and changes the plan accordingly.
        Collective.

        Args:
            names: the names of the tables.
            reason: why they must be whole.

        Raises:
            RuntimeError: the plan cannot change now.
        """
        entry = next(each for each in self.cache.entries() if each.train)
        if not self._may_change_plan(entry) or self._context.options.given_plan is not None:
            raise RuntimeError(
                f"optimizer.step(): {', '.join(names)} must be whole, because {reason}. The tables cannot be gathered "
                "now, because plan= fixes the plan, or because a call of the model still waits for its backward. Pass "
                "the optimizer to compile(), and call step() only after every backward."
            )
        if (findings := self.in_use.findings) is not None:
            self.in_use.findings = findings.with_whole(names, reason)
        self.use_plan(fit_plan(self.in_use.plan, [PlanViolation((), tuple(names))], reason), reason)

    @outside_of_modes()
    def _replace_plan(self, analysed: TrainingGraph, new: Plan, findings: Findings | None, reason: str = "") -> None:
        """Replaces the current plan by another one between two steps. Collective.

        Args:
            analysed: a captured graph of the model.
            new: the new plan.
            findings: the planner's input from which the plan was decided, or None.
            reason: the reason to log and to record in the plan's history, or "" if only buckets change.
        """
        old, context = self.in_use.plan, self._context
        with context.state.pending.closed():  # while parameters are moved, accesses to them must not apply updates
            context.state.pending.close()
            self.in_use.close()
            context.state.flush_tables()
            context.state.reads.restart()
            with stage("moving parameters to the new plan", context.communicator.rank):
                move_parameters(context, analysed, old, new)
            line = describe_replan(self.counters.calls, reason, old, new) if reason else ""
            self._adopt(replace(new, history=(*old.history, line)) if line else new, findings)
            self._on_placed(False)
        for each in self.cache.entries():
            each.programs.clear()
        if line and context.communicator.rank == 0:
            log("planned again %s", line)

    def _may_change_plan(self, entry: Entry) -> bool:
        """Returns whether this rank may change its plan now: the call trains, no backward is outstanding, no gradients
        are unreduced, and no steps are being recorded.
        """
        state = self._context.state
        tables = {decision.parameter for decision in self.in_use.plan if decision.is_table}
        return (
            entry.train
            and not state.unreduced
            and not state.awaiting_backward
            and self.flow.recorder.recording is None
            and {table.parameter for table in entry.analysed.tables} == tables
        )

    # -- pending updates -----------------------------------------------------------------------------------------------

    def pending_updates(self) -> tuple[UpdateGroup, UpdateGroup]:
        """Returns the parameters whose updates may be pending between calls, as two groups: dense ones, and tables."""
        state, lock = self._context.state, self._context.state.pending.lock

        def tables() -> Iterable[nn.Parameter]:
            """Returns all tables if any has a pending update, otherwise an empty sequence."""
            if not state.has_deferred_rows and not self.flow.has_pending_tables:
                return ()
            return state.table_parameters()

        def joined() -> list[Tensor]:
            """Returns the tensors that store the rows of joined tables."""
            return [memory for space in state.spaces.values() for memory in space.store.joined]

        def apply_dense() -> None:
            """Applies the pending updates of dense parameters."""
            self.flow.apply_buckets()

        dense = UpdateGroup(lambda: self.flow.buckets.pending_parameters, apply_dense, lock)
        return dense, UpdateGroup(tables, self._apply_pending, lock, joined)

    def late_optimizers(self) -> list[Optimizer]:
        """Returns the optimizers of tables and of dense buckets, whose last updates may still be pending."""
        found = [table.optimizer for table in self._context.state.tables.values() if table.optimizer is not None]
        return found + self.flow.buckets.optimizers

    def apply_pending(self) -> None:
        """Applies pending updates, so that code outside of a step can use the parameters. Drops rows that were fetched
        in advance for the next batch.
        """
        self._context.state.pending.close()
        self._apply_pending()

    def _apply_pending(self) -> None:
        """Applies pending updates. Also waits for gradients that are being sent, so that `.grad` contains ordinary
        tensors.

        If this happens in every step, logs a hint once.
        """
        state = self._context.state
        self.flow.apply()
        self.flow.before_writes()
        state.flush_tables()
        if state.reads.in_every_step and state.tables and not self._logged_reads:
            self._logged_reads = True
            if self._context.communicator.rank == 0:
                log(_ASKED)

    def leave_model(self) -> None:
        """Makes all tables whole on every rank, because the model is being compiled again. Collective."""
        if self.pipeline is not None:
            self.pipeline.close()
            gather_tables(self._context, self.pipeline.plan.sharded)
            self._context.optimizer_hooks.replicas = []

    def close(self) -> None:
        """Applies pending updates, and ends the communication between steps."""
        self._context.state.pending.close()  # the updates applied below read parameters
        if self.pipeline is not None:
            self.pipeline.close()


_ASKED = (
    "this training loop reads the parameters in every step (model.parameters()), or keeps a state dict of the "
    "optimizer. Each read applies the pending updates of all rows, so less of the communication overlaps with compute. "
    "To clip gradients, call model.clip_grad_norm_(1.0), which does not read the parameters"
)
