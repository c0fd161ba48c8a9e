"""Binds the ops of a program to the communicator, the launcher, the flow, and the gradients that a model has left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx

from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.in_place import ExchangeKind, exchange_gradient_
from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.flow.head_exchange import HeadExchange
from embrace_fx.runtime.flow.single_process import SingleProcessRows, runs_uncounted
from embrace_fx.runtime.kernels import lookup
from embrace_fx.runtime.launch import streams
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.memory.copies import Copies
from embrace_fx.runtime.ranks.announcement import Announcements
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.step.hooked_buckets import CommHook, HookedBucket, launch_hooked
from embrace_fx.runtime.step.missing_launches import MissingLaunches
from embrace_fx.runtime.step.packer import Packer
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.copy_ops import AWAIT_OFFLOAD, COPY_OPS, OFFLOAD, RELOAD, compute_up_to
from embrace_fx.vocabulary.graph import Shard, TrainingGraph
from embrace_fx.vocabulary.operation_id import compute_id
from embrace_fx.vocabulary.ops import launch_of, op_name


class Bindings:
    """The calls of one graph's nodes, phase by phase.

    Args:
        buckets: what the graph reduces, in launch order; None: nothing.
        flow: launches the exchanges.
        links: those that exchanges are cut for.
        copies: what copies saved values out of memory and back; None: nothing does.
        keeps_buckets: buckets on a host keep their memory from one step to the next.

    Attributes:
        by_op: op name -> what every node of that op calls, unless a phase's method says otherwise.
        of_forward, of_backward: the launches that other ranks wait for in these phases.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        state: ModelState,
        announcements: Announcements,
        buckets: tuple[tuple[str, ...], ...] | None,
        flow: Flow,
        links: Cluster,
        copies: Copies | None = None,
        *,
        keeps_buckets: bool = False,
    ) -> None:
        self._state, self._spaces = state, graph.spaces
        self._keeps_buckets = keeps_buckets
        self._copies = copies
        self._announcements = announcements
        communicator = self._communicator = announcements.communicator
        self._buckets = buckets or ()
        self._flow = flow
        on = _streams_alone(state, communicator)
        self._alone = SingleProcessRows(on, state.tables) if on is not None and runs_uncounted(graph) else None
        self.of_forward, self.of_backward = (MissingLaunches(communicator, flow) for _ in range(2))
        self.by_op: dict[str, Callable[..., Any]] = {
            **communicator.launches(),
            **HeadExchange(communicator).launches(),
            "embrace::exchange_gradient_": partial(_exchange_gradient_, communicator, links),
            "embrace::round_rows": communicator.rounding.round_rows,
            "_c10d_functional::wait_tensor": _named(partial(_wait_for, flow), "wait_for"),
        }

    def unique(self, node: fx.Node) -> Callable[..., Any] | None:
        """Finds the function that a node of the unique phase calls instead of its op; None: it calls its op."""
        return self._alone.kernel(node) if self._alone is not None else None

    def ids(self, node: fx.Node) -> Callable[..., Any] | None:
        return self._alone.kernel(node) if self._alone is not None else self._with_table_names(node)

    def forward(self, node: fx.Node) -> Callable[..., Any] | None:
        found = self._lookup(node) or self._copied(node)
        return found or self._noted(self.of_forward, node, self._in_flow(node))

    def _copied(self, node: fx.Node) -> Callable[..., Any] | None:
        if op_name(node) not in COPY_OPS:
            return None
        assert self._copies is not None
        return _named(_copy(self._copies, self._flow.recorder, node), node.name)

    def _lookup(self, node: fx.Node) -> Callable[..., Any] | None:
        """Rows of a table that may have skipped steps take them before they are read."""
        if op_name(node) != "embrace::lookup":
            return None
        role, state = node.all_input_nodes[0].meta["role"], self._state
        name = role.table if isinstance(role, Shard) else role.name

        def caught_up(shard: Tensor, ids: Tensor) -> Tensor:
            table = state.spaces.get(name) or state.tables.get(name)
            return lookup(shard, ids) if table is None else table.look_up(ids)

        return _named(caught_up, node.name)

    def backward(self, node: fx.Node) -> Callable[..., Any] | None:
        comm_hook = self._communicator.comm_hook
        if op_name(node) == "embrace::pack_bucket":
            names, keeps = self._buckets[node.meta["bucket"]], self._keeps_buckets
            return Packer(self._state, names, scales=comm_hook is None, keeps_memory=keeps)
        launch = self._in_flow(node) or self.unique(node) or self._hooked(comm_hook, node)
        return self._copied(node) or self._noted(self.of_backward, node, launch)

    def _hooked(self, comm_hook: CommHook | None, node: fx.Node) -> Callable[..., Any] | None:
        """Makes the function by which the user's hook reduces a bucket; None: there is no bucket, or no hook."""
        if comm_hook is None or op_name(node) != "_c10d_functional::all_reduce_":
            return None
        packed = node.all_input_nodes[0]
        if op_name(packed) != "embrace::pack_bucket":  # other passes reduce counts
            return None
        state, index = self._state, packed.meta["bucket"]
        names, last = self._buckets[index], index == len(self._buckets) - 1

        def reduce_bucket(flat: Tensor, *_: str) -> InFlight:
            bucket = HookedBucket(flat, [state.parameter(name) for name in names], index, is_last=last)
            return launch_hooked(comm_hook, flat, bucket)

        return _named(reduce_bucket, node.name)

    def _noted(
        self, launches: MissingLaunches, node: fx.Node, call: Callable[..., Any] | None
    ) -> Callable[..., Any] | None:
        call = call or self.by_op.get(op_name(node))
        return call and launches.add(node, call)

    def _in_flow(self, node: fx.Node) -> Callable[..., Any] | None:
        found = _call_of(self._flow, node)
        return found and _named(found, node.name)

    def _with_table_names(self, node: fx.Node) -> Callable[..., Any] | None:
        if op_name(node) != "embrace::all_gather_ids":
            return None
        announcements, names, spaces = self._announcements, node.meta["tables"], self._spaces

        def all_gather_ids(unique: Sequence[Tensor], num_rows: Sequence[int], group: str, group_size: int) -> Any:
            return announcements.all_gather_ids(unique, num_rows, group, group_size, names, spaces)

        return all_gather_ids


