"""Saves and loads models with tables larger than memory: one file of rows per rank and table, and one main file.

A rank writes its columns of the rows that differ from their first values, in ascending order and blocks, with their
deferred steps. A loading rank reads the files of all ranks whose columns it needs in parallel. No rank holds a whole
table in memory.

Contract
    `checkpoint.pt` lists the other files and is renamed into place last, so that the earlier checkpoint stays valid if
    the processes die before. All ranks share the folder. Any number of ranks may load it.

Shape legend: K rows; a rank's columns of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.runtime.tables.state_dicts import convert_loaded_state, gather_state_dict, to_user_state
from embrace_fx.runtime.tiers.record_file import TierError
from embrace_fx.runtime.tiers.records import WEIGHTS, Column, Records
from embrace_fx.runtime.tiers.slot_history import NO_HISTORIES, ClosedHistory, align_parts, read_histories
from embrace_fx.runtime.tiers.tiered_table import SlotRows, tables_larger_than_memory
from embrace_fx.runtime.tiers.working_set import ROWS_AT_ONCE
from embrace_fx.vocabulary.ops import own_columns

REST = "checkpoint.pt"


def save(
    model: nn.Module, state: ModelState, optimizers: Sequence[Optimizer], communicator: Communicator, folder: Path
) -> None:
    """Saves a model and its optimizers into a folder. Collective. No update may be pending. Raises `TierError`, on
    every rank, if a rank cannot write its files.
    """
    beyond = tables_larger_than_memory(state.tables)
    token = communicator.gather(uuid4().hex[:8], str)[0]
    ranks = communicator.world_size
    files = {name: [f"{k}.{r}-of-{ranks}.{token}.rows" for r in range(ranks)] for k, name in enumerate(beyond)}
    action, state_after = f"Saving the checkpoint in {folder}", "The previous checkpoint is intact."
    with _fail_together(communicator, action, state_after):
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in beyond.items():
            if table.memory.failure:
                raise TierError(table.memory.failure)
            _save_rows(table, folder / files[name][communicator.rank])
    others = {k: v for k, v in model.state_dict().items() if k not in beyond}
    with communicator.watching():
        rest = gather_state_dict({"model": others, "optimizers": [_optimizer_part(each, state) for each in optimizers]})
    rest["tables"] = {
        name: {"shape": tuple(table.member.shape), "files": files[name], **table.to_checkpoint()}
        for name, table in beyond.items()
    }
    with _fail_together(communicator, action, state_after):
        if communicator.rank == 0:
            _write_main_file(rest, folder)


def load(
    model: nn.Module, state: ModelState, optimizers: Sequence[Optimizer], communicator: Communicator, folder: Path
) -> None:
    """Loads a checkpoint that `save` has written, on any number of ranks. Collective. No update may be pending. Raises
    `TierError`, on every rank, if the checkpoint is missing, damaged or of another model.
    """
    beyond = tables_larger_than_memory(state.tables)
    state_after = "Tables may contain some of its rows: load an intact checkpoint before you go on."
    with _fail_together(communicator, f"Loading the checkpoint in {folder}", state_after):
        rest = torch.load(folder / REST, map_location="cpu", weights_only=True)
        _check_fits(rest, state, optimizers)
        for name, table in beyond.items():
            if name in rest["tables"]:
                saved = rest["tables"][name]
                closed = read_histories(saved["histories"], table.rows, torch.device("cpu"))
                _load_rows(table, [folder / each for each in saved["files"]], closed, communicator)
                table.load(saved)
            else:  # the checkpoint was saved before the table's rows were moved to storage
                _load_whole(table, rest["model"].pop(name), _pop_table_state(rest, table, optimizers), communicator)
    model.load_state_dict(rest["model"], strict=False)
    for optimizer, saved in zip(optimizers, rest["optimizers"], strict=True):
        for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update(options)
        for number, parameter in enumerate(_parameters(optimizer)):
            if number in saved["state"]:
                there = {  # step counters belong on the host
                    key: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in saved["state"][number].items()
                }
                own = convert_loaded_state(parameter, there, state)
                optimizer.state[parameter] = own
            elif not any(parameter is table.member.parameter for table in beyond.values()):
                optimizer.state.pop(parameter, None)


def _load_whole(table: SlotRows, values: torch.Tensor, state: Mapping[str, Any], communicator: Communicator) -> None:
    """Loads a table larger than memory from whole tensors: its weights `values` (V, D) and its state."""
    own = range(*own_columns(table.member.shape[1], communicator.world_size, communicator.rank))
    table.memory.forget(table.rows)
    of_rows = {key: value for key, value in {WEIGHTS: values, **state}.items() if key in table.memory.columns}
    for some in torch.arange(table.member.shape[0], device="cpu").split(ROWS_AT_ONCE) if not values.is_meta else ():
        cut = {key: value[some[0] : some[-1] + 1] for key, value in of_rows.items()}
        table.memory.store(
            table.numbers(some), {k: (v[:, own.start : own.stop] if v.dim() > 1 else v).cpu() for k, v in cut.items()}
        )
    counters = {key: value for key, value in state.items() if key not in of_rows}
    table.load({**table.to_checkpoint(), "histories": NO_HISTORIES, "counters": counters})


def _pop_table_state(rest: dict[str, Any], table: SlotRows, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Removes a table's optimizer state from the contents `rest` of a checkpoint's main file, and returns it."""
    for optimizer, saved in zip(optimizers, rest["optimizers"], strict=True):
        for number, parameter in enumerate(_parameters(optimizer)):
            if parameter is table.member.parameter:
                found: dict[str, Any] = saved["state"].pop(number, {})
                return found
    return {}


