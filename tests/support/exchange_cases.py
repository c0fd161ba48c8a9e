"""Gradients that exchanges are tried with, and ways to exchange them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from embrace_fx.cost import exchanges as prediction
from embrace_fx.cost.blocks import STREAMS, Streaming
from embrace_fx.runtime.exchanges import omnireduce
from embrace_fx.runtime.exchanges.in_place import STRATEGY_OF, ExchangeKind

V, D = 45, 6

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Way:
    """One way to exchange a gradient.

    Attributes:
        strategy, scheme: as of `ExchangeKind`.
        elements: each element has an index of its own, as those of a gradient of one column.
        block_size, slots: of "omnireduce", in place of those that the links call for; 0: those.
    """

    strategy: str
    scheme: str = ""
    elements: bool = False
    block_size: int = 0
    slots: int = 0

    def kind(self, dense: Tensor) -> ExchangeKind:
        rows = dense.numel() if self.elements else dense.shape[0] if dense.ndim else 1
        return ExchangeKind(rows, self.strategy, self.scheme)

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """Makes exchanges use the blocks and slots of this object."""
        with pytest.MonkeyPatch.context() as patch:
            if self.block_size:
                patch.setattr(omnireduce, "fastest_block_size", lambda *_: self.block_size)
            if self.slots:
                patch.setattr(omnireduce, "choose_streaming", self._streaming_of)
                patch.setattr(prediction, "choose_streaming", self._streaming_of)
            yield

    def _streaming_of(
        self, num_blocks: int, _width: int, _itemsize: int, world_size: int, _cluster: object
    ) -> Streaming:
        of_aggregator = -(-num_blocks // world_size)
        return Streaming(max(1, min(STREAMS * self.slots, of_aggregator)), self.slots)


PLAIN = {
    strategy if scheme in ("", "balanced") else f"{strategy}_{scheme}": Way(strategy, scheme)
    for strategy, scheme in STRATEGY_OF
}
"""Every sparse exchange as it is by default."""
WAYS = PLAIN | {
    "allgather_elements": Way("allgather", elements=True),
    "omnireduce_many_rounds": Way("omnireduce", block_size=2 * D, slots=2),
    "omnireduce_odd_blocks": Way("omnireduce", block_size=7, slots=5),
    "zen_elements": Way("zen", "balanced", elements=True),
    "ps_elements": Way("ps", elements=True),
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
