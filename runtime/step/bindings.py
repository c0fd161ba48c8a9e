"""What the ops of a program call: the communicator, the launcher, the flow, and what a model has left of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.in_place import ExchangeKind, exchange_gradient_
from embrace_fx.runtime.flow import solo
from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.launch import streams
from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.step.model_state import ModelState
from embrace_fx.vocabulary.graph import Shard, TrainingGraph, inputs_of


class Bindings:
    """The calls of one graph's nodes, phase by phase.

    Args:
        buckets: what the graph reduces, in launch order; None: nothing.
        flow: launches the exchanges; None: they are launched on the spot.
        links: those that exchanges are cut for.

    Attributes:
        by_op: op name -> what every node of that op calls, unless a phase's method says otherwise.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        state: ModelState,
        communicator: Communicator,
        buckets: tuple[tuple[str, ...], ...] | None,
        flow: Flow | None,
        links: Cluster,
    ) -> None:
        self._state = state
        self._communicator = communicator
        self._packs = iter(buckets or ())
        self._through_launcher = _through_launcher(graph, flow) if flow is not None else {}
        on = _streams_alone(state, communicator)
        self._alone = solo.SoloRows(on) if on is not None and solo.fits(graph) else None
        self.by_op: dict[str, Callable[..., Any]] = {
            **communicator.launches(),
            "embrace::exchange_gradient_": partial(_exchange_gradient_, communicator, links),
            **(_relaxed_ops(flow) if flow is not None else {}),
        }

    def unique(self, node: fx.Node) -> Callable[..., Any] | None:
        """What a node of the unique phase calls instead, or None; likewise the other phases'."""
        return self._alone.kernel(node) if self._alone is not None else None

    def ids(self, node: fx.Node) -> Callable[..., Any] | None:
        return self._alone.kernel(node) if self._alone is not None else self._with_table_names(node)

    def forward(self, node: fx.Node) -> Callable[..., Any] | None:
        return self._through_launcher.get(node.name)

    def backward(self, node: fx.Node) -> Callable[..., Any] | None:
        if str(node.target) == "embrace.pack_bucket.default":
            return _Packer(self._state, next(self._packs))
        return self._through_launcher.get(node.name) or self.unique(node)

    def _with_table_names(self, node: fx.Node) -> Callable[..., Any] | None:
        if str(node.target) != "embrace.all_gather_ids.default":
            return None
        communicator, names = self._communicator, node.meta["tables"]

        def all_gather_ids(unique: Sequence[Tensor], num_rows: Sequence[int], group: str, group_size: int) -> Any:
            return communicator.all_gather_ids(unique, num_rows, group, group_size, names)

        return all_gather_ids


def _streams_alone(state: ModelState, communicator: Communicator) -> Streams | None:
    """The streams of the device on which a single process trains."""
    parameter = state.any_parameter()
    if communicator.world_size > 1 or parameter is None:
        return None
    return streams.streams_of(parameter.device)


def _relaxed_ops(flow: Flow) -> dict[str, Callable[..., Any]]:
    """Op name -> what a relaxed program calls."""

    def await_update(parameters: list[Tensor], bucket: int) -> list[Tensor]:
        flow.await_update(bucket)
        return parameters

    def submit_bucket(flat: Tensor, bucket: int) -> None:
        flow.recorder.mark(f"backward bucket {bucket}")
        flow.buckets.submit(bucket, flat)

    def submit_rows(rows: Tensor, ids: Tensor, counts: Tensor, table: str, padding_idx: int, scale: float) -> None:
        flow.recorder.mark(f"backward {table}")
        flow.exchanges[table].submit_gradient(rows, ids, counts, padding_idx, scale)

    def await_rows(shard: Tensor, ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype) -> Tensor:
        return flow.await_rows(table)

    return {
        "embrace::await_update": await_update,
        "embrace::submit_bucket": submit_bucket,
        "embrace::submit_rows": submit_rows,
        "embrace::await_rows": await_rows,
        "_c10d_functional::wait_tensor": flow.wait_all,
    }


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
    """The op of that name where no launcher takes it: it has ended when this returns."""
    channel = Channel(communicator.process_group(group))
    with communicator.watching():
        exchange_gradient_(flat, ExchangeKind(rows, strategy, scheme), channel, links)
    return InFlight(flat, None)


def _through_launcher(graph: TrainingGraph, flow: Flow) -> dict[str, Callable[..., Any]]:
    """Node name -> how the launcher launches it: exchanges that are waited for in the phase that launches them."""
    found: dict[str, Callable[..., Any]] = {}
    tables: dict[str, str] = {}  # name of a table's counts -> the table
    shards = {node.name: role.table for node, role in inputs_of(graph.phases["forward"]) if isinstance(role, Shard)}
    for node in graph.phases["forward"].graph.nodes:
        if str(node.target) == "embrace.all_to_all_rows.default":
            columns = node.args[0]
            while columns.op != "placeholder":
                columns = columns.all_input_nodes[0]
            counts = node.args[1].meta.get("role")  # on a grid they are made here, and saved under their name
            table = tables[counts.name if counts is not None else node.args[1].name] = shards[columns.name]
            found[node.name] = partial(flow.launch_rows, table)
    buckets = 0
    for node in graph.phases["backward"].graph.nodes if "backward" in graph.phases else ():
        if str(node.target) == "embrace.all_to_all_gradients.default":
            found[node.name] = partial(flow.launch_gradients, tables[node.args[1].meta["role"].name])
        elif _reduces_bucket(node):
            found[node.name] = partial(flow.launch_bucket, buckets)
            buckets += 1
    for node_name, launch in found.items():
        launch.__name__ = node_name.replace(".", "_")
    return found


def _reduces_bucket(node: fx.Node) -> bool:
    """An AllReduce of gradients, or their exchange; other passes reduce counts."""
    reduces = str(node.target) in ("_c10d_functional.all_reduce_.default", "embrace.exchange_gradient_.default")
    return reduces and str(node.all_input_nodes[0].target) == "embrace.pack_bucket.default"


class _Packer:
    """Packs one bucket; what backwards under `no_sync` left in `.grad` is reduced along with it."""

    def __init__(self, state: ModelState, names: tuple[str, ...]) -> None:
        self._state = state
        self._names = names
        self.__name__ = "pack_bucket"

    def __call__(self, gradients: Sequence[Tensor], scale: float) -> Tensor:
        parts = [
            self._state.with_unreduced(name, gradient) for name, gradient in zip(self._names, gradients, strict=True)
        ]
        flat = torch.cat([part.reshape(-1) for part in parts])
        return flat.mul_(scale) if scale != 1.0 else flat
