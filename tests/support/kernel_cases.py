"""What the kernels of `runtime/kernels/gpu` must compute, on whatever `Put` puts the tensors on.

On a GPU they run as they are, without one in Triton's interpreter (`kernel_interpreter.py`). Each case goes through the
public functions, which choose the kernel, and compares with float64 or with Python.

Shape legend
    N ranks; V rows of the table; D or d its columns; U rows of one rank; R rows of all; K distinct ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.runtime import kernels
from embrace_fx.runtime.kernels import gpu
from embrace_fx.vocabulary.ops import own_columns
from tests.support.kernel_values import DTYPES, WIDTHS, Put, assert_near, assert_same, plain, random, random_ids
from tests.support.update_cases import decay_rows, update_no_rows, update_rows, update_rows_of_bfloat16


def columns_by_rank(rows: Tensor, ranks: int) -> Tensor:
    return torch.cat([rows[:, slice(*own_columns(rows.shape[1], ranks, rank))].reshape(-1) for rank in range(ranks)])


COLUMN_CASES = [(1, 2), (3, 2), (2, 4), (10, 4), (33, 4), (192, 3), (192, 1)]


def pack_columns(put: Put) -> None:
    for dtype in DTYPES:
        for width, ranks in COLUMN_CASES:
            rows = random(9, width, dtype=dtype)
            for count in (0, 1, 9):
                assert_same(kernels.split_columns(put(rows[:count]), ranks), columns_by_rank(rows[:count], ranks))
            mask = torch.tensor([True, False, False, True, True, False, False, False, True])
            for selected in (mask, ~mask, torch.zeros_like(mask)):
                found = kernels.split_selected_columns(put(rows), put(selected), ranks)
                assert_same(found, columns_by_rank(rows[selected], ranks))
            positions = torch.tensor([8, 0, 0, 3])
            found = kernels.split_selected_columns(put(rows), put(positions), ranks)
            assert_same(found, columns_by_rank(rows[positions], ranks))


def unpack_columns(put: Put) -> None:
    for dtype in DTYPES:
        for width, ranks in COLUMN_CASES:
            for count in (0, 1, 7):
                rows = random(count, width, dtype=dtype)
                flat = put(columns_by_rank(rows, ranks))
                assert_same(kernels.join_columns(flat, width, ranks), rows)
                out, positions = torch.zeros(12, width, dtype=dtype), torch.arange(11, -1, -1)[:count]
                expected = out.index_copy(0, positions, rows)
                found = put(out)
                kernels.join_columns_into(found, put(positions), flat, ranks)
                assert_same(found, expected)


@given(st.integers(0, 9), st.integers(1, 70), st.integers(1, 9), st.sampled_from(DTYPES))
def _columns_codec(put: Put, rows: int, width: int, ranks: int, dtype: torch.dtype) -> None:
    whole = random(rows, width, dtype=dtype, seed=rows)
    assert_same(kernels.join_columns(kernels.split_columns(put(whole), ranks), width, ranks), whole)


def columns_codec(put: Put) -> None:
    _columns_codec(put)


def sums_of_ids(ids: Tensor, rows: Tensor, padding_idx: int, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the unique ids, and the sum of each id's rows in float64."""
    unique = sorted(set(ids.tolist()) - {padding_idx})
    sums = [scale * rows[ids == one].double().sum(dim=0) for one in unique]
    return torch.tensor(unique, dtype=torch.int64), torch.stack(sums) if sums else rows[:0].double()


def coalesce(put: Put) -> None:
    sizes = [(0, 5, -1, 1.0), (1, 5, -1, 0.25), (40, 9, 3, 1 / 3), (40, 9, 0, 1.0), (70, 60, -1, 0.5)]
    for dtype in DTYPES:
        for width in WIDTHS:
            for count, num_rows, padding_idx, scale in sizes:
                ids, rows = random_ids(count, num_rows), random(count, width, dtype=dtype)
                expected = sums_of_ids(ids, rows, padding_idx, scale)
                paddings = [padding_idx] if padding_idx >= 0 else []
                found = kernels.coalesce(put(ids), put(rows.view(-1)), width, paddings, scale)
                assert_same(found[0], expected[0])
                assert_near(found[1], expected[1], dtype)


