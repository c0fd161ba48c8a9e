"""The Triton kernels on a GPU: the interpreter's cases, and what only a GPU shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from embrace_fx.runtime import kernels
from embrace_fx.runtime.exchanges import hashing
from embrace_fx.runtime.kernels import gpu
from tests.support.kernel_cases import CASES, kernels_called
from tests.support.kernel_values import Put, random_ids

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not gpu.available(), reason="Triton is not installed"),
]


def put(tensor: Tensor) -> Tensor:
    return tensor.cuda()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(case: Callable[[Put], None]) -> None:
    assert kernels_called(case, put) == set(CASES[case].split())


def test_rows_beyond_two_to_the_31_elements() -> None:
    """Rows are addressed in 64 bits: the last one's offset does not fit in 32."""
    num_rows, width = 2**22 + 8, 512
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free memory on the GPU")
    table = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    table[-1] = 7
    ids = torch.tensor([num_rows - 1, 0, num_rows - 1], device="cuda")
    assert kernels.lookup(table, ids)[:, 0].tolist() == [7, 0, 7]
    gpu.sgd_rows(
        table, None, ids[:1], torch.ones(1, width, dtype=torch.bfloat16, device="cuda"),
        {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False},
    )  # fmt: skip
    assert table[-1].unique().tolist() == [6]
    assert table[:-1].count_nonzero().item() == 0


def test_ids_have_the_same_servers_and_bitmaps_as_on_the_cpu() -> None:
    ids = torch.randperm(4_000_000)[:1_000_000].sort().values
    server, bitmap = hashing.server_of(ids, 8, 3), hashing.hash_bitmap(ids, torch.arange(4_000_000))
    assert torch.equal(hashing.server_of(ids.cuda(), 8, 3).cpu(), server)
    every = torch.arange(4_000_000, device="cuda")
    assert torch.equal(hashing.hash_bitmap(ids.cuda(), every).cpu(), bitmap)
    assert torch.equal(hashing.ids_of_bitmap(bitmap.cuda(), every).cpu(), ids)


def test_sums_have_the_same_bits_every_time() -> None:
    ids = put(random_ids(200_000, 30_000))
    rows = torch.randn(200_000, 64, device="cuda")
    first = kernels.coalesce(ids, rows.view(-1), 64, (), 1.0)
    for _ in range(5):
        assert torch.equal(kernels.coalesce(ids, rows.view(-1), 64, (), 1.0)[1], first[1])
