"""Launches this rank's collectives without waiting for them.

Contract
    Each communication class has its own process group. Collectives of one class are launched in program order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product, repeat, starmap
from operator import itemgetter, mul
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions, AllToAllOptions

from embrace_fx.cost import links as cost
from embrace_fx.runtime.kernels import column_widths
from embrace_fx.runtime.kernels.rounding import Pieces, decode_into, wire_elements
from embrace_fx.runtime.ranks.backends import setup_collectives
from embrace_fx.runtime.ranks.gathering import gather_single
from embrace_fx.runtime.ranks.groups import CLASSES, LANE_GROUPS, Groups, T
from embrace_fx.runtime.ranks.messages import send_parts, wait_all
from embrace_fx.runtime.ranks.wire_rounding import Rounding
from embrace_fx.runtime.ranks.worker import FutureWork


@dataclass(slots=True, eq=False)
class InFlight:
    """A collective that may still be running. A `Communicator` or a ticket waits for it.

    Attributes:
        value: the tensor that has the result once the collective has ended.
        work: torch's handle to wait for, or None if there is nothing to wait for.
        measured: function that returns how many bytes this rank has sent, once the collective has ended. None if the
            number was known before.
        reads: input tensors that must stay alive until the collective has ended.
    """

    value: Tensor
    work: Any
    measured: Callable[[], int] | None = None
    reads: tuple[Tensor, ...] = ()


def widen_result(
    launched: InFlight, into: Tensor, sent_bytes: int, write: Callable[[Tensor, Tensor], Tensor] = Tensor.copy_
) -> InFlight:
    """Wraps a launch whose result has a narrower dtype than the tensor `into`. The returned launch ends once the result
    has been written to `into`.

    Args:
        sent_bytes: the number of bytes that this rank sends.
        write: function of (`into`, narrow result) that writes the result.
    """
    narrow, work = launched.value, None

    def write_wide(future: torch.futures.Future[Any]) -> Tensor:
        """Writes the received narrow values to the wide tensor once the launch's future has completed."""
        future.wait()
        return write(into, narrow)

    if launched.work is None:
        write(into, narrow)
    else:
        work = FutureWork(launched.work.get_future().then(write_wide))
    return InFlight(into, work, lambda: sent_bytes, (narrow, *launched.reads))


def _launch_all_reduce(carrier: dist.ProcessGroup, _: str, flat: Tensor) -> Any:
    """Launches a sum of `flat` over the ranks of the process group `carrier`, in place. Returns torch's handle to wait
    for. The second argument, the backend's name, is unused.
    """
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    return carrier.allreduce([flat], AllreduceOptions())  # torch's function makes nine more Python calls


InTurn = Callable[[], AbstractContextManager[None]]
"""Returns a context for a collective outside of a launcher, on the current stream."""

Ask = Callable[[str, Tensor | None, Any], Tensor | None]
"""(description of a table read, numbers, reduce op) -> the reduced numbers; None if they need another collective."""

Counts = Sequence[Sequence[int]]
"""Rank -> the number of rows that it reads from each row of the table's grid. Shards by columns have one grid row."""


def counts_as_lists(counts: Tensor) -> Counts:
    """Converts numbers of rows, (N,) or (N, grid_rows), to a list of lists. For each of N ranks, it has one list: how
    many rows the rank reads from each row of the table's grid of ranks.
    """
    found: list[list[int]] = counts.view(counts.shape[0], -1).tolist()
    return found


