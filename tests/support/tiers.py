"""Tables beyond memory for tests: one by itself, and a model of one table that is trained on ranks."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import embrace_fx
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table import Member
from embrace_fx.runtime.tables.table_shard import TableShard, become_shard
from embrace_fx.runtime.tiers.initial import InitialValues, InitialValuesOfTables
from embrace_fx.runtime.tiers.record_file import RecordFile
from embrace_fx.runtime.tiers.records import TAKEN, WEIGHTS, Column
from embrace_fx.runtime.tiers.tiered_table import FileStorage, SlotRows, first_row_state
from embrace_fx.runtime.tiers.working_set import WorkingSet
from tests.support.inside import session_of
from tests.support.ranks import RankError, run_ranks

Make = Callable[[Any], Optimizer]

OPTIMIZERS: Mapping[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd, decayed": lambda p: SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: Adam(p, lr=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "adagrad": lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "rmsprop": lambda p: RMSprop(p, lr=0.01),
    "rmsprop, centered": lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "row-wise adagrad": lambda p: embrace_fx.RowWiseAdagrad(p, lr=0.1),
}


def in_memory(table: Tensor, make: Make) -> Member:
    """Returns a table with resting rows that is entirely in memory."""
    parameter = nn.Parameter(table.clone())
    return Member(parameter, Layout.of_table("t", table.shape), "exact", make([parameter]), may_defer=lambda: True)


def beyond_memory(table: Tensor, make: Make, slots: int, directory: str | Path) -> Any:
    """Returns the same table with only `slots` rows in memory."""
    parameter = nn.Parameter(table.clone())
    optimizer = make([parameter])
    columns = {WEIGHTS: Column((table.shape[1],), table.dtype), TAKEN: Column((), torch.int64)}
    columns |= first_row_state(optimizer, optimizer.param_groups[0], table[:0])[0]
    initial = InitialValuesOfTables({0: InitialValues(range(table.shape[1]), 0, table.dtype)})
    memory = WorkingSet("t", len(table), slots, columns, initial, directory)
    memory.store(torch.arange(len(table)), {WEIGHTS: table})
    like = torch.empty_strided(tuple(table.shape), (0, 0), dtype=table.dtype)
    layout = Layout.of_table("t", table.shape)
    become_shard(parameter, like, layout)
    assert isinstance(parameter, TableShard)
    parameter.held = FileStorage(like, "expected rows by ids")
    store = partial(SlotRows, memory=memory)
    return Member(parameter, layout, "exact", optimizer, may_defer=lambda: True, store=store)


ROWS, COLUMNS = 200, 6


class OneTable(nn.Module):
    """A table, and a layer that reads it."""

    def __init__(self, device: str | None = None, rows: int = ROWS) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, COLUMNS, padding_idx=3, device=device)
        self.linear = nn.Linear(COLUMNS, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.table(ids))).square().mean()


def batches(rank: int, steps: int, *, zipf: bool = True, rows: int = ROWS) -> list[tuple[Tensor]]:
    """Ids of a rank's batches, few of them often where Zipf's law holds."""
    generator = torch.Generator().manual_seed(100 + rank)
    drawn = torch.rand(steps, 3, 4, generator=generator)
    ids = ((rows**drawn - 1) if zipf else drawn * rows).long().clamp_(max=rows - 1)
    return [(each,) for each in ids]


def _full_disk(file: RecordFile) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _cut_short(file: RecordFile) -> None:
    os.ftruncate(file.descriptor, 100)


def _changed(file: RecordFile) -> None:
    for at in range(0, os.fstat(file.descriptor).st_size, 50):
        os.pwrite(file.descriptor, b"?", at)


def _gone(file: RecordFile) -> None:
    """Makes each access to the file fail, as if its device had been removed."""
    os.dup2(os.open(tempfile.gettempdir(), os.O_RDONLY), file.descriptor)


def _slow(file: RecordFile) -> None:
    for name in ("read", "write"):
        setattr(file, name, _after_a_while(getattr(file, name)))


def _after_a_while(call: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*args: Any) -> Any:
        time.sleep(0.2)
        return call(*args)

    return slow


FAULTS: Mapping[str, Callable[[RecordFile], None]] = {
    "full disk": _full_disk,
    "file cut short": _cut_short,
    "changed records": _changed,
    "device gone": _gone,
    "slow disk": _slow,
}
"""What happens to the file of a table."""


@dataclass(frozen=True)
class Run:
    """How a model is trained.

    Attributes:
        memory: of the table; None: all of it.
        ahead: batches that the loader runs ahead.
        meta: whether the table begins on the meta device.
        folder: of a checkpoint, which is loaded at first if it is there, else saved after half of the steps.
        every: how many steps there are between checkpoints, in the place of one.
        fault: of `FAULTS`: what happens to rank 1 after two thirds of the steps.
        directory: in which rows lie; "": in the host's memory.
        rows: of the table.
        zipf: whether ids follow Zipf's law.
        on_device: whether rank r trains on the CUDA device r.
    """

    optimizer: str = "adamw"
    schedule: str = "2d"
    memory: float | None = None
    steps: int = 30
    folder: str = ""
    meta: bool = False
    ahead: int = 1
    every: int = 0
    fault: str = ""
    directory: str = tempfile.gettempdir()
    rows: int = ROWS
    zipf: bool = True
    on_device: bool = False


def train(rank: int, world_size: int, run: Run) -> list[float]:
    """Losses of steps, and of an evaluation that reads every row."""
    torch.manual_seed(0)
    model, device = OneTable("meta" if run.meta else None, run.rows), torch.device("cpu")
    asked: Any = {"row_updates": "replay"} if run.memory is None else {"spill_to": run.directory or None}
    if run.on_device:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        (model.linear if run.meta else model).to(device)
        asked["process_group"] = dist.new_group(backend="nccl") if world_size > 1 else None
    stepping = OPTIMIZERS[run.optimizer](model.parameters())
    asked |= {"optimizer": stepping, "strategy": "alltoall", "schedule": run.schedule, "table_memory": run.memory}
    compiled = embrace_fx.compile(model, **asked)
    losses, half = [], run.steps // 2
    own: Any = [(ids.to(device),) for (ids,) in batches(rank, run.steps, zipf=run.zipf, rows=run.rows)]
    if loads := bool(run.folder) and Path(run.folder).exists():
        compiled.load_checkpoint(run.folder)
        own = own[half:]
        if not own:
            compiled(batches(rank, 1)[0][0].to(device))
    looks_ahead = run.schedule != "none" or run.ahead > 1
    for step, batch in enumerate(compiled.lookahead(own, run.ahead) if looks_ahead else own):
        if run.folder and not loads and (step % run.every == 1 if run.every else step == half):
            compiled.save_checkpoint(run.folder)
        if run.fault and not loads and rank == 1 and step == run.steps * 2 // 3:
            table: Any = session_of(compiled).state.tables["table.weight"]
            FAULTS[run.fault](table.store.memory.file)
        loss = compiled(*batch)
        loss.backward()
        stepping.step()
        stepping.zero_grad()
        losses.append(loss.item())
    compiled.eval()
    with torch.no_grad():
        every = torch.arange(run.rows, device=device).split(max(10, run.rows // 60))
        losses += [compiled(ids).item() for ids in every]
    compiled.close()
    return losses


def assert_same_losses(world_size: int, run: Run) -> None:
    """Fails unless a table beyond memory trains as it does in memory, to the bit."""
    expected = run_ranks(world_size, train, replace(run, memory=None))
    assert run_ranks(world_size, train, run) == expected


class TwoTables(nn.Module):
    """A table that two lookups read, and one of bags, of another width: else memory has them rest as one."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(rows, COLUMNS), nn.EmbeddingBag(rows, COLUMNS - 1, mode="sum")
        self.linear, self.dropout = nn.Linear(2 * COLUMNS - 1, 1), nn.Dropout(0.2)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        words = torch.tanh(self.words(first)).sum(1) + torch.tanh(self.words(second)).sum(1)
        # Return a sum instead of a mean, because the mean of an empty batch is nan.
        loss: Tensor = self.linear(self.dropout(torch.cat([words, self.bags(first)], 1))).square().sum() / 12
        return loss


