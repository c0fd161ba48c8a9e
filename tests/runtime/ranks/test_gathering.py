"""What few bytes of every rank travel by, and that they arrive."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from embrace_fx.runtime.ranks.gathering import AT_ONCE_BYTES, gather_single
from tests.support.ranks import run_ranks

SIZES = (0, 1, 7, AT_ONCE_BYTES // 8, AT_ONCE_BYTES // 8 + 1)


def gathers(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """Of each size, in elements of 8 bytes: whether an AlltoAll carried it; what arrives is checked."""
    group, found = dist.group.WORLD, []
    for size in SIZES:
        own = torch.arange(size) + 1000 * rank
        everyone = own.new_full((world_size * size,), -1)
        with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as at_once:
            work = gather_single(everyone, own, group, async_op=True)
            work.wait()
            again = torch.empty_like(everyone)
            gather_single(again, own, group)
        expected = torch.cat([torch.arange(size) + 1000 * other for other in range(world_size)])
        assert torch.equal(everyone, expected)
        assert torch.equal(again, expected)
        found.append((size, at_once.call_count == 2))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_few_bytes_go_at_once_and_arrive(world_size: int) -> None:
    for found in run_ranks(world_size, gathers):
        assert found == [(size, world_size > 2 and 0 < size <= AT_ONCE_BYTES // 8) for size in SIZES]
