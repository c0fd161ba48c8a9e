"""Makes the flow between steps, which follows a schedule on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from embrace_fx.passes.planner.grouping import cuts
from embrace_fx.planning.scheduling import launches
from embrace_fx.runtime.exchanges.channel import Channel, run
from embrace_fx.runtime.exchanges.in_place import (
    Exchange,
    ExchangeKind,
    ExchangeThread,
    exchange_at_once,
    exchange_gradient_,
)
from embrace_fx.runtime.exchanges.rounded import sum_rounded_
from embrace_fx.runtime.flow.bucket_updates import BucketExchange, Buckets
from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.launch.launch_queue import LaunchQueue
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.launch.stream_queue import StreamQueue
from embrace_fx.runtime.launch.streams import streams_of
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import IN_FLIGHT, Schedule
from embrace_fx.vocabulary.submissions import submitted


def start_flow(
    context: Context,
    plan: Plan,
    graph: TrainingGraph,
    schedule: Schedule,
    recorder: Recorder,
    *,
    warn: Callable[[], None],
    after_announcement: Callable[[], None],
    as_gradients: bool,
) -> Flow:
    """Makes the flow that follows a schedule, for the graph of the first training batch as it runs. Collective.

    Args:
        as_gradients: whether the graph has only gradients, launched in autograd's order.
    """
    launched, pieces = launches(schedule, plan), dict(cuts(plan, context.state.parameter).pieces)
    communicator, state = context.communicator, context.state
    device = next(context.model.parameters()).device
    streams = streams_of(device)
    communicator.connect(device)
    communicator.open_lanes(device, {launch.lane for launch in launched})
    queue: LaunchQueue
    if streams is None:
        queue = LaunchQueue(recorder, at_once=len(launched) if as_gradients else IN_FLIGHT)
    else:
        queue = StreamQueue(recorder, streams, communicator.channels(device))
        communicator.look_each_time(queue.look)
    launcher = Launcher(launched, submitted(graph.phases["forward"]), queue, communicator)
    communicator.in_turn = queue.in_turn
    communicator.rounding.forget()  # drops the residuals of other buckets
    tables = {name: state.table(name) for name in plan.row_exchanges}
    by_bucket = _exchanges(context, plan, on_streams=streams is not None)
    return Flow(
        context.announcements,
        launcher,
        {
            name: RowExchange(table, communicator, launcher, pieces.get(name, 0), overlaps=name in plan.overlapped)
            for name, table in tables.items()
        },
        Buckets(plan.buckets, state.parameters, communicator, launcher, by_bucket),
        looks_ahead=plan.looks_ahead,
        warn=warn,
        after_announcement=after_announcement,
        streams=streams,
    )


def _exchanges(context: Context, plan: Plan, *, on_streams: bool) -> dict[int, BucketExchange]:
    """Makes the functions that start the exchanges of buckets that are not AllReduced. Collective.

    On streams, the functions run the exchanges to their end immediately.
    """
    found = {k: each for k, bucket in enumerate(plan.buckets) if (each := _exchange(context, plan, bucket)) is not None}
    if not found:
        return {}
    group = context.communicator.open_group("exchanges")
    if on_streams:
        channel = Channel(group)
        return {k: partial(exchange_at_once, each, channel) for k, each in found.items()}
    start = ExchangeThread(group).start
    return {k: partial(start, each) for k, each in found.items()}


def _exchange(context: Context, plan: Plan, bucket: tuple[str, ...]) -> Exchange | None:
    """Makes the sparse exchange of a bucket, or returns None if the bucket is AllReduced."""
    first = context.state.parameter(bucket[0])
    if bucket[0] in plan.exchanged:
        decision = plan[bucket[0]]
        kind = ExchangeKind(next(iter(first.shape), 1), decision.strategy, decision.scheme)
        return lambda flat, _, channel: exchange_gradient_(flat, kind, channel, plan.links)
    rounding = context.communicator.rounding
    if not rounding.rounds(first):
        return None
    return lambda flat, name, channel: run(sum_rounded_(flat, name, channel, rounding))
