"""Loops whose calls differ in more than tensors, each beside DDP: the same losses, the same parameters at the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence

import embrace_fx
from tests.eager.models import WIDTH, Batch, Classifier, Packing, labelled, with_lengths
from tests.support.ranks import run_ranks

STEPS = 40
"""More than there may be captures."""


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.by * gradients[0], None


class Adversary(Classifier):
    """Learns nothing of the domain: its gradient is turned around, by a number that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor, kinds: Tensor, alpha: float) -> Tensor:  # type: ignore[override]
        hidden = self.encode(ids)
        of_domain = F.cross_entropy(self.domain(_Reversed.apply(hidden, alpha)), kinds % 2)  # type: ignore[no-untyped-call]
        return F.cross_entropy(self.head(hidden), kinds) + of_domain


class ByStep(Classifier):
    """Weighs a term by the number of the step."""

    def forward(self, ids: Tensor, kinds: Tensor, step: int) -> Tensor:  # type: ignore[override]
        hidden = self.encode(ids)
        return F.cross_entropy(self.head(hidden), kinds) + min(1.0, step / 100) * hidden.square().mean()


class Described(Classifier):
    """Its batch has texts, a file's name, an array and a number, of which it reads nothing."""

    def forward(self, batch: dict[str, Any]) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.head(self.encode(batch["ids"])), batch["kinds"])


class Heated(Classifier):
    """Divides by a temperature, which the loop anneals."""

    temperature = 2.0

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encode(ids)) / self.temperature, kinds)


class Listed(Packing):
    """Packs sequences by lengths in a list."""

    def forward(self, ids: Tensor, lengths: list[int], kinds: Tensor) -> Tensor:  # type: ignore[override]
        packed = pack_padded_sequence(self.rows(ids.t()), torch.tensor(lengths), enforce_sorted=False)
        return F.cross_entropy(self.head(self.rnn(packed)[1][-1]), kinds)


class Acting(Classifier):
    """Returns a distribution, and a value."""

    def forward(self, ids: Tensor, kinds: Tensor) -> Any:
        hidden = self.encode(ids)
        return torch.distributions.Categorical(logits=self.head(hidden)), hidden.mean(1)


@dataclass(frozen=True)
class Loop:
    """A model, the arguments of each of its calls, and how the loop takes its results for a loss.

    Attributes:
        before: what the loop does to the model ahead of each call.
        is_graph: whether graphs hold all of its calls.
    """

    make: Callable[[], nn.Module]
    arguments: Callable[[int, int], Batch]
    loss: Callable[[Any, int, int], Tensor] = lambda found, step, rank: found
    before: Callable[[Any, int], None] = lambda model, step: None
    is_graph: bool = True


def _described(step: int, rank: int) -> Batch:
    ids, kinds = labelled(step, rank)
    about = {"file": f"part-{step}.txt", "at": np.array([step, rank]), "score": step / 7}
    return ({"ids": ids, "kinds": kinds, "texts": [f"sentence {step} {k}" for k in range(len(ids))], "about": about},)


def _listed(step: int, rank: int) -> Batch:
    ids, lengths, kinds = with_lengths(step, rank)
    return ids, lengths.tolist(), kinds


def _of_policy(found: Any, step: int, rank: int) -> Tensor:
    chosen, value = found
    of_value: Tensor = value.square().mean() - 0.01 * chosen.entropy().mean()
    gain: Tensor = chosen.log_prob(labelled(step, rank)[1]).mean()
    return of_value - gain


def _anneal(model: Any, step: int) -> None:
    model.temperature = 2.0 / (1 + step)


LOOPS = {
    "adversary": Loop(
        Adversary, lambda k, r: (*labelled(k, r), 2 / (1 + math.exp(-10 * k / STEPS)) - 1), is_graph=False
    ),
    "by step": Loop(ByStep, lambda k, r: (*labelled(k, r), k)),
    "described": Loop(Described, _described),
    "heated": Loop(Heated, labelled, before=_anneal),
    "listed": Loop(Listed, _listed, is_graph=False),
    "acting": Loop(Acting, labelled, _of_policy, is_graph=False),
}


def _train(model: Any, plain: nn.Module, loop: Loop, rank: int) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
    for step in range(STEPS):
        loop.before(plain, step)
        optimizer.zero_grad()
        loss = loop.loss(model(*loop.arguments(step, rank)), step, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _beside_ddp(rank: int, world_size: int, name: str, strategy: str) -> None:
    torch.set_default_dtype(torch.float64)
    loop, made = LOOPS[name], []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(loop.make())
    theirs = _train(DistributedDataParallel(made[0]), made[0], loop, rank)
    compiled = embrace_fx.compile(made[1], strategy=strategy)
    torch.testing.assert_close(_train(compiled, made[1], loop, rank), theirs, rtol=1e-9, atol=1e-12)
    own = embrace_fx.full_state_dict(compiled)
    for key, other in made[0].state_dict().items():
        torch.testing.assert_close(own[key], other, rtol=1e-9, atol=1e-12, msg=f"{name}: {key}")
    assert bool(compiled.graphs.reason) != loop.is_graph, compiled.graphs.reason
    compiled.close()


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strategy", ["auto", "alltoall"])
@pytest.mark.parametrize("name", LOOPS)
def test_training_equals_ddp(name: str, strategy: str, world_size: int) -> None:
    run_ranks(world_size, _beside_ddp, name, strategy)
