"""Models that are compiled twice, by others too, or inside of others; called beside their compiled form; averaged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import embrace_fx
from tests.support import beside
from tests.support.messages import logged
from tests.support.parts import differs
from tests.support.ranks import run_ranks
from tests.support.sides import DTYPE, Matching, draw_batch


def plain() -> Matching:
    torch.manual_seed(1)
    return Matching().to(DTYPE)


def sharded(model: nn.Module) -> Any:
    return embrace_fx.compile(model, strategy="alltoall")


def train(model: Any, rank: int, steps: range = range(3)) -> list[Tensor]:
    """Returns the losses of training."""
    return beside.train(model, [draw_batch(step, rank) for step in steps], partial(SGD, lr=0.5))


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *batch: Tensor) -> Any:
        return 2 * self.inner(*batch)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def with_compiled_layer(model: Any) -> nn.Module:
    model.second = torch.compile(model.second, backend="eager")
    return model


WRAPPED: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "torch.compile of it": lambda wrap: torch.compile(wrap(plain()), backend="eager"),
    "DDP of it": lambda wrap: DistributedDataParallel(wrap(plain())),
    "module.compile() of it": lambda wrap: compiled_in_place(wrap(plain())),
    "of module.compile()": lambda wrap: wrap(compiled_in_place(plain())),
    "of a compiled layer": lambda wrap: wrap(with_compiled_layer(plain())),
    "inside of another": lambda wrap: Doubled(wrap(plain())),
}


WRAPS: dict[str, Callable[[nn.Module], Any]] = {"found": sharded, "expected": DistributedDataParallel}


def wrap_both(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for name, make in WRAPPED.items():
        ours, theirs = (train(make(wrap), rank) for wrap in WRAPS.values())
        if wrong := differs(ours, theirs):
            found[name] = wrong
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_wrappers_around_and_inside_train_as_around_ddp() -> None:
    assert run_ranks(2, wrap_both) == [{}, {}]


def told(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def compile_again(rank: int, world_size: int) -> dict[str, str]:
    compiled, replicated = sharded(plain()), embrace_fx.compile(plain(), strategy="allreduce")
    assert sharded(compiled) is compiled
    cases: list[tuple[str, Any]] = [("torch.compile", torch.compile(plain())), ("inside", Doubled(compiled))]
    found = {name: told(ValueError, lambda each=each: sharded(each)) for name, each in cases}  # type: ignore[misc]
    losses = train(compiled, rank), train(replicated, rank)
    copied = copy.deepcopy(compiled.module)
    found["copied"] = told(ValueError, lambda: sharded(copied))
    assert all(map(torch.allclose, *losses))
    again = sharded(replicated.module), embrace_fx.compile(compiled.module, strategy="allreduce")
    more = [train(each, rank, range(3, 4)) for each in again]
    assert all(map(torch.allclose, *more))
    found["closed"] = told(RuntimeError, lambda: compiled(*draw_batch(0, rank)))
    assert "words.weight" in again[0].plan.sharded
    assert not again[1].plan.sharded
    left = again[0].module
    again[0].close()
    found["left"] = told(ValueError, lambda: sharded(left))
    return found


@pytest.mark.long
def test_a_model_leaves_the_compile_it_was_given_to_first() -> None:
    for found in run_ranks(2, compile_again):
        assert "model is a OptimizedModule, which wraps a model already" in found["torch.compile"]
        assert "inner in this Doubled is compiled already" in found["inside"]
        for case in ("copied", "left"):
            assert "shards of words.weight, items.weight" in found[case]
        assert "its module was compiled again" in found["closed"]


def copy_before(rank: int, world_size: int) -> list[str]:
    model, other = sharded(plain()), sharded(plain())
    teacher = copy.deepcopy(model.module)
    with logged() as lines:
        train(model, rank)
        train(other, rank)
    assert torch.isfinite(teacher(*draw_batch(0, rank)))  # the teacher's own table is whole
    return [line for line in lines if "copy of the model has whole ones" in line]


@pytest.mark.long
def test_copies_made_before_stay_whole_and_are_told_of() -> None:
    first, second = run_ranks(2, copy_before)
    assert len(first) == 1
    assert "are now sharded, but an earlier copy of the model" in first[0]
    assert not second
