"""The launcher of collectives: process groups by communication class, launches that return what is in flight.

Contract
    Collectives of one class leave in program order on their own process group, so classes do not wait for each other.
    What ranks tell each other about a step stays on the hosts, over gloo: beside NCCL in groups of its own.
    Every step begins with an announcement: sizes and state of every rank. A rank that cannot go on says so there, and
    all ranks raise the same error; no collective is left waiting.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx import cost
from embrace_fx.runtime.kernels import bad_id, column_widths
from embrace_fx.runtime.ranks.failure import ANNOUNCEMENT, PeerFailure, Progress, RollCall
from embrace_fx.vocabulary.plain_data import from_plain, to_plain
from embrace_fx.vocabulary.schedule import LANES, Lane
from embrace_fx.vocabulary.stream_program import URGENT

ACTIVITIES = ("training", "accumulating gradients (no_sync)", "evaluating (eval or no_grad)")
"""What a call of the model can be; all ranks must do the same."""

CLASSES = ("ids", "embedding", "dense")
"""Communication classes of a program's own launches: set-up, evaluation, and what no launcher sends."""

_FAILED, _ASKS_TO_PLAN = 1, 2
"""Marks in the first number of an announcement."""

LANE_GROUPS = tuple(f"{lane} lane" for lane in LANES if lane != "compute")
"""The groups of the launcher's thread."""

LANE_GROUP: Mapping[Lane, str] = dict(zip(LANES[1:], LANE_GROUPS, strict=True))
"""The group on which a class of communication travels."""

CPU = torch.device("cpu")

MOST_BYTES = 2**28
"""What a rank may tell the others at once. A plan of a thousand parameters takes some 2**20."""

T = TypeVar("T")

