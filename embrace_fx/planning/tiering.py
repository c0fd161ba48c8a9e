"""Decides which tables keep only some rows in memory, as `table_memory` requests, and how many rows."""

from __future__ import annotations

import fnmatch
import socket
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embrace_fx.cost.sparsity import Sparsity
from embrace_fx.cost.storage import Draws, RowMemory, StorageTier
from embrace_fx.runtime.launch.streams import choose_streams
from embrace_fx.runtime.memory.copies import PinnedCopies
from embrace_fx.runtime.memory.resident import available_bytes
from embrace_fx.runtime.tables.placement import shard_parameter
from embrace_fx.runtime.tables.shard_layout import Layout, make_mesh, owned_slices
from embrace_fx.runtime.tables.table import Member
from embrace_fx.runtime.tables.table_shard import TableShard, become_shard, cut_own_shard, to_plain
from embrace_fx.runtime.tables.update_rule import not_deferrable_error
from embrace_fx.runtime.tiers.budget import Tier
from embrace_fx.runtime.tiers.initial import InitialValues, InitialValuesOfTables
from embrace_fx.runtime.tiers.record_file import TierError, measure_disk, measure_host
from embrace_fx.runtime.tiers.records import TAKEN, WEIGHTS, Column, Records
from embrace_fx.runtime.tiers.tiered_table import REFUSAL, FileStorage, SlotRows, first_row_state
from embrace_fx.runtime.tiers.working_set import ROWS_AT_ONCE, WorkingSet
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.exactness import STILL, row_update_semantics
from embrace_fx.vocabulary.joined_table import JoinedTable
from embrace_fx.vocabulary.plan import Decision, Grid, Plan


def add_working_sets(
    context: Context, plan: Plan, sparsity: Mapping[str, Sparsity], storage: tuple[StorageTier, ...] | None = None
) -> Plan:
    """Limits the number of rows in memory for each table that `table_memory` selects. The rows in memory are the
    table's working set. Returns the plan with the limits. Collective.

    Args:
        sparsity: name of a table -> the sparsity of its gradients, on rank 0.
        storage: the kinds of storage for rows that are not in memory, or None to measure them.

    Raises:
        ValueError: a table cannot have a working set, or one step reads more rows than the limit allows in memory;
            raised on every rank.
    """
    asked = _memory_limits(context, plan)
    if not asked:
        return plan
    for name in asked:
        _check_supported(context, name, plan)
    found = tiered_tables(context, plan, rank=0)  # rank 0 has at least as many columns as any other rank
    spaces = [each for space in plan.spaces for each in _split_space(context, plan, space, found)]
    if context.options.spill_to is None:
        _check_host(context, tiered_tables(context, plan, context.communicator.rank), plan)
    largest = max((Records(tier.columns) for tier in found.values()), key=lambda each: each.nbytes)
    rest = _measure_storage(context, largest) if storage is None else storage
    own = {}
    for name, tier in found.items():
        of, lies = plan[name], sparsity.get(name)
        # A reused plan contains how often each row is looked up.
        repeated = Draws(of.shape[0], 0.0, 0.0) if of.memory is None else of.memory.draws
        together = of.rows.together if of.rows is not None else 1
        own[name] = tier.row_memory(name, of.shape[0], together, repeated if lies is None else Draws.fit(lies), rest)
    agreed = context.communicator.gather(own, dict[str, RowMemory])[0]
    for name, memory in agreed.items():
        if plan[name].measured and memory.slots < memory.at_once:
            least = found[name].table_memory_text(memory.at_once, memory.num_rows)
            raise ValueError(
                f"table_memory: {found[name].whole:,g} is too little for {name}. This limit keeps {memory.slots:,} "
                f"rows in memory, but one step reads {memory.at_once:,} rows on all ranks together. Pass at least "
                f"{least}, or use smaller batches."
            )
    decisions = tuple(replace(each, memory=agreed.get(each.parameter)) for each in plan)
    spaces = context.communicator.gather(spaces, list[JoinedTable])[0]
    return replace(plan, decisions=decisions, spaces=tuple(space for space in spaces if len(space.tables) > 1))


