"""The local kernels, by their properties: what is taken apart is put together, and no id or gradient is lost.

Shape legend
    N ranks; V rows of the table; D its columns; U rows of a batch; R rows of all batches; T tables.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from embrace_fx.runtime import kernels
from embrace_fx.vocabulary.ops import own_columns
from tests.support.golden import check_transcript, run_lines


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@given(st.integers(1, 9), st.integers(1, 12))
def test_own_columns_are_those_of_torch_chunk(ranks: int, columns: int) -> None:
    """If there are fewer chunks than ranks, the last ranks own no columns."""
    chunks = list(torch.arange(columns).chunk(ranks))
    chunks += [torch.arange(0)] * (ranks - len(chunks))
    owned = [torch.arange(*own_columns(columns, ranks, rank)) for rank in range(ranks)]
    assert [part.tolist() for part in owned] == [chunk.tolist() for chunk in chunks]
    assert kernels.column_widths(columns, ranks) == tuple(len(part) for part in owned)


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
def test_unpacking_takes_one_op_for_each_gradient(shapes: list[list[int]]) -> None:
    like = [torch.empty(shape) for shape in shapes]
    flat = numbered(1 + sum(each.numel() for each in like))[1:]  # a view with a storage offset
    parts = torch.split_with_sizes(flat, [each.numel() for each in like])
    with _Ops() as ops:
        found = kernels.unpack_bucket(flat, like)
    assert len([name for name in ops.names if name != "aten.empty.memory_format"]) == len(like)
    for each, part, shape in zip(found, parts, shapes, strict=True):
        assert torch.equal(each, part.view(shape))
        assert each.stride() == part.view(shape).stride()


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _examples() -> dict[str, tuple[Any, ...]]:
    """Returns arguments for every kernel. No size that depends on data is 0."""
    rows = numbered(4, 5)
    return {
        "embrace::unique_ids": ([torch.tensor([[5, 2, 5]])], 9, -1),
        "embrace::lookup": (rows, torch.tensor([3, 3, 0])),
        "embrace::join_columns": (rows.view(-1), 5, 2),
        "embrace::split_columns": (rows, 2),
        "embrace::join_ids": ([torch.tensor([2, 5, 5]), torch.tensor([[0], [3]])], [0, 1], [0, 9], [9, 5], 1),
        "embrace::route_grid": (torch.tensor([2, 4, 5, 5, 6]), torch.tensor([3, 2]), 1, 2, 1),
        "embrace::join_grid": (rows.view(-1), torch.tensor([1, 0, 2, 3]), torch.tensor([[1, 3], [2, 0]]), 5, 0),
        "embrace::split_grid": (rows, torch.tensor([1, 0, 2, 3]), torch.tensor([[1, 3], [2, 0]]), 0),
        "embrace::coalesce": (torch.tensor([2, 5, 5, 2]), rows.view(-1), 5, [], 0.5),
        "embrace::sparse_gradient": (numbered(4, 2), [torch.tensor([[3, 2, 3]])], [1]),
        "embrace::pack_bucket": ([rows, rows[0]], 0.5),
        "embrace::unpack_bucket": (numbered(7), [torch.empty(2, 2), torch.empty(3)]),
        "embrace::unpack_ids": (torch.tensor([[2, 2, 5], [1, 5, 0]]), 1, 2),
        "embrace::random_state": (torch.device("cpu"),),
        "embrace::begin_replay": (torch.get_rng_state(), torch.device("cpu")),
        "embrace::end_replay": (torch.get_rng_state(), torch.device("cpu")),
        "embrace::copy_unwritten": (rows,),
        "embrace::scored_positions": (torch.tensor([-100, 2, 3]), -100, 4),
        "embrace::head_statistics": (rows, torch.tensor([0, 9, 3, 4]), True, "div 2.0, tanh, to float64", 1, 2),
        "embrace::head_loss": (
            *([numbered(2, 3), numbered(2, 3)], torch.tensor([0, 2]), torch.tensor([1, -100, 3])),
            *(torch.ones(4), 1, 2),
        ),
        "embrace::head_smoothing": (
            *([numbered(4, 4)], numbered(2), torch.tensor([0, 2]), torch.tensor([1, -100, 3]), 4, 2),
        ),
        "embrace::head_coefficients": (
            *(torch.tensor(0.5), numbered(3), numbered(2), torch.tensor([0, 2]), torch.tensor([1, -100, 3])),
            *(torch.ones(4), 1, 4),
        ),
        "embrace::head_gradient": (rows, torch.tensor([0, 9, 3, 4]), numbered(4, 2), "div 2.0, tanh", 1, 2),
        "embrace::chunk_of_positions": (numbered(7, 2), torch.tensor([3, 4]), 1, 2),
        "embrace::spread_positions": ([rows[:2], rows[2:]], torch.tensor([2, 0]), numbered(3, 5), 2),
    }


def test_kernels_return_what_their_transcript_shows() -> None:
    check_transcript("kernels", partial(run_lines, "runtime.kernels", ("grid", "head", "rounding")))


def test_every_local_kernel_has_an_example() -> None:
    assert _examples().keys() == kernels.LOCAL.keys()


@pytest.mark.parametrize("name", list(kernels.LOCAL))
def test_an_op_calls_its_kernel_and_its_fake_kernel_agrees(name: str) -> None:
    """Passes derive shapes and dtypes from the fake kernels; what runs yields these."""
    op = getattr(torch.ops.embrace, name.removeprefix("embrace::")).default
    args = _examples()[name]
    expected = kernels.LOCAL[name](*args)
    torch.testing.assert_close(op(*args), expected, rtol=0, atol=0)
    if not getattr(expected, "is_sparse", False):  # the op's fake values are dense, so opcheck would fail
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
