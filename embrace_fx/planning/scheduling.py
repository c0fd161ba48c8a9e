"""Makes a flow from a plan: the launches of a window, their order, and their chunks.

Chunks are cut once, for the probed links. The first order comes from the cost model. A few steps later, when every rank
has profiled durations, rank 0 computes the final order for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from statistics import mean, median

from embrace_fx.cost import links as cost
from embrace_fx.cost.storage import together
from embrace_fx.passes.memory.line import memory_line
from embrace_fx.passes.node_cost import estimate
from embrace_fx.passes.overlap.order import BackwardUnits
from embrace_fx.passes.planner.step_cost import ids_exchange, rows_bytes
from embrace_fx.passes.scheduler.compute_order import Atoms, search
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.passes.scheduler.step_graph import Sizes, build, build_alone
from embrace_fx.passes.scheduler.storage import at_pace, read_ahead, with_storage
from embrace_fx.passes.step_memory import step_memory
from embrace_fx.passes.verifier.storage import check_storage
from embrace_fx.passes.verifier.windows import check_launches
from embrace_fx.runtime.exchanges.channel import Channel, run
from embrace_fx.runtime.exchanges.in_place import (
    Exchange,
    ExchangeKind,
    ExchangeThread,
    exchange_at_once,
    exchange_gradient_,
)
from embrace_fx.runtime.exchanges.rounded import sum_rounded_
from embrace_fx.runtime.flow.bucket_updates import BucketExchange, BucketUpdates
from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.launch import streams
from embrace_fx.runtime.launch.launch_queue import LaunchQueue
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Recorder, Recording, compute_spans
from embrace_fx.runtime.launch.stream_queue import StreamQueue
from embrace_fx.runtime.memory.resident import bytes_in_use
from embrace_fx.setup.setting import Setting
from embrace_fx.vocabulary.copy_ops import COPY_OPS
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.operation_id import IDS, ROW_NORMS, OperationId, chunk_id
from embrace_fx.vocabulary.ops import op_name
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import IN_FLIGHT, LOOKS_AHEAD, Cuts, Schedule, StepGraph
from embrace_fx.vocabulary.submissions import submitted

PROFILED_AFTER, PROFILED = 5, 6
"""Steps that warm up, and steps that are measured; one or two disturbed ones do not change a median of six."""


MAY_HOLD = 1.05
"""Peak memory of a backward in another order, at most, over its peak in autograd's order; 1 under a budget."""

ComputeInOrder = Callable[[tuple[str, ...]], TrainingGraph]


_Found = tuple[Schedule, tuple[str, ...]]
"""The schedule that rank 0 has found, and units of the backward in their new order; without units it is unchanged."""


