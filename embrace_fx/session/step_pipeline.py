"""Everything that belongs to a model's steps under one plan: programs, communication between steps, schedule, and
graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from embrace_fx.capture.gradient_graph import ROUTE as EAGER
from embrace_fx.capture.structured_trace import log_graph, log_text
from embrace_fx.cost.storage import RowMemory
from embrace_fx.passes.collectives import sequence_hash
from embrace_fx.passes.join_exchanges import ExchangedParameter, JoinExchanges
from embrace_fx.passes.memory.budget import Memory
from embrace_fx.passes.memory.copy_placement import NO_COPIES
from embrace_fx.passes.overlap.buckets import ChunkBuckets
from embrace_fx.passes.overlap.order import OrderCompute
from embrace_fx.passes.pipeline import CompiledGraph, overlap_passes, run_passes, training_passes
from embrace_fx.passes.planner.grouping import cut_communication
from embrace_fx.passes.planner.pricing import Findings
from embrace_fx.passes.planner.replanning import SparsityMonitor
from embrace_fx.passes.step_graphs import StepGraphs
from embrace_fx.passes.step_memory import StepMemory, step_memory
from embrace_fx.planning.findings import scores_nothing
from embrace_fx.planning.scheduling import decide_order, issued_launches, predict_storage_reads
from embrace_fx.runtime.exchanges.in_place import create_exchanges
from embrace_fx.runtime.flow.bucket_updates import Buckets
from embrace_fx.runtime.flow.comm_pipeline import CommPipeline, within_steps
from embrace_fx.runtime.flow.device_pipeline import choose_pipeline
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.profile import Profile, StepProfiler, agree_on_profile
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.memory.resident import bytes_in_use
from embrace_fx.runtime.ranks.checksums import checksum_of_text
from embrace_fx.runtime.ranks.step_handshake import HandshakeMessage, activity_code
from embrace_fx.runtime.step.program import Program
from embrace_fx.session.batch_check import make_batch_check
from embrace_fx.session.buffer_sharing import BufferSharing
from embrace_fx.session.offloading import set_up_offloading
from embrace_fx.session.program_cache import Entry, StepCounters
from embrace_fx.setup.agreement import give_up
from embrace_fx.setup.context import Context
from embrace_fx.setup.log import log
from embrace_fx.viz.graphs import Graphs
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.plan_text import readable_bytes
from embrace_fx.vocabulary.schedule import IN_FLIGHT, Cuts, Schedule
from embrace_fx.vocabulary.submissions import submitted


class StepPipeline:
    """The programs, the communication and the schedule of a model's steps under one plan. A new plan gets a new object.

    Args:
        findings: the planner's input from which the plan was decided, or None on ranks other than rank 0.
        on_other_batch: called when the model is called with a batch other than the one that was prepared as the next.

    Attributes:
        monitor: observes how many rows batches read, if strategies depend on it. None on ranks other than rank 0.
        flow: the communication of steps. Before the first training program and after `close`, it is launched and
            awaited within each step.
        schedule: the schedule of the steps, or None before the first training program, or if nothing is scheduled.
        decided: the first schedule, which the cost model has predicted.
        recorder: measures the steps, or None if `schedule` is None.
        memory: the predicted storage reads of each table or joined table that is larger than memory, by name.
        built: whether a training program has been compiled.
    """

    def __init__(
        self,
        context: Context,
        plan: Plan,
        findings: Findings | None,
        counters: StepCounters,
        buffers: BufferSharing,
        on_other_batch: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.findings = findings and replace(findings, schedule=plan.schedule_name)
        self.monitor: SparsityMonitor | None = None
        self.monitor_rows()
        self._make = choose_pipeline(context.device)
        self._aside = within_steps(context.announcements, self._make)
        self.flow = self._aside
        self.schedule: Schedule | None = None
        self.decided: Schedule | None = None
        self.recorder: Recorder | None = None
        self.memory: Mapping[str, RowMemory] = plan.memory
        self.built = False
        self._context = context
        self._counters = counters
        self._buffers = buffers
        self._on_other_batch = on_other_batch
        budget = context.options.memory_budget
        copies = (None, NO_COPIES) if budget is None else set_up_offloading(context, plan.links.compute)
        self._copies, self._copy_rate = copies
        self._steps_of: WeakKeyDictionary[Program, StepGraphs] = WeakKeyDictionary()  # program -> its steps' graphs
        self._last: Program | None = None  # the last training program
        self._besides: dict[str, Callable[[], fx.GraphModule]] = {}  # by name, such as "forward, evaluation"
        self._logged_least = False  # whether it was logged that the memory budget cannot be met
        self._ordering: tuple[OrderCompute, ...] = ()  # reorders the backward; empty for autograd's order
        self._profiler: StepProfiler | None = StepProfiler()  # None once the steps have been profiled
        self._graph: TrainingGraph | None = None  # the graph of the first training program

    def monitor_rows(self) -> None:
        """Starts to observe how many rows batches read. Does so only on rank 0, and only if strategies depend on this
        number.
        """
        watches = self.findings is not None and self.plan.watched and not self.plan.memory
        self.monitor = SparsityMonitor(self.plan, self.findings) if watches and self.findings else None

    # -- programs ------------------------------------------------------------------------------------------------------

    def build(self, entry: Entry, *, accumulates: bool) -> None:
        """Compiles a program from a cache entry and stores it in the entry. Collective for the first training program,
        because ranks then decide the schedule.

        Args:
            accumulates: whether the program is for `no_sync`, and does not reduce dense gradients.
        """
        train, reduce = entry.train, entry.train and not accumulates
        joint, compiled, failure = None, None, None
        try:
            joint = self._compile(entry.analysed, train=train, reduce=reduce)
            compiled = self._overlap(joint, entry) if reduce else joint
        except Exception as error:  # catch any error, because the other ranks must be informed
            failure = error
        if reduce and not self.built:
            self._context.communicator.check_none_failed(failure)
            self.built = True
        elif failure is not None:
            give_up(self._context.announcements, failure)
        assert joint is not None
        assert compiled is not None
        of_steps = StepGraphs(compiled, entry.analysed)
        if reduce:
            self._decide_schedule(compiled.graph, as_gradients=entry.captured.route == EAGER)
            log_text("pass_times", compiled.describe_times)
            for name, module in compiled.graphs.items():
                log_graph(name, module)
        program = entry.programs[accumulates] = self._make_program(joint, of_steps, entry, reduce=reduce)
        if reduce:
            self._steps_of[program], self._last = of_steps, program
        else:
            when = "accumulating" if train else "evaluation"
            shown = (phase for phase in ("forward", "backward") if phase in compiled.graph.phases)
            self._besides |= {f"{phase}, {when}": partial(compiled.graph.phases.__getitem__, phase) for phase in shown}
        if self._context.options.backend == "inductor":  # compiled regions have added guards
            entry.captured = entry.captured.with_new_guards()

    @property
    def graphs(self) -> Graphs:
        """The graphs of the last training program after each pass, and the graphs of other programs, such as for
        evaluation.
        """
        if (last := self._last) is None:
            return Graphs()
        steps = self._steps_of[last]
        shown, variants = steps.steady, {**steps.modules(), **self._besides}
        return Graphs(shown.graphs, shown.phases, variants, lambda: last.sources)

    @property
    def _shown_step(self) -> CompiledGraph | None:
        """The last compiled training step, which `model.graphs` shows, or None before the first one."""
        return None if self._last is None else self._steps_of[self._last].steady

    def step_memory(self) -> StepMemory | None:
        """Predicts the memory in use during the last program's training step. Returns None before the first one."""
        return None if self._shown_step is None else step_memory(self._shown_step.graph)

    def _compile(self, analysed: TrainingGraph, *, train: bool, reduce: bool) -> CompiledGraph:
        """Runs the plan's passes on a captured graph.

        Args:
            analysed: the graph, in which tables have been found.
            train: whether the graph has a backward.
            reduce: whether the step reduces gradients.
        """
        present = {table.parameter for table in analysed.tables}
        budget = self._context.options.memory_budget
        rates = self.plan.links.compute, self._copy_rate
        memory = None if budget is None else Memory(budget, *rates, self._log_least)
        rank = self._context.communicator.rank
        join = JoinExchanges(self._exchanged_parameters(), self.plan.renormed) if train else None
        passes = training_passes(self.plan, present, rank, reduce=reduce, join=join, memory=memory)
        return run_passes(analysed, passes)

    def _log_least(self, asked: int, least: int) -> None:
        """Logs that a step needs `least` bytes, although the memory budget is `asked` bytes. Logs only once."""
        if not self._logged_least and self._context.communicator.rank == 0:
            log(
                "a step with this batch needs at least %s, but memory_budget=%g allows only %s; the step runs "
                "nevertheless",
                readable_bytes(least),
                self._context.options.memory_budget,
                readable_bytes(asked),
            )
        self._logged_least = True

    def _exchanged_parameters(self) -> dict[str, ExchangedParameter]:
        """Returns the parameters whose rows or gradients a step exchanges, by name."""
        sharded = set(self.plan.divided)
        exchanged = sharded.union(*self.plan.buckets)
        return {
            each.parameter: ExchangedParameter(each.shape, own.dtype, own.device, padding)
            for each in self.plan
            if each.parameter in exchanged
            for own in [self._context.state.parameter(each.parameter)]
            for padding in [each.padding_idx if each.parameter in sharded else None]
        }

    def _overlap(self, compiled: CompiledGraph, entry: Entry) -> CompiledGraph:
        """Moves communication of a compiled step into the next step, as the schedule requires. Returns the changed
        step.

        If the forward runs eagerly, communication stays within the step, because such a forward may read any parameter
        at any time.
        """
        if not self._launches:
            return compiled
        if entry.captured.route == EAGER:
            whole = tuple((sum(chunks),) for chunks in self._cut_sizes.chunks)
            return run_passes(entry.analysed, (ChunkBuckets(whole),), compiled)
        passes = overlap_passes(self.plan, self.plan.schedule_name, self._context.communicator.rank, self._cut_sizes)
        return run_passes(entry.analysed, (*passes, *self._ordering), compiled)

    @cached_property
    def _cut_sizes(self) -> Cuts:
        """The sizes of the chunks of dense buckets, and the numbers of pieces of row exchanges."""
        return cut_communication(self.plan, self._context.state.parameter)

    @cached_property
    def _launches(self) -> bool:
        """Whether a launcher issues the collectives. It does if there are several ranks, the model is on the CPU or on
        one GPU, and no communication hook is registered.
        """
        devices = {parameter.device for parameter in self._context.model.parameters()}
        one_device = len(devices) == 1 and next(iter(devices)).type in ("cpu", "cuda")
        return self.plan.world_size > 1 and one_device and self._context.communicator.comm_hook is None

    def _decide_schedule(self, graph: TrainingGraph, *, as_gradients: bool) -> None:
        """Decides the schedule at the first training program, and sets up the communication that follows it.
        Collective.

        Args:
            graph: the graph of the program.
            as_gradients: whether the graph only exchanges gradients, in the order in which autograd computes them.
        """
        context, plan = self._context, self.plan
        if self.schedule is not None:
            return
        if plan.world_size > 1 and not self._launches:
            if context.communicator.comm_hook is not None:
                return
            devices = ", ".join(sorted({str(parameter.device) for parameter in context.model.parameters()}))
            warnings.warn(
                f"The model is on several devices ({devices}), so schedule={plan.schedule_name!r} has no effect: "
                "communication is launched and awaited within each step. Put the model on the CPU or on one GPU, or "
                "pass schedule='none'.",
                stacklevel=2,
            )
            return
        self._graph, followed = graph, replace(plan, schedule_name="none") if as_gradients else plan
        self._order = partial(decide_order, context, followed, compute_in_order=self._compute_in_order)
        self.schedule, self.memory = self._order(graph, predict_storage_reads(plan, self._counters.ahead))
        self.decided = self.schedule
        self.recorder = Recorder(self._aside.make_clock(), partial(bytes_in_use, context.device))
        self.flow = (
            self._flow_between_steps(graph, self.schedule, self.recorder, as_gradients=as_gradients)
            if self._launches
            else within_steps(context.announcements, self._make, self.recorder)
        )
        context.optimizer_hooks.follow(self.flow)

    def _flow_between_steps(
        self, graph: TrainingGraph, schedule: Schedule, recorder: Recorder, *, as_gradients: bool
    ) -> CommPipeline:
        """Returns the communication that follows a schedule across steps. Collective.

        Args:
            graph: the graph of the first training program.
            recorder: records the launches.
            as_gradients: whether the graph only exchanges gradients, in the order in which autograd computes them.
        """
        context, plan, state = self._context, self.plan, self._context.state
        communicator, device = context.communicator, context.device
        launched, pieces = issued_launches(schedule, plan), dict(self._cut_sizes.pieces)
        communicator.connect(device)
        communicator.open_lanes(device, {launch.lane for launch in launched})
        queue = self._aside.make_queue(recorder, device, len(launched) if as_gradients else IN_FLIGHT)
        launcher = Launcher(launched, submitted(graph.phases["forward"]), queue, communicator)
        communicator.in_turn = queue.in_turn
        communicator.rounding.forget()  # its residuals belong to the buckets of the old plan
        exchanges = {
            name: RowExchange(
                state.table(name), communicator, launcher, pieces.get(name, 0), overlaps=name in plan.overlapped
            )
            for name in plan.row_exchanges
        }
        in_place = create_exchanges(plan, state.parameter, communicator, at_once=self._aside.exchanges_at_once)
        return self._make(
            context.announcements,
            launcher,
            exchanges,
            Buckets(plan.buckets, state.parameters, communicator, launcher, in_place),
            looks_ahead=plan.looks_ahead,
            warn=self._on_other_batch,
            after_announcement=self._after_announcement,
        )

    def _after_announcement(self) -> None:
        """Changes the launch order to the one that is best by measured times, once enough steps have been profiled.
        Called in each step, after all ranks have announced that they run it.
        """
        if self._profiler is None or self._graph is None:
            return
        if (own := self._profiler.count(self.flow.recorder)) is None:
            return
        self._profiler = None
        everyone = self._context.communicator.gather(own, Profile)
        self.schedule, self.memory = self._order(self._graph, self.memory, agree_on_profile(everyone))
        self.flow.launcher.reorder(issued_launches(self.schedule, self.plan))

    def close(self) -> None:
        """Applies pending updates, and ends the communication between steps."""
        flow, self.flow = self.flow, self._aside
        self._context.optimizer_hooks.follow(self.flow)
        flow.close()

    def _compute_in_order(self, units: tuple[str, ...]) -> TrainingGraph:
        """Reorders the compute of every backward. Returns the graph of the last training program.

        Args:
            units: names of tables and buckets, in the new order. Each stands for the compute that is needed before its
                gradients can be sent.
        """
        self._ordering = (OrderCompute(units),)
        for program, of_steps in self._steps_of.items():
            of_steps.reorder(self._ordering)
            program.compute_as(of_steps.steady.graph)
        assert self._shown_step is not None
        log_graph("order_compute", self._shown_step.graph.phases["backward"])
        return self._shown_step.graph

    def _make_program(self, joint: CompiledGraph, of_steps: StepGraphs, entry: Entry, *, reduce: bool) -> Program:
        """Builds the program of a cache entry.

        Args:
            joint: the compiled step, before its communication is moved into the next step.
            of_steps: the graphs of the step and of its variants, such as the first step.
            entry: the cache entry.
            reduce: whether the program reduces gradients.
        """
        analysed, train = entry.analysed, entry.train
        flow = self.flow if train and (reduce or self.flow.is_within_steps) else self._aside
        announced, share = self._buffers.prepare_forward(analysed, self._assigned_buffers(entry), reduce=reduce)
        check = make_batch_check(self._context, self.plan, analysed, self._counters, train=train)
        counters, communicator, regions = self._counters, self._context.communicator, None
        activity = activity_code(train=train, reduces=reduce)
        launches = sequence_hash(joint.graph, ordered=flow.is_within_steps)
        launched = checksum_of_text(f"{launches} {communicator.gradient_dtype}")  # ranks compare it in each step
        if self._context.options.backend != "eager":
            from embrace_fx.runtime.lower.inductor import RegionCompiler  # noqa: PLC0415  (takes seconds to import)

            regions = RegionCompiler()

        def announcement_of(leaves: Sequence[Any]) -> HandshakeMessage:
            """Returns this rank's announcement of a step to the other ranks. `leaves` is the flattened batch of the
            step.
            """
            own = HandshakeMessage(activity=activity, failure=check(leaves), program=launched, buffers=announced())
            own.rows_seen, counters.rows_seen = counters.rows_seen, {}
            own.steps = 0 if counters.uneven else communicator.progress.optimizer_steps
            own.asks_to_plan = bool(counters.replan_for)
            return own

        return Program(
            of_steps.steady.graph,
            self._context.state,
            flow,
            buckets=self.plan.buckets if reduce else None,
            constants=dict(entry.captured.result_constants),
            head=announcement_of,
            scores_nothing=partial(scores_nothing, self._context.state, analysed),
            share_buffers=share,
            links=self.plan.links,
            regions=regions,
            variants=of_steps.graph if reduce and of_steps.have_variants else None,
            copies=self._copies,
            of_gradients=entry.captured.route == EAGER,
        )

    def _assigned_buffers(self, entry: Entry) -> frozenset[str]:
        """Returns the names of the buffers that the forward may write or replace outside of its graph."""
        replay, state = entry.captured.replay, self._context.state
        if entry.captured.route == EAGER:  # the forward may write any buffer
            return frozenset(state.buffer_names())
        return frozenset() if replay is None else frozenset(state.buffers_in(replay.writes_items_of))
