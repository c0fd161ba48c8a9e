"""What loops do with batches, forwards and backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad

from embrace_fx.runtime.ranks.failure import PeerFailure
from tests.support.beside import take_steps
from tests.support.scenario import OPTIMIZERS, Mean, Training, scenario
from tests.support.sides import DTYPE, NUM_WORDS, Words, draw_batch


@scenario()
def several_epochs(training: Training) -> None:
    for epoch in range(3):
        for batch in training.batches(4, 4 * epoch):
            training.update(batch)


@scenario()
def epochs_left_early(training: Training) -> None:
    for epoch in range(3):
        for step, batch in enumerate(training.batches(6, 6 * epoch)):
            training.update(batch)
            if step == 3:
                break


@scenario()
def no_lookahead(training: Training) -> None:
    for step in range(6):
        training.update(training.batch(step))


@scenario()
def lengths_that_vary(training: Training) -> None:
    lengths = [2 + (step * (training.rank + 2)) % 5 for step in range(8)]
    for batch in training.lookahead([draw_batch(step, training.rank, n) for step, n in enumerate(lengths)]):
        training.update(batch)


@scenario(fresh=True, warned=True)
def batches_of_its_own_between(training: Training) -> None:
    for step, batch in enumerate(training.batches(7)):
        training.update(batch)
        if step % 3 == 2:
            training.update(training.batch(50 + step))


@scenario(fresh=True, warned=True)
def batches_moved(training: Training) -> None:
    for batch in training.batches():
        training.update((batch[0].clone(), *batch[1:]))


@scenario(fresh=True, warned=True)
def batches_written(training: Training) -> None:
    for step, batch in enumerate(training.batches()):
        if step % 2:
            batch[0][0, 0] = step
        training.update(batch)


@scenario()
def evaluations_between(training: Training) -> None:
    for step, batch in enumerate(training.batches()):
        training.update(batch)
        training.model.eval()
        with torch.inference_mode() if step % 2 == 0 else torch.no_grad():
            training.note(training.model(*draw_batch(40, 0)))
        training.model.train()


@scenario()
def evaluations_inside(training: Training) -> None:
    for batch in training.batches():
        loss = training.model(*batch)
        with torch.no_grad():
            training.note(training.model(*draw_batch(40, 0)))
        loss.backward()
        training.step()


@scenario()
def losses_that_are_no_numbers(training: Training) -> None:
    batches = [training.batch(step) for step in range(10)]
    if training.rank == 1:
        for step in (2, 6):
            batches[step][2].fill_(torch.nan)
    for step, batch in enumerate(training.lookahead(batches)):
        if step not in {2, 6}:
            training.update(batch)
        elif training.is_compiled:
            with pytest.raises(FloatingPointError, match=r"rank\(s\) 1\."):
                training.model(*batch).backward()


@scenario()
def ids_outside_of_a_table(training: Training) -> None:
    batches = [training.batch(step) for step in range(10)]
    for step in (3, 4, 8):
        if training.rank == step % 2:
            batches[step][0][1, 1] = NUM_WORDS
    for step, batch in enumerate(training.lookahead(batches)):
        if step not in {3, 4, 8}:
            training.update(batch)
        elif training.is_compiled:
            with pytest.raises((PeerFailure, IndexError)):  # an eager forward raises torch's own IndexError
                training.model(*batch).backward()


@scenario()
def two_losses_in_one_backward(training: Training) -> None:
    batches = training.batches(8)
    for first in batches:
        (training.model(*first) + 2 * training.model(*next(batches))).backward()
        training.step()


def _two_backwards(training: Training, order: Sequence[int]) -> None:
    batches = training.batches(8)
    for first in batches:
        losses = [training.model(*first), training.model(*next(batches))]
        for number in order:
            losses[number].backward()
        training.step()


@scenario(reference=Mean)
def two_forwards_first(training: Training) -> None:
    _two_backwards(training, (0, 1))


@scenario(reference=Mean)
def backwards_in_other_order(training: Training) -> None:
    _two_backwards(training, (1, 0))


@scenario()
def forwards_without_backward(training: Training) -> None:
    for step, batch in enumerate(training.batches(7)):
        loss = training.model(*batch)
        if step % 3:
            loss.backward()
            training.step()


@scenario()
def backwards_without_step(training: Training) -> None:
    for step, batch in enumerate(training.batches(7)):
        training.model(*batch).backward()
        if step % 3:
            training.step()


@scenario()
def steps_without_backward(training: Training) -> None:
    for batch in training.batches():
        training.update(batch)
        training.step()


@scenario()
def accumulation(training: Training) -> None:
    for step, batch in enumerate(training.batches(9)):
        with training.model.no_sync() if step % 3 < 2 else contextlib.nullcontext():
            training.model(*batch).backward()
        if step % 3 == 2:
            training.step()


@scenario()
def batches_dropped(training: Training) -> None:
    for step, batch in enumerate(training.batches()):
        training.model(*batch).backward()
        if step % 2:
            training.optimizer.step()
        training.optimizer.zero_grad()


@scenario()
def closures(training: Training) -> None:
    for batch in training.batches():

        def closure(batch: Words = batch) -> Tensor:
            training.optimizer.zero_grad()
            loss: Tensor = training.model(*batch)
            loss.backward()
            return loss

        training.optimizer.step(closure)


@scenario()
def a_penalty_outside_of_the_model(training: Training) -> None:
    for batch in training.batches():
        penalty = sum(p.square().sum() for p in training.module.first.parameters())
        (training.model(*batch) + penalty).backward()
        training.step()


NUM_IDS, DIM = 20, 4


class TwoTasks(nn.Module):
    """A table and a trunk, two heads, and a table of the second head's own."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(NUM_IDS, DIM)
        self.trunk = nn.Linear(DIM, DIM)
        self.first = nn.Linear(DIM, 1)
        self.second = nn.Linear(DIM, 1)
        self.extra = nn.Embedding(NUM_IDS, DIM)

    def forward(self, ids_B: Tensor, x_BD: Tensor) -> tuple[Tensor, Tensor]:
        h_BD = torch.tanh(self.trunk(self.ids(ids_B) * x_BD))
        return self.first(h_BD).square().mean(), torch.exp(self.second(h_BD * self.extra(ids_B))).mean(0).sum()


