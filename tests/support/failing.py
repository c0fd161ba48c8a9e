"""A model that can be made to fail in the middle of its forward or backward, and its batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

NUM_WORDS, NUM_ITEMS, NUM_CLASSES = 30, 20, 3


class Armed:
    """Where the next call of this process fails."""

    where: str | None = None

    @classmethod
    def fire(cls, where: str) -> None:
        if cls.where == where:
            cls.where = None
            raise MemoryError(f"none left in the {where}")


@torch.library.custom_op("embrace_fx_tests::may_run_out", mutates_args=())
def may_run_out(x: Tensor) -> Tensor:
    Armed.fire("forward")
    if Armed.where == "nan":
        Armed.where = None
        return x * torch.nan
    return x.clone()


@torch.library.custom_op("embrace_fx_tests::may_run_out_backward", mutates_args=())
def may_run_out_backward(x: Tensor) -> Tensor:
    Armed.fire("backward")
    return x.clone()


@may_run_out.register_fake
@may_run_out_backward.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


may_run_out.register_autograd(lambda ctx, gradient: may_run_out_backward(gradient))


class Fallible(nn.Module):
    """Two tables that share no exchange, a third one's rows read late, and classes that a label may be out of."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 6)
        self.mix = nn.Linear(6, 4)
        self.items = nn.Embedding(NUM_ITEMS, 4)
        self.classes = nn.Linear(4, NUM_CLASSES)

    def forward(self, words_BL: Tensor, items_B: Tensor, labels_B: Tensor) -> Tensor:
        x_BD = may_run_out(torch.tanh(self.mix(self.words(words_BL).mean(1)))) + self.items(items_B)
        return F.cross_entropy(self.classes(x_BD), labels_B)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Fallible().double()


def make_optimizer(model: nn.Module) -> Optimizer:
    return Adagrad(model.parameters(), lr=0.1, eps=1e-3)


def draw_batch(step: int, rank: int, length: int = 3) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(100 * step + rank)
    sizes = ((NUM_WORDS, (4, length)), (NUM_ITEMS, (4,)), (NUM_CLASSES, (4,)))
    return tuple(torch.randint(high, size, generator=random) for high, size in sizes)
