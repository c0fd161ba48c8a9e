"""One compiled model's life: agree, capture, plan, shard, then run, and capture again where batches differ."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from embrace_fx.agreement import (
    check_agreement,
    check_arguments,
    check_trainable,
    describe,
    failure_text,
    is_hooked,
    refuse_hooks,
)
from embrace_fx.capture import Captured, capture
from embrace_fx.capture.errors import CaptureError
from embrace_fx.capture.structured_trace import log_graph, log_text
from embrace_fx.compiler import Compiled, analyse, relaxing_passes, run_passes, training_passes
from embrace_fx.graph import Gradient, Parameter, TrainingGraph
from embrace_fx.lookahead import Lookahead
from embrace_fx.options import Options
from embrace_fx.passes.buffers import live_buffers, mutated_buffers
from embrace_fx.passes.collectives import sequence_hash
from embrace_fx.passes.tables import draws_randomly, extract_ids
from embrace_fx.plan import Plan
from embrace_fx.planning import Findings, Setting, find, make_plan, place, place_anew, plan_on_links
from embrace_fx.replanning import SAMPLED_EVERY, Drift, changes, story
from embrace_fx.runtime.ahead import Ahead
from embrace_fx.runtime.communicator import Communicator, bad_id_report, check_activities
from embrace_fx.runtime.failure import PeerFailure
from embrace_fx.runtime.flow import Flow
from embrace_fx.runtime.gradients import clip_gradients
from embrace_fx.runtime.kernels import unique_ids
from embrace_fx.runtime.model_state import ModelState
from embrace_fx.runtime.optimizers import Stepping, attach
from embrace_fx.runtime.phases import reader
from embrace_fx.runtime.placement import (
    broadcast_state,
    whole_parameters,
    with_own_columns,
)
from embrace_fx.runtime.program import Program
from embrace_fx.runtime.step import run_step
from embrace_fx.schedule import Schedule, Timeline
from embrace_fx.scheduling import Scheduling
from embrace_fx.timeline import gather_timeline

if TYPE_CHECKING:
    from embrace_fx.runtime.inductor import RegionCompiler

MAX_CAPTURES = 32
"""Captures of one model before it is refused another: each costs seconds, and shapes that never repeat would cost
them at every step. Torch's own limit of recompilations is of this order."""

logger = logging.getLogger(__name__)

_TRAINING, _ACCUMULATING, _EVALUATING = range(3)


@dataclass
class _Variant:
    """A program and the batches it is valid for."""

    captured: Captured
    analysed: TrainingGraph
    train: bool
    program: Program | None = None  # built when first needed under the plan in use
    accumulating: Program | None = None  # for backwards under no_sync, built when first needed