def two_tasks_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(10 * step + rank)
    ids_B = torch.randint(NUM_IDS, (5,), generator=random)
    return ids_B, torch.randn((5, DIM), generator=random, dtype=DTYPE)


def _some_results(kind: str, losses: Sequence[str], **options: Any) -> Callable[[Training], None]:
    """Losses of these results in turn."""

    def run(training: Training) -> None:
        model = training.wrap(TwoTasks(), **options)
        optimizer = training.optimize(OPTIMIZERS[kind], model.parameters())
        batches = [two_tasks_batch(training.rank, step) for step in range(8)]
        for step, batch in enumerate(training.lookahead(batches, model)):
            results = dict(zip("ab", model(*batch), strict=True))
            sum(results[name] for name in losses[step % len(losses)]).backward()
            if step % 3 == 2:  # in some steps, read gradients before the step, which waits for them
                training.note(model.module.trunk.weight.grad, model.module.trunk.bias.grad)
            optimizer.step()
            optimizer.zero_grad()

    return run


_TWO_TASKS: dict[str, Any] = {"optimizer": None, "reference": Mean, "fresh": True}
for _name, _kind, _losses, _options in (
    ("losses of some results, adam", "adam", ("ab", "a", "b", "a"), {}),
    ("losses of some results, momentum, at once", "momentum", ("ab", "a", "b", "a"), {"schedule": "none"}),
    ("a loss that comes late, momentum", "momentum", ("a", "a", "a", "a", "b", "ab"), {}),
    ("a loss that comes late, adamw", "adamw", ("a", "a", "a", "a", "b", "ab"), {}),
    ("a loss that never comes", "adamw", ("a",), {}),
):
    _run = _some_results(_kind, _losses, **_options)
    _run.__name__ = _name
    scenario(**_TWO_TASKS)(_run)


@scenario(**_TWO_TASKS)
def gradients_of_inputs_alone(training: Training) -> None:
    model = training.wrap(TwoTasks())
    optimizer = training.optimize(OPTIMIZERS["adagrad"], model.parameters())
    for step in range(4):
        ids, x = two_tasks_batch(training.rank, step)
        x.requires_grad_()
        a, b = model(ids, x)
        if step % 2:
            (slope,) = torch.autograd.grad(a + b, x)
        else:
            (a + b).backward(inputs=[x])
            assert x.grad is not None
            slope = x.grad
        a, b = model(ids, (x + 0.1 * slope.sign()).detach())
        (a + b).backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(**_TWO_TASKS)
def gradients_of_inputs_then_of_parameters(training: Training) -> None:
    model = training.wrap(TwoTasks())
    optimizer = training.optimize(OPTIMIZERS["adam"], model.parameters())
    batches = [two_tasks_batch(training.rank, step) for step in range(8)]
    for ids, x in training.lookahead([(ids, x.requires_grad_()) for ids, x in batches], model):
        a, b = model(ids, x)
        for _ in range(2):
            training.note(*torch.autograd.grad(a + b, x, retain_graph=True))
        (a + b).backward()
        optimizer.step()
        optimizer.zero_grad()


class Mixing(nn.Module):
    """Mixes rows of a table by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(NUM_IDS, DIM, dtype=DTYPE)

    def forward(self, matrix: Tensor, ids: Tensor) -> Tensor:
        return (matrix @ self.rows(ids).values()).square().mean()


@scenario(**_TWO_TASKS)
def sparse_and_nested_batches(training: Training) -> None:
    model = training.wrap(Mixing())
    optimizer = training.optimize(OPTIMIZERS["adam"], model.parameters())
    drawn = [two_tasks_batch(training.rank, step) for step in range(4)]
    jagged = [torch.nested.nested_tensor([ids[:2], ids[2:]], layout=torch.jagged) for ids, _ in drawn]
    take_steps(model, optimizer, [(x.T.relu().to_sparse_csr(), ids) for ids, (_, x) in zip(jagged, drawn, strict=True)])


@scenario(**_TWO_TASKS)
def a_scaler_of_tables_alone(training: Training) -> None:
    model = training.wrap(TwoTasks())
    named = dict(model.module.named_parameters())
    of_tables = [named.pop("ids.weight"), named.pop("extra.weight")]
    optimizers = [
        training.optimize(Adagrad, of_tables, lr=0.1, eps=1e-3),
        training.optimize(SGD, list(named.values()), lr=0.1),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(4):
        a, b = model(*two_tasks_batch(training.rank, step))
        scaler.scale(a + b).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    training.note(scaler.get_scale())
