"""What loops do to a table, to its gradient and with them, of which a rank has a part: as to the whole, or refused."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.distributed_c10d import _get_default_group

from tests.support.scenario import Training, before_each_step, enter_all
from tests.support.sides import DIM, NUM_WORDS

Use = Callable[[Training], Any]


def _grad(use: Callable[[Any], Any]) -> Use:
    return lambda training: use(training.module.words.weight.grad)


def _weight(use: Callable[[Any], Any]) -> Use:
    def used(training: Training) -> Any:
        with torch.no_grad():
            return use(training.module.words.weight)

    return used


def _set(index: Any, value: Any) -> Callable[[Any], Any]:
    return lambda tensor: tensor.__setitem__(index, value)


def _each(change: Callable[[Any, int], Any], pieces: Callable[[Any], Any]) -> Use:
    def changed(gradient: Any) -> None:
        for number, piece in enumerate(pieces(gradient), 1):
            change(piece, number)

    return _grad(changed)


MASK = torch.arange(NUM_WORDS) >= 16
SOME = torch.tensor([3, 5, 3, 20])
ONES = torch.ones(4, DIM, dtype=torch.float64)

enter_all(
    before_each_step,
    {
        "a slice is set": _grad(_set(slice(0, 16), 0.0)),
        "a slice is zeroed": _grad(lambda g: g[:16].zero_()),
        "a row is set": _grad(_set(3, 0.0)),
        "a row is scaled": _grad(lambda g: g.select(0, 3).mul_(0.5)),
        "all rows but some are zeroed by a mask": _grad(_set(~MASK, 0.0)),
        "a flat view is scaled": _grad(lambda g: g.view(-1).mul_(0.5)),
        "a flattened one is clamped": _grad(lambda g: g.flatten().clamp_(-1e-3, 1e-3)),
        "rows by their ids are set": _grad(_set(torch.tensor([1, 2, 9]), 0.25)),
        "columns are zeroed": _grad(lambda g: g[:, 1:5].zero_()),
        "one column is scaled": _grad(lambda g: g.select(1, 4).mul_(3.0)),
        "one element is set": _grad(_set((2, 5), 7.0)),
        "every other row is halved": _grad(lambda g: g[::2].mul_(0.5)),
        "the transposed is scaled by column": _grad(lambda g: g.t().mul_(torch.arange(float(NUM_WORDS)))),
        "chunks are scaled": _each(lambda piece, number: piece.mul_(number), lambda g: g.chunk(5)),
        "each row is halved": _each(lambda row, _: row.mul_(0.5), lambda g: g.unbind()),
        "rows are added by ids": _grad(lambda g: g.index_add_(0, SOME, ONES)),
        "rows are copied by ids": _grad(lambda g: g.index_copy_(0, SOME[1:], ONES[1:])),
        "rows are filled by ids": _grad(lambda g: g.index_fill_(0, SOME, 2.0)),
        "what is small is set": _grad(lambda g: g.__setitem__(g.abs() < 1e-3, 0.0)),
        "a mask of elements fills": _grad(lambda g: g.masked_fill_(g > 0, 0.0)),
        "of a view of a view": _grad(lambda g: g[4:20][2:6].unsqueeze(0).squeeze(0)[1].fill_(1.0)),
        "the slice of an alias": _grad(lambda g: g.detach()[:8].zero_()),
        "the slice of data": _grad(lambda g: g.data[8:].mul_(0.1)),
        "a row of its own": _grad(lambda g: g[5].copy_(g[6])),
    },
)


def _averaged(tensor: Tensor) -> None:
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def _gathered(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def _average_of_models(training: Training) -> None:
    PeriodicModelAverager(period=2, warmup_steps=0).average_parameters(training.model.parameters())


enter_all(
    before_each_step,
    {
        "the gradient is averaged": _grad(_averaged),
        "the gradient is gathered": _grad(_gathered),
        "the data is gathered": _weight(lambda w: _gathered(w.data)),
        "data by a functional sum": _weight(lambda w: functional.all_reduce(w.data, "sum", _get_default_group())),
        "a copy that is saved": _weight(lambda w: torch.save({"w": w.cpu()}, io.BytesIO())),
        "a lookup by a function": _weight(lambda w: F.embedding(torch.tensor([1, 2]), w)),
        "a pickle": _weight(lambda w: pickle.dumps(w.detach())),
        "a penalty of rows": lambda training: (0.1 * training.module.words.weight.norm()).backward(),
    },
    refused="words.weight",
)
enter_all(
    before_each_step,
    {
        "the data is broadcast": _weight(lambda w: dist.broadcast(w.data, 0)),
        "the parameter is broadcast": _weight(lambda w: dist.broadcast(w, 0)),
        "the data is averaged": _weight(lambda w: _averaged(w.data)),
    },
    refused="the collective ",
)


def _put_back(weight: Tensor) -> None:
    before = torch.linspace(-1, 1, NUM_WORDS * DIM, dtype=torch.float64).view(NUM_WORDS, DIM)
    weight[MASK] = before[MASK]


def _seeded(use: Callable[[Any], Any]) -> Use:
    def used(weight: Tensor) -> None:
        torch.manual_seed(5)
        use(weight)

    return _weight(used)


TABLES: Mapping[str, Use] = {
    "all parameters are averaged": _average_of_models,
    "the sum of an array": _weight(lambda w: w.detach().cpu().numpy().sum()),
    "unit rows": _weight(lambda w: w.data.copy_(F.normalize(w.data, p=2.0, dim=1))),
    "renormed rows": _weight(lambda w: w.renorm_(2, 0, 0.5)),
    "rows are put back": _weight(_put_back),
    "a copy of it trains on": _weight(lambda w: deepcopy(w).mul_(2.0).norm().item()),
    "noise": _seeded(lambda w: w.add_(torch.randn_like(w), alpha=0.01)),
    "made anew": _seeded(lambda w: nn.init.normal_(w, std=0.3)),
    "made anew between bounds": _seeded(lambda w: nn.init.uniform_(w.data, -0.1, 0.1)),
    "made anew as a matrix": _seeded(nn.init.orthogonal_),
    "spread of Xavier": _seeded(nn.init.xavier_uniform_),
    "a decay by row": _weight(lambda w: w.mul_(torch.linspace(0.9, 1.0, NUM_WORDS, dtype=torch.float64)[:, None])),
    "a decay by column": _weight(lambda w: w.mul_(torch.linspace(0.9, 1.0, DIM, dtype=torch.float64))),
    "the mean is taken away": _weight(lambda w: w.sub_(w.mean(0, keepdim=True))),
    "data replaced": _weight(lambda w: w.data.copy_(torch.linspace(0, 1, NUM_WORDS * DIM).view(NUM_WORDS, DIM))),
    "its data is halved": _weight(lambda w: setattr(w, "data", w.data * 0.5)),
    "a row is another": _weight(lambda w: w[3].copy_(w[4])),
    "all of it in a vector": lambda training: nn.utils.parameters_to_vector([training.module.words.weight]),
    "its gradient is another": _weight(lambda w: setattr(w, "grad", torch.ones(NUM_WORDS, DIM).double())),
    "its gradient is scaled anew": _weight(lambda w: setattr(w, "grad", w.grad * 0.5)),
}
enter_all(before_each_step, TABLES)
