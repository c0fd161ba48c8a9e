"""Small problems for tests: random ones in the middle of training, and tasks that can be learned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.model import Data, PerConstraint, Weights


@dataclass(frozen=True)
class Problem:
    """Weights, multipliers, data and penalties as they may be between two batches: nothing is zero, nothing fits."""

    weights: Weights
    multipliers: PerConstraint
    data: Data
    penalties: Penalties


def random_problem(
    seed: int, steps: int, heads: int, *, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> Problem:
    """Returns a random problem with a few sequences. The head reads `heads` of the steps: 1 or `steps`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * scale

    B, I, H, C = 4, 3, 5, 3  # noqa: E741  # the legend of `embrace_fx.admm.model`
    weights = Weights(normal(H, I + H + 1) / 2, normal(C, H + 1))
    multipliers = PerConstraint(normal(steps, B, H) / 4, normal(steps, B, H) / 4, normal(heads, B, C) / 4)
    data = Data(normal(steps, B, I), torch.randint(C, (heads, B), generator=generator))
    p1, p2, p3 = (10 ** torch.empty(3).uniform_(0, 1, generator=generator)).tolist()
    return Problem(weights, multipliers, data, Penalties(p1, p2, p3))


def modules(
    inputs: int, hidden: int, classes: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[nn.RNN, nn.Linear]:
    torch.manual_seed(seed)
    return nn.RNN(inputs, hidden, batch_first=True, dtype=dtype), nn.Linear(hidden, classes, dtype=dtype)


def weighed_words(sequences: int, steps: int, *, seed: int, words: int = 6) -> tuple[Tensor, Tensor]:
    """Returns one-hot words (B, N, I) and classes (B,): whether a sequence's sum of values exceeds the mean."""
    values = torch.randn(words, generator=torch.Generator().manual_seed(99))
    values -= values.mean()
    ids = torch.randint(words, (sequences, steps), generator=torch.Generator().manual_seed(seed))
    return nn.functional.one_hot(ids, words).float(), (values[ids].sum(1) > 0).long()
