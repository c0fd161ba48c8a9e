"""Loops that are no scenario, beside DDP: rows that have left early, padding rows that move, steps amid `no_sync`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

import embrace_fx
from tests.support.beside import check, ids, run
from tests.support.ranks import run_ranks
from tests.support.scenarios.losses import Branches
from tests.support.tagger import Scorer

ROWS, WIDTH = 24, 6
Make = Callable[[Any], Optimizer]
Loop = Callable[[Any, int], Any]


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, 0.1)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, 0.02, eps=1e-3)


def ahead(model: Any, batches: list[Any]) -> Any:
    return model.lookahead(batches) if isinstance(model, embrace_fx.CompiledModel) else batches


def words() -> nn.Module:
    return Scorer(30).double()


Write = Callable[[Any, Any], Any]
"""Of the table, kept from before the first call, and its optimizer."""
FILLED = torch.linspace(0, 1, 30 * WIDTH, dtype=torch.float64).view(30, WIDTH)
AVERAGES = ("exp_avg", "exp_avg_sq")


def of_unread_rows(table: Any, optimizer: Any) -> None:
    """Writes gradients of rows that this batch does not read and the next batch reads."""
    table.grad[:16] = 0.25


def of_first_row(table: Any, optimizer: Any) -> None:
    table.grad[:1] = 0.25


BEFORE: dict[str, Write] = {
    "unread rows": of_unread_rows,
    "the first row": of_first_row,
    "clipped": lambda table, optimizer: nn.utils.clip_grad_norm_([table], 0.05),
}
"""What is done between backward and step."""
AFTER: dict[str, Write] = {
    "averages put": lambda table, optimizer: optimizer.state[table].update({key: FILLED.clone() for key in AVERAGES}),
    "an average put": lambda table, optimizer: optimizer.state[table].update(exp_avg=FILLED.clone()),
    "averages copied": lambda table, optimizer: [optimizer.state[table][key].copy_(FILLED) for key in AVERAGES],
    "averages scaled": lambda table, optimizer: [state["exp_avg"].mul_(0.5) for state in optimizer.state.values()],
}
"""What is done between two steps."""


def writing(make: Make, before: Write | None, after: Write | None) -> Loop:
    def loop(model: Any, rank: int) -> None:
        optimizer, table = make(model.parameters()), model.module.words.weight  # read once, before the loop
        # Consecutive batches have no row in common, so all rows of the next batch are sent early.
        read = [torch.arange(3) + 3 * (k % 2 == 0) + 6 * rank + 12 * (k % 3 == 2) for k in range(8)]
        for k, batch in enumerate(ahead(model, [each[None] for each in read])):
            optimizer.zero_grad()
            model(batch).backward()
            if before is not None and k % 2:
                before(table, optimizer)
            optimizer.step()
            if after is not None and k % 2:
                after(table, optimizer)

    return loop


EARLY = {
    **{
        f"{each}, {make.__name__}": (words, writing(make, BEFORE[each], None))
        for each in BEFORE
        for make in (sgd, adamw)
    },
    **{name: (words, writing(adamw, None, each)) for name, each in AFTER.items()},
}


@pytest.mark.parametrize(
    ("names", "schedule"),
    [
        pytest.param((*EARLY,)[::3], "vertical", id="some"),
        *(pytest.param((), schedule, id=schedule, marks=pytest.mark.long) for schedule in ("2d", "vertical")),
    ],
)
def test_gradients_and_state_written_between_steps(names: tuple[str, ...], schedule: str) -> None:
    strategy = {"words.weight": "alltoall"}
    check(__name__, *names, cases="EARLY", once=True, strategy=strategy, schedule=schedule, rtol=1e-9)


class Padded(nn.Module):
    """A table for bags with a padding row in its middle, and a table for lookups whose first row is the padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=7)
        self.words, self.out = nn.Embedding(ROWS, WIDTH, padding_idx=0), nn.Linear(WIDTH, 1)
        nn.init.normal_(self.bags.weight)  # also initializes padding rows
        nn.init.normal_(self.words.weight)

    def forward(self, bags: Tensor, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.bags(bags) + self.words(words).mean(1))).square().mean()


def padded() -> nn.Module:
    return Padded().double()


def padded_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    bags, words = ids(step, rank, 2, 4, 3, high=ROWS)
    bags[0, 0], words[rank, 0] = 7, 0 if step % 3 else 5  # 7 is in every batch, 0 in two of three
    return bags, words


