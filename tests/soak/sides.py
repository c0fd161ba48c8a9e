"""The two sides of a soak: a compiled model, and the plain one, whose gradients are averaged by hand."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import embrace_fx
from tests.soak.plan import Round
from tests.support.failing import make_model
from tests.support.inside import session_of
from tests.support.training import make_optimizers, whole_parameters

Batch = tuple[Tensor, ...]


class PlainSide:
    """The reference: torch's own optimizer, and gradients that are the mean over ranks before it steps."""

    is_compiled = False

    def __init__(self, life: Round) -> None:
        self.plain = make_model()
        self.optimizer: Any = make_optimizers(life.optimizer, self.plain)[0]
        self.model: Any = self.plain
        self.log: list[float] = []
        self.kept: Any = None

    def lookahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return batches

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reduce(self) -> None:
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def step(self) -> None:
        self.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def keep(self) -> None:
        self.kept = copy.deepcopy((self.plain.state_dict(), self.optimizer.state_dict()))

    def go_back(self) -> None:
        if self.kept is not None:
            weights, state = copy.deepcopy(self.kept)
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state)

    def ask_for_another_plan(self) -> None:
        pass

    def parameters(self) -> dict[str, Tensor]:
        return whole_parameters(self.model)


class CompiledSide(PlainSide):
    is_compiled = True

    def __init__(self, life: Round) -> None:
        super().__init__(life)
        mixed = {"words.weight": "alltoall", "items.weight": "allreduce"}
        strategy: Any = {"mixed": mixed, "zen": {"words.weight": "zen"}}.get(life.strategy, life.strategy)
        self.model = embrace_fx.compile(self.plain, optimizer=self.optimizer, strategy=strategy, schedule=life.schedule)

    def lookahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return iter(self.model.lookahead(batches))

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()

    def reduce(self) -> None:
        pass

    def keep(self) -> None:
        self.kept = copy.deepcopy((self.model.full_state_dict(), embrace_fx.full_state_dict(self.optimizer)))

    def ask_for_another_plan(self) -> None:
        """As rank 0 does by itself where batches come to read other rows."""
        session_of(self.model).programs.counters.replan_for = "a test" if dist.get_rank() == 0 else ""


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Name -> how far apart, relative to the largest magnitude, of parameters that differ by more than rounding."""
    apart = {
        name: float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-9))
        for name, value in expected.items()
    }
    return {name: by for name, by in apart.items() if not by <= 1e-9}


def differ_among_ranks(values: dict[str, Tensor]) -> list[str]:
    """The names of those whose bits are not the same on all ranks. Collective."""
    found = []
    for name, value in values.items():
        bits = value.detach().contiguous().view(torch.int64)
        most, least = bits.clone(), bits.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        if not torch.equal(most, least):
            found.append(name)
    return found