class Communicator(Groups):
    """Launches this rank's collectives, without waiting for them.

    Without torch.distributed, or in a group of one rank, `Communicator(...)` creates a `SingleProcess`.

    Attributes:
        gradient_dtype: the dtype in which gradients are sent, set by a communication hook of the user. None to send
            them in their own dtype.
        rounding: rounds table rows and their gradients before they are sent.
        comm_hook: the user's hook that reduces buckets of gradients instead of an AllReduce, or None.
        in_turn: returns a context in which the calling thread may launch a collective, in an order that all ranks
            share. None without a launcher, or if the launcher runs on the host.
        collective_ops: how many ops on sharded tables this rank has run. Every rank must run the same number.
    """

    gradient_dtype: torch.dtype | None = None
    comm_hook: Any = None
    in_turn: InTurn | None = None

    def __new__(cls, group: dist.ProcessGroup | None, rounding: Rounding | None = None) -> Communicator:
        """Creates a `SingleProcess` unless there are several ranks."""
        is_alone = cls is Communicator and (group is None or dist.get_world_size(group) == 1)
        return super().__new__(SingleProcess if is_alone else cls)

    def __init__(self, group: dist.ProcessGroup | None, rounding: Rounding | None = None) -> None:
        super().__init__(group)
        self.rounding = rounding or Rounding()
        self.collective_ops = 0
        self._ask: Ask = lambda *_: None

    def set_read_announcer(self, ask: Ask) -> None:
        """Sets the function that tells all ranks that this rank is about to read a sharded table.

        Args:
            ask: a bound method, to which the communicator keeps only a weak reference.
        """
        found = weakref.WeakMethod(ask)
        self._ask = lambda *asked: None if (method := found()) is None else method(*asked)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Broadcasts tensors from the rank `source` of this communicator, in place."""
        self.check_open()
        if not tensors:
            return
        assert self.group is not None
        of_job = dist.get_global_rank(self.group, source)
        carriers = [self._sending_group("dense", tensor) for tensor in tensors]
        with self.watching(), self._launch_in_order(tensors[0], carriers[0][1]) or nullcontext():
            works = [
                dist.broadcast(tensor, of_job, group=group, async_op=True)
                for tensor, (group, _) in zip(tensors, carriers, strict=True)
            ]
            wait_all(works)

    def reduce_scalar(self, value: Tensor, reduce_op: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduces a small tensor over ranks in place, element by element, by a reduce op of torch such as
        `ReduceOp.SUM`. Returns the tensor.
        """
        self.check_open()
        group, backend = self._sending_group("dense", value)
        with self.watching(), self._launch_in_order(value, backend) or nullcontext():
            dist.all_reduce(value, reduce_op, group=group)
        return value

    def reduce_for_read(self, value: Tensor, reduce_op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        """Reduces a tensor over all ranks in place, as part of an operation on a sharded table that every rank must
        call. Returns the tensor.

        Args:
            what: the operation in words, such as "norm of the sharded words.weight".

        Raises:
            PeerFailure: not all ranks have called this operation. Raised on every rank.
        """
        found = self._ask(what, value, reduce_op)
        return self.reduce_scalar(value, reduce_op) if found is None else value.copy_(found)

    def gather_for_read(self, own: Tensor, what: str) -> Tensor:
        """Gathers the elements `own` (n,) of every rank, as part of an operation on a sharded table that every rank
        must call. Returns (N n,), in rank order. `what` and errors are as for `reduce_for_read`.
        """
        self._ask(what, None, None)
        return self.wait(self.gather_equal(own, "dense")).view(-1)

    def wait_for_ranks(self, what: str) -> None:
        """Waits until every rank has called the same operation on a sharded table, which `what` describes in words.

        Raises:
            PeerFailure: not all ranks have called it. Raised on every rank.
        """
        self._ask(what, None, None)

    # -- launches: the ops of the same names ---------------------------------------------------------------------------

    def gather_rows_read(
        self,
        unique: Sequence[Tensor],
        sizes: Sequence[Sequence[int]],
        num_rows: Sequence[int],
        group: str,
        counts: Tensor | None = None,
    ) -> InFlight:
        """Launches an AllGather of the ids that each rank looks up in each table, for the op `all_gather_ids`. The
        result is (N, T + largest number of ids): each rank's T counts, then its ids.

        Args:
            unique: for each of T tables, the distinct ids (U,) that this rank looks up.
            sizes: for each rank, how many ids it sends for each table.
            num_rows: for each table, its number of rows.
            group: the communication class, such as "ids".
            counts: (T,) on the device, the number of valid ids in each of `unique`. None if all are valid.
        """
        tables, longest = len(unique), max(map(sum, sizes))
        dtype = torch.int32 if max(num_rows) < 2**31 else torch.int64
        own = torch.empty((tables + longest,), dtype=dtype, device=unique[0].device)
        lengths = [u.numel() for u in unique]
        given = tables + sum(lengths)
        if counts is None:
            own[:tables] = torch.tensor(lengths, dtype=dtype, device="cpu")
            torch.cat([*unique], out=own[tables:given])
        else:
            torch.cat([counts, *unique], out=own[:given])
        return self.gather_equal(own, group)

    def gather_equal(self, own: Tensor, group: str) -> InFlight:
        """Launches an AllGather of the elements `own` (n,) of every rank. The result is (N, n). `group` is the
        communication class, such as "ids".
        """
        packed = own.new_empty((self.world_size, own.numel()))

        def gather(carrier: dist.ProcessGroup, _: str, to: Tensor, sent: Tensor) -> Any:
            """Launches the gather of `sent` to `to` on the process group `carrier`. Ignores the backend's name."""
            return gather_single(to, sent, carrier, async_op=True)

        found = self._launch(gather, group, packed.view(-1), own)
        found.value = packed
        return found

    def gather_unequal(self, own: Tensor, sizes: list[int], group: str) -> InFlight:
        """Launches an AllGather of flat tensors whose sizes differ between ranks. The result is flat, in rank order.

        Args:
            own: this rank's tensor.
            sizes: the number of elements of each rank's tensor.
            group: the communication class, such as "ids".
        """

        def exchange(carrier: dist.ProcessGroup, _: str, to: Tensor, sent: Tensor) -> Any:
            """Launches the gather of `sent` to `to` on the process group `carrier`. Ignores the backend's name."""
            return send_parts(
                carrier, [sent] * self.world_size, torch.split_with_sizes(to, sizes), self.message_waiter(group)
            )

        return self._launch(exchange, group, own.new_empty((sum(sizes),)), own)

    def all_to_all_rows(
        self, columns: Tensor, counts: Tensor, embedding_dim: int, group: str, group_size: int, grid_rows: int = 1
    ) -> InFlight:
        """Launches an AlltoAll that sends looked-up rows of a table to the ranks that read them. The op
        `all_to_all_rows`, which this implements, documents the arguments.
        """
        return self.send_rows(columns, counts_as_lists(counts), embedding_dim, group)

    def send_rows(self, columns: Tensor, counts: Counts, embedding_dim: int, group: str) -> InFlight:
        """Launches an AlltoAll that sends looked-up rows of a table to the ranks that read them. The result is flat (U
        * D,).

        Args:
            columns: this rank's columns (R, d) of the rows that all ranks read, rank after rank.
            counts: for each rank, how many rows it reads from each row of the table's grid of ranks.
            embedding_dim: the number of columns of the whole table (D).
            group: the communication class, such as "embedding".
        """
        of_owners, of_readers = self._piece_shapes(counts, embedding_dim)
        return self._send_pieces(columns.view(-1), of_readers, of_owners, self.rounding.encode_rows, group)

    def _piece_shapes(self, counts: Counts, embedding_dim: int) -> tuple[Pieces, Pieces]:
        """Returns two lists of shapes (rows, columns): of the row gradients that this rank sends to each rank, and of
        those that it receives from each rank. Looked-up rows are sent in the opposite direction. The arguments are
        those of `send_rows`.
        """
        grid_columns = self.world_size // len(counts[0])
        row, column = divmod(self.rank, grid_columns)
        widths = column_widths(embedding_dim, grid_columns)
        return [*product(counts[self.rank], widths)], [*zip(map(itemgetter(row), counts), repeat(widths[column]))]

    def all_to_all_gradients(
        self, flat: Tensor, counts: Tensor, embedding_dim: int, group: str, group_size: int, grid_rows: int = 1
    ) -> InFlight:
        """Launches an AlltoAll that sends gradients of table rows to the ranks that have these rows. The op
        `all_to_all_gradients`, which this implements, documents the arguments.
        """
        return self.send_gradients(flat, counts_as_lists(counts), embedding_dim, group)

    def send_gradients(self, flat: Tensor, counts: Counts, embedding_dim: int, group: str) -> InFlight:
        """Launches an AlltoAll that sends gradients of table rows to the ranks that have these rows. The result is
        flat.

        Args:
            flat: the gradients of the rows that this rank has read, flat (U * D,), in blocks by receiving rank.
            counts, embedding_dim, group: as for `send_rows`.
        """
        of_owners, of_readers = self._piece_shapes(counts, embedding_dim)
        # If gradients are sent rounded, the op `round_rows` has rounded them before.
        return self._send_pieces(flat, of_owners, of_readers, self.rounding.encode, group, narrows=True)

    def _send_pieces(
        self,
        sent: Tensor,
        leave: Pieces,
        come: Pieces,
        encode: Callable[[Tensor, Pieces], Tensor],
        group: str,
        *,
        narrows: bool = False,
    ) -> InFlight:
        """Launches an AlltoAll of table rows or of their gradients, which may be rounded. The result is flat.

        Args:
            sent: the values to send, flat, in blocks by receiving rank.
            leave, come: the shapes (rows, columns) of what this rank sends to each rank, and receives from each rank.
            encode: rounds values to the format in which they are sent.
            group: the communication class, such as "embedding".
            narrows: whether to cast values that are not rounded to `gradient_dtype` before they are sent.
        """
        if self.rounding.form != "exact" and group in LANE_GROUPS and self.rounding.rounds(sent):
            form, wire = self.rounding.form, encode(sent, leave)
            leaving, coming = ([wire_elements(*piece, form) for piece in pieces] for pieces in (leave, come))
        else:
            form, wire = None, self._to_wire_dtype(sent) if narrows and self.gradient_dtype is not None else sent
            leaving, coming = [*starmap(mul, leave)], [*starmap(mul, come)]
        launched = self.all_to_all(wire.new_empty((sum(coming),)), wire, coming, leaving, group)
        if wire is sent:
            return launched
        received = sent.new_empty((sum(rows * columns for rows, columns in come),))
        sent_bytes = (wire.numel() - leaving[self.rank]) * wire.element_size()
        if form is None:
            return widen_result(launched, received, sent_bytes)
        return widen_result(launched, received, sent_bytes, lambda out, codes: decode_into(out, codes, come, form))

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_sizes: list[int], send_sizes: list[int], group: str
    ) -> InFlight:
        """Launches an AlltoAll of flat tensors.

        Args:
            received: the memory for the result, in blocks by sending rank.
            sent: the elements to send, in blocks by receiving rank.
            receive_sizes, send_sizes: for each rank, the number of elements to receive from it, and to send to it.
            group: the communication class, such as "embedding".
        """

        def exchange(carrier: dist.ProcessGroup, backend: str, to: Tensor, own: Tensor) -> Any:
            """Launches the AlltoAll of `own` to `to` on the process group `carrier`. Over gloo it is sent as separate
            messages.
            """
            if backend != "gloo":
                if own.is_complex():
                    to, own = torch.view_as_real(to), torch.view_as_real(own)
                return carrier.alltoall_base(to, own, receive_sizes, send_sizes, AllToAllOptions())
            parts = torch.split_with_sizes(own, send_sizes), torch.split_with_sizes(to, receive_sizes)
            return send_parts(carrier, *parts, self._waiters.get(group) or self.message_waiter(group), backend)

        return self._launch(exchange, group, received, sent)

    def all_reduce_(self, flat: Tensor, reduce_op: str, group: str) -> InFlight:
        """Launches an in-place sum of a flat tensor over all ranks. Buckets of gradients are sent in `gradient_dtype`
        if it is set. `group` is the communication class, such as "dense lane". `reduce_op` is ignored.
        """
        narrow = self._to_wire_dtype(flat) if group == "dense lane" and self.gradient_dtype is not None else flat
        launched = self._launch(_launch_all_reduce, group, narrow)
        if narrow is flat:
            return launched
        return widen_result(launched, flat, cost.all_reduce(narrow.nbytes, self.world_size).sent_bytes)

    def rounding_report(self) -> str:
        """Returns a sentence for a report that says how a communication hook or rounding changes gradients."""
        if self.comm_hook is not None:
            return f"gradients are reduced by {self.comm_hook.name}, within the backward\n"
        if self.gradient_dtype is None:
            return self.rounding.report()
        dtype, error = self.gradient_dtype, torch.finfo(self.gradient_dtype).eps / 2
        return f"gradients, and rows of them, are sent as {dtype}: each is off by up to {error:.1e} of its value\n"

    def _to_wire_dtype(self, gradient: Tensor) -> Tensor:
        """Casts a gradient to `gradient_dtype` if that is set and narrower than the gradient's dtype. Returns the
        result.
        """
        dtype = self.gradient_dtype
        return gradient if dtype is None or dtype.itemsize >= gradient.dtype.itemsize else gradient.to(dtype)

    def _launch(self, collective: Callable[..., Any], group: str, written: Tensor, *read: Tensor) -> InFlight:
        """Launches a collective. To send CUDA tensors over gloo, copies them to the host and waits until the collective
        has ended.

        Args:
            collective: function of (process group, backend, `written`, *`read`) that launches the collective, and
                returns torch's handle to wait for.
            group: the communication class.
            written, read: the tensor that the collective writes, and the tensors that it only reads.
        """
        carrier, backend = self._sending_group(group, written)
        if not written.is_cuda or "nccl" in backend:
            turn = self._launch_in_order(written, backend) if group in CLASSES else None
            if turn is None:
                return InFlight(written, collective(carrier, backend, written, *read), reads=read)
            with turn:
                # Make the current stream wait for the collective, because the caller reads the result on it.
                collective(carrier, backend, written, *read).wait()
            return InFlight(written, None)
        on_host = [tensor.cpu() for tensor in (written, *read)]
        collective(*self._sending_group(group, on_host[0]), *on_host).wait()
        written.copy_(on_host[0])
        return InFlight(written, None)

    def _launch_in_order(self, tensor: Tensor, backend: str) -> AbstractContextManager[None] | None:
        """Returns a context in which the calling thread may launch a collective in a fixed order with those of the
        launcher. Returns None if the collective runs on the host and needs no such order.

        Args:
            tensor: the tensor to send.
            backend: the name of the backend that sends it, such as "nccl".
        """
        if "nccl" in backend:
            return setup_collectives(tensor.device) if self.in_turn is None else self.in_turn()
        # Over gloo, the launcher of a model on a device sends from the calling thread too, so no order is needed.
        if self.in_turn is None or tensor.is_cuda or "nccl" in dist.get_backend_config(self.group):
            return None
        return self.in_turn()

    def wait(self, launch: InFlight, what: str = "") -> Tensor:
        """Waits for a launch, and returns its result. If the launch fails, the error names `what` and the failed
        ranks.
        """
        if launch.work is not None:
            try:
                launch.work.wait()
            except RuntimeError as error:
                self.name_ranks(error, what)
                raise
        return launch.value

    def launches(self) -> Mapping[str, Any]:
        """Maps the names of ops to the functions that launch their collectives."""
        return {
            "embrace::all_to_all_rows": self.all_to_all_rows,
            "embrace::all_to_all_gradients": self.all_to_all_gradients,
            "_c10d_functional::all_reduce_": self.all_reduce_,
            "_c10d_functional::wait_tensor": self.wait,
        }


