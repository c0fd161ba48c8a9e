"""The process groups of the ranks that train together: one per communication class, made and ended together.

Contract
    A class of communication has a group of its own, so that classes do not wait for each other. What ranks
    exchange about a step stays on the hosts, over gloo; with NCCL it has its own groups.
    The error of a broken collective names the ranks that are gone, or stuck, on every rank.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.ranks.backends import CPU, alone_on, backend_name, carries, timeout_of
from embrace_fx.runtime.ranks.failure import (
    CLOSED,
    FORKED,
    LaunchLog,
    LivenessCheck,
    PeerFailure,
    Watching,
    failure_text,
    is_of_ranks,
)
from embrace_fx.runtime.ranks.gathering import all_gather_single, gather_single
from embrace_fx.runtime.ranks.group_deadlock import check_group_deadlock
from embrace_fx.runtime.ranks.worker import Worker
from embrace_fx.vocabulary.operation_id import CLASS_LANES, URGENT, Lane
from embrace_fx.vocabulary.plain_data import from_plain, to_plain

CLASSES = ("ids", "embedding", "dense")
"""Communication classes of a program's own launches: set-up, evaluation, and what no launcher sends."""

LANE_GROUPS = tuple(f"{lane} lane" for lane in CLASS_LANES)
"""The groups of the launcher's thread."""

LANE_GROUP: Mapping[Lane, str] = dict(zip(CLASS_LANES, LANE_GROUPS, strict=True))
"""The group of a class of communication."""

_OF_NCCL: Mapping[Lane, str] = {lane: "urgent lanes" if lane in URGENT else "other lanes" for lane in CLASS_LANES}
"""Class -> the NCCL communicator that it shares with others: one is urgent, because a communicator has one priority."""

MOST_BYTES = 2**28
"""The most that a rank may send to the others at once. A plan of a thousand parameters takes some 2**20."""

T = TypeVar("T")

_FAREWELL_S = 5.0
"""How long the end of the groups waits for their threads."""