_OF_ROWS = frozenset({"embrace::submit_rows", "embrace::await_rows", "embrace::all_to_all_rows"})
_OF_GRADIENT = frozenset({"embrace::submit_gradients", "embrace::update_rows", "embrace::all_to_all_gradients"})
"""Ops that are methods of a table's exchange, and of the gradient of its rows."""


def _call_of(flow: Flow, node: fx.Node) -> Callable[..., Any] | None:
    """Makes the function that a node calls whose communication is the flow's; None: another node.

    It takes what the op takes, and has the launch that the node is of.
    """
    op, launch = op_name(node), flow.launcher.launch_of(node)
    if op == "embrace::join_rows":
        return partial(flow.exchanges[str(node.args[3])].join_rows)
    if op in ("embrace::hand_over", "embrace::update_bucket"):
        return partial(flow.buckets.hand_over if op == "embrace::hand_over" else flow.buckets.update_bucket)
    if launch is None:
        return None
    if op in _OF_ROWS or op in _OF_GRADIENT:
        exchange = flow.exchanges[launch.what]
        owner = exchange if op in _OF_ROWS else exchange.gradient
        return partial(getattr(owner, op.removeprefix("embrace::")), launch)
    match op:
        case "embrace::submit_ids":
            return partial(flow.submit_ids)
        case "embrace::await_ids":
            return partial(flow.await_ids)
        case "embrace::submit_chunk":
            return partial(flow.buckets.submit_chunk, launch)
        case "embrace::await_chunk":
            return partial(flow.buckets.await_chunk, launch)
        case "_c10d_functional::all_reduce_" | "embrace::exchange_gradient_":
            return partial(flow.buckets.launch_bucket, launch)
    return None


def _wait_for(flow: Flow, launch: Ticket | InFlight) -> Tensor:
    """Returns the value of a launch: one that goes through the launcher, or one of the thread's own."""
    if isinstance(launch, InFlight):
        return flow.communicator.wait(launch)
    flow.recorder.stand()
    value = flow.launcher.wait(launch)
    if flow.recorder.segment is not None:
        flow.recorder.mark(compute_id("rows", launch.id.what))
        flow.recorder.begin_segment(compute_id("forward", launch.id.what))
    return value


def _copy(copies: Copies, recorder: Recorder, node: fx.Node) -> Callable[..., Any]:
    """Makes the function of a node that begins or awaits a copy."""
    launch, until, name = launch_of(node), compute_up_to(node), op_name(node)
    assert launch is not None

    def begin(value: Any, _: str) -> Any:
        recorder.mark(until)
        return (copies.offload if name == OFFLOAD else copies.reload)(value, launch, recorder)

    def end(copied: Any, _: str) -> Any:
        awaiting = copies.await_offload if name == AWAIT_OFFLOAD else copies.await_reload
        recorder.mark(until)
        with recorder.waiting(launch):
            return awaiting(copied)

    return begin if name in (OFFLOAD, RELOAD) else end


def _named(call: Callable[..., Any], node: str) -> Callable[..., Any]:
    """Returns a call under the name by which the lowered program knows it."""
    call.__name__ = node
    return call


def _streams_alone(state: ModelState, communicator: Communicator) -> Streams | None:
    """Returns the streams of the device on which a single process trains."""
    parameter = state.any_parameter()
    if communicator.world_size > 1 or parameter is None:
        return None
    return streams.streams_of(parameter.device)


def _exchange_gradient_(
    communicator: Communicator,
    links: Cluster,
    flat: Tensor,
    rows: int,
    strategy: str,
    scheme: str,
    group: str,
    group_size: int,
) -> InFlight:
    """Runs the op of that name to its end, where no launcher takes it."""
    channel = Channel(communicator.process_group(group))
    with communicator.watching():
        exchange_gradient_(flat, ExchangeKind(rows, strategy, scheme), channel, links)
    return InFlight(flat, None)
