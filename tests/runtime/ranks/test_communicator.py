"""What ranks tell each other, where their process group carries no tensors of the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from embrace_fx.runtime.ranks import backends, groups
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.step_handshake import StepHandshake
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