class SingleProcess(Communicator):
    """The communicator of a process without other ranks. Its collectives return this process's data at once."""

    def join(self, group: dist.ProcessGroup) -> None:
        """Turns this object into the communicator of `group`, before anything has been launched. Collective."""
        if dist.get_world_size(group) == 1:
            self.group = group
            return
        self.__class__ = Communicator  # type: ignore[assignment]
        self.join(group)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Leaves the tensors unchanged, because there is no other rank."""
        self.check_open()

    def reduce_scalar(self, value: Tensor, reduce_op: dist.ReduceOp.RedOpType) -> Tensor:
        """Returns the tensor unchanged, because there is no other rank."""
        self.check_open()
        return value

    def gather(self, value: T, kind: Any) -> list[T]:
        """Returns a list with this rank's value only."""
        self.check_open()
        return [value]

    def gather_equal(self, own: Tensor, group: str) -> InFlight:
        """Returns a completed launch. Its result (1, n) has the elements `own` (n,)."""
        return InFlight(own.view(1, -1), None)

    def gather_unequal(self, own: Tensor, sizes: list[int], group: str) -> InFlight:
        """Returns a completed launch. Its result is `own`."""
        return InFlight(own, None)

    def send_rows(self, columns: Tensor, counts: Counts, embedding_dim: int, group: str) -> InFlight:
        """Returns a completed launch. Its result is `columns`, flattened."""
        return InFlight(columns.view(-1), None)

    def send_gradients(self, flat: Tensor, counts: Counts, embedding_dim: int, group: str) -> InFlight:
        """Returns a completed launch. Its result is `flat`."""
        return InFlight(flat, None)

    def all_reduce_(self, flat: Tensor, reduce_op: str, group: str) -> InFlight:
        """Returns a completed launch. Its result is `flat`, because there is no other rank."""
        return InFlight(flat, None)

    def connect(self, device: torch.device) -> None:
        """Does nothing, because there is no process group to connect."""