def _split_space(context: Context, plan: Plan, space: JoinedTable, beyond: Mapping[str, Tier]) -> list[JoinedTable]:
    """Splits a joined table into joined tables, each of which can have a single working set.

    Tables that fit in memory stay joined. Tables larger than memory stay joined if they are on the CPU and store equal
    columns. On other devices, each of them is separated.

    Args:
        space: the joined table.
        beyond: name of a table larger than memory -> its memory limit and columns.
    """
    on_host = context.device.type == "cpu"
    sets: dict[object, list[str]] = {}
    for name in space.tables:
        columns = tuple(beyond[name].columns.items()) if name in beyond else ()
        sets.setdefault(columns if on_host or not columns else name, []).append(name)
    return [plan.join_tables(tables) for tables in sets.values()]


def _measure_storage(context: Context, records: Records) -> tuple[StorageTier, ...]:
    """Measures how long the slowest rank takes to read a record from storage, and to write it. Returns the storage as
    the only entry of a tuple. Collective.

    Args:
        records: the format in which a table's rows are stored.
    """
    directory, streams = context.options.spill_to, choose_streams(context.device)
    try:
        own = measure_host(records) if directory is None else measure_disk(directory, records)
    except TierError:  # a missing file raises later, when it is opened
        own = (0.0, 0.0)
    # Rows are copied between device and host while others are read or written, so the slower of both is the limit.
    if streams is not None:
        copied_ms = records.nbytes / PinnedCopies(streams).measure(context.device)[0]
        own = max(own[0], copied_ms), max(own[1], copied_ms)
    read, write = zip(*context.communicator.gather(own, tuple[float, float]), strict=True)
    return (StorageTier("host memory" if directory is None else "file", max(read), max(write)),)


def _check_host(context: Context, found: Mapping[str, Tier], plan: Plan) -> None:
    """Raises `ValueError` on every rank if a host has too little free memory for the rows of these tables. Collective.

    Args:
        found: the tables that do not keep all rows in the memory of their device.
    """
    own = sum(plan[name].shape[0] * Records(tier.columns).nbytes for name, tier in found.items())
    everyone = context.communicator.gather((socket.gethostname(), own, available_bytes()), tuple[str, int, int])
    for host, _, available in everyone:
        needed = sum(nbytes for name, nbytes, _ in everyone if name == host)
        if needed > available > 0:
            raise ValueError(
                f"table_memory: storing the rows of {', '.join(found)} in the memory of host {host} takes {needed:,} "
                f"bytes, but only {available:,} bytes are free. Pass a directory as spill_to to store the rows in a "
                "file, or train on more hosts."
            )


def tiered_tables(context: Context, plan: Plan, rank: int) -> dict[str, Tier]:
    """Returns, for each table that `table_memory` selects, its memory limit and the columns that `rank` stores for each
    row.
    """
    whole = _memory_limits(context, plan)
    columns = {name: _record_columns(context, name, plan[name].shape, rank) for name in whole}
    asked = dict(whole)
    if not isinstance(context.options.table_memory, Mapping) and any(memory >= 1 for memory in asked.values()):
        sizes = {n: plan[n].shape[0] * sum(c.nbytes for c in columns[n].values()) for n in asked}
        asked = {name: memory * sizes[name] / sum(sizes.values()) for name, memory in asked.items()}
    return {name: Tier(memory, whole[name], columns[name]) for name, memory in asked.items()}


def _memory_limits(context: Context, plan: Plan) -> dict[str, float]:
    """Maps each table that `table_memory` selects to its memory limit. A limit of at least 1 is in bytes. A limit below
    1 is the share of the table's rows to keep in memory.
    """
    if (memory := context.options.table_memory) is None:
        return {}
    if not isinstance(memory, Mapping):
        if not plan.sharded:
            raise ValueError(
                "table_memory: no table is sharded, but table_memory applies only to sharded tables. Pass "
                "strategy='alltoall', or leave out table_memory. model.report() says why tables are not sharded."
            )
        return dict.fromkeys(plan.sharded, float(memory))
    found: dict[str, float] = {}
    names = [decision.parameter for decision in plan]
    for pattern, asked in memory.items():
        if not (matched := fnmatch.filter(names, pattern)):
            raise ValueError(f"table_memory: {pattern!r} matches no parameter. The parameters are {', '.join(names)}.")
        found |= dict.fromkeys(matched, float(asked))
    return found


