"""The process groups of the ranks that train together: one for each class of communication.

Contract
    Each communication class has its own group, so that classes do not wait for each other. Handshakes stay on the
    hosts, over gloo, in a group of their own. The error of a failed collective names the dead or stuck ranks, on every
    rank.
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

from embrace_fx.runtime.ranks.backends import CPU, backend_name, group_timeout, setup_collectives, supports_device
from embrace_fx.runtime.ranks.failure import (
    CLOSED,
    LaunchLog,
    LivenessCheck,
    NamesFailedRanks,
    PeerFailure,
    failure_text,
    is_known_to_all_ranks,
)
from embrace_fx.runtime.ranks.forks import FORKED, fork_error
from embrace_fx.runtime.ranks.gathering import all_gather_single, gather_single
from embrace_fx.runtime.ranks.group_deadlock import check_group_deadlock
from embrace_fx.runtime.ranks.worker import Worker
from embrace_fx.vocabulary.operation_id import CLASS_LANES, URGENT, Lane
from embrace_fx.vocabulary.plain_data import from_plain, to_plain

CLASSES = ("ids", "embedding", "dense")
"""Communication classes of launches outside of a launcher: setup, evaluation and others."""

LANE_GROUPS = tuple(f"{lane} lane" for lane in CLASS_LANES)
"""Names of the groups that the launcher's thread uses."""

LANE_GROUP: Mapping[Lane, str] = dict(zip(CLASS_LANES, LANE_GROUPS, strict=True))
"""Communication class -> the name of its group."""

_OF_NCCL: Mapping[Lane, str] = {lane: "urgent lanes" if lane in URGENT else "other lanes" for lane in CLASS_LANES}
"""Class -> its NCCL communicator. Urgent classes share one and others another, because priority is per communicator."""

MOST_BYTES = 2**28
"""Maximum bytes of one `gather` per rank. A plan of a thousand parameters has about 2**20."""

T = TypeVar("T")

_FAREWELL_S = 5.0
"""Seconds to wait for the groups' threads when the groups end."""


