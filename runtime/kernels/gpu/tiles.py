"""Helpers of the Triton kernels: tile sizes, offsets, dtypes for sums, and checks of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_TILE_BYTES = 8192
"""Of one tensor, and twice as much of all: 4 warps of 32 threads load 8 KiB by four 128-bit loads each. Enough bytes in
flight to hide the latency of rows that lie anywhere, few enough registers for many programs on a multiprocessor."""
_MAX_COLUMNS = 1024


class Tile(NamedTuple):
    """The rows and columns that one Triton program processes."""

    rows: int
    columns: int

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the Triton launch grid for (rows, columns): one program per tile."""
        return triton.cdiv(rows, self.rows), triton.cdiv(columns, self.columns)


def choose_tile(columns: int, itemsize: int, tensors: int = 1) -> Tile:
    """Chooses the tile that a Triton program processes in tensors of rows. The number of columns of the tile is a power
    of two.

    Args:
        columns: the number of columns of a row.
        itemsize: the size of an element in bytes.
        tensors: the number of tensors of which the program loads a tile.
    """
    wide = min(triton.next_power_of_2(columns), _MAX_COLUMNS)
    share = triton.next_power_of_2(triton.cdiv(tensors, 2))
    return Tile(max(1, _TILE_BYTES // share // (wide * itemsize)), wide)


@triton.jit
def offsets(ids, count, width: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Computes the offsets of this Triton program's tile. Returns (offsets in a tensor (count, width), offsets in the
    rows `ids` of a table, mask of the elements that exist).

    Args:
        ids: (count,), the table row to which each row of the tensor belongs.
        count, width: the numbers of rows and columns of the tensor.
        ROWS, COLUMNS: the size of a tile.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < width)[None, :]
    named = tl.load(ids + row, mask=row < count, other=0)
    return row[:, None] * width + column[None, :], named[:, None] * width + column[None, :], inside


def sum_type(dtype: torch.dtype) -> Any:
    """Returns the Triton dtype in which to add values of a torch dtype: float64 for float64, otherwise float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def on_tensor_device(launch: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Decorates a function that launches a Triton kernel, so that the device of its first argument is the current CUDA
    device during the call. Triton launches on the current device.
    """

    @wraps(launch)
    def on_device(tensor: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function with the device of `tensor` as the current one."""
        with torch.cuda.device_of(tensor):
            return launch(tensor, *args, **kwargs)

    return on_device


def require_contiguous(where: str, **tensors: Tensor) -> None:
    """Raises `ValueError` if a tensor is not contiguous, because kernels address rows as contiguous memory.

    Args:
        where: the function's name, for the message.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{where} needs a contiguous {name}. Got shape {tuple(tensor.shape)} with strides {tensor.stride()}. "
                f"Pass {name}.contiguous()."
            )
