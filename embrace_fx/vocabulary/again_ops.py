"""Ops for recomputation in the backward: they repeat the forward's random draws, and copy state that the forward
overwrites.

Random draws are repeated between `begin_replay` and `end_replay`, from the generator state that `random_state` saved in
the forward. The three ops are tagged as random, so that no pass moves them past a draw.

    forward   state = random_state(cpu); noise = bernoulli(x, 0.9)
    backward  now = begin_replay(state, cpu); noise_again = bernoulli(x_again, 0.9); end_replay(now, cpu)
"""

from __future__ import annotations

import torch
from torch import Tensor

from embrace_fx.vocabulary.fake_results import op

_RANDOM = (torch.Tag.nondeterministic_seeded,)


@op("random_state", "(Device device) -> Tensor", tags=_RANDOM)
def random_state(device: torch.device) -> Tensor:
    """Returns the state of a device's default random number generator, as a uint8 tensor on the host: 5,056 bytes for a
    CPU, 16 for a GPU.
    """
    return torch.empty(5056 if device.type == "cpu" else 16, dtype=torch.uint8, device="cpu")


@op("begin_replay", "(Tensor state, Device device) -> Tensor", tags=_RANDOM)
def begin_replay(state: Tensor, device: torch.device) -> Tensor:
    """Sets a device's default random number generator to `state`. Returns its previous state, for `end_replay`."""
    return torch.empty_like(state)


@op("end_replay", "(Tensor state, Device device) -> ()", tags=_RANDOM)
def end_replay(state: Tensor, device: torch.device) -> None:
    """Sets a device's default random number generator back to `state`, the result of `begin_replay`."""


@op("copy_unwritten", "(Tensor state) -> Tensor")
def copy_unwritten(state: Tensor) -> Tensor:
    """Returns a copy of `state`, a buffer or batch tensor, made before the forward overwrites it. The backward
    recomputes values from the copy.
    """
    return torch.empty_like(state)
