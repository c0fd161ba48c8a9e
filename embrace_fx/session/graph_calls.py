"""Runs calls of captured forwards: finds a capture that is valid for a batch, or makes one, and runs its program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from embrace_fx.capture import Captured, capture
from embrace_fx.capture.errors import CaptureError, RefusedError
from embrace_fx.capture.gc_pause import pause_garbage_collection
from embrace_fx.capture.model_watch import ModelWatch
from embrace_fx.passes.pipeline import with_tables
from embrace_fx.passes.planner.plan_fit import PlanViolation
from embrace_fx.runtime.flow.lookahead import Lookahead
from embrace_fx.runtime.flow.next_batch import NextBatch
from embrace_fx.runtime.step.program import Program
from embrace_fx.runtime.step.runnable_phase import call_without_autograd
from embrace_fx.runtime.step.step import run_step
from embrace_fx.runtime.tables.placement import whole_parameters
from embrace_fx.session.program_cache import Arguments, Entries, Entry, call_key, signature
from embrace_fx.session.programs import Programs
from embrace_fx.setup.agreement import RunsEagerly, agree_on_first_call, give_up, runs_eagerly_for
from embrace_fx.setup.context import Context
from embrace_fx.setup.log import stage

MAX_CAPTURES = 32
"""Maximum number of captures of one model. A capture takes seconds, so shapes that never repeat would slow down every
step. Torch's own limit of recompilations is of the same order.
"""

MOST_UNUSED_OF_FLOATS, MOST_UNUSED = 3, 8
"""Maximum number of consecutive captures for different values, if no capture has served a second call. A float that
differs in each call is probably annealed, and does not take the same value again. An integer, such as the number of a
task, may repeat after all other tasks have been run.
"""


@dataclass(frozen=True, eq=False)
class GraphCalls:
    """Runs calls of a model whose forward is captured: finds a valid capture for a batch, or makes one."""

    _context: Context
    _programs: Programs
    _lookahead: Lookahead
    _watch: ModelWatch

    def call(self, call: Arguments) -> Any:
        """Runs the model on a batch and returns its output. Collective.

        Raises:
            PlanDoesNotFit: the plan must be changed before this call; raised on every rank.
            RunsEagerly: some rank cannot capture the forward; raised on every rank.
        """
        programs, leaves, train = self._programs, call.leaves, call.train
        kind = programs.cache[call_key(self._watch.modes(), leaves, call.spec, train)]
        entry = self._entry(kind, call)
        programs.counters.ahead = self._lookahead.batches if self._lookahead.active else 0
        if programs.pipeline is None:
            programs.make_first_plan(entry, entry.captured.inputs(leaves))
        if self._context.announcements.asked_to_plan:
            programs.replan(entry, leaves)
        entry, program = self._find_program(entry, kind, call)
        following = self._next_batch(kind, program, leaves) if train and program.overlaps_steps else None
        if program.flow is not programs.flow:
            programs.flow.finish_pending()
        programs.counters.calls += train
        inputs, hints = entry.captured.inputs(leaves), self._context.state.hints
        if train and hints is not None and self._lookahead.active:
            farthest = self._lookahead.following(leaves, farthest=True)
            rows_ahead = self._prepare_future_batch(kind, leaves, farthest, is_next=False)
            if rows_ahead is not None:
                rows_ahead.copy_rows()
            hints.step(inputs, rows_ahead, self._lookahead.batches)
        try:
            results = run_step(program, inputs, train=train, following=following)
        finally:
            if hints is not None:
                hints.end_call(train=train)
        if train:
            programs.observe()
        return entry.captured.build_result(results, call.args, call.kwargs)

    def _entry(self, captures: Entries, call: Arguments) -> Entry:
        """Returns one of `captures` that is valid for a call's batch, or captures the model if none is."""
        if (found := captures.accepting(call.leaves)) is None:
            with pause_garbage_collection():
                return self._capture(captures, call)
        found.reused += 1
        return found

    def _find_program(self, entry: Entry, kind: Entries, call: Arguments) -> tuple[Entry, Program]:
        """Returns the cache entry and the program with which to run a call. Compiles the program at its first use.

        Args:
            entry: an entry whose capture is valid for the batch.
            kind: the entries of calls with the same cache key. If compiling makes `entry` invalid for the batch,
                another of these is used, or a new one.
        """
        accumulates = call.train and not self._context.state.synchronised
        compiles = accumulates not in entry.programs
        program = self._programs.build(entry, accumulates=accumulates)
        if compiles and not entry.captured.accepts(call.leaves):  # compiling the graph has added guards
            return self._find_program(self._entry(kind, call), kind, call)
        return entry, program

    def _next_batch(self, captures: Entries, program: Program, leaves: Sequence[Any]) -> NextBatch | None:
        """Prepares to exchange the ids of the next batch during this step. Returns None if the next batch is not known.

        Args:
            captures: the cache entries of calls with this call's cache key.
            program: the program of this step.
            leaves: this call's flattened arguments.
        """
        coming = self._lookahead.following(leaves)
        if coming is None and self._lookahead.known and program.flow.looks_ahead:
            self._lookahead.warn_of_other_batch()
        return self._prepare_future_batch(captures, leaves, coming, is_next=True)

    def _prepare_future_batch(
        self, kind: Entries, leaves: Sequence[Any], coming: Sequence[Any] | None, *, is_next: bool
    ) -> NextBatch | None:
        """Prepares the ids of a future batch with the program that will run it. Returns None if the batch or its
        program is not known yet.

        Args:
            kind: the entries of calls with this call's cache key, which the future batch is assumed to share.
            leaves: this call's flattened arguments.
            coming: the future batch's flattened arguments, or None if they are not known.
            is_next: whether the future batch is the next one. Its rows are sent during this step if its program
                overlaps steps.
        """
        if coming is None or signature(coming) != signature(leaves):
            return None
        entry = kind.accepting(coming)
        program = None if entry is None or entry.captured.toggles_state else entry.programs.get(False)
        if entry is None or program is None:
            return None  # an earlier step may still change which graph is valid
        of_ids = program.ids_program
        if not of_ids.is_pure or (is_next and not program.overlaps_steps):
            return None
        try:
            inputs = entry.captured.inputs(coming)
            if is_next and entry.captured.replay is not None and max(of_ids.reads, default=-1) >= len(coming):
                return None  # the graph also reads inputs from objects that may change before the batch's own call
            return call_without_autograd(program.flow.look_ahead, of_ids, inputs)
        except Exception:  # the batch's own call will report it to all ranks
            return None

    def _capture(self, captures: Entries, call: Arguments) -> Entry:
        """Captures the forward and adds the capture to the cache entries `captures`. Returns the new entry. Collective.

        Raises:
            RunsEagerly: some rank cannot capture the forward of the first call; raised on every rank.
            PlanDoesNotFit: some rank cannot capture the forward of a later call; raised on every rank.
            CaptureError: the forward cannot be captured, and must not run eagerly.
        """
        context, programs = self._context, self._programs
        failure, captured, rank = None, None, context.communicator.rank
        programs.flow.apply()
        programs.flow.wait()  # a capture reads `.grad`, and could not apply a pending gradient
        try:
            with stage("capturing", rank):
                captured = self._captured(captures, call)
                analysed = with_tables(captured.graph)
        except Exception as error:  # catch any error, because the other ranks must be informed
            failure = error
        options = context.options
        # With these options, the forward must be captured, because the eager route does not support them.
        asks = options.memory_budget is not None or options.table_memory is not None
        asks |= options.shards_by_request and isinstance(failure, CaptureError) and failure.communicates
        route = "graph" if asks else options.route
        activity = context.activity(train=call.train)
        if programs.pipeline is None:
            with stage("waiting for the other ranks to capture", rank):
                reason = agree_on_first_call(context.communicator, activity, failure, route)
            if reason:
                raise RunsEagerly(reason)
        elif reason := runs_eagerly_for(failure, route):
            programs.check_fit(PlanViolation(eager=reason), activity)
        elif failure is not None:
            give_up(context.announcements, failure)
        assert captured is not None
        captures.found.append(entry := Entry(captured, analysed, call.train))
        if programs.pipeline is not None:
            programs.build(entry)
        return entry

    def _captured(self, kind: Entries, call: Arguments) -> Captured:
        """Captures the forward with a batch. Sizes that vary between calls of this cache key become symbolic.

        Raises:
            CaptureError: the model has been captured too often, or the forward cannot be captured.
        """
        changed = kind.found[-1].captured.changed_constants(call.leaves) if kind.found else []
        kind.values |= {each.name for each in changed if each.name and each.can_be_input} - kind.deciding
        constant = next((each for each in changed if each.name not in kind.values), None)
        if self._programs.cache.captures >= MAX_CAPTURES:
            raise CaptureError(
                f"The forward has been captured {MAX_CAPTURES} times, because the shapes of tensors or the values of "
                "Python numbers change from batch to batch. Pad batches to a few lengths, and replace numbers that "
                "change by tensors, both in arguments and in attributes of the model.",
                str(constant or f"shapes of its batches keep changing, even after {MAX_CAPTURES} captures"),
            )
        shapes = {i: tuple(leaf.shape) for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)}
        is_float = type(constant.now) is float if constant is not None else bool(kind.values)
        most = MOST_UNUSED_OF_FLOATS if is_float else MOST_UNUSED
        unused = len(kind.found) >= most and not any(each.reused for each in kind.found[-most:])
        if unused and (constant is not None or (kind.values and kind.shapes[-most:] == [shapes] * most)):
            reason = constant or f"the forward depends on the value of {', '.join(kind.values)}"
            raise RefusedError(
                f"{type(self._context.model).__name__}: {reason}, and each of the last {most} captured graphs was used "
                "for only one call. Pass the value as a tensor, or store it in a buffer. Or leave out route='graph': "
                "the forward then runs eagerly.",
                str(reason),
            )
        kind.shapes.append(shapes)
        captured = self._capture_with_inputs(kind, call)
        self._context.state.find_new_buffers(self._context.model)
        return replace(captured, conditions=captured.conditions.without_broken())

    def _capture_with_inputs(self, captures: Entries, call: Arguments) -> Captured:
        """Captures the forward. Values that have changed since earlier captures become inputs of the graph instead of
        constants.
        """
        whole = {name: table.shape for name, table in self._context.state.tables.items()}
        captured_as = partial(capture, self._context.model, train=call.train, dynamic=varying_sizes(captures))
        while True:
            try:
                with whole_parameters(self._context.model, whole):
                    captured = captured_as(call.args, call.kwargs, values=captures.values)
            except CaptureError:
                if not captures.values:
                    raise
                deciding = captures.values
            else:
                deciding = captured.deciding
            if not deciding:
                self._programs.cache.captures += 1
                return captured
            captures.values, captures.deciding = captures.values - deciding, captures.deciding | deciding


def varying_sizes(captures: Entries) -> frozenset[tuple[int, int]]:
    """Returns the tensor sizes that may differ in later calls, because they differed between `captures`. Each is given
    as (index among the flattened arguments, dimension).

    If any size has varied, first dimensions are included too, because a loader of such batches usually ends with a
    short batch. A first dimension that equals a varying size stays constant, because torch would use the same symbol
    for both.
    """
    current = captures.shapes[-1]
    sizes = {(index, dim): size for index, shape in current.items() for dim, size in enumerate(shape)}
    varied = {at for at, size in sizes.items() if any(seen[at[0]][at[1]] != size for seen in captures.shapes)}
    varied_sizes = {sizes[at] for at in varied}
    firsts = {at for at, size in sizes.items() if varied and at[1] == 0 and size not in varied_sizes}
    return frozenset(varied | firsts)
