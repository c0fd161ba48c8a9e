"""One compiled model's life: agree, capture, plan, place, run, capture again where batches differ, plan again."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from embrace_fx.capture.arguments import flatten_arguments
from embrace_fx.capture.structured_trace import log_text
from embrace_fx.planning.findings import Findings, find, make_plan, plan_on_links
from embrace_fx.planning.fitting import WHOLE, Misfit, fitted, misfit
from embrace_fx.planning.given_plan import repeated
from embrace_fx.planning.placing import place, place_anew
from embrace_fx.planning.replanning import SAMPLED_EVERY, Drift, TrainingCalls, changes, story
from embrace_fx.planning.summary import summary
from embrace_fx.runtime.flow.ahead import Ahead
from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.optimizer.stepping import Stepping
from embrace_fx.runtime.ranks.announcement import Announcements
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import PeerFailure, PlanDoesNotFit
from embrace_fx.runtime.step.model_state import ModelState
from embrace_fx.runtime.step.outside_uses import OutsideUses
from embrace_fx.runtime.step.program import Program
from embrace_fx.runtime.step.step import run_step
from embrace_fx.runtime.tables.layouts import Place
from embrace_fx.runtime.tables.placement import broadcast_state
from embrace_fx.scheduling.timeline import gather_timeline
from embrace_fx.session.buffer_sharing import BufferSharing
from embrace_fx.session.calls import Kind, Variant, kind_key
from embrace_fx.session.captures import Captures
from embrace_fx.session.comm_hooks import dtype_of_hook, told_of
from embrace_fx.session.idling import Idling, Joined
from embrace_fx.session.lookahead import Lookahead
from embrace_fx.session.memory_report import memory_report
from embrace_fx.session.model_watch import ModelWatch
from embrace_fx.session.parameter_watch import ParameterWatch
from embrace_fx.session.pipeline import analyse
from embrace_fx.session.programs import ProgramBuilder
from embrace_fx.session.replica_check import checksums_of_replicas
from embrace_fx.session.state_hooks import add_state_hooks
from embrace_fx.setup.agreement import agree_on_first_call, agree_on_set_up, give_up
from embrace_fx.setup.group import check_group, check_still_alone, default_group
from embrace_fx.setup.options import Options
from embrace_fx.setup.setting import Setting
from embrace_fx.setup.telling import stage, tell
from embrace_fx.viz.graphs import Graphs
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import Schedule, Timeline

_TRAINING, _ACCUMULATING, _EVALUATING = range(3)


class Session:
    """What stands behind a `CompiledModel`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        group: dist.ProcessGroup | None,
        options: Options,
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.options = options
        self.lookahead = Lookahead(at_end=self._end_lookahead)
        self._flow: Flow | None = None
        self._timeline: Timeline | None = None
        self._records = False  # steps are to be recorded from the first one on
        self._warned = False
        self._given_group = group
        dump_to = options.dump_to if isinstance(options.dump_to, Path | None) else Path(options.dump_to)
        self.communicator = Communicator(group if group is not None else default_group(), dump_to)
        self._begun = False
        self.announcements = Announcements(self.communicator)
        with stage("agreeing with the other ranks", self.communicator.rank):
            agree_on_set_up(self.communicator, model, optimizers, options)
        self.state = ModelState(model)
        self._parameters = ParameterWatch(self.state)
        self._watch = ModelWatch(model)
        itself = weakref.ref(self)  # optimizers must not keep their session alive

        def make_whole(names: Sequence[str], reason: str) -> None:
            if (session := itself()) is not None:
                session._make_whole(names, reason)

        stepping = Stepping(self.state, self.communicator, make_whole)
        stepping.listen()
        for optimizer in optimizers:
            stepping.adopt(optimizer)
        self._setting = Setting(model, stepping, self.state, self.announcements, options)
        self._plan: Plan | None = None
        self._findings: Findings | None = None  # of rank 0
        self._drift: Drift | None = None  # of rank 0, where anything may drift
        self._calls = TrainingCalls()
        self._captures = Captures(self._setting)
        self._buffers = BufferSharing(self.state, self.announcements, on=options.shares_buffers)
        self._builder: ProgramBuilder | None = None  # of the plan in use
        self._replicated = False
        self._placed = add_state_hooks(self)
        self._outside = OutsideUses(self.state, self.communicator)
        self._kinds: dict[Any, Kind] = {}
        self.idling = Idling(self)
        self._misfit = Misfit()  # of the batch whose program is to be built
        self._whole: set[str] = set()  # tables that some batch cannot read in shards

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError(
                "expected the model to have been called, before its plan, report or graphs are read, found that it has "
                "not been called for training: the graph is captured with the first batch. Call the model once, with "
                "gradients enabled."
            )
        return self._plan

    @property
    def shards(self) -> tuple[str, ...]:
        """The tables of which this rank holds a part."""
        return () if self._plan is None or self.communicator.world_size == 1 else self._plan.sharded

    @property
    def places(self) -> dict[str, Place]:
        """Where the parts of sharded tables lie, by each of their names."""
        tables = {table.parameter: table.place for table in self.state.tables.values() if table.place.mesh is not None}
        named = ((name, self.state.parameter(name)) for name in self.state.names)
        return {name: tables[parameter] for name, parameter in named if parameter in tables}

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.communicator.group

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def is_training(self) -> bool:
        """Whether the model has been called, and is open."""
        return self._begun and self.communicator.is_open

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Tells of a rank that dies in a collective inside."""
        return self.communicator.watching()

    @property
    def graphs(self) -> Graphs:
        assert self.plan is not None  # raises before the first call
        return Graphs() if self._builder is None else self._builder.graphs

    def report(self) -> str:
        told = str(self.plan) + told_of(self.communicator.gradient_dtype)
        held = self._builder.held() if self._builder is not None else None
        optimizers = self._setting.stepping.holders.optimizers
        return told if held is None else f"{told}\n\n{memory_report(held, self.model, optimizers)}"

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        if self._plan is not None:
            raise RuntimeError(
                "expected a hook before the model's first call, in register_comm_hook(), found that it has been called "
                "and gradients travel already. Register it after compile()."
            )
        self.communicator.gradient_dtype = dtype_of_hook(state, hook, self.group)

    def _summary(self) -> str:
        scheduling = self._builder.scheduling if self._builder is not None else None
        return summary(self.plan, scheduling.schedule.diagnostics().step_ms if scheduling is not None else None)

    @property
    def schedule(self) -> Schedule:
        assert self.plan is not None  # raises before the first call
        found = self._builder.schedule if self._builder is not None else None
        if found is None:
            raise RuntimeError(_NOT_SCHEDULED)
        return found

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise RuntimeError(
                "expected steps to have been recorded, before the timeline is read, found none. Train a few steps "
                "under `with model.record():`."
            )
        return self._timeline

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        builder = self._builder
        recorder = builder.recorder if builder is not None else None
        if recorder is None and builder is not None and builder.graphs:
            raise RuntimeError(_NOT_SCHEDULED)
        self._records = True
        if recorder is not None:
            recorder.start()
        try:
            yield
        finally:
            self._records = False
            builder = self._builder
            recorder = builder.recorder if builder is not None else None
            recording = recorder.stop() if recorder is not None and recorder.recording is not None else None
        if recording is None or builder is None or builder.schedule is None:
            raise RuntimeError(
                "expected training steps to be recorded, under `with model.record():`, found none. Train a few steps "
                "inside of it."
            )
        self._timeline = gather_timeline(self.communicator, recording, builder.schedule.steps)

    # -- calling -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """At the first call, ranks and model are those of that moment. Collective."""
        if self._given_group is None:
            group = default_group()
            check_group(group, self.communicator.group)
            if self.communicator.group is None and group is not None:
                self.communicator.join(group)
        agree_on_set_up(self.communicator, self.model, self.optimizers, self.options)  # it may have changed since
        self.state.refresh(self.model)
        self._watch.note()
        self._parameters.note()
        self._begun = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # inside of torch.compile it runs as it is
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._begun:
            self._begin()
        elif self.communicator.group is None:
            check_still_alone(default_group())
        leaves, spec = flatten_arguments(args, kwargs)
        count = self._calls.count
        while True:
            try:
                return self._call(args, kwargs, leaves, spec)
            except PlanDoesNotFit:
                self._calls.count = count
                self._fit_plan()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], spec: pytree.TreeSpec) -> Any:
        """Runs the model on a batch.

        Raises:
            PlanDoesNotFit: the plan must be changed first, on every rank.
        """
        train, announcements = torch.is_grad_enabled(), self.announcements
        self.communicator.check_open()
        announcements.activity = self._activity(train)
        self._look_at_model()
        kind = self._kinds.setdefault(kind_key(self._modes(), leaves, spec, train), Kind())
        if self._plan is None and not train:
            return self._evaluate_plainly(args, kwargs)
        variant = self._variant(kind, leaves, args, kwargs, train)
        if announcements.asked_to_plan:
            self._plan_again(variant, leaves)
        variant, program = self._runs(variant, kind, leaves, args, kwargs, train)
        following = self._following(kind, program, leaves, spec) if program.flow is not None else None
        if self._flow is not None and program.flow is None:
            self._flow.leave()
        calls = self._calls
        calls.count += train
        if train:
            self._check_replicas()
        results = run_step(program, variant.captured.inputs(leaves), train=train, following=following)
        if self._drift is not None and train and calls.count % SAMPLED_EVERY == 0:
            self._drift.observe(announcements.rows_read)
            announcements.asks_to_plan = self._drift.wants_plan
        return variant.captured.results(results, args, kwargs)

    def _modes(self) -> tuple[bool, ...]:
        """Which modules train, and which parameters take gradients."""
        return (*self._watch.modes(), *self._parameters.trains)

    def _activity(self, train: bool) -> int:
        return _EVALUATING if not train else _TRAINING if self.synchronised else _ACCUMULATING

    def _check_replicas(self) -> None:
        """Has the coming announcement compare them, where it is time."""
        every = self.options.check_replicas
        if every is not None and self.announcements.made % every == 0 and self.communicator.world_size > 1:
            self.synchronize()  # ranks may have applied more or less of the last step
            self.announcements.checksums = checksums_of_replicas(self._setting)

    def _look_at_model(self) -> None:
        """Refuses a model with other parameters than the plan's; one with other modules is captured anew.

        Raises:
            PeerFailure: on every rank. Before there is a plan, CaptureError.
        """
        changed = None
        if name := self._watch.parameters_changed():
            changed = RuntimeError(_OTHER_PARAMETERS.format(name))
        elif name := self._parameters.converted():
            changed = RuntimeError(_CONVERTED.format(name))
        if changed is not None:
            if self._plan is None:  # the other ranks make no announcements yet
                agree_on_first_call(self.announcements, changed)
            give_up(self.announcements, changed)
        if self._watch.modules_changed():
            self.parameters_may_change()
            self._watch.note()
            self.state.refresh(self.model)
            self._parameters.note()
            self._kinds.clear()
        if self._plan is not None and (shards := self.state.hooked.intersection(self._plan.sharded)):
            self._misfit = Misfit((), tuple(sorted(shards)))
            self.announcements.announce((), does_not_fit=True)

    def _variant(
        self, kind: Kind, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
    ) -> Variant:
        """A capture that is valid for a batch."""
        found = next((v for v in kind.variants if v.captured.accepts(leaves)), None)
        return self._capture(kind, leaves, args, kwargs, train) if found is None else found

    def _runs(
        self,
        variant: Variant,
        kind: Kind,
        leaves: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        train: bool,
    ) -> tuple[Variant, Program]:
        """What a batch runs on."""
        accumulates = train and not self.synchronised
        compiles = variant.program is None or (accumulates and variant.accumulating is None)
        self._make_programs(variant, accumulates=accumulates)
        program = variant.accumulating if accumulates else variant.program
        if compiles and not variant.captured.accepts(leaves):  # compiling has narrowed what the variant takes
            return self._runs(self._variant(kind, leaves, args, kwargs, train), kind, leaves, args, kwargs, train)
        assert program is not None
        return variant, program

    def _make_programs(self, variant: Variant, *, accumulates: bool) -> None:
        """Builds what is needed of a variant and not there."""
        if variant.program is None:
            self._build(variant)
        if accumulates and variant.accumulating is None:
            assert self._builder is not None
            with stage("compiling", self.communicator.rank):
                self._builder.build_accumulating(variant)

    def _following(self, kind: Kind, program: Program, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Ahead | None:
        """The next batch, where it is known and a program for it exists."""
        coming = self.lookahead.following(leaves)
        if coming is None and self.lookahead.known and program.flow is not None and program.flow.looks_ahead:
            self._warn_of_other_batch()
        if coming is None or self._kinds.get(kind_key(self._modes(), coming, spec, True)) is not kind:
            return None
        variant = next((v for v in kind.variants if v.captured.accepts(coming)), None)
        if variant is None or variant.program is None or (variant.captured.replay and variant.captured.replay.states):
            return None  # what the next batch is computed with, this step is still to make
        try:
            return variant.program.ahead(variant.captured.inputs(coming))
        except Exception:  # what is wrong with it, its own call will tell all ranks
            return None

    def _end_lookahead(self) -> None:
        """No batch is expected any more, and everything is applied."""
        if self._flow is not None:
            self._flow.expect_no_batch()
        self.synchronize()

    def _warn_of_other_batch(self) -> None:
        if not self._warned:
            warnings.warn(
                "expected the batch that lookahead() yielded, as it was, in the model's call, found another one, or "
                "one that was moved or written since. The step is exact, but its communication is not hidden. Let the "
                "loader itself move and prepare batches.",
                stacklevel=2,
            )
        self._warned = True

    def _evaluate_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the first training call there is no plan, and no table is sharded: the user's own forward runs."""
        agree_on_first_call(self.announcements, None)
        if any(parameter.device.type == "meta" for parameter in self.model.parameters()):
            raise RuntimeError(
                "expected a training call before the first evaluation, in forward(), found a model on the meta device, "
                "and how its tables are sharded is decided with the first training batch. Call it once with gradients "
                "enabled."
            )
        if not self._replicated and self.communicator.group is not None:
            broadcast_state(self.model, frozenset(), self.communicator, buffers=self.options.broadcast_buffers)
        self._replicated = True
        return self.model(*args, **kwargs)

    def _capture(
        self, kind: Kind, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
    ) -> Variant:
        failure, captured, rank = None, None, self.communicator.rank
        try:
            with stage("capturing", rank):
                captured = self._captures.capture(kind, leaves, args, kwargs, train)
                analysed = analyse(captured)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        if self._plan is None:
            with stage("waiting for the other ranks to capture", rank):
                agree_on_first_call(self.announcements, failure)
        elif failure is not None:
            give_up(self.announcements, failure)
        assert captured is not None
        first = self._plan is None
        if first:
            given = self.options.given_plan
            if given is None:
                with stage("planning", rank):
                    plan, findings = make_plan(self._setting, analysed, captured.inputs(leaves))
            else:
                plan, findings = repeated(self._setting, analysed, given), None
            self._adopt(plan, findings)
            with stage("placing parameters", rank):
                place(self._setting, analysed, plan)
            self._note_places()
            self._watch.note_parameters()
        variant = Variant(captured, analysed, train)
        kind.variants.append(variant)
        self._build(variant)
        if first and rank == 0:
            tell("%s", self._summary())
        return variant

    def _build(self, variant: Variant) -> None:
        """Makes a variant's program under the plan in use.

        Raises:
            PlanDoesNotFit: the plan must be changed first, on every rank.
        """
        assert self._builder is not None
        self._misfit = misfit(self.plan, variant.analysed, self.state.hooked)
        if self._misfit:
            self.announcements.announce((), does_not_fit=True)
        with stage("compiling", self.communicator.rank):
            self._builder.build(variant)
        self._flow, recorder = self._builder.flow, self._builder.recorder
        if self._records and recorder is not None and recorder.recording is None:
            recorder.start()

    # -- planning again ------------------------------------------------------------------------------------------------

    def _adopt(self, plan: Plan, findings: Findings | None) -> None:
        """Puts a plan in use, of which nothing is built yet."""
        self._plan, self._findings = plan, findings
        self._drift = _drift(plan, findings)
        self._flow = None
        self._builder = ProgramBuilder(self._setting, plan, self._calls, self._buffers, self._warn_of_other_batch)
        log_text("plan", str(plan))

    def _plan_again(self, variant: Variant, leaves: Sequence[Any]) -> None:
        """Another plan, as rank 0 asked for in the last announcement, if this is a moment for it. Collective.

        Raises:
            PeerFailure: the ranks are not doing the same thing, or a batch is bad; on every rank, and nothing changed.
        """
        everyone = self.announcements.announce([self._may_plan_again(variant)])
        if not all(may for (may,) in everyone):
            return
        old, used = self.plan, {d.parameter for d in self.plan if d.strategy not in ("frozen", "unused")}
        findings = find(self._setting, variant.analysed, variant.captured.inputs(leaves), used)
        if findings is not None:
            findings = findings.with_whole(self._whole, WHOLE)
        if findings is not None and self._drift is not None:
            findings = findings.with_rows(self._drift.rows)
        new = plan_on_links(self._setting, findings, old)
        self.announcements.asks_to_plan = False
        if not changes(old, new):
            self._drift = _drift(old, findings)
            return
        self._place_anew(variant.analysed, old, new, findings)

    def _fit_plan(self) -> None:
        """The plan in use with what some rank's batch needs besides, before the step that asks for it. Collective.

        Raises:
            PeerFailure: this is no moment for it on some rank; on every rank, and nothing changed.
        """
        own, self._misfit = self._misfit, Misfit()
        reason = "an earlier call's backward is still to come" if self.state.awaiting_backward else None
        if self.state.unreduced and any(name in self.state.tables for name in own.whole):
            reason = "gradients wait that were summed up under no_sync()"
        told = tuple[tuple[str, ...], tuple[str, ...], str | None]
        everyone = self.communicator.gather((own.late, own.whole, reason), told)
        needed = [Misfit(late, whole) for late, whole, _ in everyone]
        names = ", ".join(sorted({name for each in needed for name in (*each.late, *each.whole)}))
        if reasons := {rank: reason for rank, (*_, reason) in enumerate(everyone) if reason is not None}:
            raise PeerFailure({rank: _NO_MOMENT.format(names, reason) for rank, reason in reasons.items()})
        self._whole |= {name for each in needed for name in each.whole}
        self.change_plan(fitted(self.plan, needed))

    # -- ranks that have run out of batches ----------------------------------------------------------------------------

    def join_hook(self, *, divides_by_all: bool) -> Joined:
        return Joined(self.idling, divides_by_all=divides_by_all)

    def meet_joined(self) -> None:
        """At the head of a call under `join`. Collective."""
        self.idling.meet(self._activity(torch.is_grad_enabled()))

    @property
    def is_planned(self) -> bool:
        return self._plan is not None

    def any_variant(self) -> Variant:
        """One of the model's captures."""
        return next(v for kind in self._kinds.values() for v in kind.variants)

    def program_of(self, variant: Variant, *, accumulates: bool) -> Program:
        """A program of what was not captured from a batch."""
        self._make_programs(variant, accumulates=accumulates)
        program = variant.accumulating if accumulates else variant.program
        assert program is not None
        return program

    def change_plan(self, new: Plan) -> None:
        """Puts a plan in use that follows from the one in use. Collective."""
        self._place_anew(self.any_variant().analysed, self.plan, new, self._findings)

    def send_state(self, source: int) -> None:
        """One rank's parameters, but those in shards, and buffers to every rank. Collective."""
        sharded, buffers = frozenset(self.plan.sharded), self.options.broadcast_buffers
        broadcast_state(self.model, sharded, self.communicator, buffers=buffers, source=source)

    def _place_anew(self, analysed: TrainingGraph, old: Plan, new: Plan, findings: Findings | None) -> None:
        """Puts another plan in use, between two steps. Collective."""
        if self._flow is not None:
            self._flow.close()
        self.state.settle_tables()
        place_anew(self._setting, analysed, old, new)
        told = story(self._calls.count, old, new)
        self._adopt(replace(new, history=(*old.history, told)), findings)
        self._note_places()
        self._setting.stepping.flow = None
        for kind in self._kinds.values():
            for each in kind.variants:
                each.program = each.accumulating = None
        if self.communicator.rank == 0:
            tell("planned again %s", told)

    def _make_whole(self, names: Sequence[str], reason: str) -> None:
        """Another plan, before a step is taken that needs tables whole. Collective, as the step is.

        Raises:
            RuntimeError: a backward under the plan in use is still to come; on every rank, and nothing changed.
        """
        variant = next(v for kind in self._kinds.values() for v in kind.variants if v.train)
        old = self.plan
        if not self._may_plan_again(variant) or self.options.given_plan is not None:
            raise RuntimeError(
                f"expected an element-wise optimizer, in optimizer.step(), found that {reason}, while results of an "
                f"earlier call still wait for their backward, or the plan is given, and {', '.join(names)} cannot be "
                "put together. Pass the optimizer to compile(), and step after every backward."
            )
        findings = None if self._findings is None else self._findings.with_whole(names, reason)
        self._place_anew(variant.analysed, old, plan_on_links(self._setting, findings, old), findings)

    def _may_plan_again(self, variant: Variant) -> bool:
        """Whether this rank can do without the plan in use: no backward is to come, no sum half made, no recording."""
        tables = {decision.parameter for decision in self.plan if decision.is_table}
        return (
            variant.train
            and not self.state.unreduced
            and not self.state.awaiting_backward
            and (self._flow is None or self._flow.recorder.recording is None)
            and {table.parameter for table in variant.analysed.tables} == tables
        )

    # -- state ---------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Applies every update that an optimizer has stepped. Waits for nothing that other ranks are still to do."""
        if self._flow is not None:
            self._flow.settle()
            self._flow.settle_rows()
        self.state.settle_tables()

    def parameters_were_loaded(self) -> None:
        """Other parameters may stand in the place of those that were: `assign=True`."""
        for name, table in self.state.tables.items():
            table.parameter = self.state.parameter(name)
        self.communicator.progress.optimizer_steps = 0  # ranks are alike again
        self._watch.note_parameters()
        if self._plan is not None:
            self._note_places()

    def _note_places(self) -> None:
        """Parameters are where the plan has them."""
        self._placed.note(self)
        self._outside.watch(frozenset(d.parameter for d in self.plan if d.strategy in ("unused", "frozen")))

    @property
    def synchronised(self) -> bool:
        """Whether backwards reduce gradients."""
        return self.state.synchronised

    @synchronised.setter
    def synchronised(self, value: bool) -> None:
        self.state.synchronised = value

    def parameters_may_change(self) -> None:
        """Parameters are handed out: they are up to date, and nothing that was read from them ahead is used."""
        if self._flow is not None:
            self._flow.parameters_may_change()
        self.state.settle_tables()

    def close(self) -> None:
        """Applies what is pending, and ends the threads and process groups behind the model."""
        flow, self._flow = self._flow, None
        self._setting.stepping.flow = None
        if flow is not None:
            flow.close()
        self.state.settle_tables()
        self._kinds.clear()
        if self._builder is not None:
            self._builder.flow = None
        self.communicator.close()

    def clear_gradients(self) -> None:
        """What backwards under `no_sync` left is gone with the gradients."""
        self.state.unreduced.clear()


def _drift(plan: Plan, findings: Findings | None) -> Drift | None:
    """What follows the plan's tables, where there are any to follow, on rank 0."""
    return Drift(plan, findings) if findings is not None and plan.watched else None


_NOT_SCHEDULED = (
    "expected a model that has been trained, on the CPU or on one GPU, before its schedule is read or its steps are "
    "recorded, found one that has only been evaluated, or that lies on several devices: nothing of it is scheduled. "
    "Train a step first; embrace_fx.plan(model, batch, world_size=...).schedule needs none."
)

_NO_MOMENT = (
    "expected every call's backward, and under no_sync() the step, before a batch that needs another plan, in the "
    "model's call, found that {} are used otherwise than before, and {}. Call the model once with a batch that uses "
    "them, on its own"
)

_OTHER_PARAMETERS = (
    "expected the parameters of compile(), in the model's call, found that {} came, went or was replaced: gradients "
    "are exchanged, and tables sharded, for those that there were. Change layers, resize embeddings, tie weights and "
    "parametrize before the first call, or compile the changed model anew"
)

_CONVERTED = (
    "expected every parameter to stay of its dtype, in the model's call, found that that of {} has changed since the "
    "first call: what is exchanged was decided by it. Convert the model before the first call, or compile it anew"
)