def _check_supported(context: Context, name: str, plan: Plan) -> None:
    """Raises `ValueError` if a table cannot keep only some rows in memory."""
    parameter, known_optimizers = context.state.parameter(name), context.optimizer_hooks.known_optimizers
    held = known_optimizers.find(parameter)
    if name not in plan.sharded or plan[name].grid is not None:
        how = f"sharded by a {plan[name].grid}" if plan[name].grid is not None else f"whole ({plan[name].reason})"
        raise ValueError(
            f"table_memory: {name} must be sharded by columns, but is {how}. Pass strategy={{{name!r}: 'alltoall'}}, "
            "or leave the table out of table_memory."
        )
    device = _device_of(context, name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"table_memory: {name} is on device {device}, but table_memory supports only the CPU and CUDA devices. "
            "Leave the table out of table_memory."
        )
    if device.type == "cpu" and context.options.spill_to is None:
        raise ValueError(
            f"table_memory: {name} is on the CPU, so the rows beyond the limit must be stored in a file. Pass the "
            "directory for this file as spill_to. (Without spill_to, a model on CUDA uses host memory.)"
        )
    if len(held) != 1:
        raise ValueError(
            f"table_memory: {len(held)} of the optimizers passed to compile() update {name}, but exactly one must "
            "update it, because the optimizer's state is stored with each row. Call compile(model, "
            "optimizer=optimizer, ...)."
        )
    how = known_optimizers.dense_update_policy(parameter, row_update_semantics(context.options.row_updates))
    if how == "sweep" or (how not in STILL and context.options.row_updates == "sweep"):
        raise ValueError(not_deferrable_error(name, type(held[0][0])))


def _record_columns(context: Context, name: str, shape: tuple[int, ...], rank: int) -> dict[str, Column]:
    """Returns the columns that a rank stores for each row of a table, by name: weights, number of applied steps, and
    optimizer state.
    """
    parameter = context.state.parameter(name)
    ((optimizer, group),) = context.optimizer_hooks.known_optimizers.find(parameter)
    width = len(_owned_columns(shape, context.communicator.world_size, rank))
    like = torch.empty((0, width), dtype=parameter.dtype, device="cpu")
    columns = {WEIGHTS: Column((width,), parameter.dtype), TAKEN: Column((), torch.int64)}
    return columns | first_row_state(optimizer, group, like)[0]


def _owned_columns(shape: tuple[int, ...], ranks: int, rank: int) -> range:
    """Returns the columns that `rank` owns if a table of this shape is sharded by columns over `ranks` ranks."""
    return range(shape[1])[owned_slices(shape, Grid(1, ranks), rank)[1]]


def lazily_initialized(context: Context, name: str) -> nn.Embedding | nn.EmbeddingBag | None:
    """Returns the embedding layer of a table on the meta device, if the table's initial values can be computed row by
    row. Returns None if the table has values already, or its module overrides `reset_parameters`.
    """
    parameter = context.state.parameter(name)
    if not parameter.is_meta:
        return None
    for module in context.model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module._parameters.get("weight") is parameter:
            stock = type(module).reset_parameters in (nn.Embedding.reset_parameters, nn.EmbeddingBag.reset_parameters)
            return module if stock else None
    return None


def open_working_sets(context: Context, plan: Plan, beyond: Mapping[str, Tier]) -> dict[str, tuple[WorkingSet, int]]:
    """Creates the working sets, which keep some rows of tables larger than memory. The tables of a joined table share
    one. Collective: raises on all ranks if it fails on one.

    Args:
        beyond: name of a table larger than memory -> its memory limit and columns.

    Returns:
        Maps the name of a table to (its working set, the index of the table's first row in the working set).
    """
    found: dict[str, tuple[WorkingSet, int]] = {}
    told, directory = None, context.options.spill_to
    for name, tables in plan.row_exchanges.items():
        if tables[0] not in beyond:
            continue
        space, columns, device = plan.join_tables(tables), beyond[tables[0]].columns, _device_of(context, tables[0])
        first_rows = {table: space.rows_of(table).start for table in tables}
        initial = InitialValuesOfTables(
            {first: _initial_values(context, each, plan[each]) for each, first in first_rows.items()}
        )
        rows, slots = space.bounds[-1], sum(plan.memory[each].slots for each in tables)
        try:
            memory = WorkingSet(
                name, rows, slots, columns, initial, directory, lambda: context.optimizer_hooks.recorder, device
            )
            found |= {table: (memory, first) for table, first in first_rows.items()}
        except TierError as error:
            told = told or str(error)
    _raise_on_all(context, told)
    return found


