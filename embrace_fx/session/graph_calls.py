"""Runs calls under the graph route: finds a valid capture for a batch, or makes one, and runs its program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from embrace_fx.planning.fitting import Misfit
from embrace_fx.runtime.flow.next_batch import NextBatch, look_ahead
from embrace_fx.runtime.step.phases import autocast_is_in_the_graph
from embrace_fx.runtime.step.program import Program
from embrace_fx.runtime.step.step import run_step
from embrace_fx.session.calls import Arguments, Kind, Kinds, Variant, kind_key
from embrace_fx.session.captures import Captures
from embrace_fx.session.garbage import not_collecting
from embrace_fx.session.lookahead import Lookahead
from embrace_fx.session.model_watch import ModelWatch
from embrace_fx.session.pipeline import analyse
from embrace_fx.session.plan_in_use import PlanInUse
from embrace_fx.setup.agreement import RunsEagerly, agree_on_first_call, give_up, runs_eagerly_for
from embrace_fx.setup.setting import Setting
from embrace_fx.setup.telling import stage


@dataclass(frozen=True, eq=False)
class GraphCalls:
    """Runs one model's calls on captured graphs."""

    _setting: Setting
    _planned: PlanInUse
    _kinds: Kinds
    _captures: Captures
    _lookahead: Lookahead
    _watch: ModelWatch

    def call(self, call: Arguments) -> Any:
        """Runs the model on a batch. Collective.

        Raises:
            PlanDoesNotFit: the plan must be changed first; on every rank.
            RunsEagerly: no graph holds the forward; on every rank.
        """
        planned, leaves, train = self._planned, call.leaves, call.train
        kind = self._kinds[kind_key(self._watch.modes(), leaves, call.spec, train)]
        variant = self._variant(kind, call)
        planned.calls.ahead = self._lookahead.batches if self._lookahead.active else 0
        if planned.plan is None:
            with not_collecting():
                planned.make(variant, variant.captured.inputs(leaves))
        if self._setting.announcements.asked_to_plan:
            planned.make_again(variant, leaves)
        variant, program = self._runs(variant, kind, call)
        following = self._following(kind, program, leaves, call.spec) if program.flow is not None else None
        if planned.flow is not None and program.flow is None:
            planned.flow.leave()
        planned.calls.count += train
        inputs, hints = variant.captured.inputs(leaves), self._setting.state.hints
        if train and hints is not None and self._lookahead.active:
            farthest = self._lookahead.following(leaves, farthest=True)
            rows_ahead = self._of_coming(kind, farthest, call.spec, is_next=False)
            if rows_ahead is not None:
                rows_ahead.copy_rows()
            hints.step(inputs, rows_ahead, self._lookahead.batches)
        try:
            results = run_step(program, inputs, train=train, following=following)
        finally:
            if hints is not None:
                hints.end_call()
        if train:
            planned.observe()
        return variant.captured.results(results, call.args, call.kwargs)

    def _variant(self, kind: Kind, call: Arguments) -> Variant:
        """Finds, or makes, a capture that is valid for a batch."""
        found = next((v for v in kind.variants if v.captured.accepts(call.leaves)), None)
        if found is not None:
            found.reused += 1
            return found
        with not_collecting():
            return self._capture(kind, call)

    def _runs(self, variant: Variant, kind: Kind, call: Arguments) -> tuple[Variant, Program]:
        """Finds the variant and the program that a batch runs on; compiles the program at first."""
        accumulates = call.train and not self._setting.state.synchronised
        compiles = accumulates not in variant.programs
        program = self._planned.build(variant, accumulates=accumulates)
        if compiles and not variant.captured.accepts(call.leaves):  # compiling has added guards
            return self._runs(self._variant(kind, call), kind, call)
        return variant, program

    def _following(
        self, kind: Kind, program: Program, leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> NextBatch | None:
        """Returns the next batch, if it is known and has a program."""
        coming = self._lookahead.following(leaves)
        if coming is None and self._lookahead.known and program.flow is not None and program.flow.looks_ahead:
            self._lookahead.warn_of_other_batch()
        return self._of_coming(kind, coming, spec, is_next=True)

    def _of_coming(
        self, kind: Kind, coming: Sequence[Any] | None, spec: pytree.TreeSpec, *, is_next: bool
    ) -> NextBatch | None:
        """Reads a future batch by the program on which it will run; None: one of the two is not known yet.

        Args:
            is_next: it is the next one, whose rows leave ahead where its program overlaps steps.
        """
        if coming is None or self._kinds.get(kind_key(self._watch.modes(), coming, spec, True)) is not kind:
            return None
        variant = next((v for v in kind.variants if v.captured.accepts(coming)), None)
        program = None if variant is None or variant.captured.switches else variant.programs.get(False)
        if variant is None or program is None:
            return None  # an earlier step may still change which graph is valid
        of_ids = program.ids_program
        if of_ids is None or not of_ids.is_pure or (is_next and not program.overlaps_steps):
            return None
        try:
            inputs = variant.captured.inputs(coming)
            if is_next and any(index >= len(coming) for index in of_ids.reads):
                return None  # objects, from which the other inputs are read, may change until its turn
            with torch.no_grad(), autocast_is_in_the_graph():
                return look_ahead(of_ids, inputs, program.streams)
        except Exception:  # what is wrong with it, its own call will tell all ranks
            return None

    def _capture(self, kind: Kind, call: Arguments) -> Variant:
        setting, planned = self._setting, self._planned
        failure, captured, rank = None, None, setting.communicator.rank
        if planned.flow is not None:
            planned.flow.flush()  # a capture reads `.grad`, and what waits there could not be applied amid it
        try:
            with stage("capturing", rank):
                captured = self._captures.capture(kind, call.leaves, call.args, call.kwargs, call.train)
                analysed = analyse(captured)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        options = setting.options
        asks = options.memory_budget is not None or options.table_memory is not None  # only the graph route keeps these
        route = "graph" if asks else options.route
        activity = setting.activity(train=call.train)
        if planned.plan is None:
            with stage("waiting for the other ranks to capture", rank):
                reason = agree_on_first_call(setting.communicator, activity, failure, route)
            if reason:
                raise RunsEagerly(reason)
        elif reason := runs_eagerly_for(failure, route):
            planned.fits(Misfit(eager=reason), activity)
        elif failure is not None:
            give_up(setting.announcements, failure)
        assert captured is not None
        kind.variants.append(variant := Variant(captured, analysed, call.train))
        if planned.plan is not None:
            planned.build(variant)
        return variant