def _check_fits(rest: Mapping[str, Any], state: ModelState, optimizers: Sequence[Optimizer]) -> None:
    """Raises `TierError` if the contents `rest` of a checkpoint's main file do not fit the model or its optimizers."""
    beyond = {name: tuple(table.member.shape) for name, table in tables_larger_than_memory(state.tables).items()}
    saved = {name: of_table["shape"] for name, of_table in rest["tables"].items()}
    saved |= {name: tuple(rest["model"][name].shape) for name in beyond.keys() & rest["model"].keys()}
    if saved != beyond:
        raise TierError(
            f"the checkpoint was saved with table_memory for the tables {saved}, but this model has table_memory for "
            f"{beyond}. Pass table_memory for the same tables to compile()"
        )
    names = {*rest["model"], *saved}
    if missing := sorted(set(state.names).difference(names)):
        raise TierError(
            f"the checkpoint has no values for {', '.join(missing)}. Load the checkpoint into a model that has the "
            "same parameters and buffers as the saved one"
        )
    groups = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
    if groups != [each["sizes"] for each in rest["optimizers"]]:
        raise TierError(
            "the optimizers in the checkpoint have "
            f"{[each['sizes'] for each in rest['optimizers']]} parameters in their groups, but the model's optimizers "
            f"have {groups}. Pass optimizers with the same param groups to compile()"
        )


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_part(optimizer: Optimizer, state: ModelState) -> dict[str, Any]:
    """Returns the part of a checkpoint that describes an optimizer: the options and sizes of its param groups, and its
    state by parameter number, except that of tables larger than memory.
    """
    tables, found = {table.parameter: table for table in state.tables.values()}, {}
    for number, parameter in enumerate(_parameters(optimizer)):
        table, own = tables.get(parameter), optimizer.state.get(parameter) or {}
        if own and (table is None or not isinstance(table.store, SlotRows)):
            found[number] = {key: to_user_state(parameter, value) for key, value in own.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"groups": groups, "sizes": [len(group["params"]) for group in optimizer.param_groups], "state": found}


