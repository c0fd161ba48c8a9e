"""Parameters placed as a plan says, and placed anew under another plan."""

from __future__ import annotations

import torch
from torch import nn

from embrace_fx.planning.findings import row_updates_of
from embrace_fx.runtime.optimizer.stepping import DenseTable
from embrace_fx.runtime.tables.placement import broadcast_state, materialise, shard_parameter, unshard_parameter
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.setup.setting import Setting
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Plan


def place(setting: Setting, graph: TrainingGraph, plan: Plan) -> None:
    """Shards the tables, makes the replicas equal, and hands the tables to their optimizers."""
    grids = {name: plan[name].grid for name in plan.sharded}
    materialise(setting.model, grids, setting.optimizers, setting.communicator)
    for name in plan.sharded:
        _shard(setting, name, plan)
    if setting.communicator.world_size > 1:
        broadcast_state(setting.model, frozenset(plan.sharded), setting.communicator)
    _hand_over(setting, graph, plan)


def place_anew(setting: Setting, graph: TrainingGraph, old: Plan, new: Plan) -> None:
    """Places tables as another plan says, between two steps; state and gradients of theirs come along. Collective.

    A gradient of a replica is the mean already, the same on all ranks; of a shard each rank has its own part.
    """
    group, state = setting.communicator.group, setting.state
    with setting.communicator.watching(), torch.no_grad():
        for name in old.sharded:
            if name not in new.sharded:
                table = state.tables.pop(name)
                gradient = table.dense_gradient(group)
                table.parameter.grad = None
                unshard_parameter(setting.model, name, setting.optimizers, group).grad = gradient
        for name in new.sharded:
            if name not in old.sharded:
                gradient = state.parameter(name).grad
                state.parameter(name).grad = None
                _shard(setting, name, new)
                if gradient is not None:
                    state.tables[name].add_dense_gradient(gradient)
    ordered = {name: state.tables[name] for name in new.sharded}
    state.tables.clear()
    state.tables.update(ordered)
    _hand_over(setting, graph, new)


def _shard(setting: Setting, name: str, plan: Plan) -> None:
    parameter = shard_parameter(setting.model, name, setting.optimizers, setting.communicator, plan[name].grid)
    setting.state.tables[name] = _row_table(setting, name, parameter)


def _hand_over(setting: Setting, graph: TrainingGraph, plan: Plan) -> None:
    """Tells optimizers and announcements which tables there are."""
    for stepping in setting.stepping.values():
        stepping.sharded, stepping.dense_tables = [], []
    for table in setting.state.tables.values():
        setting.stepping[id(table.optimizer)].sharded.append(table)
    for found in graph.tables:
        parameter = setting.state.parameter(found.parameter)
        if found.parameter not in plan.sharded and _updated_by_rows(setting, parameter):
            table = _row_table(setting, found.parameter, parameter)
            dense = DenseTable(table, all_rows=found.use != "sparse")
            setting.stepping[id(table.optimizer)].dense_tables.append(dense)
    exchanged = (*plan.sharded, *plan.renormed)
    setting.communicator.tables = len(exchanged)
    setting.communicator.watched = tuple(name for name in plan.watched if name not in exchanged)


def _updated_by_rows(setting: Setting, parameter: nn.Parameter) -> bool:
    return row_updates_of(setting.optimizers, setting.classes, setting.options.row_updates, parameter)[1]


def _row_table(setting: Setting, name: str, parameter: nn.Parameter) -> RowTable:
    for optimizer in setting.optimizers:
        if any(p is parameter for group in optimizer.param_groups for p in group["params"]):
            kind = setting.classes[id(optimizer)]
            return RowTable(name, parameter, optimizer, kind, setting.options.row_updates)
    raise AssertionError(f"{name} is updated by rows, but no optimizer holds it")
