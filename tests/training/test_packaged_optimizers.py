"""Optimizers of packages next to DDP on the same ranks: a model whose table would be sharded ends where DDP's does."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.support.part_deeds import ROWS, Tagger
from tests.support.parts import differs
from tests.support.ranks import run_ranks

STEPS = 7
Parameters = list[nn.Parameter]
Make = Callable[[Any, Parameters], Any]
"""(module of the package, parameters) -> an optimizer, or what steps as one."""


def _of(name: str, **options: Any) -> Make:
    return lambda package, parameters: getattr(package, name)(parameters, **options)


class _Both:
    """One optimizer for matrices, and another for all else."""

    def __init__(self, of_matrices: Make) -> None:
        self._of_matrices = of_matrices

    def __call__(self, package: Any, parameters: Parameters) -> Any:
        matrices = [p for p in parameters if p.dim() == 2]
        rest = [p for p in parameters if p.dim() != 2]
        return _Several([self._of_matrices(package, matrices), torch.optim.AdamW(rest, 1e-2, eps=1e-3)])


class _Several:
    """Optimizers that step one after the other."""

    def __init__(self, each: list[Any]) -> None:
        self._each = each

    def step(self) -> None:
        for each in self._each:
            each.step()

    def zero_grad(self) -> None:
        for each in self._each:
            each.zero_grad()


def _sharp(package: Any, parameters: Parameters) -> Any:
    return package.SAM(parameters, torch.optim.AdamW, lr=1e-2, eps=1e-3)


def _muon(package: Any, parameters: Parameters) -> Any:
    return package.Muon([{"params": parameters, "use_muon": True}], lr=1e-2)


def _lookahead(package: Any, parameters: Parameters) -> Any:
    return package.Lookahead(torch.optim.AdamW(parameters, 1e-2, eps=1e-3), k=3)


def _zero(package: Any, parameters: Parameters) -> Any:
    return package.ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-2, eps=1e-3)


_COLLECTED: Mapping[str, dict[str, float]] = {
    "Lion": {"lr": 1e-3},
    "Prodigy": {"lr": 1.0, "d0": 1e-3},
    "DAdaptAdam": {"lr": 1.0, "d0": 1e-3},
    "ScheduleFreeAdamW": {"lr": 1e-2},
    "ScheduleFreeSGD": {"lr": 0.1},
    "Lamb": {"lr": 1e-2},
    "LARS": {"lr": 0.1},
    "AdaFactor": {"lr": 1e-2},
    "SOAP": {"lr": 1e-2},
    "Adan": {"lr": 1e-2},
}
OPTIMIZERS: Mapping[str, tuple[str, Make]] = {
    "Lion": ("lion_pytorch", _of("Lion", lr=1e-3)),
    "schedule-free AdamW": ("schedulefree", _of("AdamWScheduleFree", lr=1e-2, eps=1e-3, warmup_steps=3)),
    "schedule-free SGD": ("schedulefree", _of("SGDScheduleFree", lr=0.1)),
    "Prodigy": ("prodigyopt", _of("Prodigy", lr=1.0, eps=1e-3, d0=1e-3)),
    "D-Adaptation, Adam": ("dadaptation", _of("DAdaptAdam", lr=1.0, d0=1e-3)),
    "D-Adaptation, SGD": ("dadaptation", _of("DAdaptSGD", lr=1.0, d0=1e-3)),
    "Muon of torch": ("torch.optim", _Both(_of("Muon", lr=1e-2))),
    "Adafactor of torch": ("torch.optim", _of("Adafactor", lr=1e-2)),
    "Adafactor of transformers": ("transformers.optimization", _of("Adafactor", lr=None, relative_step=True)),
    "ZeroRedundancy": ("torch.distributed.optim", _zero),
    "8-bit AdamW of bitsandbytes": ("bitsandbytes.optim", _of("AdamW8bit", lr=1e-2, min_8bit_size=16)),
    "8-bit AdamW of torchao": ("torchao.optim", _of("AdamW8bit", lr=1e-2)),
    **{f"{name} of a collection": ("pytorch_optimizer", _of(name, **options)) for name, options in _COLLECTED.items()},
    "Muon of a collection": ("pytorch_optimizer", _Both(_muon)),
    "SAM of a collection": ("pytorch_optimizer", _sharp),
    "Lookahead of a collection": ("pytorch_optimizer", _lookahead),
}


REFUSED = ("Lookahead of a collection",)
"""Slow weights are whole copies of the table from before it was sharded, and are written from parts."""


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(ROWS, (4, 3), generator=draw), torch.randint(3, (4,), generator=draw)


def _train(rank: int, name: str, wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
    package, make = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = wrap(Tagger())
    optimizer = make(importlib.import_module(package), list(model.parameters()))
    torch.manual_seed(1)  # some round at random
    for step in range(STEPS):
        if hasattr(optimizer, "train"):
            optimizer.train()
        loss = _backward(model, rank, step)
        assert math.isfinite(loss)
        if hasattr(optimizer, "first_step"):
            optimizer.first_step(zero_grad=True)
            _backward(model, rank, step)
            optimizer.second_step(zero_grad=True)
        else:
            optimizer.step()
        optimizer.zero_grad()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    found = [value.detach().clone() for value in embrace_fx.full_state_dict(model).values()]
    with contextlib.suppress(AttributeError):
        model.close()
    return found


def _backward(model: Any, rank: int, step: int) -> float:
    loss = model(*_batch(step, rank))
    loss.backward()
    return float(loss.detach())


def _both(rank: int, world_size: int, name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that follow an older torch
        try:
            found = _train(rank, name, lambda module: embrace_fx.compile(module, strategy="alltoall"))
        except RuntimeError as error:
            return str(error)
        expected = _train(rank, name, DistributedDataParallel)
    start = list(embrace_fx.full_state_dict(Tagger()).values())
    assert differs(expected, start)
    return differs(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_a_package_ends_where_ddp_does(name: str) -> None:
    package = OPTIMIZERS[name][0].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{name} needs the package {package}")
    for wrong in run_ranks(2, _both, name):
        if name in REFUSED:
            assert "a part of the sharded emb.weight" in wrong
        else:
            assert not wrong
