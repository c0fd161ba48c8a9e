"""Makes the plan of a model's calls for the first batch, and changes it where batches or optimizers ask for it.

Programs, the flow between steps and the schedule are built under a plan, and end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.capture.structured_trace import log_text
from embrace_fx.cost.links import Cluster
from embrace_fx.passes.planner.pricing import Findings
from embrace_fx.planning.findings import find, make_plan, plan_on_links
from embrace_fx.planning.fitting import NO_MOMENT, RENAMED, WHOLE, Misfit, fitted, misfit, renamed
from embrace_fx.planning.given_plan import repeated
from embrace_fx.planning.placing import gather_tables, place, place_anew
from embrace_fx.planning.replanning import SAMPLED_EVERY, Calls, Drift, changes, story
from embrace_fx.planning.summary import summary
from embrace_fx.planning.tiering import at_rest, fit_plan
from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.ranks.announcement import Announcement, activity_of
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.runtime.step.program import Program
from embrace_fx.runtime.tables.pending_parameters import Updates
from embrace_fx.session.buffer_sharing import BufferSharing
from embrace_fx.session.calls import Kind, Variant
from embrace_fx.session.garbage import not_collecting
from embrace_fx.session.programs import ProgramBuilder
from embrace_fx.setup.setting import Setting
from embrace_fx.setup.telling import stage, tell
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.modes import outside_of_modes
from embrace_fx.vocabulary.plan import Plan


class PlanInUse:
    """Holds the plan that one model's calls run under, and all that is built under it.

    Args:
        kinds: the kinds of calls so far, whose programs are built under the plan.
        on_other_batch: called when another batch comes than the expected one.
        on_placed: called when tables have been placed as a plan says; told whether it is the first.

    Attributes:
        plan: the plan in use; None before the first training call.
        builder: the builder of the programs under the plan, which owns the flow between steps; None like the plan.
        calls: the state that calls share.
        buffers: shares the model's buffers.
        links: the links that have been probed; None before.
        records: whether the steps of each program are recorded as soon as it is built.
    """

    def __init__(
        self,
        setting: Setting,
        kinds: Mapping[Any, Kind],
        on_other_batch: Callable[[], None],
        on_placed: Callable[[bool], None],
    ) -> None:
        self.plan: Plan | None = None
        self.builder: ProgramBuilder | None = None
        self._findings: Findings | None = None  # on rank 0, those that the plan was made from
        self._drift: Drift | None = None  # on rank 0, the watch over the rows that batches read, if strategies need it
        self.calls, self.records = Calls(), False
        self.links: Cluster | None = None
        self._setting = setting
        self._kinds = kinds
        self.buffers = BufferSharing(setting, self.calls)
        self._on_other_batch = on_other_batch
        self._on_placed = on_placed
        self._misfit = Misfit()  # the last batch's needs that the plan does not meet
        self._told_asked = False
        self._whole: set[str] = set()  # tables that some batch reads in a way shards cannot be read

    @property
    def flow(self) -> Flow | None:
        """The communication between steps; None before the first training program, and on one rank."""
        return None if self.builder is None else self.builder.flow

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of the steps; None before the first training program, and if nothing is scheduled."""
        scheduling = None if self.builder is None else self.builder.scheduling
        return None if scheduling is None else scheduling.recorder

    def _in_use(self) -> Plan:
        assert self.plan is not None
        return self.plan

    # -- programs ------------------------------------------------------------------------------------------------------

    def build(self, variant: Variant, *, accumulates: bool = False) -> Program:
        """Returns a variant's program under the plan; builds it at first.

        Raises:
            PlanDoesNotFit: the plan must be changed first, on every rank.
        """
        assert self.builder is not None
        if not variant.programs:
            state = self._setting.state
            found = misfit(self._in_use(), variant.analysed, state.hooked, state.ignored)
            begins = variant.train and not self.builder.built  # all ranks build then: they must hear of one that cannot
            self.fits(found, activity_of(train=variant.train, reduces=not accumulates), meets=begins)
        for each in (False, accumulates):  # one that reduces gradients comes first: it starts the flow
            if each not in variant.programs:
                with stage("compiling", self._setting.communicator.rank), not_collecting():
                    self.builder.build(variant, accumulates=each)
                self.start_recording()
        return variant.programs[accumulates]

    def start_recording(self) -> None:
        """Starts the recording that was asked for, once there is a recorder."""
        recorder = self.recorder
        if self.records and recorder is not None and recorder.recording is None:
            recorder.start()

    def fits(self, found: Misfit, activity: int, *, meets: bool = False) -> None:
        """Makes all ranks change the plan, if it does not meet the needs that this rank's batch has (`found`).

        Args:
            activity: the activity of the call.
            meets: all ranks come here, whether or not it meets the needs of their batches.

        Raises:
            PlanDoesNotFit: it does not meet them; on every rank.
        """
        self._misfit = found
        if found or meets:
            self._setting.announcements.announce(Announcement(activity=activity, does_not_fit=bool(found)))

    def any_variant(self) -> Variant:
        """Returns one of the model's captures."""
        return next(variant for kind in self._kinds.values() for variant in kind.variants)

    # -- plans ---------------------------------------------------------------------------------------------------------

    def make(self, variant: Variant, leaves: Sequence[Any]) -> None:
        """Makes the first plan, places parameters as it says, and builds the first program. Collective.

        Raises:
            PeerFailure: a rank's batch is bad, on every rank.
            ValueError: the options do not fit the model, on every rank.
        """
        setting, analysed, findings = self._setting, variant.analysed, None
        given, rank = setting.options.given_plan, setting.communicator.rank
        if given is None:
            with stage("planning", rank):
                plan, findings = make_plan(setting, analysed, leaves, self.links)
        else:
            plan = repeated(setting, analysed, given)
        plan = fit_plan(setting, plan, findings.sparsity if findings else {}, partial(at_rest, setting))
        self._adopt(plan, findings)
        with stage("placing parameters", rank):
            place(setting, analysed, plan)
        self._on_placed(True)
        self.build(variant)
        if rank == 0:
            tell("%s", summary(plan))

    def _adopt(self, plan: Plan, findings: Findings | None) -> None:
        """Puts a new plan in use, without programs: all at once, or on an error nothing."""
        findings = findings and replace(findings, schedule=plan.schedule_name)
        drift = None if self._setting.options.table_memory is not None else _drift(plan, findings)
        builder = ProgramBuilder(self._setting, plan, self.calls, self.buffers, self._on_other_batch)
        self.plan, self.builder, self._findings, self._drift = plan, builder, findings, drift
        log_text("plan", lambda: str(plan))

    def observe(self) -> None:
        """Follows the rows of training calls; asks for another plan where they drift."""
        if (drift := self._drift) is not None and self.calls.count % SAMPLED_EVERY == 0:
            drift.observe(self._setting.announcements.rows_read)
            self.calls.asks_to_plan |= drift.wants_plan

    def make_again(self, variant: Variant, leaves: Sequence[Any]) -> None:
        """Makes the plan that rank 0 asked for in the last announcement, if the plan may change now. Collective.

        It may not while ranks have run out of batches (`join`), because a plan is made for every rank's batch.

        Raises:
            PeerFailure: the ranks are not doing the same thing, or a batch is bad; on every rank, and nothing changed.
        """
        setting, old = self._setting, self._in_use()
        if self.calls.uneven or not self.may_change(variant):
            return
        used = {d.parameter for d in old if d.strategy not in ("frozen", "unused")}
        with stage("planning again", setting.communicator.rank):
            findings = find(setting, variant.analysed, variant.captured.inputs(leaves), used, old.schedule_name)
        if findings is not None:
            findings = findings.with_whole(self._whole, WHOLE)
        drift = self._drift
        if findings is not None and drift is not None and drift.wants_plan:  # otherwise it has no means yet
            findings = findings.with_rows(drift.rows)
        new = plan_on_links(setting, findings, old, known=self.links)
        self.calls.asks_to_plan = False
        if not changes(old, new) and (new.buckets, new.schedule_name) == (old.buckets, old.schedule_name):
            self._drift = _drift(old, findings)
            return
        self._place_anew(variant.analysed, new, findings)

    def fit(self) -> str:
        """Adds the needs of all ranks' batches to the plan, before the step that has them. Collective.

        Returns:
            Why forwards run eagerly from here on, on every rank; "" where graphs hold them.

        Raises:
            PeerFailure: the plan may not change now on some rank; on every rank, and nothing changed.
        """
        own, self._misfit = self._misfit, Misfit()
        state, communicator = self._setting.state, self._setting.communicator
        reason = "an earlier call's backward is still to come" if state.awaiting_backward else None
        if state.unreduced and (own.renamed or any(name in state.tables for name in own.whole)):
            reason = "gradients wait that were summed up under no_sync()"
        everyone = communicator.gather((own, reason), tuple[Misfit, str | None])
        needed = [needs for needs, _ in everyone]
        names = ", ".join(sorted({name for each in needed for name in each.names()})) or "parameters"
        if len({each.renamed for each in needed}) > 1:
            raise PeerFailure(dict.fromkeys(range(len(needed)), RENAMED.format(names)))
        if reasons := {rank: reason for rank, (_, reason) in enumerate(everyone) if reason is not None}:
            raise PeerFailure({rank: NO_MOMENT.format(names, reason) for rank, reason in reasons.items()})
        if eager := next((each.eager for each in needed if each.eager), ""):
            return eager
        self._whole |= {name for each in needed for name in each.whole}
        self.change(fitted(self._in_use(), needed))
        if own.renamed:
            self._adopt(renamed(self._in_use(), dict(own.renamed)), None)
        return ""

    def plan_for(self, variant: Variant, leaves: Sequence[Any]) -> None:
        """Makes a plan for another graph of the model, and puts it in use. Collective."""
        setting = self._setting
        with stage("planning again", setting.communicator.rank):
            findings = find(setting, variant.analysed, leaves, frozenset())
        new = plan_on_links(setting, findings, self._in_use(), known=self.links)
        self._place_anew(variant.analysed, new, findings)

    def change(self, new: Plan) -> None:
        """Puts a modified copy of the plan in use. Collective."""
        self._place_anew(self.any_variant().analysed, new, self._findings)

    def make_whole(self, names: Sequence[str], reason: str) -> None:
        """Makes a plan with these tables whole, before an optimizer's step that needs them so. Collective.

        Raises:
            RuntimeError: a backward under the plan in use is still to come; on every rank, and nothing changed.
        """
        variant = next(v for kind in self._kinds.values() for v in kind.variants if v.train)
        if not self._may_change(variant) or self._setting.options.given_plan is not None:
            raise RuntimeError(
                f"expected an element-wise optimizer, in optimizer.step(), found that {reason}, while results of an "
                f"earlier call still wait for their backward, or the plan is given, and {', '.join(names)} cannot be "
                "put together. Pass the optimizer to compile(), and step after every backward."
            )
        findings = None if self._findings is None else self._findings.with_whole(names, reason)
        self._place_anew(variant.analysed, plan_on_links(self._setting, findings, self._in_use()), findings)

    @outside_of_modes()
    def _place_anew(self, analysed: TrainingGraph, new: Plan, findings: Findings | None) -> None:
        """Puts another plan in use, between two steps. Collective."""
        old, setting = self._in_use(), self._setting
        with setting.state.pending.closed():  # while parameters move, only the flow applies their updates
            self._end_flow()
            setting.state.settle_tables()
            setting.state.reads.restart()
            with stage("placing parameters anew", setting.communicator.rank):
                place_anew(setting, analysed, old, new)
            told = story(self.calls.count, old, new)
            self._adopt(replace(new, history=(*old.history, told)), findings)
            self._on_placed(False)
        for kind in self._kinds.values():
            for each in kind.variants:
                each.programs.clear()
        if setting.communicator.rank == 0:
            tell("planned again %s", told)

    def updates(self) -> tuple[Updates, Updates]:
        """Makes the two kinds of pending updates between calls: of dense parameters, and of tables."""
        state, lock = self._setting.state, self._setting.state.pending.lock

        def apply_dense() -> None:
            if self.flow is not None:
                self.flow.settle_buckets()

        def tables() -> Iterable[nn.Parameter]:
            if not state.has_resting_rows and ((flow := self.flow) is None or not flow.has_tables_under_way):
                return ()
            return state.table_parameters()

        def joined() -> list[Tensor]:
            return [
                *(memory for space in state.spaces.values() for memory in space.joined),
            ]

        dense = Updates(lambda: () if (flow := self.flow) is None else flow.buckets.stepped, apply_dense, lock)
        return dense, Updates(tables, self._tables_may_change, lock, joined)

    def late_optimizers(self) -> list[Optimizer]:
        """Lists the optimizers whose last step may still be pending."""
        found = [table.optimizer for table in self._setting.state.tables.values() if table.optimizer is not None]
        return found if (flow := self.flow) is None else found + flow.buckets.optimizers

    def synchronize(self) -> None:
        """Applies every update that an optimizer has stepped; waits for no work that other ranks have not begun."""
        self._setting.state.pending.close()
        self._apply()

    def _apply(self) -> None:
        if self.flow is not None:
            self.flow.parameters_may_change()
        self._setting.state.settle_tables()

    def parameters_may_change(self) -> None:
        """Applies pending updates, and discards rows prefetched from the parameters: the caller may write them."""
        self._setting.state.pending.close()
        self._tables_may_change()

    def _tables_may_change(self) -> None:
        self._apply()
        state = self._setting.state
        if state.reads.in_every_step and state.tables and not self._told_asked:
            self._told_asked = True
            if self._setting.communicator.rank == 0:
                tell(_ASKED)

    def leave_model(self) -> None:
        """Makes all tables whole, for another `compile`. Collective."""
        if self.plan is not None:
            self._end_flow()
            gather_tables(self._setting, self.plan.sharded)
            self._setting.stepping.replicas = []

    def may_change(self, variant: Variant) -> bool:
        """Tells whether the plan may change on every rank. Collective.

        Raises:
            PeerFailure: the ranks are not doing the same thing; on every rank.
        """
        told = Announcement(activity=self._setting.activity(train=variant.train), sizes=(self._may_change(variant),))
        return all(may for (may,) in self._setting.announcements.announce(told))

    def _may_change(self, variant: Variant) -> bool:
        """Tells whether the plan may change on this rank: no backward, `no_sync` sum or recording is unfinished."""
        state, flow = self._setting.state, self.flow
        tables = {decision.parameter for decision in self._in_use() if decision.is_table}
        return (
            variant.train
            and not state.unreduced
            and not state.awaiting_backward
            and (flow is None or flow.recorder.recording is None)
            and {table.parameter for table in variant.analysed.tables} == tables
        )

    def close(self) -> None:
        """Applies pending updates, and ends the communication between steps."""
        self._setting.state.pending.close()  # applying updates below reads parameters
        self._end_flow()

    def _end_flow(self) -> None:
        if self.builder is not None:
            self.builder.end_flow()


def _drift(plan: Plan, findings: Findings | None) -> Drift | None:
    """Makes rank 0's watch over the rows that batches read; None on other ranks, and if no table is watched."""
    return Drift(plan, findings) if findings is not None and plan.watched else None


_ASKED = (
    "this loop asks for the parameters in every step (model.parameters()), or keeps a state dict of the optimizer: all "
    "that is pending is applied, which hides less, and all rows take the step. model.clip_grad_norm_(1.0) does not ask"
)