def _write_main_file(rest: dict[str, Any], folder: Path) -> None:
    """Writes a checkpoint's main file, then deletes the files of rows in the folder that it does not name."""
    being_written = folder / f"{REST}.part"
    with being_written.open("wb") as file:
        torch.save(rest, file)
        file.flush()
        os.fsync(file.fileno())
    being_written.replace(folder / REST)
    own = {name for table in rest["tables"].values() for name in table["files"]}
    for path in folder.glob("*.rows"):
        if path.name not in own:
            path.unlink()


@contextlib.contextmanager
def _fail_together(communicator: Communicator, action: str, state_after: str) -> Iterator[None]:
    """Opens a context for this rank's part of an action, in words. At its end, every rank raises if any rank has
    failed, and says by the sentence `state_after` what holds then. Collective.
    """
    failure = None
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        failure = f"{action} failed: {error}"
    for rank, text in communicator.reports(failure).items():
        raise TierError(f"rank {rank}: {text}. {state_after}")


# -- the rows of a table -----------------------------------------------------------------------------------------------


def _save_rows(table: SlotRows, path: Path) -> None:
    """Writes this rank's rows of a table to a file. No update may be pending."""
    with path.open("wb") as file:
        for _, records in table.changed_rows():
            file.write(records.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _load_rows(
    table: SlotRows, paths: Sequence[Path], closed: Sequence[ClosedHistory], communicator: Communicator
) -> None:
    """Replaces this rank's columns of all rows of a table by those in a checkpoint. Raises `TierError` if a file is
    damaged.

    Args:
        paths: the files of the table's rows, one for each rank that saved the checkpoint.
        closed: the deferred optimizer steps in the checkpoint.
    """
    width, columns = table.member.shape[1], table.memory.records.columns
    own = range(*own_columns(width, communicator.world_size, communicator.rank))
    cuts = [range(*own_columns(width, len(paths), rank)) for rank in range(len(paths))]
    shared = [range(max(cut.start, own.start), min(cut.stop, own.stop)) for cut in cuts]
    needed = [part for part in zip(paths, cuts, shared, strict=True) if part[2]] or [(paths[0], cuts[0], range(0))]
    table.memory.forget(table.rows)
    with contextlib.ExitStack() as stack:
        files = [_read_blocks(columns, *part, table.memory.part, stack) for part in needed]
        for blocks in zip(*files, strict=True):
            (rows, *others), parts = zip(*blocks, strict=True)
            if not all(torch.equal(each, rows) for each in others):
                raise TierError(_BROKEN.format(paths[0].parent, "the files contain different rows"))
            align_parts(parts, closed)
            of_parts = {key: [part[key] for part in parts] for key in columns}
            values = {k: torch.cat(v, 1) if columns[k].size else v[0] for k, v in of_parts.items()}
            table.memory.store(table.numbers(rows), values)


def _read_blocks(
    columns: Mapping[str, Column], path: Path, cut: range, shared: range, count: int, stack: contextlib.ExitStack
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yields the rows in a file in blocks of at most `count`: (row ids (K,), name -> values (K, ...) of `columns`).
    Cuts values with one number per column of the table.

    Args:
        cut: the table columns that are in the file.
        shared: the table columns in the file that this rank needs.
        stack: closes the file when the stack is closed.
    """
    file = stack.enter_context(path.open("rb"))
    records = Records({k: replace(c, size=(len(cut),)) if c.size else c for k, c in columns.items()})
    data = torch.empty(records.nbytes * count, dtype=torch.uint8, device="cpu")
    while size := file.readinto(data.numpy().data):
        if size % records.nbytes:
            raise TierError(_BROKEN.format(path, "the last record is incomplete"))
        read = data[:size].view(-1, records.nbytes)
        if bool((wrong := records.wrong(read)).any()):
            raise TierError(_BROKEN.format(path, f"{int(wrong.sum())} records have a wrong checksum"))
        found, first = records.unpack(read), shared.start - cut.start
        yield records.rows(read), {k: v[:, first : first + len(shared)] if v.dim() > 1 else v for k, v in found.items()}


_BROKEN = "the table rows saved in {} are damaged: {}. Load an earlier checkpoint"