class Scheduling:
    """The schedule of one compiled model, and the flow that follows it, which a single process has not.

    Args:
        graph: the graph of the first training batch, as it runs.
        gradients_alone: the graph has only gradients, which are launched in the order in which autograd makes them.
        cuts: the pieces in which communication travels.
        compute_in_order: reorders the backward's units, and returns the new graph; None: the order is fixed.
        ahead: number of batches that the loader is read ahead.

    Attributes:
        memory: the prediction for tables beyond memory, at the measured speed once there is a profile.
        recorder: measures the steps, once the schedule has started.
    """

    recorder: Recorder

    def __init__(
        self,
        setting: Setting,
        plan: Plan,
        graph: TrainingGraph,
        cuts: Cuts,
        compute_in_order: ComputeInOrder | None = None,
        *,
        gradients_alone: bool = False,
        ahead: int = 0,
    ) -> None:
        self._setting = setting
        self._plan = plan
        self._graph = graph
        self._gradients_alone = gradients_alone
        self._compute_in_order = compute_in_order
        self._steps, self._profiled = 0, False
        self._recording: Recording | None = None
        self._exchanged = plan.row_exchanges
        self.looks_ahead = bool(cuts.pieces)
        self._cluster = plan.links.among(plan.world_size)
        self.memory = {
            name: read_ahead(together(beyond), ahead, plan.world_size)
            for name, tables in self._exchanged.items()
            if (beyond := [plan.memory[table] for table in tables if table in plan.memory])
        }
        self._cuts = cuts
        self.schedule = self._order(None)
        self._flow: Flow | None = None

    def start(self, warn: Callable[[], None]) -> Flow | None:
        """Makes the flow that follows the schedule, on several ranks. Collective."""
        communicator, state, plan = self._setting.communicator, self._setting.state, self._plan
        device = next(self._setting.model.parameters()).device
        on = streams.streams_of(device)
        self.recorder = recorder = Recorder(on.clock() if on is not None else None, partial(bytes_in_use, device))
        if plan.world_size == 1:
            return None
        order = launches(self.schedule, self.looks_ahead)
        communicator.connect(device)
        communicator.open_lanes(device, {launch.lane for launch in order})
        of_forward = submitted(self._graph.phases["forward"])
        queue: LaunchQueue
        if on is None:
            queue = LaunchQueue(recorder, at_once=len(order) if self._gradients_alone else IN_FLIGHT)
        else:
            queue = StreamQueue(recorder, on, communicator.channels(device))
            communicator.look_each_time(queue.look)
        launcher = Launcher(order, of_forward, queue, communicator)
        communicator.in_turn = queue.in_turn
        pieces = dict(self._cuts.pieces)
        communicator.rounding.forget()  # drops the residuals of other buckets
        tables = {name: state.table(name) for name in self._exchanged}
        by_bucket = self._exchanges(on_streams=on is not None)
        self._flow = Flow(
            self._setting.announcements,
            launcher,
            {name: RowExchange(table, communicator, launcher, pieces.get(name, 0)) for name, table in tables.items()},
            BucketUpdates(plan.buckets, state.parameter, communicator, launcher, by_bucket),
            looks_ahead=self.looks_ahead,
            warn=warn,
            after_announcement=self._after_announcement,
            streams=on,
        )
        return self._flow

    def _exchanges(self, on_streams: bool) -> dict[int, BucketExchange]:
        """Makes the functions that start the exchanges of buckets that are not AllReduced. Collective.

        Args:
            on_streams: each exchange runs to its end where it is launched, on the stream of its class.
        """
        by_bucket = {
            k: found for k, each in enumerate(self._plan.buckets) if (found := self._exchange(each)) is not None
        }
        if not by_bucket:
            return {}
        group = self._setting.communicator.open_group("exchanges")
        if on_streams:
            channel = Channel(group)
            return {k: partial(exchange_at_once, each, channel) for k, each in by_bucket.items()}
        start = ExchangeThread(group).start
        return {k: partial(start, each) for k, each in by_bucket.items()}

    def _exchange(self, bucket: tuple[str, ...]) -> Exchange | None:
        """Makes the exchange of a bucket; None: it is AllReduced."""
        plan, first = self._plan, self._setting.state.parameter(bucket[0])
        if bucket[0] in plan.exchanged:
            decision = plan[bucket[0]]
            kind = ExchangeKind(next(iter(first.shape), 1), decision.strategy, decision.scheme)
            return lambda flat, _, channel: exchange_gradient_(flat, kind, channel, plan.links)
        rounding = self._setting.communicator.rounding
        if not rounding.rounds(first):
            return None
        return lambda flat, name, channel: run(sum_rounded_(flat, name, channel, rounding))

    def _after_announcement(self) -> None:
        """Counts, profiles and reorders steps; called where every rank is known to continue."""
        assert self._flow is not None
        if self._profiled:
            return
        self._steps += 1
        recorder = self._flow.recorder
        if self._steps == PROFILED_AFTER:
            if recorder.recording is None:
                self._recording = recorder.start()
        elif self._steps == PROFILED_AFTER + PROFILED + 1:
            if recorder.recording is not None and recorder.recording is self._recording:
                self._follow(self._flow, profile(recorder.stop()))
            else:
                self._steps = 0  # the user records these steps: profiles the next ones

    def _follow(self, flow: Flow, own: Profile) -> None:
        """Applies the order computed from all ranks' profiles, from the next window on."""
        communicator = self._setting.communicator
        agreed = agree_on_profile(communicator.gather(own, Profile))
        self.schedule = self._order(agreed)
        flow.launcher.reorder(launches(self.schedule, self.looks_ahead))
        self._profiled = True

    def _order(self, profiled: Profile | None) -> Schedule:
        """Returns, on every rank, the schedule that rank 0 computes."""
        communicator = self._setting.communicator
        if profiled is not None:
            self.memory = {name: at_pace(name, of, profiled.byte_ms) for name, of in self.memory.items()}
        own = self._search(profiled) if communicator.rank == 0 else None
        found = communicator.gather(own, _Found | None)[0]
        assert found is not None  # rank 0 has found one
        agreed, units = found
        if units:
            assert self._compute_in_order is not None
            self._graph = self._compute_in_order(units)
        if self._plan.world_size > 1:
            check_launches(self._graph, launches(agreed, self.looks_ahead))
        check_storage(agreed.steps, self.memory)
        node_ms = estimate(self._cluster.compute, self._graph.expected)
        line = memory_line(agreed.predicted, step_memory(self._graph), node_ms)
        return replace(agreed, predicted=replace(agreed.predicted, memory=line))

    def _search(self, profiled: Profile | None) -> _Found:
        steps = self._step_graph(profiled)
        alone = self._gradients_alone and self._plan.world_size > 1
        name = "none" if alone else self._plan.schedule_name
        if profiled is None or not self._may_reorder():
            return schedule(steps, name, "profile" if profiled else "cost model"), ()
        measured = {each.what: ms for each, ms in profiled.compute_ms.items() if each.kind == "backward"}
        units = BackwardUnits.of(self._graph.phases["backward"])
        atoms = Atoms.of(units, estimate(self._cluster.compute, self._graph.expected), measured)
        memory = step_memory(self._graph)
        bound = memory.backward_peak([*units.needed_by])
        if self._setting.options.memory_budget is None:
            bound = round(bound * MAY_HOLD)
        return search(steps, name, "profile", atoms, lambda order: memory.backward_peak(units.ordered(order)), bound)

    def _may_reorder(self) -> bool:
        """Tells whether a backward can be reordered without compiling regions or placing copies again."""
        copies = any(op_name(node) in COPY_OPS for node in self._graph.phases["backward"].graph.nodes)
        return self._compute_in_order is not None and self._setting.options.backend == "eager" and not copies

    def _expected_bytes(self) -> dict[OperationId, int]:
        """Predicts the bytes that a rank sends in sparse exchanges, which do not follow from a bucket's size."""
        plan = self._plan
        exchanged = {k: bucket[0] for k, bucket in enumerate(plan.buckets) if bucket[0] in plan.exchanged}
        return {chunk_id(k, 0): plan[name].sent_bytes_per_step for k, name in exchanged.items()}

    def _step_graph(self, profiled: Profile | None) -> StepGraph:
        """Builds the step graph of a window."""
        plan = self._plan
        if plan.world_size == 1:
            return with_storage(build_alone(self._graph, self._cluster.compute), self.memory)
        sizes = Sizes(
            profiled.sent_bytes if profiled else self._expected_bytes(),
            {name: _one_way_bytes(plan, tables) for name, tables in self._exchanged.items()},
            sum(ids_exchange(plan[table], plan.world_size).sent_bytes for table in plan.sharded),
            {name: sum(plan[table].norm_bytes for table in tables) for name, tables in self._exchanged.items()},
            self._setting.options.rows,
        )
        durations = profiled.compute_ms if profiled else None
        steps = build(self._graph, sizes, durations, self._cluster, plan.world_size)
        return with_storage(steps, self.memory)


