"""Binds the ops of a program to the runtime functions that run them: communicator, launcher, tables and copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx

from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.in_place import ExchangeKind, exchange_gradient_
from embrace_fx.runtime.flow.comm_pipeline import CommPipeline
from embrace_fx.runtime.flow.head_exchange import HeadExchange
from embrace_fx.runtime.kernels import lookup
from embrace_fx.runtime.memory.copies import Copies
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.step.hooked_buckets import CommHook, HookedBucket, run_comm_hook
from embrace_fx.runtime.step.packer import Packer
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.copy_ops import COPY_OPS, OFFLOAD, RELOAD
from embrace_fx.vocabulary.graph import Shard, TrainingGraph
from embrace_fx.vocabulary.head_ops import HEAD_LAUNCHES
from embrace_fx.vocabulary.ops import launch_of, op_name
from embrace_fx.vocabulary.submissions import compute_up_to


@dataclass(eq=False)
class Bindings:
    """Maps the nodes of one graph to the runtime functions that run them."""

    graph: InitVar[TrainingGraph]
    state: ModelState
    flow: CommPipeline
    buckets: tuple[tuple[str, ...], ...]  # the parameters of each bucket that the graph reduces, in launch order
    links: Cluster  # from which message sizes are chosen
    copies: Copies | None  # offloads saved values to the host and reloads them
    keeps_buckets: bool  # whether buckets on a host keep their memory from one step to the next

    def __post_init__(self, graph: TrainingGraph) -> None:
        flow, communicator, spaces = self.flow, self.flow.communicator, graph.spaces
        self._kernel = flow.kernels(graph, self.state.tables)
        gather_ids = flow.announcements.all_gather_ids
        self._heads = HeadExchange(communicator, flow.recorder)
        self._made: dict[str, Callable[[fx.Node], Callable[..., Any]]] = {
            "_c10d_functional::wait_tensor": self._wait_function,
            "embrace::submit_ids": lambda _: flow.submit_ids,
            "embrace::await_ids": lambda _: flow.await_ids,
            "embrace::join_rows": lambda node: flow.exchanges[str(node.args[3])].join_rows,
            "embrace::defer_bucket": lambda _: flow.buckets.defer_bucket,
            "embrace::update_bucket": lambda _: flow.buckets.update_bucket,
            "embrace::pack_bucket": self._packer,
            "embrace::lookup": self._lookup_function,
            "embrace::all_gather_ids": lambda node: partial(gather_ids, tables=node.meta["tables"], spaces=spaces),
            **dict.fromkeys(COPY_OPS, self._copy_function),
            **dict.fromkeys(HEAD_LAUNCHES, self._heads.begin_function),
        }
        if communicator.comm_hook is not None:
            self._made["_c10d_functional::all_reduce_"] = partial(self._comm_hook_function, communicator.comm_hook)
        self._on_the_spot: dict[str, Callable[..., Any]] = {
            **communicator.launches(),
            "embrace::round_rows": communicator.rounding.round_rows,
            "embrace::exchange_gradient_": partial(_exchange_gradient_, communicator, self.links),
        }

    def call(self, node: fx.Node) -> Callable[..., Any] | None:
        """Returns the runtime function that runs a node, or None if the node runs a kernel or one of torch's ops."""
        op, launch = op_name(node), self.flow.launcher.launch_of(node)
        found = self._kernel(node)
        if found is None and launch is not None and op in _OF_LAUNCH:
            found = partial(_OF_LAUNCH[op](self.flow, launch.what), launch)
        elif found is None:
            found = self._made[op](node) if op in self._made else self._on_the_spot.get(op)
        if found is None:
            return None
        call = partial(found)
        call.__name__ = node.name  # type: ignore[attr-defined]  # appears in the program's source code
        return call

    def _wait_function(self, node: fx.Node) -> Callable[..., Any]:
        """Returns the function that waits for a collective."""
        launch, flow = node.all_input_nodes[0], self.flow
        if op_name(launch) in HEAD_LAUNCHES:
            return self._heads.end_function(node)
        return flow.communicator.wait if flow.launcher.launch_of(launch) is None else flow.await_launch

    def _packer(self, node: fx.Node) -> Packer:
        """Returns the object that packs a bucket's gradients into one tensor."""
        scales, names = self.flow.communicator.comm_hook is None, self.buckets[node.meta["bucket"]]
        return Packer(self.state, names, scales=scales, keeps_memory=self.keeps_buckets)

    def _copy_function(self, node: fx.Node) -> Callable[..., Any]:
        """Returns the function that starts or awaits a saved value's offload to the host, or its reload."""
        launch, until, name = launch_of(node), compute_up_to(node), op_name(node)
        recorder, copy = self.flow.recorder, getattr(self.copies, name.removeprefix("embrace::"))
        assert launch is not None

        def run(value: Any, _: str) -> Any:
            recorder.mark(until)
            if name in (OFFLOAD, RELOAD):
                return copy(value, launch, recorder)
            return recorder.timed(launch, copy, value)

        return run

    def _lookup_function(self, node: fx.Node) -> Callable[..., Any]:
        """Returns the function that looks up rows of a table, after applying their deferred optimizer steps."""
        role, state = node.all_input_nodes[0].meta["role"], self.state
        name = role.table if isinstance(role, Shard) else role.name

        def look_up_rows(shard: Tensor, ids: Tensor) -> Tensor:
            table = state.spaces.get(name) or state.tables.get(name)
            return lookup(shard, ids) if table is None else table.look_up(ids)

        return look_up_rows

    def _comm_hook_function(self, comm_hook: CommHook, node: fx.Node) -> Callable[..., Any]:
        """Returns the function that starts to reduce a bucket with the user's communication hook."""
        packed = node.all_input_nodes[0]
        if op_name(packed) != "embrace::pack_bucket":  # an AllReduce of counts of ids, not of a bucket
            return self.flow.communicator.all_reduce_
        state, index = self.state, packed.meta["bucket"]
        names, last = self.buckets[index], index == len(self.buckets) - 1

        def reduce_bucket(flat: Tensor, *_: str) -> InFlight:
            bucket = HookedBucket(flat, [state.parameter(name) for name in names], index, is_last=last)
            return run_comm_hook(comm_hook, flat, bucket)

        return reduce_bucket


