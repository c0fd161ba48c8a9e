"""Published models from tiny configurations: their batches, and their training against the reference.

Batches are dicts of padded examples, results are objects with a `.loss`; lengths differ between steps and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import embrace_fx
from embrace_fx.vocabulary.plan import Decision
from tests.support.inside import captures_of
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same, train_reference
from tests.support.training import whole_parameters

NUM_WORDS = 120
PAD, START = 0, 1
IGNORED = -100
BATCH_SIZE = 3
TIMEOUT_S = 280.0
Batch = dict[str, Any]

SGD_01 = partial(SGD, lr=0.1)
ADAGRAD = partial(Adagrad, lr=0.05, eps=1e-3)
ADAM = partial(Adam, lr=0.01, eps=1e-3)
FOUR = ((9, 12, 7, 9), (11, 6, 8, 10))
THREE = ((9, 5, 8), (6, 10, 7))


@dataclass(frozen=True)
class Training:
    """A model, its optimizer, and its batches: `lengths[rank][step]` tokens in the longest example.

    Attributes:
        kind: what a batch holds beside the ids: "question" (start and end), "language" or "translation" (labels).
        extra: further arguments of the model's call.
    """

    make: Callable[[], nn.Module]
    kind: str
    optimizer: Callable[..., Optimizer]
    lengths: tuple[tuple[int, ...], ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.lengths[0])

    def make_model(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().train().to(dtype)

    def batch(self, step: int, rank: int) -> Batch:
        return make_batch(self.kind, self.lengths[rank][step], 100 * step + rank) | dict(self.extra)


def make_batch(kind: str, length: int, seed: int) -> Batch:
    """Padded examples: the first is `length` tokens long, the others shorter."""
    random = torch.Generator().manual_seed(seed)

    def text(longest: int, padding: int) -> tuple[Tensor, Tensor]:
        real = torch.randint(max(1, longest // 2), longest + 1, (BATCH_SIZE,), generator=random)
        real[0] = longest
        mask = (torch.arange(longest) < real.unsqueeze(1)).long()
        ids = torch.randint(3, NUM_WORDS, mask.shape, generator=random)
        return torch.where(mask.bool(), ids, padding), mask

    ids, mask = text(length, PAD)
    batch: Batch = {"input_ids": ids, "attention_mask": mask}
    if kind == "question":
        batch["start_positions"] = torch.randint(0, length, (BATCH_SIZE,), generator=random)
        batch["end_positions"] = torch.randint(0, length, (BATCH_SIZE,), generator=random)
    elif kind == "language":
        batch["labels"] = torch.where(mask.bool(), ids, IGNORED)
    else:
        batch["labels"] = text(length + 2, IGNORED)[0]
    return batch


@dataclass(frozen=True)
class Trained:
    """What a rank has after training.

    Attributes:
        losses: one per step.
        captures: how many graphs were captured.
        result: type of a result, and its fields.
    """

    parameters: dict[str, Tensor]
    plan: dict[str, Decision]
    losses: list[float]
    captures: int
    result: tuple[str, tuple[str, ...]]

    @property
    def sharded(self) -> set[str]:
        return {name for name, decision in self.plan.items() if decision.strategy == "alltoall"}


def train_compiled(rank: int, world_size: int, training: Training) -> Trained:
    """Trains a compiled model as a user would, from initial values that only rank 0 has right."""
    model = training.make_model(seed=rank)
    optimizer = training.optimizer(model.parameters())
    compiled = embrace_fx.compile(model, optimizer=optimizer, strategy="alltoall")
    losses = []
    for step in range(training.steps):
        result = compiled(**training.batch(step, rank))
        result.loss.backward()
        compiled.optimizer.step()
        compiled.optimizer.zero_grad()
        losses.append(result.loss.item())
    plan = {decision.parameter: decision for decision in compiled.plan}
    kind = type(result).__name__, tuple(result.keys())
    return Trained(whole_parameters(compiled), plan, losses, captures_of(compiled), kind)


class LossOnly(nn.Module):
    """A model whose forward returns its loss, as the reference wants it; `losses` are those of all calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def forward(self, **batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss


def check(training: Training) -> Trained:
    """Trains on two ranks and asserts losses and parameters of the reference; returns what rank 0 has."""
    results = run_ranks(2, train_compiled, training, timeout_s=TIMEOUT_S)
    reference = LossOnly(training.make_model())
    batches = [[training.batch(step, rank) for step in range(training.steps)] for rank in range(2)]
    expected = train_reference(
        lambda: reference, lambda model: [training.optimizer(model.parameters())], batches, training.steps
    )
    for rank, result in enumerate(results):
        assert result.losses == pytest.approx(reference.losses[rank::2], rel=1e-9)
        assert_same(result.parameters, {n.removeprefix("model."): v for n, v in expected.items()}, torch.float64)
        assert (result.plan, result.captures) == (results[0].plan, results[0].captures)
    return results[0]
