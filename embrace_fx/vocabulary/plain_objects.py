"""Detects objects whose whole state is their attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_plain_object(value: Any) -> bool:
    """Returns whether the attributes of `value` are its whole state. This is false for tensors, numbers, containers,
    and instances of classes with slots.
    """
    builtin = isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    makes_itself: Any = type(value).__new__
    return not builtin and makes_itself is object.__new__ and hasattr(value, "__dict__")
