"""What a user sees of a compiled model: the report, the graphs, the schedule, and what was recorded of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from embrace_fx.planning.summary import summary
from embrace_fx.scheduling.scheduling import Scheduling
from embrace_fx.scheduling.timeline import gather_timeline
from embrace_fx.session.comm_hooks import told_of
from embrace_fx.session.memory_report import memory_report
from embrace_fx.session.plan_in_use import PlanInUse
from embrace_fx.setup.setting import Setting
from embrace_fx.viz.graphs import Graphs
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import Schedule, Timeline


class Views:
    """Of one model."""

    def __init__(self, setting: Setting, planned: PlanInUse) -> None:
        self._setting = setting
        self._planned = planned
        self._timeline: Timeline | None = None

    @property
    def plan(self) -> Plan:
        if self._planned.plan is None:
            raise RuntimeError(
                "expected the model to have been called, before its plan, report or graphs are read, found that it has "
                "not been called for training: the graph is captured with the first batch. Call the model once, with "
                "gradients enabled."
            )
        return self._planned.plan

    @property
    def graphs(self) -> Graphs:
        assert self.plan is not None  # raises before the first call
        return Graphs() if self._planned.builder is None else self._planned.builder.graphs

    def report(self) -> str:
        told, setting = str(self.plan) + told_of(self._setting.communicator.gradient_dtype), self._setting
        held = self._planned.builder.held() if self._planned.builder is not None else None
        return (
            told
            if held is None
            else f"{told}\n\n{memory_report(held, setting.model, setting.stepping.holders.optimizers)}"
        )

    def summary(self) -> str:
        """What was decided, in a line."""
        scheduling = self._scheduling()
        return summary(self.plan, scheduling.schedule.diagnostics().step_ms if scheduling is not None else None)

    def _scheduling(self) -> Scheduling | None:
        return None if self._planned.builder is None else self._planned.builder.scheduling

    @property
    def schedule(self) -> Schedule:
        assert self.plan is not None  # raises before the first call
        if (scheduling := self._scheduling()) is None:
            raise RuntimeError(_NOTHING_SENT.format("schedule"))
        return scheduling.schedule

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
        assert self.plan is not None  # raises before the first call
        scheduling, flow = self._scheduling(), self._planned.flow
        if flow is None or scheduling is None:
            raise RuntimeError(_NOTHING_SENT.format("timeline"))
        flow.recorder.start()
        try:
            yield
        finally:
            recording = flow.recorder.stop()
        self._timeline = gather_timeline(self._setting.communicator, recording, scheduling.schedule.steps)


_NOTHING_SENT = (
    "expected at least two ranks, before the {} is read, found one: nothing is sent, so nothing is scheduled. Start "
    "the program with torchrun on more ranks."
)
