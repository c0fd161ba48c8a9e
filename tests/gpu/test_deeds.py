"""What users do besides plain steps has on devices the values that it has on the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu.deeds import (
    DEEDS,
    Found,
    accumulates,
    fails_on_one_rank,
    plans_anew,
    trains_on_a_grid,
    trains_two_models,
)
from tests.gpu.needs import gpus
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same

pytestmark = pytest.mark.timeout(900)


def check(deed: Callable[[int, int, str], Found], ranks: int) -> list[Found]:
    """Returns what each rank found, apart from tensors."""
    expected = run_ranks(ranks, deed, "cpu", timeout_s=400.0)
    others = []
    for found, on_host in zip(run_ranks(ranks, deed, "cuda", timeout_s=400.0), expected, strict=True):
        values, of_host = ({k: v for k, v in each.items() if isinstance(v, Tensor)} for each in (found, on_host))
        assert_same(values, of_host, torch.float64)
        others.append({k: v for k, v in found.items() if k not in values})
        assert others[-1] == {k: v for k, v in on_host.items() if k not in values}
    return others


@gpus(2)
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_on_two_devices(deed: Callable[[int, int, str], Found]) -> None:
    others = check(deed, 2)
    if deed is fails_on_one_rank:
        assert others[0] == {"failed": [(3, [1])]}
    if deed is plans_anew:
        assert others[0] == {"changes": ["alltoall", "allreduce", "alltoall"]}


@gpus(4)
@pytest.mark.parametrize("deed", [accumulates, trains_on_a_grid, trains_two_models], ids=lambda deed: deed.__name__)
def test_on_four_devices(deed: Callable[[int, int, str], Found]) -> None:
    check(deed, 4)
