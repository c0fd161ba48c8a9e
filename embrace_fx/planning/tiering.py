"""Which tables keep a working set of rows in memory, as `table_memory` asks, and how many rows."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embrace_fx.planning.fitting import without_tables
from embrace_fx.runtime.tables.layouts import Place, mesh_of, own_part
from embrace_fx.runtime.tables.part import Origin
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.runtime.tables.placement import shard_parameter
from embrace_fx.runtime.tables.table_part import TablePart, become_part, local_part
from embrace_fx.runtime.tiers.initial import FirstValues
from embrace_fx.runtime.tiers.record_file import TierError
from embrace_fx.runtime.tiers.records import Column
from embrace_fx.runtime.tiers.tiered_table import (
    REFUSAL,
    HeldInFile,
    TieredTable,
    not_replayable,
    state_columns,
)
from embrace_fx.runtime.tiers.working_set import ROW_BYTES, ROWS_AT_ONCE, SLOT_BYTES, TAKEN, WEIGHTS, WorkingSet
from embrace_fx.setup.setting import Setting
from embrace_fx.vocabulary.exactness import semantics
from embrace_fx.vocabulary.plan import Plan


@dataclass(frozen=True)
class Tier:
    """A table beyond memory.

    Attributes:
        memory: bytes for its working set, or, below 1, the share of its rows.
        columns: what there is of a row on this rank, by name.
    """

    memory: float
    columns: Mapping[str, Column]

    def slots(self, rows: int, table: str) -> int:
        """How many rows stay in memory.

        Raises:
            ValueError: none would.
        """
        of_slot = sum(column.nbytes for column in self.columns.values()) + SLOT_BYTES
        if self.memory < 1:
            return max(1, min(rows, ceil(self.memory * rows)))
        found = int((self.memory - rows * ROW_BYTES) // (of_slot * 1.25))  # a part of the rows is on its way
        if found < 1:
            raise ValueError(
                f"expected table_memory of at least {rows * ROW_BYTES + of_slot:,} bytes for {table}, in the first "
                f"call, found {int(self.memory):,}: {ROW_BYTES} bytes tell of each of its {rows:,} rows where it is, "
                f"and one row in memory takes {of_slot}. Raise it, or train on more ranks."
            )
        return min(rows, found)


def fit_plan(setting: Setting, plan: Plan) -> Plan:
    """The plan with each table beyond memory in no stack.

    Raises:
        ValueError: a table cannot be kept so; the same on every rank.
    """
    asked = _asked(setting, plan)
    for name in asked:
        _check(setting, name, plan)
    stacks = (without_tables(plan, stack, list(asked)) for stack in plan.stacks)
    return replace(plan, stacks=tuple(stack for stack in stacks if len(stack.tables) > 1)) if asked else plan


def tiers(setting: Setting, plan: Plan) -> dict[str, Tier]:
    """The tables beyond memory, by name."""
    asked = _asked(setting, plan)
    columns = {name: _columns(setting, name) for name in asked}
    if not isinstance(setting.options.table_memory, Mapping) and any(memory >= 1 for memory in asked.values()):
        sizes = {n: plan[n].shape[0] * sum(c.nbytes for c in columns[n].values()) for n in asked}
        asked = {name: memory * sizes[name] / sum(sizes.values()) for name, memory in asked.items()}
    return {name: Tier(memory, columns[name]) for name, memory in asked.items()}


def _asked(setting: Setting, plan: Plan) -> dict[str, float]:
    memory = setting.options.table_memory
    if memory is None:
        return {}
    if not isinstance(memory, Mapping):
        if not plan.sharded:
            raise ValueError(
                "expected a table in shards, with table_memory, in the first call, found none: tables that are whole "
                "on each rank stay in memory. Pass strategy='alltoall', or leave table_memory out; model.report() "
                "tells why a table is whole."
            )
        return dict.fromkeys(plan.sharded, float(memory))
    found: dict[str, float] = {}
    names = [decision.parameter for decision in plan]
    for pattern, asked in memory.items():
        if not (matched := fnmatch.filter(names, pattern)):
            raise ValueError(
                f"expected the name of a table, in table_memory, found {pattern!r}, which no parameter matches. The "
                f"parameters are {', '.join(names)}."
            )
        found |= dict.fromkeys(matched, float(asked))
    return found


def _check(setting: Setting, name: str, plan: Plan) -> None:
    """Raises `ValueError` where a table cannot have a working set."""
    parameter, holders = setting.state.parameter(name), setting.stepping.holders
    held = holders.of(parameter)
    if name not in plan.sharded or plan[name].grid is not None:
        how = f"on a {plan[name].grid}" if plan[name].grid is not None else f"whole on each rank: {plan[name].reason}"
        raise ValueError(
            f"expected {name} in shards by columns, with table_memory, in the first call, found it {how}. Pass "
            f"strategy={{{name!r}: 'alltoall'}}, or leave it out of table_memory."
        )
    if parameter.device.type not in ("cpu", "meta"):
        raise ValueError(
            f"expected {name} on the CPU, with table_memory, found it on {parameter.device}: a working set on a device "
            "is not there yet. Leave it out of table_memory."
        )
    if len(held) != 1:
        raise ValueError(
            f"expected one optimizer of {name} in compile(), with table_memory, found {len(held)}: what it keeps of a "
            "row lies beside the row. Pass it: compile(model, optimizer=optimizer, ...)."
        )
    how = holders.moving(parameter, semantics(setting.options.row_updates))
    if how == "sweep" or (how and setting.options.row_updates == "sweep"):
        raise ValueError(not_replayable(name, type(held[0][0])))


def _columns(setting: Setting, name: str) -> dict[str, Column]:
    parameter = setting.state.parameter(name)
    ((optimizer, group),) = setting.stepping.holders.of(parameter)
    width = len(_own_columns(setting, parameter.shape))
    like = torch.empty((0, width), dtype=parameter.dtype, device="cpu")
    columns = {WEIGHTS: Column((width,), parameter.dtype), TAKEN: Column((), torch.int64)}
    return columns | state_columns(optimizer, group, like, optimizer.state.get(parameter) or {})


def _own_columns(setting: Setting, shape: torch.Size) -> range:
    mesh = mesh_of(setting.communicator, "cpu", None)
    return range(shape[1])[own_part(shape, mesh)[1]] if mesh is not None else range(shape[1])


def begins_lazily(setting: Setting, name: str) -> nn.Embedding | nn.EmbeddingBag | None:
    """Finds the module of a table on the meta device whose rows are computed when they are first read; None: its values
    are there, or its module has its own way to make them."""
    parameter = setting.state.parameter(name)
    if parameter.device.type != "meta":
        return None
    for module in setting.model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight is parameter:
            stock = type(module).reset_parameters in (nn.Embedding.reset_parameters, nn.EmbeddingBag.reset_parameters)
            return module if stock else None
    return None


def place_tiered(setting: Setting, name: str, shape: torch.Size, mesh: DeviceMesh | None, tier: Tier) -> TieredTable:
    """Puts a table into its file, or leaves its rows to be computed, and a working set into its place. Collective.

    Args:
        shape: of the whole table.
        mesh: where its parts lie, if its parameter is this rank's part already.
    """
    parameter, communicator = setting.state.parameter(name), setting.communicator
    ((optimizer, _),) = setting.stepping.holders.of(parameter)
    state, columns = optimizer.state.get(parameter) or {}, _own_columns(setting, shape)
    module, first = begins_lazily(setting, name), {}
    if module is None:
        place = shard_parameter(name, parameter, shape, communicator, None, mesh)
        parts = {key: place.part_of(value, communicator.group) for key, value in state.items() if key in tier.columns}
        first = {WEIGHTS: local_part(parameter), **{key: local_part(part) for key, part in parts.items()}}
    else:
        communicator.connect(torch.device("cpu"))
        place = Place(shape, mesh_of(communicator, "cpu", None))
    like = torch.empty_strided((shape[0], len(columns)), (0, 0), dtype=parameter.dtype)  # of one element
    seed = communicator.gather(torch.initial_seed() % 2**62, int)[0] ^ crc32(name.encode())
    initial = FirstValues(columns, shape[1], parameter.dtype, seed, getattr(module, "padding_idx", None))
    memory = _made(setting, name, tier, shape[0], initial, first)
    optimizer.state[parameter] = {key: value for key, value in state.items() if key not in tier.columns}
    if not isinstance(parameter, TablePart):
        become_part(parameter, like, Layout.of_table(place), Origin(name, "", place.mesh, communicator))
    assert isinstance(parameter, TablePart)
    parameter.held = HeldInFile(like, REFUSAL.format(name=name, asked="an op"))
    return TieredTable(
        name,
        parameter,
        place,
        communicator,
        semantics(setting.options.row_updates),
        optimizer,
        gradients=setting.state.gradients_reader(),
        memory=memory,
        shown=tier.columns.keys() & state.keys(),
    )


def _made(
    setting: Setting,
    name: str,
    tier: Tier,
    rows: int,
    initial: FirstValues,
    first: Mapping[str, Tensor],
) -> WorkingSet:
    """The working set of a part, its first values in the file. Collective: what one rank cannot do, none does."""
    assert setting.options.tables_in is not None
    memory, told = None, ""
    try:
        memory = WorkingSet(name, rows, tier.slots(rows, name), tier.columns, initial, setting.options.tables_in)
        for some in torch.arange(rows, device="cpu").split(ROWS_AT_ONCE) if first else ():
            memory.store(some, {key: value.index_select(0, some) for key, value in first.items()})
    except (ValueError, TierError) as error:
        told = str(error)
    for rank, each in enumerate(setting.communicator.gather(told, str)):
        if each:
            raise ValueError(each if setting.communicator.world_size == 1 else f"on rank {rank}: {each}")
    assert memory is not None
    return memory
