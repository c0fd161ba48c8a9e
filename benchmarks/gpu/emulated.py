"""An *emulated* fabric: a process group of N ranks of which one is real.

Contract
    A collective occupies the one link of its rank for the time that the cost model gives it, then makes the local copy
    that it implies; compute is real. Collectives of all groups share the link, in the order in which they are launched:
    two that overlap do not each get the whole bandwidth. Other ranks are taken to be exactly as this one: they send
    what it sends and are never late, so what varies between ranks (arrival times, ids, stragglers, congestion) is not
    in these figures. Tensors on the host are exchanged at once.

Two ranks:
    all_reduce (sum)    x            ->  2 x         (sparse: two lists of rows, added up)
    all_gather          x            ->  x x
    all_to_all          x0 x1        ->  x0 x0       (rank 1 sends what rank 0 keeps of its own)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

from benchmarks.gpu.device import Device
from embrace_fx.cost.links import Cluster, Collective, launch_ms

NAME = "emulated"
_ProcessGroup: Any = dist.ProcessGroup
LATENCY_MS = 0.02
"""Start-up of a message between machines: about what NCCL takes over InfiniBand or RoCE (nccl-tests)."""


@dataclass
class Fabric:
    """The emulated link of the real rank.

    Attributes:
        busy_ms: kind of collective -> the time for which it has occupied the link.
        takes_time: whether transfers take time; if False, a collective only copies.
    """

    device: Device
    ranks: int
    gigabits: int
    busy_ms: dict[Collective, float]
    takes_time: bool = True

    def cluster(self) -> Cluster:
        return Cluster(bandwidth_bytes_per_ms=self.gigabits * 1e6 / 8, latency_ms=LATENCY_MS)

    def launch(self, kind: Collective, own: Tensor, copy: Callable[[], Any], results: list[Tensor]) -> Any:
        if own.device.type != self.device.torch.type or (own.device.type == "cpu" and own.numel() < 64):
            copy()  # small host tensors are used for agreement between ranks; their time is not emulated
            return _done(results)
        sent = sum(part.numel() * part.element_size() for part in _parts(own))
        ms = launch_ms(self.cluster(), kind, sent, self.ranks) if self.takes_time else 0.0
        self.busy_ms[kind] += ms
        return _create_work_from_future(self.device.transfer(ms, copy, results))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the dense tensors of which a tensor consists."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def _done(results: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(results)
    return _create_work_from_future(future)


class EmulatedGroup(_ProcessGroup):  # type: ignore[misc]  # its methods are overloaded, and called by their first form
    """A process group in which this process is rank 0 and all other ranks are emulated. Its methods are those that
    torch.distributed calls, with their names in torch 2.11 and 2.13.
    """

    def __init__(self, fabric: Fabric, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._fabric = fabric
        self._ranks = size

    def size(self) -> int:
        return self._ranks

    def getBackendName(self) -> str:
        return NAME

    def _get_backend(self, device: torch.device) -> Any:
        return _Backend()

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        (tensor,) = tensors
        if tensor.is_sparse:  # becomes an AllGather of indices and values, whose rows are summed
            return self._fabric.launch("all_gather", tensor, lambda: self._add_up(tensor), list(tensors))
        summed = opts is None or opts.reduceOp == dist.ReduceOp.SUM
        factor = self._ranks if summed else 1
        return self._fabric.launch("all_reduce", tensor, lambda: tensor.mul_(factor), list(tensors))

    def _add_up(self, tensor: Tensor) -> None:
        indices, values = _parts(tensor)
        gathered = torch.sparse_coo_tensor(
            indices.repeat(1, self._ranks), values.repeat(self._ranks, 1), tensor.shape, check_invariants=False
        )
        tensor.copy_(gathered.coalesce())

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        return self._fabric.launch(
            "all_gather", own, lambda: output.view(self._ranks, -1).copy_(own.view(-1)), [output]
        )

    _allgather_base = all_gather_single

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        def copy() -> None:
            for output in outputs[0]:
                output.copy_(inputs[0])

        return self._fabric.launch("all_gather", inputs[0], copy, list(outputs[0]))

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> Any:
        kept = own.narrow(0, 0, input_sizes[0] if input_sizes else own.shape[0] // self._ranks)
        blocks = output.split(list(output_sizes)) if output_sizes else output.chunk(self._ranks)

        def copy() -> None:
            if all(len(block) == len(kept) for block in blocks):
                output.view(self._ranks, *kept.shape).copy_(kept)
                return
            for block in blocks:
                block.zero_()
                common = min(len(block), len(kept))
                block[:common].copy_(kept[:common])

        return self._fabric.launch("all_to_all", own, copy, [output])

    alltoall_base = all_to_all_single

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return _done(list(tensors))

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Any:
        return _done(list(tensors))

    def barrier(self, opts: Any = None) -> Any:
        return _done([])


class _Options:
    _timeout = timedelta(minutes=5)


class _Backend:
    """The attributes of a group's backend that are read: its name, which assigns compute and launches to streams, and
    its timeout.
    """

    options = _Options()

    def name(self) -> str:
        return f"{NAME} nccl"


@contextmanager
def emulated(device: Device, ranks: int, gigabits: int) -> Iterator[Fabric]:
    """Opens a context in which torch.distributed is initialized as rank 0 of `ranks` ranks, and every new group is
    emulated.
    """
    fabric = Fabric(device, ranks, gigabits, {"all_reduce": 0.0, "all_to_all": 0.0, "all_gather": 0.0})
    if hasattr(dist.Backend, NAME.upper()):
        dist.Backend.backend_list.remove(NAME)
        delattr(dist.Backend, NAME.upper())
    dist.Backend.register_backend(
        NAME, lambda store, rank, size, timeout: EmulatedGroup(fabric, rank, size), devices=["cpu", "cuda"]
    )
    make_group = dist.new_group

    def new_group(*args: Any, **options: Any) -> Any:
        return make_group(*args, **{**options, "backend": NAME, "pg_options": None})

    dist.init_process_group(NAME, store=HashStore(), rank=0, world_size=ranks)
    try:
        with mock.patch.object(dist, "new_group", new_group):
            yield fabric
    finally:
        device.synchronize()
        dist.destroy_process_group()
