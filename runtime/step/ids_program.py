"""Builds the part of a program that finds a batch's rows, which can run before the batch's own step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from embrace_fx.runtime.flow.next_batch import IdsProgram
from embrace_fx.runtime.kernels import padded_unique_ids
from embrace_fx.runtime.step.runnable_phase import Runnable, make_runnable
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.graph import BatchInput, Mutation, TrainingGraph, Values, inputs_of, outputs_of
from embrace_fx.vocabulary.ops import draws_random_numbers, op_name


def make_ids_program(graph: TrainingGraph, state: ModelState, unique_phase: Runnable) -> IdsProgram:
    """Builds the functions that find which table rows a batch reads and which of them each rank must send."""
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
        unique=lambda leaves: unique_phase.run_and_save(leaves, {}),
        unique_on_device=_unique_on_device(graph, state, sent),
        rows_of_batch=lambda values: [values[name] for name in sent],
        routing=_make_routing(graph, state),
        tables=tables,
        spaces=graph.spaces,
        num_rows=tuple(size for gather in gathers for size in gather.args[1]),
        routes=routes,
        paddings=paddings,
        is_pure=_can_run_ahead(graph.phases["unique"], graph.phases["forward"]),
        reads=tuple(role.index for _, role in inputs_of(graph.phases["unique"]) if isinstance(role, BatchInput)),
    )


def _unique_on_device(
    graph: TrainingGraph, state: ModelState, sent: Sequence[str]
) -> Callable[[Sequence[Any]], tuple[Values, list[Tensor]]]:
    """Returns the function `unique_on_device` of an `IdsProgram`. It pads the unique ids to a fixed length, so that the
    host need not wait for their number. `sent` has, for each table, the name of the value with its unique ids.
    """
    counts: dict[str, Tensor] = {}

    def device_function(node: fx.Node) -> Callable[..., Any] | None:
        if op_name(node) != "embrace::unique_ids":
            return None
        name = next(user.name for user in node.users if user.args[1] == 0)

        def unique_ids_on_device(ids: Sequence[Tensor], num_rows: int, padding_idx: int) -> list[Tensor]:
            rows, counts[name], where = padded_unique_ids(ids, num_rows, padding_idx)
            return [rows, *where]

        return unique_ids_on_device

    unique = make_runnable(graph.phases["unique"], state, device_function)

    def unique_on_device(leaves: Sequence[Any]) -> tuple[Values, list[Tensor]]:
        values = unique.run_and_save(leaves, {})
        found = [counts[name] for name in sent]
        counts.clear()
        return values, found

    return unique_on_device


def _make_routing(graph: TrainingGraph, state: ModelState) -> Callable[[Values, list[Tensor]], None]:
    """Returns the function `routing` of an `IdsProgram`: it runs the ids phase on ids that were already exchanged."""
    unpacked: list[list[Tensor]] = []

    def gathered_ids(node: fx.Node) -> Callable[..., Any] | None:
        if op_name(node) == "embrace::unpack_ids":
            return lambda *_: unpacked.pop()
        launches = ("embrace::all_gather_ids", "_c10d_functional::wait_tensor")
        return (lambda *_: None) if op_name(node) in launches else None

    route = make_runnable(graph.phases["ids"], state, gathered_ids)

    def routing(values: Values, of_tables: list[Tensor]) -> None:
        unpacked.append(of_tables)
        route.run_and_save((), values)

    return routing


def _can_run_ahead(unique: fx.GraphModule, forward: fx.GraphModule) -> bool:
    """Returns whether a batch's ids can be computed before its step: their graph (`unique`) draws no random numbers and
    reads no values that the forward writes.
    """
    written = {role.of for _, role in outputs_of(forward) if isinstance(role, Mutation)}
    return not any(map(draws_random_numbers, unique.graph.nodes)) and written.isdisjoint(
        role for _, role in inputs_of(unique)
    )