def cuts(setting: Setting, plan: Plan) -> Cuts:
    """Chooses the pieces in which the communication of a plan travels; of one process there is none."""
    if plan.world_size == 1:
        return Cuts((), ())
    chunks = tuple(tuple(bucket_chunks(setting, plan, bucket)) for bucket in plan.buckets)
    exchanged = plan.row_exchanges.items() if plan.schedule_name in LOOKS_AHEAD else ()
    return Cuts(chunks, tuple((name, delayed_chunks(plan, tables)) for name, tables in exchanged))


def bucket_chunks(setting: Setting, plan: Plan, bucket: tuple[str, ...]) -> list[int]:
    """Counts the elements of each chunk of a bucket's AllReduce: equal chunks of about the cost model's size.

    Schedule "none", in which no launch overtakes another, reduces whole buckets. A sparse exchange, which sends in
    rounds, takes a whole gradient.
    """
    parameters = [setting.state.parameter(name) for name in bucket]
    elements = sum(parameter.numel() for parameter in parameters)
    if plan.schedule_name == "none" or bucket[0] in plan.exchanged:
        return [elements]
    wanted = cost.chunk_bytes(plan.links, plan.world_size) / parameters[0].element_size()
    count = max(1, round(elements / wanted))
    size = ceil(elements / count)
    return [min(size, elements - start) for start in range(0, elements, size)]


