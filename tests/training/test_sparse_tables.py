"""Tables with sparse=True train as under DDP, whole or sharded, and `.grad` looks alike: sparse, of the same rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

import embrace_fx
from tests.support.beside import check
from tests.support.ranks import run_ranks

ROWS, DIM, STEPS = 60, 6, 6


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.emb = nn.Embedding(ROWS, DIM, sparse=True, **options)
        self.out = nn.Linear(DIM, 3)

    def encode(self, ids: Tensor) -> Tensor:
        return self.emb(ids).mean(1)

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.encode(ids)), wanted)


class Gated(Words):
    """Multiplies half of its rows by zero, so that their gradients are zero."""

    def __init__(self) -> None:
        super().__init__(padding_idx=3)

    def encode(self, ids: Tensor) -> Tensor:
        return super().encode(ids) * (ids[:, :1] % 2)


class Bags(Words):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)

    def encode(self, ids: Tensor) -> Tensor:
        weights = torch.linspace(0.0, 1.0, ids.numel(), dtype=self.out.weight.dtype).view(ids.shape)
        return super().encode(ids) - self.emb(ids.flip(0)).sum(1) + self.bags(ids, per_sample_weights=weights)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = functools.partial(torch.randint, generator=torch.Generator().manual_seed(100 * step + rank))
    return draw(ROWS, (5, 4)), draw(3, (5,))


def optimizers(model: Any, of_tables: Callable[[Any], Optimizer]) -> tuple[Optimizer, Optimizer]:
    named = [(name, parameter) for name, parameter in model.named_parameters()]
    tables = [p for name, p in named if "emb" in name or "bags" in name]
    return of_tables(tables), AdamW([p for name, p in named if "out" in name], 1e-2, eps=1e-3)


def sparse_adam(parameters: Any) -> Optimizer:
    return SparseAdam(parameters, 1e-2, eps=1e-3)


def seen(gradient: Any) -> list[Any]:
    """Returns the rows and values of a gradient, from its sparse tensor."""
    assert gradient.is_sparse
    assert gradient.layout is torch.sparse_coo
    assert gradient.is_coalesced()
    own = gradient.coalesce()
    values = own.values()
    whole = values.full_tensor() if hasattr(values, "full_tensor") else values.clone()
    return [own.indices().clone(), whole, gradient._nnz(), float(values.norm()), gradient.to_dense().sum().item()]


def loop(
    of_tables: Callable[[Any], Optimizer] = sparse_adam,
    look: Callable[[Any], list[Any]] | None = seen,
    every: int = 1,
    *,
    in_place: bool = False,
    scaled: bool = False,
) -> Callable[[Any, int], list[Any]]:
    """Steps of every so many batches; notes losses, and what a look at the table's gradient finds."""

    def run(model: Any, rank: int) -> list[Any]:
        steps, log = optimizers(model, of_tables), list[Any]()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scaled)
        for k in range(STEPS):
            with contextlib.nullcontext() if (k + 1) % every == 0 else model.no_sync():
                loss = model(*batch(k, rank))
                scaler.scale(loss).backward()
            log.append(loss.detach())
            if (k + 1) % every:
                continue
            for each in steps if scaled else ():
                scaler.unscale_(each)
            log += look(model.module.emb.weight.grad) if look is not None else []
            for each in steps:
                scaler.step(each)
            for each in steps:
                each.zero_grad(set_to_none=not in_place)
            scaler.update()
        return log + getattr(model.module, "hooked", [])

    return run


def clipped(gradient: Any) -> list[Any]:
    """Clips the norm of a gradient's values in place. Returns the largest value."""
    values = gradient.coalesce().values()
    values.mul_(0.1 / (values.norm() + 1e-6))
    return [gradient._values().abs().max().item()]


def hooked() -> nn.Module:
    """Returns a model with a hook on its table that records the values of gradients."""
    plain: Any = Words()
    plain.hooked = []
    plain.emb.weight.register_hook(lambda g: plain.hooked.append(g.coalesce().values().clone()))
    return plain


CASES = {
    "sparse adam sees rows": (Words, loop()),
    "rows whose gradient is zero move on": (Gated, loop()),
    "bags and two lookups": (Bags, loop()),
    "sums of several backwards": (Words, loop(every=3)),
    "momentum": (Words, loop(lambda p: SGD(p, 0.3, momentum=0.9))),
    "adagrad without a look": (Words, loop(lambda p: Adagrad(p, 0.1), None)),
    "values written in place": (Words, loop(lambda p: SGD(p, 0.3), clipped)),
    "a scaler unscales values": (Words, loop(scaled=True)),
    "a hook sees rows": (hooked, loop()),
    "gradients zeroed in place": (Words, loop(look=None, in_place=True)),
}
WAYS: dict[str, dict[str, Any]] = {
    "alltoall": {"strategy": "alltoall"},
    "asked to be whole": {"strategy": "allreduce"},
    "auto": {"strategy": "auto"},
    "zen, one after the other": {"strategy": "zen", "schedule": "none"},
    "eager": {"strategy": "auto", "route": "eager"},
}
DEFAULT = (
    ("sparse adam sees rows", ("alltoall", "eager")),
    ("rows whose gradient is zero move on", ("asked to be whole", "zen, one after the other")),
)


