"""Horovod on gloo: dense gradients (AllReduce) or sparse ones of the tables (AllGather).

Its processes find each other through an HTTP server, which `horovodrun` starts and rank 0 starts here, on its own host.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import horovod.torch as hvd  # type: ignore[import-not-found]
import torch.distributed as dist
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts  # type: ignore[import-not-found]
from horovod.runner.http.http_server import RendezvousServer  # type: ignore[import-not-found]

from benchmarks.peers.base import Task, Training, ordinary_steps, with_sparse_tables

CYCLE_MS = 1.0
"""Horovod's own: how often its ranks ask each other what there is to reduce."""


@dataclass(frozen=True)
class Horovod:
    """`hvd.DistributedOptimizer` around the optimizer; `sparse`: tables are `nn.Embedding(sparse=True)`."""

    sparse: bool

    def prepare(self, task: Task) -> Training:
        os.environ["HOROVOD_CYCLE_TIME"] = f"{CYCLE_MS * task.slow:g}"
        _join_servers()
        hvd.init()
        model = with_sparse_tables(task.model(), self.sparse)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            task.make_optimizer(model.parameters()), named_parameters=model.named_parameters()
        )
        return Training(ordinary_steps(model, optimizer))


def _join_servers() -> None:
    """Tells Horovod who the ranks are and where rank 0's server listens; each rank is the only one of its host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port = [_start_server() if rank == 0 else 0]
    dist.broadcast_object_list(port)
    os.environ.update(
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_RENDEZVOUS_ADDR=os.environ["MASTER_ADDR"],
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port[0]),
        HOROVOD_GLOO_IFACE=os.environ["GLOO_SOCKET_IFNAME"],
        HOROVOD_HOSTNAME=f"rank{rank}",
        HOROVOD_RANK=str(rank),
        HOROVOD_SIZE=str(size),
        HOROVOD_LOCAL_RANK="0",
        HOROVOD_LOCAL_SIZE="1",
        HOROVOD_CROSS_RANK=str(rank),
        HOROVOD_CROSS_SIZE=str(size),
        # The lab stops systems between their turns, which Horovod must not treat as a failure.
        HOROVOD_GLOO_TIMEOUT_SECONDS="7200",
        HOROVOD_STALL_CHECK_DISABLE="1",
    )


def _start_server() -> int:
    size = dist.get_world_size()
    server = RendezvousServer()
    port: int = server.start()
    server.init(get_host_assignments(parse_hosts(",".join(f"rank{r}:1" for r in range(size))), size))
    return port