def delayed_chunks(plan: Plan, tables: Sequence[str]) -> int:
    """Counts the pieces of tables' delayed gradients, as if all of the first batch's rows were delayed."""
    own = _one_way_bytes(plan, tables) * plan.world_size / (plan.world_size - 1)
    return max(1, round(own / cost.chunk_bytes(plan.links, plan.world_size, "all_to_all")))


def _one_way_bytes(plan: Plan, tables: Sequence[str]) -> int:
    """Counts the bytes of tables' rows one way; as many are those of their gradients, the other way."""
    return sum(rows_bytes(plan[table], plan.world_size) for table in tables) // 2


@dataclass(frozen=True)
class Profile:
    """Medians over a few steps on one rank.

    Attributes:
        compute_ms: compute operation -> milliseconds.
        sent_bytes: launch -> bytes.
        byte_ms: read or write of rows beyond memory -> milliseconds per byte.
    """

    compute_ms: dict[OperationId, float]
    sent_bytes: dict[OperationId, int]
    byte_ms: dict[OperationId, float] = field(default_factory=dict)


def profile(recording: Recording) -> Profile:
    """Computes the medians over the whole windows of a recording."""
    windows = range(recording.window)
    spans: dict[OperationId, list[float]] = {}
    for span in compute_spans(recording):
        if span.window in windows:  # adds up an operation that waits have cut into pieces
            spans.setdefault(span.operation, [0.0] * len(windows))[span.window] += (span.ended_s - span.started_s) * 1e3
    sent: dict[OperationId, list[int]] = {}
    took_ms: dict[OperationId, float] = {}
    for transfer in recording.transfers:
        sent.setdefault(transfer.launch, []).append(transfer.sent_bytes)
        if transfer.launch.lane == "storage":
            took = (transfer.ended_s - transfer.started_s) * 1e3
            took_ms[transfer.launch] = took_ms.get(transfer.launch, 0.0) + took
    return Profile(
        {operation: median(values) for operation, values in spans.items()},
        {launch: round(median(values)) for launch, values in sent.items()},
        {launch: ms / sum(sent[launch]) for launch, ms in took_ms.items()},
    )


def agree_on_profile(everyone: Sequence[Profile]) -> Profile:
    """Makes one profile for all ranks: the slowest rank's compute, the mean of sent bytes, the slowest storage."""
    slowest = max(everyone, key=lambda each: sum(each.compute_ms.values()))
    launched = {launch for each in everyone for launch in each.sent_bytes}
    sent = {launch: round(mean(each.sent_bytes.get(launch, 0) for each in everyone)) for launch in launched}
    moved = {launch for each in everyone for launch in each.byte_ms}
    paces = {launch: max(each.byte_ms.get(launch, 0.0) for each in everyone) for launch in moved}
    return Profile(slowest.compute_ms, sent, paces)


def launches(schedule: Schedule, looks_ahead: bool) -> tuple[OperationId, ...]:
    """Lists the launches of a schedule that the launcher issues. The calling thread issues the AllReduce of row norms,
    and the AllGather of ids of a batch that was not known ahead.
    """
    return tuple(each for each in schedule.launches if each != ROW_NORMS and (looks_ahead or each != IDS))
