"""Prefetches rows of tables beyond memory that upcoming batches of all ranks will read.

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
from embrace_fx.runtime.tables.model_state import ModelState, ToCome
from embrace_fx.runtime.tiers.tiered_table import SlotRows, beyond_memory
from embrace_fx.runtime.tiers.working_set import WorkingSet


class RowsAhead:
    """Gathers the rows of upcoming batches.

    Args:
        state: the model's state, with tables beyond memory.
        communicator: of the ranks. With several ranks, the constructor is collective.
    """

    def __init__(self, state: ModelState, communicator: Communicator) -> None:
        self._state = state
        self._number = 0
        self._to_come: deque[tuple[int, ToCome]] = deque()  # on a single rank: number of a coming call -> its batch
        self._coming: deque[tuple[int, Future[list[Tensor]]]] = deque()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._group: dist.ProcessGroup | None = None
        if communicator.world_size > 1:
            assert communicator.group is not None
            ranks = dist.get_process_group_ranks(communicator.group)
            self._group = communicator.sub_group("rows ahead", [ranks], backend="gloo")
            # A daemon, because a gather blocked by a dead rank must not block this process's exit.
            threading.Thread(target=_gather, args=(self._jobs, self._group), daemon=True).start()

    def step(self, leaves: Sequence[Any], coming: ToCome | None, ahead: int) -> None:
        """Begins a step.

        Args:
            leaves: of the current batch.
            coming: the batch of `ahead` calls later, or None if it is not known.
        """
        self._number += 1
        beyond = self._beyond()
        sets = {memory: k for k, memory in enumerate(dict.fromkeys(table.memory for table in beyond.values()))}
        for memory in sets:
            memory.begin_step(self._number)
        if self._group is None:
            self._step_alone(leaves, coming, ahead)
            return
        if ahead == 1:  # the result would arrive no earlier than the lookup
            return
        found: Future[list[Tensor]] = Future()
        self._coming.append((self._number + ahead, found))
        places = {name: (sets[rows.memory], rows.rows) for name, rows in beyond.items()}
        for name, space in self._state.spaces.items():
            if isinstance(rows := space.store, SlotRows):
                places[name] = sets[rows.memory], rows.rows
        self._jobs.put((coming, places, len(sets), found))
        while self._coming and self._coming[0][1].done():
            due, done = self._coming.popleft()
            if done.exception() is None and due > self._number:
                for memory, numbers in zip(sets, done.result(), strict=True):
                    if numbers.numel():
                        memory.read_ahead(numbers, due)

    def end_call(self) -> None:
        """Ends a call: forgets the ids of its lookup."""
        for rows in self._beyond().values():
            rows.expect(None)

    def _beyond(self) -> dict[str, SlotRows]:
        """Returns the rows of the tables that are kept in files."""
        return beyond_memory(self._state.tables)

    def _step_alone(self, leaves: Sequence[Any], coming: ToCome | None, ahead: int) -> None:
        """Reads ahead the known rows of upcoming calls; on a device, those that were known one call earlier."""
        devices = {name: rows for name, rows in self._beyond().items() if rows.needs_host}
        while self._to_come and self._to_come[0][0] <= self._number:
            due, batch = self._to_come.popleft()
            if devices and due == self._number and batch.is_batch(leaves):
                rows = batch.rows()
                for name, store in devices.items():
                    store.expect(rows.get(name))
        if coming is not None:
            self._to_come.append((self._number + ahead, coming))
            late = 1 if devices else 0
            if len(self._to_come) > late:
                due, batch = self._to_come[-1 - late]
                self._read_ahead(batch.rows(), due)

    def _read_ahead(self, rows: Mapping[str, Tensor], due: int) -> None:
        """Asks each working set to read the rows that the step `due` looks up."""
        of_sets: dict[WorkingSet, list[Tensor]] = {}
        for name, table in self._beyond().items():
            if (ids := rows.get(name)) is not None and ids.numel():
                of_sets.setdefault(table.memory, []).append(table.numbers(ids))
        for memory, numbers in of_sets.items():
            memory.read_ahead(torch.cat(numbers), due)


_Job = tuple[ToCome | None, Mapping[str, tuple[int, range]], int, Future[list[Tensor]]]
"""An upcoming batch; table or row space -> the index of its working set and its rows there; the number of working sets;
and the future of the rows in each."""


def _gather(jobs: SimpleQueue[_Job], group: dist.ProcessGroup) -> None:
    """Gathers the rows of all ranks, by working set, until a gather fails. The failure is reported elsewhere."""
    size, none = dist.get_world_size(group), torch.empty(0, dtype=torch.int64, device="cpu")
    while True:
        coming, places, sets, found = jobs.get()
        try:
            of_sets = [[none] for _ in range(sets)]
            for name, rows in ({} if coming is None else coming.rows()).items():
                if name in places:
                    number, there = places[name]
                    of_sets[number].append(rows.to(torch.int64) + there.start)
            own = [torch.cat(of_set) for of_set in of_sets]
            counts = torch.tensor([rows.numel() for rows in own], device="cpu")
            everyone = [torch.empty_like(counts) for _ in range(size)]
            dist.all_gather(everyone, counts, group=group)
            longest = max(1, *(int(each.sum()) for each in everyone))
            sent = torch.cat([*own, torch.empty(longest - int(counts.sum()), dtype=torch.int64, device="cpu")])
            packed = [torch.empty_like(sent) for _ in range(size)]
            dist.all_gather(packed, sent, group=group)
            parts = [each[: int(n.sum())].split(n.tolist()) for each, n in zip(packed, everyone, strict=True)]
            found.set_result([torch.cat(of_set) for of_set in zip(*parts, strict=True)])
        except Exception as error:
            found.set_exception(error)
            return
