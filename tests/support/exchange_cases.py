"""Gradients that exchanges are tried with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embrace_fx.runtime.exchanges.options import ExchangeOptions

V, D = 45, 6

DTYPES = (torch.float64, torch.float32, torch.bfloat16)

VARIANTS: dict[str, tuple[str, ExchangeOptions]] = {
    "allreduce": ("allreduce", ExchangeOptions()),
    "allgather": ("allgather", ExchangeOptions()),
    "allgather_elements": ("allgather", ExchangeOptions(unit="element")),
    "omnireduce": ("omnireduce", ExchangeOptions()),
    "omnireduce_many_rounds": ("omnireduce", ExchangeOptions(block_size=2 * D, slots=2)),
    "omnireduce_odd_blocks": ("omnireduce", ExchangeOptions(block_size=7, slots=5)),
    "zen": ("zen", ExchangeOptions(seed=-1)),
    "zen_elements": ("zen", ExchangeOptions(unit="element")),
    "zen_hierarchical": ("zen", ExchangeOptions(scheme="hierarchical")),
    "ps": ("ps", ExchangeOptions()),
    "ps_elements": ("ps", ExchangeOptions(unit="element")),
}


def bernoulli(density: float, *shape: int) -> Tensor:
    return torch.rand(*shape) < density


def _one_element(rank: int, world_size: int) -> Tensor:
    mask = torch.zeros(V, D, dtype=torch.bool)
    mask[0, 0] = rank == world_size - 1
    return mask


def _blocks(rank: int, world_size: int) -> Tensor:
    return bernoulli(0.3, V // 5, 1).repeat_interleave(5, dim=0).expand(V, D)


PATTERNS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda rank, world_size: bernoulli(0.2, V, 1).expand(V, D),
    "blocks": _blocks,
    "elements": lambda rank, world_size: bernoulli(0.05, V, D),
    "zero": lambda rank, world_size: torch.zeros(V, D, dtype=torch.bool),
    "dense": lambda rank, world_size: torch.ones(V, D, dtype=torch.bool),
    "one_element": _one_element,
    "density_by_rank": lambda rank, world_size: bernoulli((0.9, 0.0, 0.02, 0.3)[rank], V, D),
    "skewed": lambda rank, world_size: (bernoulli(0.9, V, 1) & (torch.arange(V) < V // 8).view(V, 1)).expand(V, D),
}
