"""What loops do to a sharded table, to its gradient and with them: each next to DDP, or refused.

Each deed is done once, at a step of its own, so that one training tells of all of them: where the parameters are apart
after a step, its deed did it.
"""

from __future__ import annotations

import contextlib
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
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils import _pytree as pytree

import embrace_fx
from tests.support.parts import whole_of

ROWS, WIDTH = 24, 6
Deed = Callable[[Any, nn.Embedding], Any]
"""(the model as it was compiled or wrapped, the embedding) -> what is logged."""


class Tagger(nn.Module):
    """One table, and layers above it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, ids_BL: Tensor, tags_B: Tensor) -> Tensor:
        return F.cross_entropy(self.out(torch.tanh(self.emb(ids_BL).mean(1))), tags_B)


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(ROWS, (4, 3), generator=draw), torch.randint(3, (4,), generator=draw)


def _grad(deed: Callable[[Any], Any]) -> Deed:
    return lambda model, emb: _done(deed(emb.weight.grad))


def _weight(deed: Callable[[Any], Any]) -> Deed:
    def done(model: Any, emb: nn.Embedding) -> Any:
        with torch.no_grad():
            return _done(deed(emb.weight))

    return done


def _done(answer: Any) -> Any:
    """What is logged: numbers, and copies of tensors, put together."""
    return pytree.tree_map_only(Tensor, Tensor.clone, whole_of(answer))


def _set(index: Any, value: Any) -> Callable[[Any], Any]:
    return lambda tensor: tensor.__setitem__(index, value)


_MASK = torch.arange(ROWS) >= 16
_IDS = torch.tensor([3, 5, 3, 20])

VIEWS_OF_THE_GRADIENT: Mapping[str, Deed] = {
    "a slice is set": _grad(_set(slice(0, 16), 0.0)),
    "a slice is zeroed": _grad(lambda g: g[:16].zero_()),
    "a row is set": _grad(_set(3, 0.0)),
    "a row is scaled": _grad(lambda g: g.select(0, 3).mul_(0.5)),
    "all rows but some are zeroed by a mask": _grad(_set(~_MASK, 0.0)),
    "a flat view is scaled": _grad(lambda g: g.view(-1).mul_(0.5)),
    "a flattened one is clamped": _grad(lambda g: g.flatten().clamp_(-1e-3, 1e-3)),
    # found by nobody before
    "rows by their ids are set": _grad(_set(torch.tensor([1, 2, 9]), 0.25)),
    "columns are zeroed": _grad(lambda g: g[:, 1:5].zero_()),
    "one column is scaled": _grad(lambda g: g.select(1, 4).mul_(3.0)),
    "one element is set": _grad(_set((2, 5), 7.0)),
    "every other row is halved": _grad(lambda g: g[::2].mul_(0.5)),
    "the transposed is scaled by column": _grad(lambda g: g.t().mul_(torch.arange(float(ROWS)))),
    "chunks are scaled": _grad(lambda g: [piece.mul_(k) for k, piece in enumerate(g.chunk(5), 1)] and None),
    "each row is": _grad(lambda g: [row.mul_(0.5) for row in g.unbind()] and None),
    "rows are added by ids": _grad(lambda g: g.index_add_(0, _IDS, torch.ones(4, WIDTH, dtype=torch.float64))),
    "rows are copied by ids": _grad(lambda g: g.index_copy_(0, _IDS[1:], torch.ones(3, WIDTH, dtype=torch.float64))),
    "rows are filled by ids": _grad(lambda g: g.index_fill_(0, _IDS, 2.0)),
    "what is small is set": _grad(lambda g: g.__setitem__(g.abs() < 1e-3, 0.0)),
    "a mask of elements fills": _grad(lambda g: g.masked_fill_(g > 0, 0.0)),
    "of a view of a view": _grad(lambda g: g[4:20][2:6].unsqueeze(0).squeeze(0)[1].fill_(1.0)),
    "an alias's slice": _grad(lambda g: g.detach()[:8].zero_()),
    "the data's slice": _grad(lambda g: g.data[8:].mul_(0.1)),
    "row by row of its own": _grad(lambda g: g[5].copy_(g[6])),
}


def _averaged(tensor: Tensor) -> None:
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def _gathered(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


COLLECTIVES: Mapping[str, Deed] = {
    "the data is broadcast": _weight(lambda w: dist.broadcast(w.data, 0)),
    "the parameter is": _weight(lambda w: dist.broadcast(w, 0)),
    "the data is averaged": _weight(lambda w: _averaged(w.data)),
    "the gradient is averaged": _grad(_averaged),
    "the gradient is gathered": _grad(_gathered),
    "the data is": _weight(lambda w: _gathered(w.data)),
    "all parameters are averaged": lambda model, emb: _average_of_models(model),
    # found by nobody before
    "a functional one": _weight(lambda w: functional.all_reduce(w.data, "sum", [*range(dist.get_world_size())])),
}


def _average_of_models(model: Any) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager  # noqa: PLC0415

    PeriodicModelAverager(period=2, warmup_steps=0).average_parameters(model.parameters())


TABLES: Mapping[str, Deed] = {
    "a lookup": _weight(lambda w: F.embedding(torch.tensor([1, 2]), w)),
    "an array": _weight(lambda w: w.detach().cpu().numpy().sum()),
    "unit rows": _weight(lambda w: w.data.copy_(F.normalize(w.data, p=2.0, dim=1))),
    "renormed rows": _weight(lambda w: w.renorm_(2, 0, 0.5)),
    "a copy that is saved": _weight(lambda w: torch.save({"w": w.cpu()}, io.BytesIO())),
    "a pickle": _weight(lambda w: pickle.dumps(w.detach())),
    "rows are put back": lambda model, emb: _put_back(emb.weight),
    # found by nobody before
    "a copy of it trains on": _weight(lambda w: deepcopy(w).mul_(2.0).norm().item()),
    "noise": _weight(lambda w: _seeded(lambda: w.add_(torch.randn_like(w), alpha=0.01))),
    "made anew": _weight(lambda w: _seeded(lambda: nn.init.normal_(w, std=0.3))),
    "made anew between bounds": _weight(lambda w: _seeded(lambda: nn.init.uniform_(w.data, -0.1, 0.1))),
    "made anew as a matrix": _weight(lambda w: _seeded(lambda: nn.init.orthogonal_(w))),
    "spread of Xavier": _weight(lambda w: _seeded(lambda: nn.init.xavier_uniform_(w))),
    "a decay by row": _weight(lambda w: w.mul_(torch.linspace(0.9, 1.0, ROWS, dtype=torch.float64)[:, None])),
    "a decay by column": _weight(lambda w: w.mul_(torch.linspace(0.9, 1.0, WIDTH, dtype=torch.float64))),
    "the mean is taken away": _weight(lambda w: w.sub_(w.mean(0, keepdim=True))),
    "it is replaced": _weight(lambda w: w.data.copy_(torch.linspace(0, 1, ROWS * WIDTH).view(ROWS, WIDTH))),
    "its data is": lambda model, emb: setattr(emb.weight, "data", emb.weight.data * 0.5),
    "a row is another": _weight(lambda w: w[3].copy_(w[4])),
    "all of it into a vector": lambda model, emb: nn.utils.parameters_to_vector([emb.weight]),
    "its gradient is another": lambda model, emb: setattr(emb.weight, "grad", torch.ones(ROWS, WIDTH).double()),
    "its gradient is scaled anew": _weight(lambda w: setattr(w, "grad", w.grad * 0.5)),
    "a penalty of rows": lambda model, emb: _backward(0.1 * emb.weight.norm()),
}


def _put_back(weight: Tensor) -> None:
    with torch.no_grad():
        before = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
        weight[_MASK] = before[_MASK]


def _backward(loss: Any) -> None:
    loss.backward()


def _seeded(deed: Callable[[], Any]) -> None:
    torch.manual_seed(5)
    deed()


def train(
    rank: int, deeds: Mapping[str, Deed], refused: Mapping[str, str] | None, kind: str, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """By deed, what it answered and the parameters after its step; and errors, of those that were refused.

    Args:
        refused: those that a compiled model refuses: DDP leaves them out; None: a compiled model, which tells.
        kind: of the optimizer.
        options: of `compile`.
    """
    torch.manual_seed(0)
    plain = Tagger().double()
    model: Any = embrace_fx.compile(plain, **options) if refused is None else DistributedDataParallel(plain)
    made: dict[str, Callable[[Any], Optimizer]] = {
        "sgd": lambda p: SGD(p, 0.5, momentum=0.5),
        "adamw": lambda p: AdamW(p, 0.02, eps=1e-3),
    }
    optimizer = made[kind](model.parameters())
    answers: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for step, (name, deed) in enumerate(deeds.items()):
        model(*batch_of(step, rank)).backward()
        answer = None
        if refused is None or name not in refused:
            try:
                answer = deed(model, model.module.emb)
            except (RuntimeError, TypeError) as error:
                if refused is not None:
                    raise
                errors[name] = f"{type(error).__name__}: {error}"
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        whole = embrace_fx.full_state_dict(model)
        answers[name] = answer, [value.detach().clone() for value in whole.values()]
    with contextlib.suppress(AttributeError):
        model.close()
    return answers, errors
