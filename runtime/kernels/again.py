"""Kernels of `embrace_fx/vocabulary/again_ops.py`: the default generators' states, copies of written state."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def begin_replay(state: Tensor, device: torch.device) -> Tensor:
    now = random_state(device)
    end_replay(state, device)
    return now


def end_replay(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def copy_unwritten(state: Tensor) -> Tensor:
    return state.clone()