class Groups:
    """The process groups of the ranks that train together.

    Args:
        group: the process group of the ranks that train together, or None for a single process. `join` can add a group
            later.

    Attributes:
        meshes: cached device meshes on which tables are sharded by rows and columns.
        refuse: called with an error text before this rank raises the error, so that ranks that wait for this rank learn
            the reason.
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
        self._hosts: dist.ProcessGroup | None = None  # the process group for handshakes, whose tensors are on the host
        self._made: list[dist.ProcessGroup] = []  # the process groups that `end_groups` destroys
        self._liveness: LivenessCheck | None = None
        self.progress = LaunchLog()
        self._end: Callable[[], object] = lambda: None
        self._closed = ""  # why this object is closed, or "" while it is open
        self._connected = False
        if group is not None:
            self.join(group)

    def join(self, group: dist.ProcessGroup) -> None:
        """Creates the process groups that are needed for communication between the ranks of `group`. Collective."""
        self.group = group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        store = dist.distributed_c10d._get_default_store()
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"joining/{restarts}/{dist.distributed_c10d._world.group_count}"
        joining = LivenessCheck(store, name, self.rank, self.world_size, self.progress)
        try:
            with check_group_deadlock(store, group), NamesFailedRanks(joining):
                attempt = self._create_groups(group)
        finally:
            joining.close()
        name = f"{self._groups['ids'].group_name}/{attempt}"
        self._liveness = LivenessCheck(store, name, self.rank, self.world_size, self.progress)
        self._end = weakref.finalize(self, end_groups, self._liveness, self._made)

    def _create_groups(self, group: dist.ProcessGroup) -> str:
        """Creates the main process group, and a gloo group for CPU tensors. Collective.

        Args:
            group: the user's process group, whose ranks the new groups contain.

        Returns:
            A random text, equal on all ranks, that differs after each restart of the job.
        """
        on_host = supports_device(group, CPU)
        # Send a message first: it fails at once if a rank is dead, while creating a group would wait for the rank.
        if on_host:
            self._hosts = group
            self._check_group_counts()
        # Use one group for all classes: each gloo group has a thread that wakes a hundred times a second on the compute
        # cores, and each NCCL group has a communicator that takes device memory.
        self._groups = dict.fromkeys(CLASSES, self._new_group("program"))
        # Do not use the user's group: `mismatch_watchdog` must reply in this group while a user's collective blocks
        # this thread.
        self._hosts = self._new_group("hosts", backend="gloo")
        self._carriers.clear()
        # After a restart, the store may still contain the entries of the previous attempt.
        return self.gather(uuid4().hex, str)[0]

    def close(self) -> None:
        """Destroys the process groups and ends their threads, on this rank only. All communication must have ended."""
        self._closed, self._hosts = CLOSED, None
        self._groups.clear()
        self._carriers.clear()
        self._waiters.clear()
        self._end()

    def leave_fork(self) -> None:
        """Closes this object in a forked child process. Does not destroy the process groups, because the parent process
        still uses their connections.
        """
        self._closed, self._liveness, self.refuse = FORKED, None, lambda reason: None
        if isinstance(self._end, weakref.finalize):
            self._end.detach()

    @property
    def is_open(self) -> bool:
        """Whether the process groups can still be used."""
        return not self._closed

    def check_open(self) -> None:
        """Raises `RuntimeError` if this object is closed."""
        if self._closed:
            self.check_fork()
            raise RuntimeError(self._closed)

    def check_fork(self) -> None:
        """Raises `RuntimeError` in a forked child process."""
        if self._closed == FORKED:
            raise fork_error()

    def open_lanes(self, device: torch.device = CPU, lanes: Collection[Lane] = CLASS_LANES) -> None:
        """Creates a process group for each class of communication whose collectives the launcher starts in a planned
        order while the model computes. Collective; requires at least two ranks.

        With gloo, each class has its own group. With NCCL, urgent classes share one group and all others share another,
        because NCCL sets priorities per group.

        Args:
            device: the device of the tensors to send.
            lanes: the classes of communication for which to create groups.
        """
        if self.world_size < dist.get_world_size():
            self._check_group_counts()
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
        """Returns a map from each class of communication to the name of its channel. On one channel, all ranks start
        collectives in the same order.

        Args:
            device: the device of the tensors to send.
        """
        return _OF_NCCL if self.uses_nccl(device) else LANE_GROUP

    def connect(self, device: torch.device) -> None:
        """Connects the ranks of the main process group before its first collective, if NCCL sends tensors on `device`.
        Only the first call does this. Collective.
        """
        if not self._connected and self.uses_nccl(device):
            self._connected = True
            self._connect(CLASSES[0], device)

    def open_group(self, name: str, backend: str | None = None) -> dist.ProcessGroup:
        """Returns the process group called `name`, and creates it if needed. Collective; requires at least two ranks.

        Args:
            backend: the backend, or None for the backend of the main group.
        """
        if name not in self._groups:
            self._groups[name] = self._new_group(name, backend)
        return self._groups[name]

    def join_group(self) -> dist.ProcessGroup:
        """Returns the process group that torch's `Join` uses to count ranks without batches. This is the user's group
        if it supports CPU tensors, otherwise a gloo group. Collective.
        """
        assert self.group is not None
        return self.group if supports_device(self.group, CPU) else self.open_group("joins", "gloo")

    def process_group(self, name: str) -> dist.ProcessGroup | None:
        """Returns the process group of the communication class `name`, or None for a single process."""
        return self._groups.get(name)

    def message_waiter(self, name: str) -> Worker | None:
        """Returns the worker thread that waits for point-to-point messages of the communication class `name`. Returns
        None if the launcher sends no collectives of this class.
        """
        if name in LANE_GROUPS and name not in self._waiters:
            self._waiters[name] = Worker("messages")
        return self._waiters.get(name)

    def _check_group_counts(self) -> None:
        """Checks that all ranks belong to the same number of process groups, because torch derives the name of a new
        group from this number. Collective.

        Raises:
            ValueError: the numbers differ, and the ranks that train together are not all ranks of the job.
        """
        if self._hosts is None:
            return
        are_all = self.world_size == dist.get_world_size()
        if not are_all:
            gc.collect()  # this closes the groups of deleted models
        counts = self.gather(len(dist.distributed_c10d._world.pg_names), int)
        if len(set(counts)) > 1 and not are_all:
            raise ValueError(
                f"The ranks of this process group belong to different numbers of process groups: {min(counts)} to "
                f"{max(counts)} (rank {dist.get_rank()}: {counts[self.rank]}). torch derives the name of a new group "
                "from this number, so compile() or the first call would hang. Create groups so that every rank belongs "
                "to equally many of them, as in a device mesh, or compile the model in the default group."
            )

    def sub_group(self, name: str, parts: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
        """Creates a process group for each list of ranks, and returns the group that contains this rank. Collective.

        Args:
            name: the groups' name, for torch's logs.
            parts: disjoint lists of global ranks.
            backend: the backend, or None for the backend of the main group.
        """
        assert self.group is not None
        if self.world_size < dist.get_world_size():
            self._check_group_counts()
            parts = [ranks for ranks in parts if dist.get_rank() in ranks]
        # If all ranks of the job create a group, torch names it by the number of groups created so far. If only some
        # do, torch names it by the number of existing groups, which differs once a rank has deleted a model.
        made = [self._new_group(name, backend, ranks=ranks) for ranks in parts]
        (own,) = (group for group in made if group is not None)
        assert isinstance(own, dist.ProcessGroup)
        return own

    def _new_group(
        self, name: str, backend: str | None = None, urgent: bool = False, ranks: Sequence[int] | None = None
    ) -> Any:
        """Creates a process group of all ranks that train together, or of some of them.

        Args:
            name: the group's name, for torch's logs.
            backend: the backend, or None for the backend of the main group.
            urgent: whether NCCL's stream gets a high priority.
            ranks: global ranks, or None for all ranks that train together.

        Returns:
            The group, or None if this rank is not in it.
        """
        assert self.group is not None
        ranks, options = list(ranks or dist.get_process_group_ranks(self.group)), None
        own = dist.get_backend_config(self.group)
        if backend is None and "nccl" in own:  # set NCCL's options, because torch would use the default group's timeout
            backend = own
        timeout = group_timeout(self.group)
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
        """Makes NCCL connect the ranks of a process group now, so that no step has to wait for the connection. All
        ranks connect groups in the same order.
        """
        group, own = self._groups[name], torch.zeros(self.world_size, device=device)
        with self.watching(), setup_collectives(device):
            dist.all_reduce(own, group=group)
            dist.all_to_all_single(torch.empty_like(own), own, group=group)
            all_gather_single(own.new_empty(own.numel() ** 2), own, group=group)

    def uses_nccl(self, device: torch.device) -> bool:
        """Returns whether NCCL sends tensors on `device`."""
        assert self.group is not None
        return (
            device.type == "cuda" and supports_device(self.group, device) and "nccl" in backend_name(self.group, device)
        )

    def _sending_group(self, name: str, tensor: Tensor) -> tuple[dist.ProcessGroup, str]:
        """Returns the process group by which a tensor is sent, and the name of its backend.

        This is the group of the communication class if it supports the tensor's device, otherwise the group for CPU
        tensors.

        Args:
            name: the name of the communication class.
        """
        found = self._carriers.get((name, tensor.device))
        if found is None:
            group: Any = self._groups[name]
            group = group if supports_device(group, tensor.device) else self._hosts
            found = self._carriers[name, tensor.device] = group, backend_name(group, tensor.device)
        return found

    def host_group(self) -> dist.ProcessGroup:
        """Returns the process group for CPU tensors. Requires at least two ranks."""
        assert self._hosts is not None
        return self._hosts

    def timeout(self) -> timedelta | None:
        """Returns the timeout of the user's process group. Returns None for a single process, or if the backend does
        not report its timeout.
        """
        return group_timeout(self.group) if self.group is not None else None

    def missing_ranks(self) -> list[int]:
        """Returns the ranks that no longer respond. Called after a collective has failed."""
        return self._liveness.missing() if self._liveness is not None else []

    def run_periodically(self, look: Callable[[Any, str], None]) -> str:
        """Makes the thread that detects dead ranks call a method a few times per second. All ranks must call this in
        the same order.

        Args:
            look: a bound method, to which only a weak reference is kept. It is called with the thread's connection to
                torch.distributed's store, and a prefix for keys in the store.

        Returns:
            The key prefix, or "" for a single process.
        """
        if (liveness := self._liveness) is None:
            return ""
        name, found = f"embrace_fx/{liveness.name}/{len(liveness.looks)}", weakref.WeakMethod(look)
        liveness.looks.append(lambda store: None if (method := found()) is None else method(store, name))
        return name

    def gather(self, value: T, kind: Any) -> list[T]:
        """Gathers a value from every rank, in rank order. Meant for setup and failures, because it is slow.

        The value is sent as plain data (`embrace_fx.vocabulary.plain_data`), and its type is checked on arrival.

        Args:
            kind: the value's type, as a type hint; equal on all ranks.

        Raises:
            RuntimeError: a rank sends more than `MOST_BYTES` (raised on every rank), or a value of another type.
        """
        self.check_open()
        own = torch.frombuffer(bytearray(json.dumps(to_plain(value)).encode()), dtype=torch.uint8)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device="cpu")
        with self.watching():
            gather_single(sizes, torch.tensor([own.numel()], device="cpu"), self._hosts)
        longest = int(sizes.max())
        if longest > MOST_BYTES:
            raise RuntimeError(
                f"Rank {int(sizes.argmax())} sends {longest} bytes to the other ranks, but at most {MOST_BYTES} bytes "
                "are allowed for one object, such as a plan or a recording. Record fewer steps in model.record()."
            )
        everyone = torch.empty((self.world_size, longest), dtype=torch.uint8, device="cpu")
        with self.watching():
            padded = torch.cat([own, own.new_zeros(longest - own.numel())])
            gather_single(everyone.view(-1), padded, self._hosts)
        contents = [row[:size].numpy().tobytes() for row, size in zip(everyone, sizes.tolist(), strict=True)]
        return [_decode_gathered(kind, content, rank) for rank, content in enumerate(contents)]

    def reports(self, failure: str | None) -> dict[int, str]:
        """Gathers errors. Returns a map from rank to error text for the ranks that have failed. Collective.

        Args:
            failure: this rank's error text, or None if it has not failed.
        """
        return {rank: text for rank, text in enumerate(self.gather(failure, str | None)) if text is not None}

    def check_none_failed(self, failure: Exception | None) -> None:
        """Raises `PeerFailure` on every rank if `failure` is not None on any rank. Collective."""
        if found := self.reports(None if failure is None else failure_text(failure)):
            raise PeerFailure(found) from failure

    def watching(self, what: object = "") -> contextlib.AbstractContextManager[None]:
        """Returns a context for a collective. If the collective fails, the context raises an error that names the dead
        or stuck ranks.

        Args:
            what: the name under which `LaunchLog` records the collective.
        """
        return contextlib.nullcontext() if self._liveness is None else NamesFailedRanks(self._liveness, what)

    def name_ranks(self, error: RuntimeError, what: object = "") -> None:
        """Raises an error that names the ranks that made a collective fail because they are dead or stuck. Returns
        without raising if all ranks already know the error, or on a single process.

        Args:
            error: the error that the collective raised.
            what: the name under which `LaunchLog` records the collective.
        """
        if self._liveness is not None and not is_known_to_all_ranks(error):
            self._liveness.raise_named(error, str(what))


def _decode_gathered(kind: Any, content: bytes, rank: int) -> Any:
    """Decodes the content of a message that `rank` has sent. Raises `RuntimeError` if the value is not of type
    `kind`.
    """
    try:
        return from_plain(kind, json.loads(content))
    except (ValueError, RecursionError) as error:
        raise RuntimeError(
            f"Rank {rank} sent something other than a {getattr(kind, '__name__', kind)}: {error}. Install the same "
            "version of embrace_fx on every rank."
        ) from error


def end_groups(liveness: LivenessCheck | None, groups: list[dist.ProcessGroup]) -> None:
    """Ends the thread that detects dead ranks, and destroys process groups that contain all ranks of the job, on this
    rank.

    Smaller groups are not destroyed, because torch would give the next group the same name, and thus the same
    addresses. Waits at most `_FAREWELL_S` seconds, because a collective may still be running.
    """
    if liveness is not None:
        liveness.close()

    def destroy() -> None:
        """Destroys the process groups that still exist."""
        registered = dist.distributed_c10d._world.pg_map
        while groups:
            group = groups.pop()
            if group in registered:
                dist.destroy_process_group(group)

    thread = threading.Thread(target=destroy, name="embrace_fx end", daemon=True)
    thread.start()
    thread.join(_FAREWELL_S)
