"""Parameters that modules rename, add or lose amid training, and models that leave their session or the process."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

import embrace_fx
from tests.support.beside import check, ids, train
from tests.support.ranks import run_ranks
from tests.support.tagger import Scorer

ROWS, WIDTH = 40, 6
_tagger = partial(Scorer, ROWS, WIDTH, scores=3)
ADAMW = partial(torch.optim.AdamW, lr=0.1, eps=1e-3)


class _Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def _every_second(model: Any, name: str) -> None:
    module = model.get_submodule(name)
    prune.custom_from_mask(module, "weight", torch.arange(module.weight.numel()).view(module.weight.shape) % 2)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a layer is pruned": lambda model: prune.l1_unstructured(model.out, "weight", amount=0.3),
    "the table is pruned": lambda model: _every_second(model, "words"),
    "a layer's weight has a norm": lambda model: parametrizations.weight_norm(model.out),
    "the table is parametrized": lambda model: parametrize.register_parametrization(model.words, "weight", _Halved()),
    "a bias goes": lambda model: model.out.register_parameter("bias", None),
}


def _steps(model: Any, rank: int, first: int) -> list[Tensor]:
    return train(model, [(ids(step, rank, 4, 3, high=ROWS),) for step in range(first, first + 3)], ADAMW)


def _compiled_again(change: Callable[[Any], Any]) -> Callable[[Any, int], list[Tensor]]:
    def loop(model: Any, rank: int) -> list[Tensor]:
        losses = _steps(model, rank, 0)
        change(model.module)
        if isinstance(model, DistributedDataParallel):
            return losses + _steps(DistributedDataParallel(model.module), rank, 3)
        return losses + _steps(embrace_fx.compile(model.module, strategy=model.plan["words.weight"].strategy), rank, 3)

    return loop


AGAIN = {name: (_tagger, _compiled_again(change)) for name, change in CHANGES.items()}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["alltoall", "allreduce"])
def test_a_changed_model_is_compiled_anew_and_trains_as_under_ddp(strategy: str) -> None:
    check(__name__, cases="AGAIN", strategy=strategy, rtol=1e-5)


def _renormed(model: Any) -> None:
    prune.ln_structured(model.words, "weight", amount=0.3, n=2, dim=0)


def _kept(model: Any) -> None:
    prune.l1_unstructured(model.words, "weight", amount=0.3)
    prune.remove(model.words, "weight")


def _flat(change: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[[Any], Any]:
    """Makes a change of a table by flat ids and values, as thresholds and masks of one's own make them."""

    def changed(model: Any) -> None:
        random = torch.Generator().manual_seed(3)
        with torch.no_grad():
            change(
                model.words.weight.view(-1),
                torch.randperm(ROWS * WIDTH, generator=random)[:50],
                torch.randn(50, generator=random),
            )

    return changed


def _put_where(flat: Tensor, ids: Tensor, values: Tensor) -> None:
    flat[flat.abs() < 0.5] = 0


def _put_values(flat: Tensor, ids: Tensor, values: Tensor) -> None:
    flat[ids - flat.numel()] = values


def _put_squares(flat: Tensor, ids: Tensor, values: Tensor) -> None:
    flat[ids.view(5, 10)] = values.view(5, 10)


def _put_smallest(flat: Tensor, ids: Tensor, values: Tensor) -> None:
    flat[flat.abs().topk(40, largest=False).indices] = 0


def _add_twice(flat: Tensor, ids: Tensor, values: Tensor) -> None:
    flat.index_put_((torch.cat([ids, ids]),), torch.cat([values, values]), accumulate=True)


PRUNED: dict[str, Callable[[Any], Any]] = {
    "smallest elements": lambda model: prune.l1_unstructured(model.words, "weight", amount=0.3),
    "drawn elements": lambda model: prune.random_unstructured(model.words, "weight", amount=0.3),
    "a mask": lambda model: _every_second(model, "words"),
    "rows by their norms": _renormed,
    "and no longer": _kept,
    **{each.__name__: _flat(each) for each in (_put_where, _put_values, _put_squares, _put_smallest, _add_twice)},
}


def _amid(change: Callable[[Any], Any]) -> Callable[[Any, int], list[Tensor]]:
    """Returns a loop with one optimizer that changes the model between two steps."""

    def loop(model: Any, rank: int) -> list[Tensor]:
        optimizer, plain = ADAMW(model.parameters()), model.module
        losses = []
        for step in range(6):
            losses += train(model, [(ids(step, rank, 4, 3, high=ROWS),)], lambda _: optimizer)
            if step == 2:
                torch.manual_seed(1)
                change(plain)
        return losses

    return loop


AMID = {name: (_tagger, _amid(change)) for name, change in PRUNED.items()}


BY_DEFAULT = ("smallest elements", "rows by their norms", "_put_squares", "_add_twice")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("names", [BY_DEFAULT, pytest.param((), marks=pytest.mark.long)], ids=["some", "all"])
def test_a_table_pruned_amid_training_is_as_under_ddp(names: tuple[str, ...], ranks: int) -> None:
    check(__name__, *names, cases="AMID", ranks=ranks, strategy="alltoall", rtol=1e-5)


def _changed(rank: int, world_size: int, closes: bool) -> int:
    for change in CHANGES.values():
        model = embrace_fx.compile(_tagger(), strategy="alltoall")
        _steps(model, rank, 0)
        change(model.module)
        if closes:
            model.close()
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()  # an optimizer of other parameters must not matter
        model.module.state_dict()
    return len(CHANGES)


@pytest.mark.long
@pytest.mark.parametrize("closes", [False, True])
def test_a_changed_model_leaves_other_optimizers_alone(closes: bool) -> None:
    assert run_ranks(2, _changed, closes) == [len(CHANGES)] * 2


_READER = """
import sys, torch
sys.modules["embrace_fx"] = None
module = torch.jit.load if sys.argv[2] == "jit" else lambda path: torch.load(path, weights_only=False)
model = module(sys.argv[1])
model.load_state_dict(model.state_dict())
print(model(torch.arange(8).view(4, 2)).mean().item())
"""


def _files(rank: int, world_size: int, folder: str) -> tuple[float, str]:
    torch.manual_seed(0)
    model = embrace_fx.compile(nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Flatten(), nn.Linear(2 * WIDTH, 1)))
    sharded = embrace_fx.compile(_tagger(), strategy="alltoall")
    model(torch.arange(8).view(4, 2)).mean().backward()
    sharded(torch.arange(8).view(4, 2)).backward()
    with model.whole(), torch.no_grad():
        expected = model.module(torch.arange(8).view(4, 2)).mean().item()
        if rank == 0:
            torch.save(model.module, Path(folder, "plain"))
            torch.jit.save(torch.jit.script(model.module), str(Path(folder, "jit")))
    with pytest.raises(TypeError) as caught:
        pickle.dump(sharded.module, io.BytesIO())
    return expected, str(caught.value)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_module_is_saved_and_scripted_for_who_has_not_the_package(tmp_path: Path) -> None:
    (expected, told), _ = run_ranks(2, _files, str(tmp_path))
    assert "full_state_dict()" in told
    assert "whole()" in told
    for kind in ("plain", "jit"):
        command = [sys.executable, "-c", _READER, str(tmp_path / kind), kind]
        read = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
        assert read.returncode == 0, read.stderr
        assert float(read.stdout) == pytest.approx(expected)