def coalesce_adds_in_the_order_of_ranks(put: Put) -> None:
    """Compares bits: 1e8 - 1e8 + 3 is 3, but other orders of the sum give 0."""
    ids = torch.tensor([4, 7, 4, 7, 4, 9])
    rows = torch.tensor([1e8, 1.0, -1e8, 2.0, 3.0, 5.0]).unsqueeze(1).repeat(1, 33)
    in_order = torch.tensor([3.0, 3.0, 5.0]).unsqueeze(1).repeat(1, 33)
    found = kernels.coalesce(put(ids), put(rows.view(-1)), 33, (), 1.0)
    assert_same(found[1], in_order)


def sum_into_adds_in_the_order_of_ranks(put: Put) -> None:
    """As `coalesce`, where the host knows the sums; the last row goes into none."""
    ids, number = torch.tensor([4, 7, 9]), torch.tensor([0, 1, 0, 1, 0, 2, 3])
    rows = torch.tensor([1e8, 1.0, -1e8, 2.0, 3.0, 5.0, 8.0]).unsqueeze(1).repeat(1, 33)
    found = kernels.sum_known_ids(put(rows.view(-1)), (put(ids), put(number)), 33, 1.0)
    assert_same(found[0], ids)
    assert_same(found[1], torch.tensor([3.0, 3.0, 5.0]).unsqueeze(1).repeat(1, 33))


def coalesce_adds_narrow_values_widely(put: Put) -> None:
    """In bfloat16, 256 + 1 would be 256."""
    rows = torch.tensor([256.0, *[1.0] * 8]).bfloat16()
    found = kernels.coalesce(put(torch.zeros(9, dtype=torch.int64)), put(rows), 1, (), 1.0)
    assert found[1].item() == 264.0


def refuse_strided(put: Put) -> None:
    """A kernel called by itself refuses it; the public functions leave such a tensor to torch's ops."""
    table = put(random(6, 8)).t()
    with pytest.raises(ValueError, match=r"Got shape \(8, 6\) with strides \(1, 8\)"):
        gpu.pack_columns(table, 4)
    assert_same(kernels.split_columns(table, 4), columns_by_rank(plain(table), 4))


CASES: dict[Callable[[Put], None], str] = {
    pack_columns: "pack_columns",
    unpack_columns: "unpack_columns",
    columns_codec: "pack_columns",
    coalesce: "find_segments sum_segments",
    coalesce_adds_in_the_order_of_ranks: "find_segments sum_segments",
    sum_into_adds_in_the_order_of_ranks: "known_segments sum_segments",
    coalesce_adds_narrow_values_widely: "find_segments sum_segments",
    decay_rows: "decay_rows",
    update_rows: "sgd_rows adagrad_rows adam_rows",
    update_rows_of_bfloat16: "sgd_rows adagrad_rows adam_rows",
    update_no_rows: "sgd_rows adagrad_rows adam_rows",
    refuse_strided: "pack_columns",
}
"""Each case, and the kernels that it must call."""


def kernels_called(case: Callable[[Put], None], put: Put) -> set[str]:
    """Runs a case, which raises where a result is wrong. Returns those of its kernels that it has called."""
    called: set[str] = set()

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return kernel(*args, **kwargs)

        return call

    kept = {name: getattr(gpu, name) for name in CASES[case].split()}
    try:
        for name, kernel in kept.items():
            setattr(gpu, name, counted(name, kernel))
        case(put)
    finally:
        for name, kernel in kept.items():
            setattr(gpu, name, kernel)
    return called
