"""Blocks that take a device's time: a forward, the gradient of what it reads, and that of its weights.

Contract
    `lab::forward`, `lab::data_gradient` and `lab::weight_gradient` are pure and differentiable as one block. Sizes are
    real, values are stand-ins: a result holds one value everywhere, which depends on samples of all that was read. So
    two systems that exchange gradients alike have the same losses, and one that does not shows it.

When a value is there
    A tensor of the CPU can be sent as soon as its op has returned. So each op waits for its piece of the queue: no
    system sends a gradient before the device has made it. The device is synchronous, its host sleeps while it computes.
    What a host does between two pieces the device does not hide, as one that is queued ahead would; slow motion makes
    that part small, for every system alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from benchmarks.device.queue import QUEUE
from embrace_fx.cost.links import CORE
from embrace_fx.runtime.probe.pace import expected_ms

FLOPS_PER_MS = CORE.flops_per_ms
"""By which counters of FLOPs learn that a block computes, and how long each of its parts: a core does 20 GFLOP/s."""
SAMPLES = 64
"""Elements of a tensor that a stand-in value depends on, spread over all of it."""


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)].mean()


def _filled(value: Tensor, shape: Sequence[int]) -> Tensor:
    return value.expand(tuple(shape)).clone(memory_format=torch.contiguous_format)


def _occupy(ms: float) -> None:
    QUEUE.wait(QUEUE.submit(ms))


def reference(device: torch.device) -> Callable[[], None]:
    """Returns a function that takes the device's time for the probe's reference work, as `pace.reference` does."""
    return partial(_occupy, expected_ms(CORE))


@custom_op("lab::forward", mutates_args=())
def forward(
    reads: Sequence[Tensor], weights: Sequence[Tensor], shape: Sequence[int], times_ms: Sequence[float]
) -> Tensor:
    """Returns the output of a block, a tensor of this shape.

    Args:
        reads: outputs of other blocks, and rows of tables.
        times_ms: the device's times for the forward, the data gradient and the weight gradient.
    """
    _occupy(times_ms[0])
    return _filled(torch.stack([_sample(each) for each in (*reads, *weights)]).mean(), shape)


@forward.register_fake
def _(reads: Sequence[Tensor], weights: Sequence[Tensor], shape: Sequence[int], times_ms: Sequence[float]) -> Tensor:
    return (*reads, *weights)[0].new_empty(tuple(shape))


@custom_op("lab::data_gradient", mutates_args=())
def data_gradient(gradient: Tensor, reads: Sequence[Tensor], ms: float) -> list[Tensor]:
    """Returns the gradients of the tensors that a block has read."""
    _occupy(ms)
    value = _sample(gradient)
    return [_filled(value * (1 + _sample(each)), each.shape) for each in reads]


@data_gradient.register_fake
def _(gradient: Tensor, reads: Sequence[Tensor], ms: float) -> list[Tensor]:
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in reads]


@custom_op("lab::weight_gradient", mutates_args=())
def weight_gradient(gradient: Tensor, reads: Sequence[Tensor], weights: Sequence[Tensor], ms: float) -> list[Tensor]:
    """Returns the gradients of a block's weights."""
    _occupy(ms)
    value = _sample(gradient)
    if reads:
        value = value * (1 + _sample(reads[0]))
    return [_filled(value, each.shape) for each in weights]


@weight_gradient.register_fake
def _(gradient: Tensor, reads: Sequence[Tensor], weights: Sequence[Tensor], ms: float) -> list[Tensor]:
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in weights]


@register_flop_formula(torch.ops.lab.forward)
def _forward_flops(reads: Any, weights: Any, shape: Any, times_ms: Sequence[float], **_: Any) -> float:
    return FLOPS_PER_MS * times_ms[0]


@register_flop_formula(torch.ops.lab.data_gradient)
def _data_gradient_flops(gradient: Any, reads: Any, ms: float, **_: Any) -> float:
    return FLOPS_PER_MS * ms


@register_flop_formula(torch.ops.lab.weight_gradient)
def _weight_gradient_flops(gradient: Any, reads: Any, weights: Any, ms: float, **_: Any) -> float:
    return FLOPS_PER_MS * ms


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    reads, weights, _, ctx.times_ms = inputs
    ctx.num_reads = len(reads)
    ctx.save_for_backward(*reads, *weights)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    reads, weights = ctx.saved_tensors[: ctx.num_reads], ctx.saved_tensors[ctx.num_reads :]
    _, data_ms, weight_ms = ctx.times_ms
    # Data gradients come first, because earlier blocks and row gradients of tables wait for them.
    of_reads = torch.ops.lab.data_gradient(gradient, reads, data_ms) if reads else []
    of_weights = torch.ops.lab.weight_gradient(gradient, reads, weights, weight_ms) if weights else []
    return of_reads, of_weights, None, None


forward.register_autograd(_backward, setup_context=_save)
