"""Padding rows that are not zero, which most optimizers move without a gradient, in consecutive batches; beside DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.scenario import compiled_once

ROWS, WIDTH, STEPS = 24, 6, 6

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "decaying": lambda of: AdamW(of, 0.02, eps=1e-3, weight_decay=0.1),
    "linear": lambda of: SGD(of, 0.1, momentum=0.9, weight_decay=0.1),
    "averages": lambda of: RMSprop(of, 0.02, eps=1e-3, momentum=0.5),
    "swept": lambda of: Adam(of, 0.02, eps=1e-3, weight_decay=0.1),
    "swept too": lambda of: NAdam(of, 0.02, eps=1e-3, weight_decay=0.1),
    "still": lambda of: SGD(of, 0.1),
}


class Padded(nn.Module):
    """Two tables: bags with a padding row amid the others, and lookups whose first row it is."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=7)
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.out = nn.Linear(WIDTH, 1)
        nn.init.normal_(self.bags.weight)  # padding rows too
        nn.init.normal_(self.words.weight)

    def forward(self, bags: Tensor, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.bags(bags) + self.words(words).mean(1))).square().mean()


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(7 * step + rank)
    bags, words = torch.randint(ROWS, (2, 4, 3), generator=random)
    bags[0, 0], words[rank, 0] = 7, 0 if step % 3 else 5  # one is in every batch, the other in two in a row of three
    return bags, words


def write_averages(model: Padded, optimizer: Optimizer) -> None:
    """Gives every row, padding rows among them, a momentum of the loop's own."""
    for table in (model.bags.weight, model.words.weight):
        for key, value in optimizer.state[table].items():
            if isinstance(value, Tensor) and value.dim():
                optimizer.state[table][key] = torch.linspace(0.01, 0.3, ROWS * WIDTH).double().view(ROWS, WIDTH)


def _train(rank: int, wrap: Callable[[nn.Module], Any], make: str, writes: bool) -> None:
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        plain = Padded().double()
        model: Any = wrap(plain) if compiled else DistributedDataParallel(plain)
        optimizer = OPTIMIZERS[make](model.parameters())
        batches = [_batch(step, rank) for step in range(STEPS)]
        for step, batch in enumerate(model.lookahead(batches) if compiled else batches):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if writes and step == 1:
                write_averages(model.module, optimizer)
        whole = embrace_fx.full_state_dict(model.module)
        found.append([whole[name] for name in sorted(whole)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-11)


def _train_each(rank: int, world_size: int, makes: tuple[str, ...], options: dict[str, Any], writes: bool) -> None:
    wrap = compiled_once(**options)  # by the first optimizer; each later one has the model from the beginning
    for make in makes:
        try:
            _train(rank, wrap, make, writes)
        except BaseException as error:
            error.add_note(f"by the optimizer: {make}")
            raise


@pytest.mark.parametrize("writes", [False, True], ids=["as made", "state written"])
def test_padding_rows_take_their_step_before_the_next_batch_reads_them(writes: bool) -> None:
    run_ranks(2, _train_each, tuple(OPTIMIZERS), {"strategy": "alltoall", "schedule": "2d"}, writes)


@pytest.mark.parametrize(("strategy", "schedule"), [("alltoall", "vertical"), (embrace_fx.Grid(2, 1), "2d")], ids=str)
def test_padding_rows_on_other_layouts_and_schedules(strategy: Any, schedule: str) -> None:
    run_ranks(2, _train_each, ("decaying", "swept"), {"strategy": strategy, "schedule": schedule}, True)
