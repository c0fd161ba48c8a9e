"""The ids' phases of a graph as functions that can run ahead of their batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from embrace_fx.runtime.flow.next_batch import IdsProgram
from embrace_fx.runtime.kernels import padded_unique_ids
from embrace_fx.runtime.step.runnable_phase import Runnable, runnable
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.graph import BatchInput, Mutation, TrainingGraph, Values, inputs_of, outputs_of
from embrace_fx.vocabulary.ops import draws, op_name


def ids_program(graph: TrainingGraph, state: ModelState, unique_phase: Runnable) -> IdsProgram:
    """Returns the `IdsProgram` of a graph.

    Args:
        unique_phase: the unique phase as it runs in its batch's own step.
    """
    gathers = [n for n in graph.phases["ids"].graph.nodes if op_name(n) == "embrace::all_gather_ids"]
    sent = [node.meta["role"].name for gather in gathers for node in gather.args[0]]
    paddings = {
        node.args[3]: tuple(node.args[4])
        for node in (graph.phases["backward"].graph.nodes if "backward" in graph.phases else ())
        if op_name(node) == "embrace::submit_gradients"
    }
    tables = tuple(table for gather in gathers for table in gather.meta["tables"])
    routes = {
        node.args[3]: (node.args[1].meta["role"].name, node.args[2].meta["role"].name)
        for node in graph.phases["forward"].graph.nodes
        if op_name(node) == "embrace::submit_rows"
    }
    return IdsProgram(
        unique=lambda leaves: unique_phase.saved(leaves, {}),
        unique_on_device=_unique_on_device(graph, state, sent),
        rows_of_batch=lambda values: [values[name] for name in sent],
        routing=_routing(graph, state),
        tables=tables,
        spaces=graph.spaces,
        num_rows=tuple(size for gather in gathers for size in gather.args[1]),
        routes=routes,
        paddings=paddings,
        is_pure=_are_pure(graph.phases["unique"], graph.phases["forward"]),
        reads=tuple(role.index for _, role in inputs_of(graph.phases["unique"]) if isinstance(role, BatchInput)),
    )


def _unique_on_device(
    graph: TrainingGraph, state: ModelState, sent: Sequence[str]
) -> Callable[[Sequence[Any]], tuple[Values, list[Tensor]]]:
    """Returns the function that finds a batch's unique rows on a device, padded to a fixed length.

    Args:
        sent: names of the unique rows, by table.
    """
    counts: dict[str, Tensor] = {}

    def unique_of(node: fx.Node) -> Callable[..., Any] | None:
        """Returns the function that finds unique ids on the device, for nodes that do so."""
        if op_name(node) != "embrace::unique_ids":
            return None
        name = next(user.name for user in node.users if user.args[1] == 0)

        def unique_ids_on_device(ids: Sequence[Tensor], num_rows: int, padding_idx: int) -> list[Tensor]:
            """Finds unique ids, padded to a fixed length, and notes their count."""
            rows, counts[name], where = padded_unique_ids(ids, num_rows, padding_idx)
            return [rows, *where]

        return unique_ids_on_device

    unique = runnable(graph.phases["unique"], state, unique_of)

    def unique_on_device(leaves: Sequence[Any]) -> tuple[Values, list[Tensor]]:
        """Returns the values of the phase and the counts of unique ids."""
        values = unique.saved(leaves, {})
        found = [counts[name] for name in sent]
        counts.clear()
        return values, found

    return unique_on_device


def _routing(graph: TrainingGraph, state: ModelState) -> Callable[[Values, list[Tensor]], None]:
    """Returns the function that runs the ids phase, given the ids that all ranks have exchanged."""
    unpacked: list[list[Tensor]] = []

    def given(node: fx.Node) -> Callable[..., Any] | None:
        """Returns a function that returns the exchanged ids, for a node that would exchange them."""
        if op_name(node) == "embrace::unpack_ids":
            return lambda *_: unpacked.pop()
        launches = ("embrace::all_gather_ids", "_c10d_functional::wait_tensor")
        return (lambda *_: None) if op_name(node) in launches else None

    route = runnable(graph.phases["ids"], state, given)

    def routing(values: Values, of_tables: list[Tensor]) -> None:
        """Routes the gathered ids of all tables."""
        unpacked.append(of_tables)
        route.saved((), values)

    return routing


def _are_pure(unique: fx.GraphModule, forward: fx.GraphModule) -> bool:
    """Returns whether a batch's ids can be found in advance: without random numbers, or values that the forward
    writes.
    """
    written = {role.of for _, role in outputs_of(forward) if isinstance(role, Mutation)}
    return not any(map(draws, unique.graph.nodes)) and written.isdisjoint(role for _, role in inputs_of(unique))