def _device_of(context: Context, name: str) -> torch.device:
    """Returns the device of a parameter, or the model's device if the parameter is on the meta device."""
    parameter = context.state.parameter(name)
    return context.device if parameter.is_meta else parameter.device


def _initial_values(context: Context, name: str, decision: Decision) -> InitialValues:
    """Returns an object that computes the initial values of a table's rows, for the columns that this rank owns.
    Collective.
    """
    communicator, module = context.communicator, lazily_initialized(context, name)
    seed = communicator.gather(torch.initial_seed() % 2**62, int)[0] ^ crc32(name.encode())
    own = _owned_columns(decision.shape, communicator.world_size, communicator.rank)
    dtype, padding = context.state.parameter(name).dtype, getattr(module, "padding_idx", None)
    return InitialValues(own, decision.shape[1], dtype, seed, padding)


def place_tiered(
    context: Context, name: str, shape: torch.Size, mesh: DeviceMesh | None, memory: WorkingSet, first: int
) -> Member:
    """Moves the rows of a table larger than memory to storage. The rows of a lazily initialized table are computed when
    they are first read instead. Returns the table. Collective.

    Args:
        shape: the shape of the whole table.
        mesh: the mesh of the ranks if the parameter is already this rank's shard, or None.
        memory: the working set of the table.
        first: the index of the table's first row in the working set.
    """
    parameter, communicator = context.state.parameter(name), context.communicator
    ((optimizer, _),) = context.optimizer_hooks.known_optimizers.find(parameter)
    device, columns = _device_of(context, name), memory.records.columns
    state, values = optimizer.state.get(parameter) or {}, dict[str, Tensor]()
    if lazily_initialized(context, name) is None:
        layout = shard_parameter(name, parameter, shape, communicator, None, mesh)
        parts = {key: cut_own_shard(value, layout) for key, value in state.items() if key in columns}
        values = {WEIGHTS: to_plain(parameter), **{key: to_plain(part) for key, part in parts.items()}}
    else:
        communicator.connect(device)
        layout = Layout.of_table(name, shape, make_mesh(communicator, device.type, None), weakref.ref(communicator))
    _store_initial_values(context, memory, first, shape[0], values)
    width = len(_owned_columns(shape, communicator.world_size, communicator.rank))
    # A placeholder that takes the memory of one element.
    like = torch.empty_strided((shape[0], width), (0, 0), dtype=parameter.dtype, device=device)
    if not isinstance(parameter, TableShard):
        become_shard(parameter, like, layout)
    assert isinstance(parameter, TableShard)
    parameter.held = FileStorage(like, REFUSAL.format(name=name, asked="This operation"))
    return Member(
        parameter,
        layout,
        row_update_semantics(context.options.row_updates),
        optimizer,
        may_defer=lambda: True,
        gradients=context.state.gradients_reader(),
        store=partial(SlotRows, memory=memory, first=first),
    )


def _store_initial_values(
    context: Context, memory: WorkingSet, first: int, rows: int, values: Mapping[str, Tensor]
) -> None:
    """Writes the initial values of a table to a working set. Collective: raises on all ranks if it fails on one.

    Args:
        memory: the working set.
        first: the index of the table's first row in the working set.
        rows: the number of rows of the table.
        values: name of a column -> the values of all rows; {} to write nothing.
    """
    told = None
    try:
        for some in torch.arange(rows, device="cpu").split(ROWS_AT_ONCE) if values else ():
            cut = {key: value[int(some[0]) :][: some.numel()].cpu() for key, value in values.items()}
            memory.store(some + first, cut)
    except TierError as error:
        told = str(error)
    _raise_on_all(context, told)


def _raise_on_all(context: Context, told: str | None) -> None:
    """Raises `ValueError` on every rank if some rank has an error. Collective.

    Args:
        told: the text of this rank's error, or None.
    """
    for rank, each in context.communicator.reports(told).items():
        raise ValueError(each if context.communicator.world_size == 1 else f"on rank {rank}: {each}")