@pytest.mark.parametrize(
    ("name", "ways"), [*DEFAULT, *(pytest.param(name, tuple(WAYS), marks=pytest.mark.long) for name in CASES)]
)
def test_a_loop_ends_where_it_ends_under_ddp(name: str, ways: tuple[str, ...]) -> None:
    for way in ways:
        check(__name__, name, ddp={"find_unused_parameters": True}, dtype=torch.float64, rtol=1e-9, **WAYS[way])


def _whole_amid_training(rank: int, world_size: int, grid: bool) -> list[Any]:
    """Gathers the gradients of sharded tables, and splits them again, during training."""
    strategy: Any = embrace_fx.Grid(3, 1) if grid else "alltoall"
    torch.manual_seed(0)
    model: Any = embrace_fx.compile(Words().double(), strategy={"emb.weight": strategy})
    model(*batch(0, rank)).backward()
    before = model.module.emb.weight.grad.full_tensor()
    with model.whole():
        within = seen(model.module.emb.weight.grad)
    after = model.module.emb.weight.grad
    assert after is not None
    assert after.is_sparse
    torch.testing.assert_close(after.full_tensor(), before)
    torch.testing.assert_close(before.index_select(0, within[0][0]), within[1])
    return within


@pytest.mark.parametrize("grid", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_gradient_stays_sparse_where_its_table_is_put_together(grid: bool) -> None:
    everyone = run_ranks(3, _whole_amid_training, grid)
    for found in everyone:
        torch.testing.assert_close(found, everyone[0])


def _refused(rank: int, world_size: int) -> dict[str, str]:
    torch.manual_seed(0)
    model: Any = embrace_fx.compile(Words().double(), strategy={"emb.weight": embrace_fx.Grid(2, 1)})
    told = {}
    model(*batch(0, rank)).backward()
    gradient: Any = model.module.emb.weight.grad
    for asked in ("values", "indices", "_nnz"):
        with pytest.raises(RuntimeError) as refused:
            getattr(gradient, asked)()
        told[asked] = str(refused.value)
    model.zero_grad()
    with model.no_sync():
        model(*batch(1, rank)).backward()
    with pytest.raises(RuntimeError) as refused:
        model.module.emb.weight.grad.coalesce().values()
    told["no_sync"] = str(refused.value)
    return told


def test_what_a_rank_cannot_tell_of_its_rows_is_refused() -> None:
    for told in run_ranks(2, _refused):
        assert "values() is not supported" in told["values"]
        assert "indices() is not supported" in told["indices"]
        assert "_nnz() is not supported" in told["_nnz"]
        assert "under no_sync()" in told["no_sync"]


def _written_late(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model: Any = embrace_fx.compile(Words().double(), strategy="alltoall")
    model(*batch(0, rank)).backward()
    gradient: Any = model.module.emb.weight.grad
    values = gradient.values()
    gradient.add_(1.0)  # makes the gradient dense
    values.mul_(2.0)
    with pytest.raises(RuntimeError) as refused:
        SGD(model.parameters(), 0.1).step()
    return str(refused.value)


def test_values_that_are_no_longer_the_gradients_are_not_written_in_silence() -> None:
    for told in run_ranks(2, _written_late):
        assert "after the gradient had been used as a dense tensor" in told


@pytest.mark.parametrize("strategy", ["alltoall", "allreduce"])
def test_one_process_has_the_gradients_of_the_plain_model(strategy: Any) -> None:
    torch.manual_seed(0)
    plain: Any = Bags().double()
    torch.manual_seed(0)
    model: Any = embrace_fx.compile(Bags().double(), strategy=strategy)
    for k in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(*batch(k, 0)).backward()
        torch.testing.assert_close(seen(model.module.emb.weight.grad), seen(plain.emb.weight.grad.coalesce()))


def test_adam_steps_a_table_whose_gradient_is_sparse() -> None:
    """PyTorch's Adam raises an error for sparse gradients, but here it receives dense ones."""
    model: Any = embrace_fx.compile(Words().double(), strategy="allreduce")
    before = model.module.emb.weight.detach().clone()
    model(*batch(0, 0)).backward()
    Adam(model.parameters(), 0.1).step()
    assert not torch.equal(model.module.emb.weight, before)
