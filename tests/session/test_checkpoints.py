"""Checkpoints as DDP's users write them: whole on one rank, copied in memory, of averaged weights, loaded anywhere."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam
from torch.optim.swa_utils import AveragedModel

import embrace_fx
from embrace_fx.passes.planner.asked_strategies import Strategy
from tests.support.beside import take_steps
from tests.support.inside import session_of
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.sides import DTYPE, Matching, draw_batch


class Run:
    """The training of a model whose two tables are joined."""

    def __init__(self, strategy: Strategy = "alltoall", *, lazy: bool = False) -> None:
        torch.manual_seed(3)
        self.plain: Any = Matching().to(DTYPE)
        make = Adam if lazy else Adagrad
        self.optimizer: Any = make(self.plain.parameters(), lr=0.1, eps=1e-3)
        self.model = embrace_fx.compile(
            self.plain, optimizer=self.optimizer, strategy=strategy, row_updates="lazy" if lazy else "exact"
        )

    def train(self, rank: int, steps: range) -> None:
        take_steps(self.model, self.optimizer, [draw_batch(step, rank) for step in steps])


def parameters(run: Run) -> dict[str, Tensor]:
    """Returns copies of the whole parameters. Collective."""
    return {name: value.clone() for name, value in run.model.full_state_dict().items()}


def move_state(rank: int, world_size: int, old: Strategy, new: Strategy, when: str) -> None:
    source = Run(old, lazy=True)
    source.train(rank, range(2))
    target = Run(new, lazy=True)
    if when == "after the first call":
        target.train(rank, range(7, 8))
    target.model.load_state_dict(source.model.state_dict())
    target.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))  # torch would share the tensors
    for run in (source, target):
        run.train(rank, range(2, 4))
    assert_same(parameters(target), parameters(source), DTYPE)


@pytest.mark.parametrize(
    "when", [pytest.param("before the first call", marks=pytest.mark.long), "after the first call"]
)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("alltoall", "allreduce"),
        pytest.param("alltoall", "alltoall", marks=pytest.mark.long),
        pytest.param("allreduce", embrace_fx.Grid(2, 1), marks=pytest.mark.long),
        pytest.param(embrace_fx.Grid(2, 1), "alltoall", marks=pytest.mark.long),
        pytest.param(embrace_fx.Grid(2, 1), "allreduce", marks=pytest.mark.long),
    ],
)
def test_a_state_dict_is_loaded_whatever_the_strategies(old: Strategy, new: Strategy, when: str) -> None:
    run_ranks(2, move_state, old, new, when)


WRITERS: dict[str, Callable[[Any], object]] = {
    "pickle": pickle.dumps,
    "torch.save": lambda value: torch.save(value, io.BytesIO()),
}


def write_shards(rank: int, world_size: int) -> dict[str, str]:
    run = Run()
    run.train(rank, range(2))
    values = {
        "state dict": run.model.state_dict(),
        "module": run.model.module,
        "module's state dict": run.plain.state_dict(),
        "optimizer's state dict": run.optimizer.state_dict(),
    }
    found = {}
    for what, value in values.items():
        for writer, write in WRITERS.items():
            with pytest.raises(TypeError) as raised:
                write(value)
            found[f"{what} by {writer}"] = str(raised.value)
    run.train(rank, range(2, 3))  # training can continue after the errors
    return found


NAMED_BY = {
    "module": "words.weight, items.weight",
    "optimizer's state dict": "the optimizer's state of the sharded words.weight",
}


def test_a_shard_is_not_written_to_one_ranks_file() -> None:
    for found in run_ranks(2, write_shards):
        for what, message in found.items():
            assert "would lose the other ranks' columns" in message
            assert "model.full_state_dict()" in message
            assert NAMED_BY.get(what.split(" by")[0], "words.weight") in message, what


class Holder(nn.Module):
    """A module that contains a compiled model, like a LightningModule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.head = nn.Linear(2, 2)


def inside_another_module(rank: int, world_size: int) -> None:
    run = Run()
    run.train(rank, range(2))
    holder = Holder(run.model)
    state = embrace_fx.full_state_dict(holder)
    assert set(state) == {*(f"inner.{name}" for name in run.plain.state_dict()), "head.weight", "head.bias"}
    other = Run()
    other.train(rank, range(5, 6))
    Holder(other.model).load_state_dict(state)
    assert_same(parameters(other), parameters(run), DTYPE)


@pytest.mark.long
def test_a_module_that_contains_a_compiled_model_saves_and_loads_whole_tensors() -> None:
    run_ranks(2, inside_another_module)


def test_a_model_whose_tables_are_whole_is_pickled_and_copied() -> None:
    run = Run()
    run.train(0, range(2))
    ways: tuple[Callable[[Any], Any], ...] = (lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy)
    for made in ways:
        compiled, plain = made(run.model), made(run.model.module)
        assert_same(dict(compiled.state_dict()), parameters(run), DTYPE)
        assert_same(dict(plain.state_dict()), parameters(run), DTYPE)
        assert session_of(compiled).options == session_of(run.model).options
        assert session_of(compiled).optimizers == ()
        run.train(0, range(1))


def averaged(rank: int, world_size: int) -> None:
    run = Run("allreduce")
    average = AveragedModel(run.plain)
    for step in range(3):
        run.train(rank, range(step, step + 1))
        average.update_parameters(run.model)
    state = embrace_fx.full_state_dict(average)
    whole, expected = Run("allreduce"), []
    for step in range(3):
        whole.train(rank, range(step, step + 1))
        expected.append(parameters(whole))
    for name in expected[0]:
        mean = torch.stack([each[name] for each in expected]).mean(0)
        torch.testing.assert_close(state[f"module.{name}"], mean, rtol=1e-12, atol=1e-12)