class Alike(nn.Module):
    """Tables with the same width that are looked up together and therefore joined."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tags, self.words = nn.Embedding(rows // 2, COLUMNS), nn.Embedding(rows, COLUMNS)
        self.sites, self.bags = nn.Embedding(rows // 2 + 1, COLUMNS), nn.Embedding(rows // 2, COLUMNS)
        self.linear, self.dropout = nn.Linear(4 * COLUMNS, 1), nn.Dropout(0.2)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        read = ((self.tags, second), (self.words, first), (self.sites, first), (self.bags, second))
        found = torch.cat([table(ids % table.num_embeddings) for table, ids in read], -1)
        return self.linear(self.dropout(torch.tanh(found))).square().sum() / 12


@dataclass(frozen=True)
class Loop:
    """A loop over `TwoTables`, or over tables that are `Alike`.

    Attributes:
        memory: as of `Run`, or by table.
        deeds: of each step: "update", or what is done besides or in its place.
        epoch: steps after which the loop begins anew, as if the loader had ended.
        folder: of checkpoints, for "save" and "load".
    """

    memory: Any
    deeds: Sequence[str]
    optimizer: str = "adamw"
    schedule: str = "2d"
    ahead: int = 3
    epoch: int = 1000
    seed: int = 0
    rows: int = ROWS
    folder: str = ""
    alike: bool = False


DEEDS = ("update", "clip", "accumulate", "skip", "ask", "evaluate", "rate", "empty", "save", "load")


def run_loop(rank: int, world_size: int, loop: Loop) -> list[float]:
    """Losses, and what else a loop has seen; at the end of an evaluation that reads every row."""
    torch.manual_seed(loop.seed)
    model = Alike(loop.rows) if loop.alike else TwoTables(loop.rows)
    optimizer = OPTIMIZERS[loop.optimizer](model.parameters())
    asked: Any = {"table_memory": loop.memory, "spill_to": tempfile.gettempdir()} if loop.memory else {}
    asked |= {"optimizer": optimizer, "strategy": "alltoall", "row_updates": "replay", "schedule": loop.schedule}
    compiled = embrace_fx.compile(model, **asked)
    generator, seen = torch.Generator().manual_seed(1000 * loop.seed + rank), list[float]()

    def drawn(deed: str) -> Any:
        drawn = torch.rand(2, 0 if deed == "empty" and rank == 0 else 4, 3, generator=generator)
        return (loop.rows**drawn - 1).long().unbind()

    batches = [drawn(deed) for deed in loop.deeds]
    for first in range(0, len(batches), loop.epoch):
        epoch = slice(first, first + loop.epoch)
        of_epoch = zip(compiled.lookahead(batches[epoch], loop.ahead), loop.deeds[epoch], strict=True)
        for step, (batch, deed) in enumerate(of_epoch, first):
            _do(deed, step, batch, compiled, optimizer, seen, loop.folder)
    # Tables with different limits are not joined, so there is nothing to compare for a mapping of limits.
    if not loop.alike or world_size == 1 or not isinstance(loop.memory, Mapping):
        assert len(compiled.plan.spaces) == int(loop.alike and world_size > 1)
    seen += _evaluated(compiled, [(ids[None], ids[None].flip(1)) for ids in torch.arange(loop.rows).split(10)])
    compiled.close()
    return seen


def _do(deed: str, step: int, batch: Any, compiled: Any, optimizer: Optimizer, seen: list[float], folder: str) -> None:
    with compiled.no_sync() if deed == "accumulate" else contextlib.nullcontext():
        loss = compiled(*batch)
        loss.backward()
    seen.append(loss.item())
    if deed == "accumulate":
        return
    if deed == "clip":
        seen.append(float(nn.utils.clip_grad_norm_(compiled.parameters(), 0.05)))
    if deed != "skip":
        optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    if deed == "ask":
        compiled.synchronize()
    if deed == "evaluate":
        seen += _evaluated(compiled, [batch])
    if deed == "plan anew":
        _plan_anew(compiled)
    if deed == "rate":
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.7
    if deed == "save":
        compiled.save_checkpoint(folder)
    if deed == "load" and Path(folder).exists():
        compiled.load_checkpoint(folder)


def _plan_anew(compiled: Any) -> None:
    """Switches to a plan that joins all sharded tables."""
    programs = session_of(compiled).programs
    plan = programs.pipeline.plan
    spaces = (plan.join_tables(sorted(plan.sharded)),) if plan.spaces else ()
    programs.change(replace(plan, spaces=spaces), "a test")


def _evaluated(compiled: nn.Module, batches: Any) -> list[float]:
    compiled.eval()
    with torch.no_grad():
        found = [compiled(*batch).item() for batch in batches]
    compiled.train()
    return found


def assert_same_loop(world_size: int, loop: Loop) -> None:
    """Fails unless a loop over tables beyond memory sees what it sees with them in memory, to the bit."""
    with tempfile.TemporaryDirectory() as folder:
        expected = _outcome(world_size, replace(loop, memory=None, folder=f"{folder}/in memory"))
        found = _outcome(world_size, replace(loop, folder=f"{folder}/beyond"))
        assert found == expected, loop


def _outcome(world_size: int, loop: Loop) -> Any:
    """Returns what ranks see; or which of them find no finite loss, where a random loop diverges."""
    try:
        return run_ranks(world_size, run_loop, loop)
    except RankError as error:
        if (diverged := re.search("FloatingPointError: .*", str(error))) is None:
            raise
        return diverged.group()