@dataclass
class _Kind:
    """Calls that differ in shapes alone: structure, dtypes, constants, training mode and autocast are the same."""

    variants: list[_Variant] = field(default_factory=list)
    shapes: list[dict[int, tuple[int, ...]]] = field(default_factory=list)


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
        self.synchronised = True
        self.lookahead = Lookahead(at_end=self._end_lookahead)
        self._flow: Flow | None = None
        self._scheduling: Scheduling | None = None
        self._timeline: Timeline | None = None
        self._warned = False
        self._graphs: Mapping[str, fx.GraphModule] = {}
        self._communicator = Communicator(group)
        self._agree_on_set_up()
        self._state = ModelState(model)
        self._compiled_for = self._parameters_are()
        stepping = {
            id(optimizer): Stepping(communicator=self._communicator, check=self._state.check_gradients)
            for optimizer in optimizers
        }
        classes = {id(optimizer): attach(optimizer, stepping[id(optimizer)]) for optimizer in optimizers}
        self._setting = Setting(model, optimizers, classes, stepping, self._state, self._communicator, options)
        self._plan: Plan | None = None
        self._drift: Drift | None = None  # of rank 0, where anything may drift
        self._calls = 0  # for training, so far
        self._sequence: str | None = None
        self._captures = 0
        self._stale_buffers: set[str] = set()  # changed by training since the ranks last shared them
        self._replicated = False
        itself = weakref.ref(self)  # the model must not keep its session alive

        def before_state_dict(*_: Any) -> None:
            if (session := itself()) is not None:
                session.parameters_may_change()

        model.register_state_dict_pre_hook(before_state_dict)
        self._kinds: dict[Any, _Kind] = {}

    def _parameters_are(self) -> tuple[tuple[bool, torch.dtype, bool], ...]:
        """What of each parameter must not change."""
        return tuple((each.requires_grad, each.dtype, is_hooked(each)) for each in self._state.parameters())

    def _agree_on_set_up(self) -> None:
        """Checks the arguments of all ranks together: a rank that failed alone would leave the others waiting."""
        own: dict[str, Any] | str
        try:
            check_arguments(self.model, self.optimizers)
            self.options.check()
            if self.options.backend == "inductor":
                from embrace_fx.runtime.inductor import check_toolchain  # noqa: PLC0415  (takes seconds to import)

                check_toolchain({parameter.device.type for parameter in self.model.parameters()})
            check_trainable(self.model)
            refuse_hooks(self.model)
            own = describe(self.model, self.optimizers, self.options)
        except ValueError as error:
            own = str(error)
        check_agreement(self._communicator.gather_objects(own))

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
    def graphs(self) -> Mapping[str, fx.GraphModule]:
        assert self.plan is not None  # raises before the first call
        return self._graphs

    def report(self) -> str:
        return str(self.plan)

    @property
    def schedule(self) -> Schedule:
        assert self.plan is not None  # raises before the first call
        if self._scheduling is None:
            raise RuntimeError(_NOTHING_SENT.format("schedule"))
        return self._scheduling.schedule

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
        if self._flow is None or self._scheduling is None:
            raise RuntimeError(_NOTHING_SENT.format("timeline"))
        self._flow.recorder.start()
        try:
            yield
        finally:
            recording = self._flow.recorder.stop()
        self._timeline = gather_timeline(self._communicator, recording, self._scheduling.schedule.steps)

    # -- calling -------------------------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        train = torch.is_grad_enabled()
        self._communicator.activity = _EVALUATING if not train else _TRAINING if self.synchronised else _ACCUMULATING
        if self._parameters_are() != self._compiled_for:
            self._give_up(_CHANGED_PARAMETERS)
        kind = self._kinds.setdefault(self._key(leaves, spec, train), _Kind())
        if self._plan is None and not train:
            return self._evaluate_plainly(args, kwargs)
        variant = self._variant(kind, leaves, args, kwargs, train)
        if self._communicator.asked_to_plan:
            self._plan_again(variant, leaves)
        variant, program = self._runs(variant, kind, leaves, args, kwargs, train)
        following = self._following(kind, program, leaves, spec) if program.flow is not None else None
        if self._flow is not None and program.flow is None:
            self._flow.leave()
        self._calls += train
        results = run_step(program, leaves, train=train, following=following)
        if self._drift is not None and train and self._calls % SAMPLED_EVERY == 0:
            self._drift.observe(self._communicator.rows_read)
            self._communicator.asks_to_plan = self._drift.wants_plan
        return pytree.tree_unflatten(results, variant.captured.result_spec)

    def _variant(
        self, kind: _Kind, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
    ) -> _Variant:
        """A capture that is valid for a batch."""
        found = next((v for v in kind.variants if v.captured.accepts(leaves)), None)
        return self._capture(kind, leaves, args, kwargs, train) if found is None else found

    def _runs(
        self,
        variant: _Variant,
        kind: _Kind,
        leaves: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        train: bool,
    ) -> tuple[_Variant, Program]:
        """What a batch runs on."""
        accumulates = train and not self.synchronised
        compiles = variant.program is None or (accumulates and variant.accumulating is None)
        if variant.program is None:
            self._build(variant)
        program = self._accumulating(variant) if accumulates else variant.program
        if compiles and not variant.captured.accepts(leaves):  # compiling has narrowed what the variant takes
            return self._runs(self._variant(kind, leaves, args, kwargs, train), kind, leaves, args, kwargs, train)
        assert program is not None
        return variant, program

    def _following(self, kind: _Kind, program: Program, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Ahead | None:
        """The next batch, where it is known and a program for it exists."""
        coming = self.lookahead.following(leaves)
        if coming is None and self.lookahead.known and program.flow is not None and program.flow.looks_ahead:
            self._warn_of_other_batch()
        if coming is None or self._kinds.get(self._key(coming, spec, True)) is not kind:
            return None
        variant = next((v for v in kind.variants if v.captured.accepts(coming)), None)
        return variant.program.ahead(coming) if variant is not None and variant.program is not None else None

    def _end_lookahead(self) -> None:
        """No batch is expected any more, and everything is applied."""
        if self._flow is not None:
            self._flow.expect_no_batch()
            self._flow.settle()

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
        self._agree_on_first_call(None)
        if any(parameter.device.type == "meta" for parameter in self.model.parameters()):
            raise RuntimeError(
                "expected a training call before the first evaluation, in forward(), found a model on the meta device, "
                "and how its tables are sharded is decided with the first training batch. Call it once with gradients "
                "enabled."
            )
        if not self._replicated and self._communicator.group is not None:
            broadcast_state(self.model, frozenset(), self._communicator)
        self._replicated = True
        return self.model(*args, **kwargs)

    def _key(self, leaves: Sequence[Any], spec: pytree.TreeSpec, train: bool) -> Any:
        signature = tuple(
            (leaf.dtype, leaf.device, leaf.dim(), leaf.requires_grad) if isinstance(leaf, Tensor) else _constant(leaf)
            for leaf in leaves
        )
        modes = tuple(module.training for module in self.model.modules())
        autocast = tuple(
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        )
        return spec, signature, train, modes, autocast

    def _capture(
        self, kind: _Kind, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
    ) -> _Variant:
        failure, captured = None, None
        try:
            captured = self._try_capture(kind, leaves, args, kwargs, train)
            analysed = analyse(captured)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        if self._plan is None:
            self._agree_on_first_call(failure)
        elif failure is not None:
            self._give_up(failure)
        assert captured is not None
        if self._plan is None:
            self._plan, findings = make_plan(self._setting, analysed, leaves)
            self._drift = _drift(self._plan, findings)
            place(self._setting, analysed, self._plan)
            log_text("plan", str(self._plan))
        variant = _Variant(captured, analysed, train)
        self._build(variant)
        kind.variants.append(variant)
        return variant

    def _try_capture(
        self, kind: _Kind, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
    ) -> Captured:
        if self._captures >= MAX_CAPTURES:
            raise CaptureError(
                "expected batches whose shapes repeat or vary in ways one graph can take, and whose numbers repeat, in "
                f"forward(), found that {MAX_CAPTURES} captures do not suffice. Pad batches to a few lengths, pass "
                "dynamic=True, or pass numbers that change, attributes of the model too, as tensors."
            )
        self._captures += 1
        kind.shapes.append({i: tuple(leaf.shape) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})
        with whole_parameters(self.model, self._whole_shapes()):
            captured = capture(self.model, args, kwargs, train=train, dynamic=self._dynamic(kind))
        return replace(captured, read=captured.read.unchanged())

    def _whole_shapes(self) -> dict[str, torch.Size]:
        return {name: table.parameter.shape for name, table in self._state.tables.items()}

    def _dynamic(self, kind: _Kind) -> frozenset[tuple[int, int]]:
        """Which sizes may vary: all, none, or those that have."""
        current = kind.shapes[-1]
        if self.options.dynamic is False:
            return frozenset()
        return frozenset(
            (index, dim)
            for index, shape in current.items()
            for dim, size in enumerate(shape)
            if self.options.dynamic or any(seen[index][dim] != size for seen in kind.shapes)
        )

    def _agree_on_first_call(self, failure: Exception | None) -> None:
        """Before there is a plan, and with it announcements: all ranks do the same, and none has failed to capture."""
        own = (self._communicator.activity, None if failure is None else failure_text(failure))
        everyone: list[tuple[int, str | None]] = self._communicator.gather_objects(own)
        check_activities([activity for activity, _ in everyone])
        for rank, (_, report) in enumerate(everyone):
            if report is not None:
                text = report if len(everyone) == 1 else f"the capture failed on rank {rank}: {report}"
                raise CaptureError(text) from failure

    def _give_up(self, failure: Exception) -> NoReturn:
        """Reports a failure in place of a step, so that the other ranks do not wait for this one.

        Raises:
            CaptureError: the failure itself, if it is one; the other ranks raise PeerFailure.
            PeerFailure: any other failure, on every rank.
        """
        report = None
        try:
            self._communicator.announce((), failure_text(failure))
        except PeerFailure as raised:
            report = raised
        assert report is not None  # what is announced is raised, on every rank
        if isinstance(failure, CaptureError):
            raise failure
        raise report from failure

    # -- building programs ---------------------------------------------------------------------------------------------

    def _plan_again(self, variant: _Variant, leaves: Sequence[Any]) -> None:
        """Another plan, as rank 0 asked for in the last announcement, if this is a moment for it. Collective.

        Raises:
            PeerFailure: the ranks are not doing the same thing, or a batch is bad; on every rank, and nothing changed.
        """
        everyone = self._communicator.announce([self._may_plan_again(variant)])
        if not all(may for (may,) in everyone):
            return
        old, used = self.plan, {d.parameter for d in self.plan if d.strategy not in ("frozen", "unused")}
        findings = find(self._setting, variant.analysed, leaves, used)
        if findings is not None and self._drift is not None:
            findings = findings.with_rows(self._drift.rows)
        new = plan_on_links(self._setting, findings, old)
        self._communicator.asks_to_plan = False
        if not changes(old, new):
            self._drift = _drift(old, findings)
            return
        if self._flow is not None:
            self._flow.close()
        place_anew(self._setting, variant.analysed, old, new)
        told = story(self._calls, old, new)
        self._plan = replace(new, history=(*old.history, told))
        self._drift = _drift(self._plan, findings)
        self._flow = self._scheduling = self._sequence = None
        for stepping in self._setting.stepping.values():
            stepping.flow = None
        for kind in self._kinds.values():
            for each in kind.variants:
                each.program = each.accumulating = None
        log_text("plan", str(self._plan))
        if self._communicator.rank == 0:
            logger.info("planned again %s", told)

    def _may_plan_again(self, variant: _Variant) -> bool:
        """Whether this rank can do without the plan in use: no backward is to come, no sum half made, no recording."""
        tables = {decision.parameter for decision in self.plan if decision.is_table}
        return (
            variant.train
            and not self._state.unreduced
            and not self._state.awaiting_backward
            and (self._flow is None or self._flow.recorder.recording is None)
            and {table.parameter for table in variant.analysed.tables} == tables
        )

    def _build(self, variant: _Variant) -> None:
        """Makes a variant's program under the plan in use."""
        captured, analysed, train = variant.captured, variant.analysed, variant.train
        compiled, failure = None, None
        try:
            compiled = self._compile(analysed, reduce=train)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        if train and self._sequence is None:
            self._agree_on_sequence(compiled, failure)
        elif failure is not None:
            self._give_up(failure)
        assert compiled is not None
        if train:
            self._check_gradients(analysed)
            self._check_sequence(compiled)
            compiled = self._relax(compiled, analysed)
            self._graphs = compiled.graphs
            for name, module in compiled.graphs.items():
                log_graph(name, module)
        variant.program = self._program(compiled, captured, analysed, train=train, reduce=train)
        variant.captured = self._as_compiled(captured)

    def _accumulating(self, variant: _Variant) -> Program:
        """The same graph with its dense gradients left as they are."""
        if variant.accumulating is None:
            compiled = self._compile(variant.analysed, reduce=False)
            variant.accumulating = self._program(compiled, variant.captured, variant.analysed, train=True, reduce=False)
            variant.captured = self._as_compiled(variant.captured)
        return variant.accumulating

    def _as_compiled(self, captured: Captured) -> Captured:
        """The capture with what compiling its regions has found out about the batches that they are valid for."""
        return captured.guarded_again() if self.options.backend == "inductor" else captured

    def _compile(self, analysed: TrainingGraph, *, reduce: bool) -> Compiled:
        present = {table.parameter for table in analysed.tables}
        return run_passes(analysed, training_passes(self.plan, present, self._communicator.rank, reduce=reduce))

    def _relax(self, compiled: Compiled, analysed: TrainingGraph) -> Compiled:
        """Lets communication run into the next step, as the schedule says. Collective the first time."""
        if self._communicator.world_size == 1:
            return compiled
        devices = {parameter.device for parameter in self.model.parameters()}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            warnings.warn(
                f"expected a model on the CPU or on one GPU for schedule={self.options.schedule!r}, found one on "
                f"{', '.join(sorted(map(str, devices)))}: its communication is launched and waited for within each "
                "step. Pass schedule='none' to say so.",
                stacklevel=2,
            )
            return compiled
        if self._flow is None:
            self._scheduling = Scheduling(self._setting, self.plan, compiled.graph)
            self._flow = self._scheduling.start(self._warn_of_other_batch)
            for stepping in self._setting.stepping.values():
                stepping.flow = self._flow
        return run_passes(analysed, relaxing_passes(self.plan, self.options.schedule), compiled)

    def _program(
        self, compiled: Compiled, captured: Captured, analysed: TrainingGraph, *, train: bool, reduce: bool
    ) -> Program:
        buckets = self.plan.buckets if reduce else None
        live, mutated = live_buffers(analysed), frozenset(mutated_buffers(analysed))

        def share_live() -> None:
            self._stale_buffers |= mutated
            self._share_buffers(live)

        def share_stale() -> None:
            self._share_buffers(sorted(self._stale_buffers))
            self._stale_buffers = set()

        before_forward = share_live if train else share_stale
        return Program(
            compiled.graph,
            self._state,
            self._communicator,
            buckets,
            captured.result_constants,
            before_forward,
            self._look_at_batch(analysed, train=train),
            self._flow if train and reduce else None,
            regions=self._region_compiler(),
        )

    def _region_compiler(self) -> RegionCompiler | None:
        if self.options.backend == "eager":
            return None
        from embrace_fx.runtime.inductor import RegionCompiler  # noqa: PLC0415  (takes seconds to import)

        return RegionCompiler()

    def _look_at_batch(self, analysed: TrainingGraph, *, train: bool) -> Callable[[Sequence[Any]], str | None]:
        """What looks at the ids of data-parallel tables, ahead of the announcement; it tells those of shards anyway.

        An id outside its table is a failure. Of tables that are watched, every few steps, the rows read are counted.
        """
        exchanged = (*self.plan.sharded, *self.plan.renormed)
        tables = [t for t in analysed.tables if t.parameter not in exchanged and all(u.ids_from_batch for u in t.uses)]
        tables = [t for t in tables if not draws_randomly(extract_ids(analysed, [t]))]
        if not tables or self._communicator.world_size == 1:
            return lambda leaves: None
        read_ids = reader(extract_ids(analysed, tables), self._state)
        uses = [(t.parameter, t.num_rows) for t in tables for _ in t.uses]
        watched = [t for t in tables if t.parameter in self.plan.watched] if train else []

        def look(leaves: Sequence[Any]) -> str | None:
            with torch.no_grad():
                ids = read_ids(leaves)
                found = (bad_id_report(each, *use) for each, use in zip(ids, uses, strict=True))
                failure = next((report for report in found if report is not None), None)
                if failure is None and self._calls % SAMPLED_EVERY == 0:
                    for table in watched:
                        own = [each for each, (name, _) in zip(ids, uses, strict=True) if name == table.parameter]
                        rows = unique_ids(own, table.num_rows, table.uses[0].padding_idx)[0].numel()
                        self._communicator.rows_seen[table.parameter] = rows
                return failure

        return look

    def _check_gradients(self, analysed: TrainingGraph) -> None:
        """A gradient that the plan does not know of would stay this rank's own."""
        trained = {r.of.name for _, r in analysed.outputs() if isinstance(r, Gradient) and isinstance(r.of, Parameter)}
        late = [d.parameter for d in self.plan if d.strategy == "unused" and d.parameter in trained]
        if late and self._communicator.world_size > 1:
            self._give_up(
                RuntimeError(
                    "expected a batch to train only parameters that the first batch trained on some rank, in "
                    f"backward(), found gradients of {', '.join(late)} too. Begin with a batch that uses every "
                    "parameter."
                )
            )

    def _share_buffers(self, names: Sequence[str]) -> None:
        self._communicator.broadcast([self._state.buffer_reader(name)() for name in names])

    def _agree_on_sequence(self, compiled: Compiled | None, failure: Exception | None) -> None:
        """Every rank launches the same collectives in the same order, or none goes on."""
        own = (
            "" if compiled is None else sequence_hash(compiled.graph),
            None if failure is None else failure_text(failure),
        )
        everyone: list[tuple[str, str | None]] = self._communicator.gather_objects(own)
        if failures := {rank: text for rank, (_, text) in enumerate(everyone) if text is not None}:
            raise PeerFailure(failures) from failure
        others = [rank for rank, each in enumerate(everyone) if each != everyone[0]]
        if others:
            raise RuntimeError(
                "expected every rank's graph to launch the same collectives, after the last pass, found that ranks "
                f"{others} differ from rank 0: their batches led the forward along another path. Make the forward read "
                "the same tables and parameters on every rank."
            )
        self._sequence = own[0]

    def _check_sequence(self, compiled: Compiled) -> None:
        """A batch of other shapes launches what the first one did."""
        if sequence_hash(compiled.graph) != self._sequence:
            self._give_up(
                RuntimeError(
                    "expected a batch of other shapes to launch the same collectives as the first, after the last "
                    "pass, found others: the forward took another path. Make it read the same tables and parameters "
                    "for every batch"
                )
            )

    # -- state ---------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Applies every update that an optimizer has stepped. Waits for nothing that other ranks are still to do."""
        if self._flow is not None:
            self._flow.settle()

    def parameters_may_change(self) -> None:
        """Parameters are handed out: they are up to date, and nothing that was read from them ahead is used."""
        if self._flow is not None:
            self._flow.parameters_may_change()

    def clear_row_gradients(self) -> None:
        self._state.unreduced.clear()
        for name, table in self._state.tables.items():
            table.clear_gradient()
            if self._flow is not None:
                self._flow.exchanges[name].discard()

    def clip_gradients(self, max_norm: float, norm_type: float) -> Tensor:
        if self._flow is not None:
            self._flow.materialise()
        dense = [p for name, p in self.model.named_parameters() if name not in self._state.tables]
        tables = list(self._state.tables.values())
        norm = clip_gradients(dense, tables, self._communicator, max_norm, norm_type)
        self._state.note_gradients(dense)
        return norm

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        return self.model.load_state_dict(with_own_columns(self.model, state_dict), strict, assign)


def _drift(plan: Plan, findings: Findings | None) -> Drift | None:
    """What follows the plan's tables, where there are any to follow, on rank 0."""
    return Drift(plan, findings) if findings is not None and plan.watched else None


_NOTHING_SENT = (
    "expected at least two ranks, before the {} is read, found one: nothing is sent, so nothing is scheduled. Start "
    "the program with torchrun on more ranks."
)

_CHANGED_PARAMETERS = RuntimeError(
    "expected every parameter to stay as it was at compile(), in the model's call, found that requires_grad or the "
    "dtype of one has changed, or that it has got a gradient hook: what is exchanged was decided by the first two, and "
    "a hook would not run. Freeze, thaw or convert parameters before compile(), and change gradients after backward()"
)


def _constant(leaf: Any) -> Any:
    """A non-tensor argument as part of the key; one that cannot be hashed is told apart by its text."""
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), repr(leaf)
    return type(leaf), leaf
