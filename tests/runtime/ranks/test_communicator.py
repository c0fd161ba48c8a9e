"""What ranks tell each other, where their process group carries no tensors of the host."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from embrace_fx.runtime.ranks import backends, gathering, groups
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.groups import LANE_GROUPS
from embrace_fx.runtime.ranks.step_handshake import StepHandshake
from embrace_fx.vocabulary.operation_id import CLASS_LANES
from tests.support.ranks import run_ranks


def speaks_beside_a_group_of_devices(rank: int, world_size: int) -> dict[str, object]:
    with pytest.MonkeyPatch.context() as patched:
        supports_device = backends.supports_device
        hosts_only: list[dist.ProcessGroup] = []

        def of_device_alone(group: dist.ProcessGroup, device: torch.device) -> bool:
            return supports_device(group, device) and (group in hosts_only or device.type != "cpu")

        patched.setattr(backends, "supports_device", of_device_alone)
        patched.setattr(groups, "supports_device", of_device_alone)
        communicator = Communicator(dist.group.WORLD)
        hosts_only.append(communicator.host_group())
        values = [torch.tensor([float(rank + 1)])]
        communicator.broadcast(values)
        total = communicator.reduce_scalar(torch.tensor(rank + 1), dist.ReduceOp.SUM)
        return {
            "apart": communicator._hosts not in communicator._groups.values(),
            "announced": [list(each) for each in StepHandshake(communicator).announce_step([rank])],
            "objects": communicator.gather(rank, int),
            "broadcast": values[0].item(),
            "total": total.item(),
            "reduced": communicator.wait(communicator.all_reduce_(torch.tensor([1]), "sum", "ids")).tolist(),
        }


def test_ranks_speak_over_a_group_of_the_hosts() -> None:
    for found in run_ranks(2, speaks_beside_a_group_of_devices):
        assert found == {
            "apart": True,
            "announced": [[0], [1]],
            "objects": [0, 1],
            "broadcast": 1.0,
            "total": 3,
            "reduced": [2],
        }


def tells(rank: int, world_size: int, value: object, kind: object, most_bytes: int) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(groups, "MOST_BYTES", most_bytes)
        communicator = Communicator(dist.group.WORLD)
        with pytest.raises(RuntimeError) as caught:
            communicator.gather(value if rank == 1 else "x", kind)
        assert communicator.gather(rank, int) == [0, 1]  # the next collective succeeds
        return str(caught.value)


@pytest.mark.parametrize(
    ("value", "most_bytes", "says"),
    [
        ("y" * 200, 100, "Rank 1 sends 202 bytes to the other ranks, but at most 100"),
        (5, 100, "Rank 1 sent something other than a str: it is"),
    ],
    ids=["too much", "of another type"],
)
def test_what_ranks_tell_each_other_is_checked_on_every_rank(value: object, most_bytes: int, says: str) -> None:
    for message in run_ranks(2, tells, value, str, most_bytes):
        assert says in message


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    is_cuda = True

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()


def launches_for_devices(rank: int, world_size: int) -> dict[str, Any]:
    """Launches collectives of CUDA tensors over gloo, then of any over a backend that is called NCCL."""
    communicator = Communicator(dist.group.WORLD)
    flat = torch.tensor([1.0, rank]).as_subclass(OnDevice)
    launched = communicator.all_reduce_(flat, "sum", "dense")
    found: dict[str, Any] = {"through the host": (launched.work, launched.value is flat, flat.tolist())}
    entered: list[str] = []

    def turn(of: str) -> Any:
        entered.append(of)
        return contextlib.nullcontext()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Communicator, "_sending_group", lambda *_: (communicator.host_group(), "nccl"))
        patched.setattr("embrace_fx.runtime.ranks.communicator.setup_collectives", lambda device: turn(str(device)))
        for name, dtype in (("in turn", torch.float32), ("complex", torch.complex64)):
            sent, received = torch.arange(3).to(dtype) + 10 * rank, torch.zeros(4 - 2 * rank, dtype=dtype)
            come, leave = [2 - rank, 2 - rank], [2, 1]
            launched = communicator.all_to_all(received, sent, come, leave, "embedding")
            found[name] = launched.work, launched.value.tolist()
            communicator.in_turn = partial(turn, "the launcher's")
        launched = communicator.all_reduce_(torch.tensor([1.0]), "sum", "dense lane")  # a lane is in order by itself
        found["lane"] = launched.work is not None, communicator.wait(launched).tolist()
    communicator.reduce_scalar(torch.tensor(1), dist.ReduceOp.SUM)  # over gloo
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        communicator.reduce_scalar(torch.tensor(1), dist.ReduceOp.SUM)  # NCCL carries what the launcher sends
    return found | {"entered": entered}


def test_launches_of_tensors_on_devices() -> None:
    for rank, found in enumerate(run_ranks(2, launches_for_devices)):
        received = ([0, 1, 10, 11], [2, 12])[rank]
        assert found == {
            "through the host": (None, True, [2, 1]),
            "in turn": (None, received),
            "complex": (None, received),
            "lane": (True, [2]),
            "entered": ["cpu", "the launcher's", "the launcher's"],
        }


def opens_groups_of_nccl(rank: int, world_size: int) -> list[Any]:
    """Opens all groups where NCCL is told to send what is on a device, and returns what torch was asked for."""
    told: list[Any] = []
    new_group = dist.new_group

    def made(ranks: list[int], *, pg_options: Any, backend: str | None, timeout: timedelta, **options: Any) -> Any:
        urgent = None if pg_options is None else (pg_options.is_high_priority_stream, pg_options._timeout == timeout)
        told.append((options["group_desc"], ranks, backend, urgent, options["use_local_synchronization"]))
        return new_group(ranks, timeout=timeout, backend="gloo", **options)

    def sends(name: str, real: Any) -> Any:
        def send(*tensors: Any, **where: Any) -> None:
            told.append((name, [tensor.numel() for tensor in tensors]))
            real(*tensors, **where)

        return send

    def set_up(device: torch.device) -> Any:
        told.append(str(device))
        return contextlib.nullcontext()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "new_group", made)
        patched.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        patched.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
        patched.setattr(groups, "setup_collectives", set_up)
        patched.setattr(dist, "all_reduce", sends("all_reduce", dist.all_reduce))
        patched.setattr(dist, "all_to_all_single", sends("all_to_all", dist.all_to_all_single))
        patched.setattr(groups, "all_gather_single", sends("all_gather", gathering.all_gather_single))
        communicator = Communicator(dist.group.WORLD)
        communicator.open_lanes(lanes=CLASS_LANES[2:3])  # over gloo
        patched.setattr(Communicator, "uses_nccl", lambda self, device: True)
        told.append("nccl")
        for _ in range(2):
            communicator.connect(torch.device("cpu"))
            communicator.open_lanes()
        lanes = {name: communicator._groups[name].group_desc for name in LANE_GROUPS}
        told += [lanes, dict(communicator.channels(torch.device("cpu")))]
    return told


def test_groups_of_nccl() -> None:
    def made(name: str, backend: str, urgent: tuple[bool, bool] | None = None) -> tuple[Any, ...]:
        return f"embrace_fx_{name}", [0, 1], backend, urgent, False

    own, lanes = "cpu:gloo,cuda:nccl", ("embrace_fx_urgent_lanes", "embrace_fx_dense_lane")
    connected = ["cpu", ("all_reduce", [2]), ("all_to_all", [2, 2]), ("all_gather", [4, 2])]
    for found in run_ranks(2, opens_groups_of_nccl):
        assert found == [
            *(made("program", own), made("hosts", "gloo"), made("dense_lane", own), "nccl", *connected),
            *(made("urgent_lanes", "nccl", (True, True)), *connected),
            dict(zip(LANE_GROUPS, (*lanes[:1] * 2, *lanes[1:] * 2), strict=True)),
            dict(zip(CLASS_LANES, (*("urgent lanes",) * 2, *("other lanes",) * 2), strict=True)),
        ]