_OF_LAUNCH: Mapping[str, Callable[[CommPipeline, str], Callable[..., Any]]] = {
    "embrace::submit_rows": lambda flow, what: flow.exchanges[what].submit_rows,
    "embrace::await_rows": lambda flow, what: flow.exchanges[what].await_rows,
    "embrace::all_to_all_rows": lambda flow, what: flow.exchanges[what].all_to_all_rows,
    "embrace::submit_gradients": lambda flow, what: flow.exchanges[what].gradient.submit_gradients,
    "embrace::update_rows": lambda flow, what: flow.exchanges[what].gradient.update_rows,
    "embrace::all_to_all_gradients": lambda flow, what: flow.exchanges[what].gradient.all_to_all_gradients,
    "embrace::submit_chunk": lambda flow, _: flow.buckets.submit_chunk,
    "embrace::await_chunk": lambda flow, _: flow.buckets.await_chunk,
    "embrace::exchange_gradient_": lambda flow, _: flow.buckets.launch_bucket,
    "_c10d_functional::all_reduce_": lambda flow, _: flow.buckets.launch_bucket,
}
"""Methods of nodes whose launch the flow's launcher issues; they take it first."""


def _exchange_gradient_(
    communicator: Communicator, links: Cluster, flat: Tensor, rows: int, strategy: str, scheme: str, group: str, _: int
) -> InFlight:
    """Runs the op `exchange_gradient_`, and returns its result as an exchange that has already ended."""
    channel = Channel(communicator.process_group(group))
    with communicator.watching():
        exchange_gradient_(flat, ExchangeKind(rows, strategy, scheme), channel, links)
    return InFlight(flat, None)
