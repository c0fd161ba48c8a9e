"""Reads ahead the rows of tables larger than memory that upcoming batches of all ranks need.

Contract
    At each training call, every rank passes the rows that its batch some calls later reads. Ranks gather them in a
    separate thread and process group. No step waits for the gather: rows that arrive too late are read at the lookup.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.model_state import ModelState, UpcomingBatch
from embrace_fx.runtime.tiers.tiered_table import SlotRows, tables_larger_than_memory
from embrace_fx.runtime.tiers.working_set import WorkingSet

Rows = dict[WorkingSet, Tensor]
"""The rows (K,) of each working set that a batch looks up."""


class RowsAhead:
    """Reads the rows that upcoming batches of all ranks need from files, before the batches are used. With several
    ranks, the constructor is collective.
    """

    def __init__(self, state: ModelState, communicator: Communicator) -> None:
        self._state, self._number = state, 0
        # For a single rank: (number of a future call, its batch).
        self._upcoming: deque[tuple[int, UpcomingBatch]] = deque()
        self._coming: deque[tuple[int, Future[Rows]]] = deque()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._group: dist.ProcessGroup | None = None
        if communicator.world_size > 1:
            assert communicator.group is not None
            ranks = dist.get_process_group_ranks(communicator.group)
            self._group = communicator.sub_group("rows ahead", [ranks], backend="gloo")
            # Use a daemon thread, because a gather that waits for a dead rank must not keep this process from exiting.
            threading.Thread(target=_gather_loop, args=(self._jobs, self._group), daemon=True).start()

    def step(self, leaves: Sequence[Any], upcoming: UpcomingBatch | None, ahead: int) -> None:
        """Begins a training step, and starts reading the rows of a later batch if it is known. See `Prefetcher`."""
        self._number += 1
        places = self._file_tables()
        for memory in dict.fromkeys(each.memory for each in places.values()):
            memory.begin_step(self._number)
        if self._group is None:
            self._step_alone(leaves, upcoming, ahead, places)
        elif ahead > 1:  # with one batch ahead, the gathered rows would arrive no earlier than the lookup
            found: Future[Rows] = Future()
            self._coming.append((self._number + ahead, found))
            self._jobs.put((upcoming, places, found))
            while self._coming and self._coming[0][1].done():
                due, done = self._coming.popleft()
                if done.exception() is None:
                    _read_ahead(done.result(), due)

    def end_call(self, *, train: bool) -> None:
        """Counts the step if the call trains, and forgets which ids the call was expected to look up."""
        places = self._file_tables().values()
        for rows in places:
            rows.expect(None)
        for memory in {each.memory for each in places}:
            memory.counts.steps += train

    def _file_tables(self) -> dict[str, SlotRows]:
        """Returns the tables and joined tables that are larger than memory, by name."""
        return tables_larger_than_memory({**self._state.tables, **self._state.spaces})

    def _step_alone(
        self, leaves: Sequence[Any], upcoming: UpcomingBatch | None, ahead: int, places: Mapping[str, SlotRows]
    ) -> None:
        """Starts reading the rows of an upcoming batch, in a single process. The batch is `upcoming` or, if ids are
        looked up on a device, the batch that the previous call announced.
        """
        late = int(any(each.needs_host for each in places.values()))
        while self._upcoming and self._upcoming[0][0] <= self._number:
            due, batch = self._upcoming.popleft()
            if late and due == self._number and batch.is_batch(leaves):
                for name in (rows := batch.rows()).keys() & places.keys():
                    places[name].expect(rows[name])
        if upcoming is not None:
            self._upcoming.append((self._number + ahead, upcoming))
            if len(self._upcoming) > late:
                due, batch = self._upcoming[-1 - late]
                _read_ahead(_looked_up_rows(batch, places), due)


def _read_ahead(rows: Rows, due: int) -> None:
    """Starts reading the rows that step `due` will look up."""
    for memory, numbers in rows.items():
        if numbers.numel():
            memory.read_ahead(numbers, due)


def _looked_up_rows(batch: UpcomingBatch | None, places: Mapping[str, SlotRows]) -> Rows:
    """Returns the row numbers (K,) that a batch, if any, looks up in each working set of the tables `places`."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    found = {each.memory: [none] for each in places.values()}
    for name, ids in ({} if batch is None else batch.rows()).items():
        if name in places:
            found[places[name].memory].append(places[name].numbers(ids.to(torch.int64)))
    return {memory: torch.cat(numbers) for memory, numbers in found.items()}


_Job = tuple[UpcomingBatch | None, Mapping[str, SlotRows], Future[Rows]]
"""An upcoming batch, the tables and joined tables, and the future of the rows."""


def _gather_loop(jobs: SimpleQueue[_Job], group: dist.ProcessGroup) -> None:
    """Gathers, for each job, the rows that all ranks will look up. Runs in a thread until a gather fails, whose job's
    future then has the exception.
    """
    size = dist.get_world_size(group)
    while True:
        coming, places, found = jobs.get()
        try:
            own = _looked_up_rows(coming, places)
            counts = torch.tensor([rows.numel() for rows in own.values()], device="cpu")
            everyone = [torch.empty_like(counts) for _ in range(size)]
            dist.all_gather(everyone, counts, group=group)
            longest = max(1, *(int(each.sum()) for each in everyone))
            rest = torch.empty(longest - int(counts.sum()), dtype=torch.int64, device="cpu")
            packed = [torch.empty(longest, dtype=torch.int64, device="cpu") for _ in range(size)]
            dist.all_gather(packed, torch.cat([*own.values(), rest]), group=group)
            parts = [each[: int(n.sum())].split(n.tolist()) for each, n in zip(packed, everyone, strict=True)]
            found.set_result({memory: torch.cat(rows) for memory, *rows in zip(own, *parts, strict=True)})
        except Exception as error:
            found.set_exception(error)
            return
