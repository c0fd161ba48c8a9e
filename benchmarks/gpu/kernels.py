"""Each Triton kernel: against float64 torch ops, and its time against the bytes that have to move.

A kernel is checked at a small size, and timed where it moves the whole table once. Under the dry run torch's ops stand
in for the kernels: what is checked then is this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import bytes_moved
from benchmarks.gpu.device import gpu_kernels
from benchmarks.gpu.environment import copy_bytes_per_ms
from benchmarks.gpu.section import Context
from embrace_fx.runtime.kernels import column_widths

GROUP = 8
"""Ranks that a kernel packs for."""
CHECKED = (1_000, 512)
TOLERANCE = 1e-5
"""Of float32 against float64, relative to the largest value."""
TARGET = 0.8
"""Of the bandwidth of a copy."""

Call = Callable[..., Any]
ADAGRAD = {"eps": 1e-6, "weight_decay": 0.0}
SGD = {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}


@dataclass(frozen=True)
class Case:
    """One kernel, with arguments of one size.

    Attributes:
        kernel: its name among the Triton kernels.
        arguments: the arguments, newly created for this case, because a kernel may write into them.
        twin: the same computation in torch ops.
        options: keyword arguments of both functions.
        moved: the bytes that must be read and written.
        written: positions of the arguments that contain the result; empty if the result is returned.
    """

    kernel: str
    arguments: tuple[Any, ...]
    twin: Call
    moved: int
    options: tuple[tuple[str, Any], ...] = ()
    written: tuple[int, ...] = ()


def cases(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """Yields the cases one by one, because at full size a table takes gigabytes."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    ids = torch.randperm(rows, device=device, generator=generator)
    table, gradients = random(rows, columns), random(rows, columns)
    yield Case("pack_columns", (table, GROUP), _pack, bytes_moved.move_columns(rows, columns, 4))
    packed = _pack(table, GROUP)
    yield Case(
        "unpack_columns",
        (packed, torch.empty_like(table), GROUP),
        _unpack,
        bytes_moved.move_columns(rows, columns, 4),
    )
    del packed
    twice = ids[: rows // 2].repeat(2)
    yield Case(
        "coalesce",
        (twice, table[: len(twice)].reshape(-1), columns, -1, 0.5),
        _coalesce,
        bytes_moved.coalesce(len(twice), rows // 2, columns, 4),
    )
    yield Case(
        "sgd_rows",
        (table, None, ids, gradients),
        _sgd,
        bytes_moved.update(rows, columns, 4, 0),
        (("options", SGD),),
        written=(0,),
    )
    yield Case(
        "adagrad_rows",
        (table, random(rows, columns).square_(), ids, gradients),
        _adagrad,
        bytes_moved.update(rows, columns, 4, 1),
        (("options", ADAGRAD), ("step_size", 0.01)),
        written=(0, 1),
    )


# The baselines use torch's ops, because those of `runtime/kernels` call Triton kernels for CUDA tensors.


def _pack(rows: Tensor, group: int) -> Tensor:
    return torch.cat([part.reshape(-1) for part in rows.split(column_widths(rows.shape[1], group), 1)])


def _unpack(flat: Tensor, out: Tensor, group: int) -> Tensor:
    widths = column_widths(out.shape[1], group)
    blocks = flat.split([len(out) * width for width in widths])
    views = [block.view(len(out), width) for block, width in zip(blocks, widths, strict=True)]
    return torch.cat(views, 1, out=out)


def _coalesce(ids: Tensor, flat: Tensor, columns: int, padding_idx: int, scale: float) -> list[Tensor]:
    unique, inverse = torch.unique(ids, return_inverse=True)
    sums = flat.new_zeros((len(unique), columns))
    return [unique, sums.index_add_(0, inverse, flat.view(-1, columns), alpha=scale)]


def _sgd(shard: Tensor, buffer: None, ids: Tensor, rows: Tensor, options: Mapping[str, Any]) -> None:
    shard.index_add_(0, ids, rows, alpha=-options["lr"])


def _adagrad(
    shard: Tensor, sums: Tensor, ids: Tensor, rows: Tensor, options: Mapping[str, Any], step_size: float
) -> None:
    sums.index_add_(0, ids, rows * rows)
    shard.index_add_(0, ids, rows / (sums[ids].sqrt() + options["eps"]), alpha=-step_size)


def run(context: Context) -> None:
    device, sizes = context.device, context.sizes
    checked = CHECKED if device.is_real else (sizes.rows, sizes.columns)
    for case in cases(*checked, device.torch):
        context.add(kind="check", kernel=case.kernel, **_check(case, _kernel(context, case)))
    copied = sizes.rows * sizes.columns * 4
    bandwidth = copy_bytes_per_ms(device, copied, sizes.repeats)
    context.add(kind="copy", bytes=copied, bytes_per_ms=bandwidth)
    for case in cases(sizes.rows, sizes.columns, device.torch):
        if not context.affords(5.0, case.kernel):
            return
        kernel, options = _kernel(context, case), dict(case.options)
        moved = case.moved if device.is_real else copied
        for name, call in (("triton" if device.is_real else "stand-in", kernel), ("torch", case.twin)):
            ms = device.time_ms(partial(call, *case.arguments, **options), sizes.repeats)
            share = moved / ms / bandwidth
            met = share >= TARGET if name == "triton" else None
            row = {"kernel": case.kernel, "by": name, "ms": ms, "floor_bytes": moved, "share_of_copy": share}
            context.add(kind="time", **row, target_met=met)


def _kernel(context: Context, case: Case) -> Call:
    return getattr(gpu_kernels(), case.kernel) if context.device.is_real else case.twin


def _check(case: Case, kernel: Call) -> dict[str, Any]:
    """Compares the kernel's result with that of torch's ops on the same values in float64."""
    options = dict(case.options)
    own = [a.clone() if isinstance(a, Tensor) else a for a in case.arguments]
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else _copy(a) for a in case.arguments]
    found, expected = kernel(*own, **options), case.twin(*wide, **options)
    if case.written:
        found, expected = [own[k] for k in case.written], [wide[k] for k in case.written]
    difference = max(map(_difference, _listed(found), _listed(expected)))
    return {"difference": difference, "tolerance": TOLERANCE, "passed": difference <= TOLERANCE}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _listed(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _difference(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference relative to the largest value, or infinity if shapes differ."""
    if found.numel() != expected.numel():
        return float("inf")
    found, expected = found.double().reshape(-1), expected.double().reshape(-1)
    scale = float(expected.abs().max().clamp(min=1e-30)) if expected.numel() else 1.0
    return float((found - expected).abs().max()) / scale if expected.numel() else 0.0