class Groups:
    """The process groups of the ranks that train together.

    Without torch.distributed, or in a group of one, there are none.

    Args:
        group: the ranks that train together; None: a single process, which may join some later.

    Attributes:
        meshes: of tables on a grid of these ranks (`embrace_fx.runtime.tables.layouts`).
        refuse: informs ranks that may wait for this one elsewhere why it is about to raise.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.world_size = 1
        self.rank = 0
        self.meshes: dict[Any, Any] = {}
        self.refuse: Callable[[str], None] = lambda reason: None
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._carriers: dict[tuple[str, torch.device], tuple[dist.ProcessGroup, str]] = {}
        self._waiters: dict[str, Worker] = {}
        self._hosts: dist.ProcessGroup | None = None  # for what ranks exchange about a step
        self._made: list[dist.ProcessGroup] = []  # all groups that end with this object
        self._liveness: LivenessCheck | None = None
        self.progress = LaunchLog()
        self._end: Callable[[], object] = lambda: None
        self._closed = ""  # the reason
        self._connected = False
        if group is not None:
            self.join(group)

    def join(self, group: dist.ProcessGroup) -> None:
        """Makes a single process, which has launched nothing yet, one of the ranks that train together. Collective."""
        self.group = group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if self.world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            name = f"joining/{restarts}/{dist.distributed_c10d._world.group_count}"
            joining = LivenessCheck(store, name, self.rank, self.world_size, self.progress)
            try:
                with check_group_deadlock(store, group), Watching(joining):
                    attempt = self._meet(group)
            finally:
                joining.close()
            name = f"{self._groups['ids'].group_name}/{attempt}"
            self._liveness = LivenessCheck(store, name, self.rank, self.world_size, self.progress)
        self._end = weakref.finalize(self, end_groups, self._liveness, self._made)

    def _meet(self, group: dist.ProcessGroup) -> str:
        """Makes the groups of the calling thread; returns a text that no other attempt of the job has."""
        on_host = carries(group, CPU)
        if on_host:  # making a group would wait for a dead rank; a message to it fails at once
            self._hosts = group
            self._agree_on_counts()
        # One for all classes: a group of gloo has a thread that wakes a hundred times a second, on cores that compute,
        # and a group of NCCL a communicator that takes the device's memory.
        self._groups = dict.fromkeys(CLASSES, self._new_group("program"))
        # Not the user's group: while a collective of the user's blocks this thread, `mismatch_watchdog` answers here.
        self._hosts = self._new_group("hosts", backend="gloo")
        self._carriers.clear()
        # A job that a launcher restarts may find the store of the attempt before, with all that was said there.
        return self.gather(uuid4().hex, str)[0]

    def close(self) -> None:
        """Ends the groups and threads that this has made. On each rank by itself; nothing may be under way."""
        self._closed, self._hosts = CLOSED, None
        self._groups.clear()
        self._carriers.clear()
        self._waiters.clear()
        self._end()

    def leave_fork(self) -> None:
        """Closes this for a forked child, whose copies of the connections are its parent's."""
        self._closed, self._liveness, self.refuse = FORKED, None, lambda reason: None
        if isinstance(self._end, weakref.finalize):
            self._end.detach()

    @property
    def is_open(self) -> bool:
        return not self._closed

    def check_open(self) -> None:
        """Raises `RuntimeError` once this is closed."""
        if self._closed:
            raise RuntimeError(self._closed)

    def check_fork(self) -> None:
        """Raises `RuntimeError` in a forked child."""
        if self._closed == FORKED:
            raise RuntimeError(FORKED)

    def open_lanes(self, device: torch.device = CPU, lanes: Collection[Lane] = CLASS_LANES) -> None:
        """Makes the launcher's own groups: a group has one thread launching on it. Collective.

        Over gloo each class has one. Over NCCL, whose launches run one after the other in the launcher's order, urgent
        classes share one, and all others another.

        Args:
            device: of the tensors that they carry.
            lanes: the classes that have launches.
        """
        if self.world_size == 1:
            return
        if self.world_size < dist.get_world_size():
            self._agree_on_counts()
        for lane, name in zip(CLASS_LANES, LANE_GROUPS, strict=True):
            if name in self._groups or lane not in lanes:
                continue
            if not self.uses_nccl(device):
                self.open_group(name)
                continue
            shares = [LANE_GROUP[other] for other in CLASS_LANES if _OF_NCCL[other] == _OF_NCCL[lane]]
            made = next((self._groups[each] for each in shares if each in self._groups), None)
            self._groups[name] = made or self._new_group(_OF_NCCL[lane], backend="nccl", urgent=lane in URGENT)
            if made is None:
                self._connect(name, device)

    def channels(self, device: torch.device) -> Mapping[Lane, str]:
        """Maps each class to the channel of its launches: those of one channel meet on all ranks in one order."""
        return _OF_NCCL if self.world_size > 1 and self.uses_nccl(device) else LANE_GROUP

    def connect(self, device: torch.device) -> None:
        """Makes the connections of the program's own group, where NCCL needs any, before it is used. Collective."""
        if self.world_size > 1 and not self._connected and self.uses_nccl(device):
            self._connected = True
            self._connect(CLASSES[0], device)

    def open_group(self, name: str, backend: str | None = None) -> dist.ProcessGroup:
        """Returns the group of that name; makes it of the same ranks at first. Collective, of at least two ranks."""
        if name not in self._groups:
            self._groups[name] = self._new_group(name, backend)
        return self._groups[name]

    def group_of_joins(self) -> dist.ProcessGroup:
        """Returns the hosts' group to count ranks without batches: the user's group if it can carry that.
        Collective.
        """
        assert self.group is not None
        return self.group if carries(self.group, CPU) else self.open_group("joins", "gloo")

    def process_group(self, name: str) -> dist.ProcessGroup | None:
        """Returns a communication class's group; None: a single process."""
        return self._groups.get(name)

    def waiter(self, name: str) -> Worker | None:
        """Returns the waiter that signals the end of a launcher class's messages; None for another class."""
        if name in LANE_GROUPS and name not in self._waiters:
            self._waiters[name] = Worker("messages")
        return self._waiters.get(name)

    def _agree_on_counts(self) -> None:
        """Checks that these ranks are in equally many groups: torch names new groups of some ranks by that number.
        Collective.

        Raises:
            ValueError: they are not, and these are not all ranks of the job.
        """
        if self._hosts is None:
            return
        are_all = self.world_size == dist.get_world_size()
        if not are_all:
            gc.collect()  # groups of models that one rank has not collected yet
        counts = self.gather(len(dist.distributed_c10d._world.pg_names), int)
        if len(set(counts)) > 1 and not are_all:
            raise ValueError(
                f"Ranks of the process group are in {min(counts)} to {max(counts)} process groups, rank "
                f"{dist.get_rank()} in {counts[self.rank]}. torch names new groups by that number, so compile() or the "
                "first call would hang. Create groups such that every rank is in the same number, as a device mesh "
                "does, or compile in the default group."
            )

    def sub_group(self, name: str, parts: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
        """Makes a group of each part of these ranks; returns the one that this rank is in. Collective among all ranks.

        Args:
            parts: global numbers, each once.
            backend: None: those of these ranks.
        """
        assert self.group is not None
        if self.world_size < dist.get_world_size():
            self._agree_on_counts()
            parts = [ranks for ranks in parts if dist.get_rank() in ranks]
        # Where all ranks of the job make all groups, torch names them by how many it has ever made: the same on all.
        # Those that some make alone it names by how many there are: one rank may have collected an earlier model.
        made = [self._new_group(name, backend, ranks=ranks) for ranks in parts]
        (own,) = (group for group in made if group is not None)
        assert isinstance(own, dist.ProcessGroup)
        return own

    def _new_group(
        self, name: str, backend: str | None = None, urgent: bool = False, ranks: Sequence[int] | None = None
    ) -> Any:
        """Makes a further group of the same ranks, or of some; `backend` None: with the back ends of this one.

        Returns:
            The group; None where this rank is none of its.
        """
        assert self.group is not None
        ranks, options = list(ranks or dist.get_process_group_ranks(self.group)), None
        own = dist.get_backend_config(self.group)
        if backend is None and "nccl" in own:  # otherwise torch would use the default group's
            backend = own
        timeout = timeout_of(self.group)
        if urgent:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            if timeout is not None:
                options._timeout = timeout
        created = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=options,
            group_desc=f"embrace_fx_{name.replace(' ', '_')}",
            use_local_synchronization=self.world_size < dist.get_world_size(),
        )
        if not isinstance(created, dist.ProcessGroup):
            return None
        if len(ranks) == dist.get_world_size():
            self._made.append(created)
        return created

    def _connect(self, name: str, device: torch.device) -> None:
        """Makes NCCL connect a group now, in one order on all ranks: a host that waits for it would stop a step."""
        group, own = self._groups[name], torch.zeros(self.world_size, device=device)
        with self.watching(), alone_on(device):
            dist.all_reduce(own, group=group)
            dist.all_to_all_single(torch.empty_like(own), own, group=group)
            all_gather_single(own.new_empty(own.numel() ** 2), own, group=group)

    def uses_nccl(self, device: torch.device) -> bool:
        """Returns whether NCCL sends tensors of a device."""
        assert self.group is not None
        return device.type == "cuda" and carries(self.group, device) and "nccl" in backend_name(self.group, device)

    def _carrier(self, name: str, tensor: Tensor) -> tuple[dist.ProcessGroup, str]:
        """Returns the group that carries a class's tensors of a device, and the name of its back end.

        This is the class's own group, or the hosts' group if the class's does not take tensors of this device.
        """
        found = self._carriers.get((name, tensor.device))
        if found is None:
            group: Any = self._groups[name]
            group = group if carries(group, tensor.device) else self._hosts
            found = self._carriers[name, tensor.device] = group, backend_name(group, tensor.device)
        return found

    def host_group(self) -> dist.ProcessGroup:
        """Returns the group that carries tensors of the hosts, of at least two ranks."""
        assert self._hosts is not None
        return self._hosts

    def timeout(self) -> timedelta | None:
        """Returns the user's timeout of messages; None in a single process, or if the back end does not report it."""
        return timeout_of(self.group) if self.group is not None else None

    def missing_ranks(self) -> list[int]:
        """Returns the ranks that no longer answer, asked for once a message has failed."""
        return self._liveness.missing() if self._liveness is not None else []

    def look_each_time(self, look: Callable[[Any, str], None]) -> str:
        """Has the liveness check's thread also call `look`, a few times a second. Called on all ranks in one order.

        Args:
            look: a method, whose object may go; takes the thread's own store, and a name that nothing else has there.

        Returns:
            That name.
        """
        if (liveness := self._liveness) is None:
            return ""
        name, found = f"embrace_fx/{liveness.name}/{len(liveness.looks)}", weakref.WeakMethod(look)
        liveness.looks.append(lambda store: None if (method := found()) is None else method(store, name))
        return name

    def gather(self, value: T, kind: Any) -> list[T]:
        """Gathers `value` of every rank, in rank order. For set-up and failures, never on the step's path.

        It travels as plain data (`embrace_fx.vocabulary.plain_data`), which is checked where it arrives.

        Args:
            kind: its type, as a hint; the same on all ranks.

        Raises:
            RuntimeError: a rank sends more than `MOST_BYTES`, on every rank; or something of another type.
        """
        self.check_open()
        if self.world_size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(to_plain(value)).encode()), dtype=torch.uint8)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device="cpu")
        with self.watching():
            gather_single(sizes, torch.tensor([own.numel()], device="cpu"), self._hosts)
        longest = int(sizes.max())
        if longest > MOST_BYTES:
            raise RuntimeError(
                f"Rank {int(sizes.argmax())} sends {longest} bytes to the other ranks, and at most {MOST_BYTES} are "
                "allowed. Send less."
            )
        everyone = torch.empty((self.world_size, longest), dtype=torch.uint8, device="cpu")
        with self.watching():
            padded = torch.cat([own, own.new_zeros(longest - own.numel())])
            gather_single(everyone.view(-1), padded, self._hosts)
        contents = [row[:size].numpy().tobytes() for row, size in zip(everyone, sizes.tolist(), strict=True)]
        return [_of_peer(kind, content, rank) for rank, content in enumerate(contents)]

    def reports(self, failure: str | None) -> dict[int, str]:
        """Gathers what keeps ranks from going on, by rank: this one's `failure`, if any. Collective."""
        return {rank: text for rank, text in enumerate(self.gather(failure, str | None)) if text is not None}

    def check_none_failed(self, failure: Exception | None) -> None:
        """Raises `PeerFailure` on every rank, where one has failed. Collective."""
        if found := self.reports(None if failure is None else failure_text(failure)):
            raise PeerFailure(found) from failure

    def watching(self, what: object = "") -> contextlib.AbstractContextManager[None]:
        """Context manager: names the ranks that are gone or stuck in the error of a broken collective.

        Args:
            what: what is waited for inside, by its name in `progress`.
        """
        return contextlib.nullcontext() if self._liveness is None else Watching(self._liveness, what)

    def name_ranks(self, error: RuntimeError, what: object = "") -> None:
        """Raises the error of a broken collective with the names of ranks, as `watching` does, if they are known."""
        if self._liveness is not None and not is_of_ranks(error):
            self._liveness.raise_named(error, str(what))


def _of_peer(kind: Any, content: bytes, rank: int) -> Any:
    try:
        return from_plain(kind, json.loads(content))
    except (ValueError, RecursionError) as error:
        raise RuntimeError(
            f"Rank {rank} sent something other than a {getattr(kind, '__name__', kind)}: {error}. Run the same version "
            "of embrace_fx on every rank."
        ) from error


def end_groups(liveness: LivenessCheck | None, groups: list[dist.ProcessGroup]) -> None:
    """Ends a liveness check, and process groups of all ranks of the job, for this rank.

    Groups of fewer ranks stay: torch names the next one by the number of groups, and would give it the addresses of one
    that has ended. The end waits `_FAREWELL_S` at most, because something may still be under way on a group.
    """
    if liveness is not None:
        liveness.close()

    def end() -> None:
        registered = dist.distributed_c10d._world.pg_map
        while groups:
            group = groups.pop()
            if group in registered:
                dist.destroy_process_group(group)

    thread = threading.Thread(target=end, name="embrace_fx end", daemon=True)
    thread.start()
    thread.join(_FAREWELL_S)