_FAREWELL_S = 5.0
"""How long the end of a communicator waits for the threads of its groups."""

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch renamed it, and the old name warns."""


@dataclass(slots=True)
class InFlight:
    """A value that a collective is still writing. `wait` yields it.

    Attributes:
        sent_bytes: tells, at the end, what this rank has sent, where that was not known before; None: it was.
        reads: what the collective reads besides: to be kept until it has ended.
    """

    value: Tensor
    work: Any
    sent_bytes: Callable[[], int] | None = None
    reads: tuple[Tensor, ...] = ()


class _Widening:
    """The work of a collective on a narrower tensor: it ends when the values have been written into a wider one."""

    def __init__(self, work: Any, narrow: Tensor, into: Tensor) -> None:
        def write(future: torch.futures.Future[Any]) -> Tensor:
            future.wait()
            return into.copy_(narrow)

        self._done: torch.futures.Future[Any] = work.get_future().then(write)

    def get_future(self) -> torch.futures.Future[Any]:
        return self._done

    def wait(self) -> None:
        self._done.wait()


def widened(launched: InFlight, into: Tensor, sent_bytes: int) -> InFlight:
    """A narrower tensor that is under way, as a wider one."""
    narrow, work = launched.value, None
    if launched.work is None:
        into.copy_(narrow)
    else:
        work = _Widening(launched.work, narrow, into)
    return InFlight(into, work, lambda: sent_bytes, (narrow, *launched.reads))


class Communicator:
    """Issues this rank's collectives.

    Without torch.distributed, or in a group of one, there is nothing to send: launches return their own data.

    Args:
        group: the ranks that train together; None: a single process, which may join some later.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.world_size = 1
        self.rank = 0
        self.activity = 0
        self.failure: str | None = None  # found before the step's announcement, which reports it
        self.gradient_dtype: torch.dtype | None = None  # in which gradients travel; None: their own
        self.tables = 0  # how many tables exchange ids, once planned
        self.watched: tuple[str, ...] = ()  # other tables of which an announcement tells the rows read
        self.rows_seen: dict[str, int] = {}  # of those, in the coming step; of a table that is not there, unknown
        self.rows_read: dict[str, tuple[int, ...]] = {}  # table -> rows that each rank reads, as far as announced
        self.asks_to_plan = False  # this rank would have another plan made
        self.asked_to_plan = False  # any rank would, as of the last announcement
        self.meshes: dict[Any, Any] = {}  # of tables on a grid of these ranks (`embrace_fx.runtime.tables.layouts`)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._hosts: dist.ProcessGroup | None = None  # what ranks tell each other about a step
        self._made: list[dist.ProcessGroup] = []  # of those and others, what ends with this
        self._roll_call: RollCall | None = None
        self.progress = Progress()
        self._end: Callable[[], object] = lambda: None
        self._closed = False
        if group is not None:
            self.join(group)

    def join(self, group: dist.ProcessGroup) -> None:
        """Makes a single process, which has launched nothing yet, one of the ranks that train together. Collective."""
        self.group = group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if self.world_size > 1:
            if "nccl" in dist.get_backend_config(group):
                self._open(CLASSES)
            else:  # every group of gloo has a thread that wakes a hundred times a second, on cores that compute
                self._groups = dict.fromkeys(CLASSES, self._new_group("program"))
            on_host = _carries(group, CPU)
            self._hosts = self._groups["ids"] if on_host else self._new_group("hosts", backend="gloo")
            store = dist.distributed_c10d._get_default_store()
            # A job that a launcher restarts may find the store of the attempt before, with all that was said there.
            attempt = self.gather(uuid4().hex, str)[0]
            name = f"{self._groups['ids'].group_name}/{attempt}"
            self._roll_call = RollCall(store, name, self.rank, self.world_size, self.progress)
        self._end = weakref.finalize(self, end_groups, self._roll_call, self._made)

    def close(self) -> None:
        """Ends the groups and threads that this has made. On each rank by itself; nothing may be under way."""
        self._closed, self._hosts = True, None
        self._groups.clear()
        self._end()

    def check_open(self) -> None:
        """Raises `RuntimeError` once this is closed."""
        if self._closed:
            raise RuntimeError(
                "expected a compiled model that is open, found that it has been closed: its process groups have ended. "
                "Compile a model anew."
            )

    def open_lanes(self, device: torch.device = CPU, lanes: Collection[Lane] = LANES) -> None:
        """Makes the launcher's own groups, one for each class: a group has one thread launching on it. Collective.

        Args:
            device: of the tensors that they carry.
            lanes: those classes of which anything is to be launched.
        """
        if self.world_size == 1:
            return
        for lane, name in zip(LANES[1:], LANE_GROUPS, strict=True):
            if name in self._groups or lane not in lanes:
                continue
            if self.uses_nccl(device):
                self._groups[name] = self._new_group(name, backend="nccl", urgent=lane in URGENT)
                self._connect(name, device)
            else:
                self._groups[name] = self._new_group(name)

    def open_group(self, name: str) -> dist.ProcessGroup:
        """Another group of the same ranks, or the one of that name. Collective, of at least two ranks."""
        self._open([name])
        return self._groups[name]

    def process_group(self, name: str) -> dist.ProcessGroup | None:
        """A communication class's group; None: a single process."""
        return self._groups.get(name)

    def _open(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._groups:
                self._groups[name] = self._new_group(name)

    def sub_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A group of some of these ranks, by their global numbers. Collective among them."""
        return self._new_group(name, ranks=ranks)

    def _new_group(
        self, name: str, backend: str | None = None, urgent: bool = False, ranks: Sequence[int] | None = None
    ) -> dist.ProcessGroup:
        """Another group of the same ranks, or of some; `backend` None: with the back ends of this one."""
        assert self.group is not None
        ranks, options = list(ranks or dist.get_process_group_ranks(self.group)), None
        own = dist.get_backend_config(self.group)
        if backend is None and "nccl" in own:  # torch would take those of the default group
            backend = own
        timeout = _timeout(self.group)
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
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        assert isinstance(created, dist.ProcessGroup)
        if len(ranks) == dist.get_world_size():
            self._made.append(created)
        return created

    def _connect(self, name: str, device: torch.device) -> None:
        """Has NCCL make a group's connections, for which the hosts of all ranks wait: in one order, and not in a step,
        where the thread that stands by may be the one that comes first."""
        group, own = self._groups[name], torch.zeros(self.world_size, device=device)
        with self.watching():
            dist.all_reduce(own, group=group)
            dist.all_to_all_single(torch.empty_like(own), own, group=group)
            all_gather_single(own.new_empty(own.numel() ** 2), own, group=group)

    def uses_nccl(self, device: torch.device) -> bool:
        """Whether tensors of a device travel by NCCL."""
        assert self.group is not None
        return device.type == "cuda" and _carries(self.group, device) and "nccl" in _backend(self.group, device)

    def _group_for(self, name: str, tensor: Tensor) -> dist.ProcessGroup | None:
        """A class's group, or that of the hosts where the class's does not take the tensor."""
        group = self._groups[name]
        return group if _carries(group, tensor.device) else self._hosts

    # -- agreement -----------------------------------------------------------------------------------------------------

    def gather(self, value: T, kind: Any) -> list[T]:
        """`value` of every rank, in rank order. For set-up and failures, never on the step's path.

        It travels as plain data (`embrace_fx.vocabulary.plain_data`), which is checked where it arrives.

        Args:
            kind: its type, as a hint; the same on all ranks.

        Raises:
            RuntimeError: a rank has more to tell than `MOST_BYTES`, on every rank; or what it tells is of another type.
        """
        self.check_open()
        if self.world_size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(to_plain(value)).encode()), dtype=torch.uint8)
        sizes = torch.empty(self.world_size, dtype=torch.int64)
        with self.watching():
            all_gather_single(sizes, torch.tensor([own.numel()]), group=self._hosts)
        longest = int(sizes.max())
        if longest > MOST_BYTES:
            raise RuntimeError(
                f"expected at most {MOST_BYTES} bytes from each rank, in what ranks tell each other, found {longest} "
                f"from rank {int(sizes.argmax())}. Leave out what no other rank needs to know."
            )
        everyone = torch.empty((self.world_size, longest), dtype=torch.uint8)
        with self.watching():
            padded = torch.cat([own, own.new_zeros(longest - own.numel())])
            all_gather_single(everyone.view(-1), padded, group=self._hosts)
        told = [row[:size].numpy().tobytes() for row, size in zip(everyone, sizes.tolist(), strict=True)]
        return [_of_peer(kind, content, rank) for rank, content in enumerate(told)]

    def announce(self, sizes: Sequence[int], failure: str | None = None) -> list[list[int]]:
        """Every rank's `sizes`, at the head of a step.

        Raises:
            PeerFailure: any rank has a `failure`, or the ranks are not doing the same thing; on all ranks.
        """
        self.check_open()
        failure, self.failure = self.failure or failure, None
        if self.world_size == 1:
            if failure is not None:
                raise PeerFailure({0: failure})
            return [list(sizes)]
        # One length whatever the step, or the announcement itself would hang; a step with the next batch's sizes in it
        # has most to say.
        padding = [0] * (1 + 2 * self.tables - len(sizes))
        seen = [self.rows_seen.get(name, -1) for name in self.watched]
        self.rows_seen = {}
        marks = _FAILED * (failure is not None) | _ASKS_TO_PLAN * self.asks_to_plan
        own = torch.tensor([marks, self.activity, *seen, *sizes, *padding], dtype=torch.int64)
        everyone = own.new_empty((self.world_size, own.numel()))
        self.progress.begin_step()
        with self.watching(ANNOUNCEMENT):
            all_gather_single(everyone.view(-1), own, group=self._hosts)
        rows: list[list[int]] = everyone.tolist()
        self.asked_to_plan = any(row[0] & _ASKS_TO_PLAN for row in rows)
        first = 2 + len(seen)
        self.rows_read = {}
        self.note_rows(self.watched, [row[2:first] for row in rows])
        if any(row[0] & _FAILED for row in rows):
            failures = self.gather(failure, str | None)
            raise PeerFailure({rank: text for rank, text in enumerate(failures) if text is not None})
        check_activities([row[1] for row in rows])
        return [row[first : first + len(sizes)] for row in rows]

    def note_rows(self, tables: Sequence[str], sizes: Sequence[Sequence[int]]) -> None:
        """Keeps what was announced: `sizes` by rank, by table; below 0 where it is unknown."""
        self.rows_read.update(zip(tables, zip(*sizes, strict=True), strict=False))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's values, in place."""
        self.check_open()
        if self.world_size == 1:
            return
        assert self.group is not None
        source = dist.get_global_rank(self.group, 0)
        with self.watching():
            works = [dist.broadcast(t, source, group=self._group_for("dense", t), async_op=True) for t in tensors]
            for work in works:
                work.wait()

    def reduce_scalar(self, value: Tensor, reduce_op: dist.ReduceOp.RedOpType) -> Tensor:
        """The sum or maximum of a small tensor over ranks, by element."""
        self.check_open()
        if self.world_size > 1:
            with self.watching():
                dist.all_reduce(value, reduce_op, group=self._group_for("dense", value))
        return value

    def watching(self, what: str = "") -> contextlib.AbstractContextManager[None]:
        """A context in which the error of a broken collective names the ranks that are gone, or stuck.

        Args:
            what: what is waited for inside, by its name in `progress`.
        """
        return self._roll_call.watching(what) if self._roll_call is not None else contextlib.nullcontext()

    def host_group(self) -> dist.ProcessGroup:
        """The group that carries tensors of the hosts, of at least two ranks."""
        assert self._hosts is not None
        return self._hosts

    def timeout(self) -> timedelta | None:
        """The user's timeout of the ranks' messages; None in a single process, or where the back end does not tell."""
        return _timeout(self.group) if self.group is not None else None

    def missing_ranks(self) -> list[int]:
        """The ranks that no longer answer, asked for once a message has failed."""
        return self._roll_call.missing() if self._roll_call is not None else []

    # -- launches: the ops of the same names ---------------------------------------------------------------------------

    def all_gather_ids(
        self, unique: Sequence[Tensor], num_rows: Sequence[int], group: str, group_size: int, tables: Sequence[str]
    ) -> InFlight:
        counts = [u.numel() for u in unique]
        reports = (bad_id_report(*each) for each in zip(unique, tables, num_rows, strict=True))
        everyone = self.announce(counts, next((report for report in reports if report is not None), None))
        self.note_rows(tables, everyone)
        return self.gather_rows_read(unique, everyone, num_rows, group)

    def gather_rows_read(
        self, unique: Sequence[Tensor], sizes: Sequence[Sequence[int]], num_rows: Sequence[int], group: str
    ) -> InFlight:
        """The payload of `all_gather_ids`, its sizes (by rank, by table) being known."""
        counts = [u.numel() for u in unique]
        longest = max(map(sum, sizes))
        dtype = torch.int32 if max(num_rows) < 2**31 else torch.int64
        own = torch.empty((len(counts) + longest,), dtype=dtype, device=unique[0].device)
        own[: len(counts)] = torch.tensor(counts, dtype=dtype)
        torch.cat([u.to(dtype) for u in unique], out=own[len(counts) : len(counts) + sum(counts)])
        if self.world_size == 1:
            return InFlight(own.view(1, -1), None)
        return self._gather(own, group)

    def gather_rows_ahead(
        self,
        unique: Sequence[Tensor],
        counts: Tensor,
        capacities: Sequence[Sequence[int]],
        num_rows: Sequence[int],
        group: str,
    ) -> InFlight:
        """As `gather_rows_read`, where only the device knows how many rows are read.

        Args:
            unique: by table, as long as the rank's capacity.
            counts: (T,) how many of them are rows.
            capacities: by rank, by table.
        """
        dtype = torch.int32 if max(num_rows) < 2**31 else torch.int64
        longest = max(map(sum, capacities))
        own = counts.new_zeros((counts.numel() + longest,), dtype=dtype)
        packed = torch.cat([counts, *unique])
        own[: packed.numel()] = packed
        if self.world_size == 1:
            return InFlight(own.view(1, -1), None)
        return self._gather(own, group)

    def _gather(self, own: Tensor, group: str) -> InFlight:
        packed = own.new_empty((self.world_size, own.numel()))
        found = self._launch(
            lambda to, sent: all_gather_single(to, sent, group=self._groups[group], async_op=True),
            group,
            packed.view(-1),
            own,
        )
        return InFlight(packed, found.work, reads=found.reads)

    def all_to_all_rows(
        self, columns: Tensor, counts: Tensor, embedding_dim: int, group: str, group_size: int, grid_rows: int = 1
    ) -> InFlight:
        if grid_rows > 1:
            return self.send_grid_rows(columns, counts.tolist(), embedding_dim, group)
        return self.send_rows(columns, counts.tolist(), embedding_dim, group)

    def send_rows(self, columns: Tensor, rows_by_rank: Sequence[int], embedding_dim: int, group: str) -> InFlight:
        """`all_to_all_rows` with counts on the host."""
        if self.world_size == 1:
            return InFlight(columns.view(-1), None)
        widths = column_widths(embedding_dim, self.world_size)
        own_width, own_rows = widths[self.rank], rows_by_rank[self.rank]
        received = columns.new_empty((own_rows * embedding_dim,))
        return self._all_to_all(
            received,
            columns.view(-1),
            [own_rows * width for width in widths],
            [rows * own_width for rows in rows_by_rank],
            group,
        )

    def send_grid_rows(
        self, columns: Tensor, counts: Sequence[Sequence[int]], embedding_dim: int, group: str
    ) -> InFlight:
        """`all_to_all_rows` on a grid, with counts on the host: by rank, by row of the grid."""
        received = columns.new_empty((sum(counts[self.rank]) * embedding_dim,))
        of_owners, of_readers = self._grid_sizes(counts, embedding_dim)
        return self._all_to_all(received, columns.view(-1), of_owners, of_readers, group)

    def _grid_sizes(self, counts: Sequence[Sequence[int]], embedding_dim: int) -> tuple[list[int], list[int]]:
        """Elements of the own rows that each rank has, and of each rank's rows that this one has."""
        grid_columns = self.world_size // len(counts[0])
        row, column = divmod(self.rank, grid_columns)
        widths = column_widths(embedding_dim, grid_columns)
        of_owners = [rows * width for rows in counts[self.rank] for width in widths]
        return of_owners, [of_rank[row] * widths[column] for of_rank in counts]

    def all_to_all_gradients(
        self, flat: Tensor, counts: Tensor, embedding_dim: int, group: str, group_size: int, grid_rows: int = 1
    ) -> InFlight:
        if grid_rows > 1:
            return self.send_grid_gradients(flat, counts.tolist(), embedding_dim, group)
        return self.send_gradients(flat, counts.tolist(), embedding_dim, group)

    def send_grid_gradients(
        self, flat: Tensor, counts: Sequence[Sequence[int]], embedding_dim: int, group: str
    ) -> InFlight:
        """`all_to_all_gradients` on a grid, with counts on the host: by rank, by row of the grid."""
        of_owners, of_readers = self._grid_sizes(counts, embedding_dim)
        return self._all_to_all_narrowly(flat.new_empty((sum(of_readers),)), flat, of_readers, of_owners, group)

    def send_gradients(self, flat: Tensor, rows_by_rank: Sequence[int], embedding_dim: int, group: str) -> InFlight:
        """`all_to_all_gradients` with counts on the host."""
        if self.world_size == 1:
            return InFlight(flat, None)
        widths = column_widths(embedding_dim, self.world_size)
        own_width, own_rows = widths[self.rank], rows_by_rank[self.rank]
        received = flat.new_empty((sum(rows_by_rank) * own_width,))
        return self._all_to_all_narrowly(
            received,
            flat,
            [rows * own_width for rows in rows_by_rank],
            [own_rows * width for width in widths],
            group,
        )

    def _all_to_all(
        self, received: Tensor, sent: Tensor, receive_sizes: list[int], send_sizes: list[int], group: str
    ) -> InFlight:
        return self._launch(
            lambda to, own: dist.all_to_all_single(
                to, own, receive_sizes, send_sizes, group=self._groups[group], async_op=True
            ),
            group,
            received,
            sent,
        )

    def all_reduce_(self, flat: Tensor, reduce_op: str, group: str) -> InFlight:
        carrier = self._group_for(group, flat)
        narrow = self._narrow(flat) if group == "dense lane" else flat
        launched = self._launch(lambda own: dist.all_reduce(own, group=carrier, async_op=True), group, narrow)
        sent_bytes = cost.all_reduce(narrow.nbytes, self.world_size).sent_bytes
        return launched if narrow is flat else widened(launched, flat, sent_bytes)

    def _narrow(self, gradient: Tensor) -> Tensor:
        """A gradient as it travels: itself, or a narrower copy."""
        dtype = self.gradient_dtype
        return gradient if dtype is None or dtype.itemsize >= gradient.dtype.itemsize else gradient.to(dtype)

    def _all_to_all_narrowly(
        self, received: Tensor, sent: Tensor, receive_sizes: list[int], send_sizes: list[int], group: str
    ) -> InFlight:
        """An AlltoAll of gradients."""
        narrow = self._narrow(sent)
        if narrow is sent:
            return self._all_to_all(received, sent, receive_sizes, send_sizes, group)
        arriving = received.new_empty(received.shape, dtype=narrow.dtype)
        launched = self._all_to_all(arriving, narrow, receive_sizes, send_sizes, group)
        sent_bytes = (sum(send_sizes) - send_sizes[self.rank]) * narrow.element_size()
        return widened(launched, received, sent_bytes)

    def _launch(self, collective: Callable[..., Any], group: str, written: Tensor, *read: Tensor) -> InFlight:
        """A collective under way; of tensors on a device over gloo, which takes them from the host, an ended one."""
        if not travels_by_host(written, self._groups[group]):
            return InFlight(written, collective(written, *read), reads=read)
        on_host = [tensor.cpu() for tensor in (written, *read)]
        collective(*on_host).wait()
        written.copy_(on_host[0])
        return InFlight(written, None)

    def wait(self, launch: InFlight, what: str = "") -> Tensor:
        if launch.work is not None:
            with self.watching(what):
                launch.work.wait()
        return launch.value

    def launches(self) -> Mapping[str, Any]:
        """Op name -> what a lowered program calls."""
        return {
            "embrace::all_gather_ids": self.all_gather_ids,
            "embrace::all_to_all_rows": self.all_to_all_rows,
            "embrace::all_to_all_gradients": self.all_to_all_gradients,
            "_c10d_functional::all_reduce_": self.all_reduce_,
            "_c10d_functional::wait_tensor": self.wait,
        }


def _of_peer(kind: Any, content: bytes, rank: int) -> Any:
    try:
        return from_plain(kind, json.loads(content))
    except (ValueError, RecursionError) as error:
        raise RuntimeError(
            f"expected plain data of type {getattr(kind, '__name__', kind)} from rank {rank}, in what ranks tell each "
            f"other, found something else: {error}. Run the same version of embrace_fx on every rank."
        ) from error


def end_groups(roll_call: RollCall | None, groups: list[dist.ProcessGroup]) -> None:
    """Ends a roll call, and process groups of all ranks of the job, for this rank.

    Torch names groups of fewer ranks by how many groups there are, so that a later one would meet the addresses of one
    that has ended: those stay. Nobody waits for ever for a group on which something is still under way.
    """
    if roll_call is not None:
        roll_call.close()

    def end() -> None:
        registered = dist.distributed_c10d._world.pg_map
        while groups:
            group = groups.pop()
            if group in registered:
                dist.destroy_process_group(group)

    thread = threading.Thread(target=end, name="embrace_fx end", daemon=True)
    thread.start()
    thread.join(_FAREWELL_S)


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The user's timeout of a group, which new groups do not inherit; None where its back end does not tell."""
    backend = group._get_backend(CPU if _carries(group, CPU) else torch.device("cuda"))
    found: timedelta | None = getattr(backend.options, "_timeout", None)
    return found


def _carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group has a back end for tensors of a device."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def travels_by_host(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a group takes a tensor only from the host: one on a GPU, over gloo."""
    return tensor.is_cuda and "nccl" not in _backend(group, tensor.device)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    return group._get_backend(torch.device(device.type)).name()


def check_activities(activities: Sequence[int]) -> None:
    """Raises where ranks call the model for different things.

    Args:
        activities: index into `ACTIVITIES` of every rank.

    Raises:
        PeerFailure: saying what each rank does.
    """
    if len(set(activities)) > 1:
        raise PeerFailure(
            {r: f"expected all ranks to do the same, found this one {ACTIVITIES[a]}" for r, a in enumerate(activities)}
        )


def unreadable(error: Exception) -> str:
    """What a rank reports of a batch whose ids cannot be computed."""
    return f"expected ids that can be computed from the batch, found {type(error).__name__}: {error}; look at the batch"


def bad_id_report(ids: Tensor, table: str, num_rows: int) -> str | None:
    """What a rank reports of an id outside a table; None where all are inside."""
    found = bad_id(ids, num_rows)
    if found is None:
        return None
    return (
        f"expected ids from 0 to {num_rows - 1}, in a lookup of {table} ({num_rows} rows), found {found}; "
        "look at the batch, or give the table more rows"
    )
