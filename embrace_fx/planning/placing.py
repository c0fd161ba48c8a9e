"""Shards parameters as a plan says, and moves them when the plan changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from embrace_fx.planning.tiering import lazily_initialized, open_working_sets, place_tiered, tiered_tables
from embrace_fx.runtime.ranks.step_handshake import MessageFormat
from embrace_fx.runtime.tables.placement import broadcast_state, initialize_meta, shard_parameter, unshard_parameter
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.state_dicts import cut_own_state
from embrace_fx.runtime.tables.table import Member, Table
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.runtime.tiers.rows_ahead import RowsAhead
from embrace_fx.runtime.tiers.tiered_table import REFUSAL, SlotRows, tables_larger_than_memory
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.exactness import row_update_semantics
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Plan


def place_parameters(context: Context, graph: TrainingGraph, plan: Plan) -> None:
    """Shards the tables that a plan shards, and makes all other parameters equal to rank 0's. Collective."""
    grids = {name: plan[name].grid for name in plan.sharded}
    shapes = {name: parameter.shape for name, parameter in context.model.named_parameters()}
    with context.communicator.watching():
        beyond = tiered_tables(context, plan, context.communicator.rank)
        lazily = [context.state.parameter(name) for name in beyond if lazily_initialized(context, name) is not None]
        made = initialize_meta(
            context.model, grids, context.optimizer_hooks.known_optimizers.optimizers, context.communicator, lazily
        )
        sets = open_working_sets(context, plan, beyond) if beyond else {}
        for name in plan.sharded:
            if name in sets:
                table = place_tiered(context, name, shapes[name], made.get(name), *sets[name])
                table.has_sparse_gradient = plan[name].sparse
                context.state.tables[name] = table
            else:
                _shard_table(context, name, plan, shapes[name], made.get(name))
        if sets:
            context.state.hints = RowsAhead(context.state, context.communicator)
    apart, buffers = context.state.ignored.union(plan.sharded), context.options.shares_buffers
    broadcast_state(context.model, apart, context.communicator, buffers=buffers)
    _register_tables(context, graph, plan)


def move_parameters(context: Context, graph: TrainingGraph, old: Plan, new: Plan) -> None:
    """Shards the tables that only plan `new` shards, and gathers those that only plan `old` shards, with their
    optimizer state and gradients. Collective.

    When a table is sharded, each rank keeps its part of the gradient, which is already the mean over ranks.
    """
    state = context.state
    gather_tables(context, [name for name in old.sharded if name not in new.sharded])
    with context.communicator.watching(), torch.no_grad():
        for name in new.sharded:
            if name not in old.sharded:
                parameter = state.parameter(name)
                gradient, parameter.grad = parameter.grad, None
                _shard_table(context, name, new, parameter.shape, None)
                if gradient is not None:
                    state.tables[name].add_whole_gradient(gradient)
    ordered = {name: state.tables[name] for name in new.sharded}
    state.tables.clear()
    state.tables.update(ordered)
    _register_tables(context, graph, new)


def gather_tables(context: Context, names: Sequence[str]) -> None:
    """Gathers the sharded tables `names`, so that every rank has them whole, with optimizer state and gradients.
    Collective.
    """
    with context.communicator.watching(), torch.no_grad():
        for name in names:
            table = context.state.tables[name]
            if isinstance(table.store, SlotRows):
                raise RuntimeError(REFUSAL.format(name=name, asked="An operation on the whole table"))
            del context.state.tables[name]
            unshard_parameter(table, context.optimizer_hooks.known_optimizers.optimizers)


def gather_buffers(model: nn.Module) -> None:
    """Replaces the model's sharded buffers, such as pruning masks of tables, by whole ones. Collective."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if isinstance(buffer, TableShard):
                module._buffers[key] = buffer.full_tensor()


def _shard_table(context: Context, name: str, plan: Plan, shape: torch.Size, mesh: DeviceMesh | None) -> None:
    """Shards a table as the plan says, and adds the shard to the model's state. Collective.

    Args:
        shape: the shape of the whole table.
        mesh: the mesh of the ranks if the parameter is already this rank's shard, or None.
    """
    parameter, communicator = context.state.parameter(name), context.communicator
    layout = shard_parameter(name, parameter, shape, communicator, plan[name].grid, mesh)
    always, reads = context.options.row_updates == "replay", context.state.reads
    table = Member(
        parameter,
        layout,
        row_update_semantics(context.options.row_updates),
        may_defer=(lambda: always or not reads.in_every_step) if plan[name].defers_rows else (lambda: False),
        gradients=context.state.gradients_reader(),
    )
    for optimizer in context.optimizer_hooks.known_optimizers.optimizers:
        if any(p is parameter for group in optimizer.param_groups for p in group["params"]):
            table.optimizer = optimizer
        if state := optimizer.state.get(parameter):
            optimizer.state[parameter] = cut_own_state(parameter, layout, state)
    table.has_sparse_gradient = plan[name].sparse
    context.state.tables[name] = table


def _register_tables(context: Context, graph: TrainingGraph, plan: Plan) -> None:
    """Registers placed tables with the optimizer hooks, as members of joined tables, and with the messages that ranks
    exchange at the start of each step.
    """
    row_updates, optimizer_hooks = row_update_semantics(context.options.row_updates), context.optimizer_hooks
    optimizer_hooks.replicas = []
    optimizer_hooks.of_any_layout |= any(use.sparse for table in graph.tables for use in table.uses)
    for found in graph.tables:
        parameter = context.state.parameter(found.parameter)
        if (
            found.parameter not in plan.sharded
            and optimizer_hooks.known_optimizers.dense_update_policy(parameter, row_updates) == "lazy"
        ):
            table = Member(parameter, Layout.of_table(found.parameter, parameter.shape), row_updates)
            table.is_read_densely = found.use != "sparse"
            optimizer_hooks.replicas.append(table)
    exchanged = (*plan.sharded, *plan.renormed)
    tables = context.state.tables
    beyond = [rows.memory for rows in tables_larger_than_memory(tables).values()]
    context.announcements.trouble = lambda: next((each.failure for each in beyond if each.failure), None)
    context.state.spaces = {
        space.name: Table.from_members(space, [tables[n] for n in space.tables]) for space in plan.spaces
    }
    watched = tuple(name for name in plan.watched if name not in exchanged)
    context.announcements.form = MessageFormat(len(plan.row_exchanges) + len(plan.renormed), watched)