def padding(make: Make, writes: bool) -> Loop:
    """Steps; after the second every row, padding rows among them, may be given a momentum of the loop's own."""

    def loop(model: Any, rank: int) -> None:
        optimizer = make(model.parameters())
        for step, batch in enumerate(ahead(model, [padded_batch(step, rank) for step in range(6)])):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            for table in (model.module.bags.weight, model.module.words.weight) if writes and step == 1 else ():
                for key, value in optimizer.state[table].items():
                    if isinstance(value, Tensor) and value.dim():
                        optimizer.state[table][key] = torch.linspace(0.01, 0.3, ROWS * WIDTH).double().view(ROWS, WIDTH)

    return loop


OPTIMIZERS: dict[str, Make] = {
    "decaying": lambda of: AdamW(of, 0.02, eps=1e-3, weight_decay=0.1),
    "linear": lambda of: SGD(of, 0.1, momentum=0.9, weight_decay=0.1),
    "averages": lambda of: RMSprop(of, 0.02, eps=1e-3, momentum=0.5),
    "swept": lambda of: Adam(of, 0.02, eps=1e-3, weight_decay=0.1),
    "swept too": lambda of: NAdam(of, 0.02, eps=1e-3, weight_decay=0.1),
    "still": lambda of: SGD(of, 0.1),
}
PADDING = {
    f"{name}{', written' * writes}": (padded, padding(make, writes))
    for name, make in OPTIMIZERS.items()
    for writes in (False, True)
}


@pytest.mark.parametrize(
    ("names", "strategy", "schedule"),
    [
        pytest.param((), "alltoall", "2d", marks=pytest.mark.long),
        pytest.param(("decaying, written", "swept, written"), "alltoall", "vertical", marks=pytest.mark.long),
        (("decaying, written", "swept"), embrace_fx.Grid(2, 1), "2d"),
    ],
    ids=["2d", "vertical", "a grid"],
)
def test_padding_rows_take_their_step_before_the_next_batch_reads_them(
    names: tuple[str, ...], strategy: Any, schedule: str
) -> None:
    check(__name__, *names, cases="PADDING", once=True, strategy=strategy, schedule=schedule, rtol=1e-10)


def present(in_place: bool) -> Loop:
    """Returns, for each step, which parameters have a gradient while ranks run out of batches."""

    def loop(model: Any, rank: int) -> list[list[bool]]:
        optimizer, found = sgd(model.parameters()), []
        with model.join():
            for k, taken in enumerate(("ab", "", "a", "", "b", "")[: 3 + 3 * rank]):
                model(ids(k, rank, 5, high=10), taken).backward()
                found.append([parameter.grad is not None for parameter in model.module.parameters()])
                optimizer.step()
                optimizer.zero_grad(set_to_none=not in_place)
        return found

    return loop


PRESENT = {"to none": (Branches, present(False)), "in place": (Branches, present(True))}


@pytest.mark.long
def test_what_a_rank_reached_before_it_ran_out_has_a_gradient() -> None:
    check(__name__, cases="PRESENT", ddp={"find_unused_parameters": True}, strategy="alltoall", rtol=1e-5)


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.other, self.linear = nn.Embedding(30, 4), nn.Embedding(20, 4), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.words(ids) * self.other(ids % 20)).square().mean()


def two_tables() -> nn.Module:
    return TwoTables().double()


def amid_no_sync(make: Make) -> Loop:
    """Every third step begins with a backward under `no_sync()` that a step takes at once; returns refusals."""

    def loop(model: Any, rank: int) -> list[str]:
        optimizer, told = make(model.parameters()), []
        for step in range(7):
            batch = ids(step, rank, 6, high=30)
            if step % 3 == 1:
                with model.no_sync():
                    model(batch).backward()
                try:
                    optimizer.step()
                except RuntimeError as error:
                    told.append(str(error))
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return told

    return loop


AMID: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    each.__name__: (two_tables, amid_no_sync(lambda of, each=each: each(of, lr=0.1)))  # type: ignore[misc]
    for each in (SGD, torch.optim.Adagrad, AdamW)
}


@pytest.mark.long
def test_of_whole_tables_each_rank_steps_its_own() -> None:
    check(__name__, "SGD", "Adagrad", cases="AMID", strategy="allreduce")


def _goes_on(rank: int, world_size: int, name: str) -> list[Any]:
    return run(lambda model: embrace_fx.compile(model, strategy="alltoall"), AMID[name], rank)


@pytest.mark.parametrize("name", ["Adagrad", "AdamW"])
def test_of_sharded_tables_every_rank_is_refused_and_may_go_on(name: str) -> None:
    (told, one), (also_told, other) = run_ranks(2, _goes_on, name)
    assert told == also_told
    assert len(told) == 2
    assert "Run the last backward of each step outside of no_sync()" in told[0]
    torch.testing.assert_close(one, other)
