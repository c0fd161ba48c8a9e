"""Training outside the plain case: odd batches, odd tables, and the things a training loop does beside its steps.

The plain case, each model with each optimizer, is test_training.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR

import embrace_fx
from embrace_fx.exactness import RowUpdates
from embrace_fx.ops import own_columns
from tests.models import MODELS, Batch, TwoTableLMWorkload, Workload
from tests.ranks import run_ranks
from tests.reference import assert_same
from tests.training import (
    SEED,
    expected_parameters,
    make_optimizers,
    train_compiled,
    trained,
    whole,
)

STEPS = 8
DTYPE = torch.float64
WORKLOADS = dict(MODELS)

SHARDED_BY: tuple[tuple[str, RowUpdates], ...] = (("adagrad", "exact"), ("adam", "lazy"), ("sparse_adam", "exact"))
"""Optimizers, with their row updates, that shard a table: one without, one with and one with torch's own lazy steps."""

SHARDED_AND_NOT = pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
"""Exact row updates: the tables of the first are sharded, those of the second are not."""


def _check(
    world_size: int,
    workload: Workload,
    optimizer: str,
    row_updates: RowUpdates,
    strategies: Mapping[str, str],
    strategy: Any = "alltoall",
) -> None:
    """Trains on ranks, compares with the reference, and says how the tables were expected to be kept."""
    __tracebackhide__ = True
    expected = expected_parameters(world_size, workload, DTYPE, optimizer, row_updates, STEPS)
    for result in run_ranks(world_size, train_compiled, workload, DTYPE, optimizer, row_updates, strategy, STEPS):
        assert_same(result.parameters, expected, DTYPE)
        assert result.strategies == strategies


# -- batches -----------------------------------------------------------------------------------------------------------


VARYING: tuple[tuple[str, int, str, RowUpdates, dict[str, str]], ...] = (
    ("two_table_lm", 2, "adagrad", "exact", {"embedding.weight": "alltoall", "output.weight": "alltoall"}),
    ("transformer_encoder", 2, "adam", "lazy", {"tokens.weight": "alltoall", "positions.weight": "alltoall"}),
    ("tied_lm", 3, "adamw", "exact", {"embedding.weight": "allreduce"}),
    (
        "bag_recommender",
        2,
        "sparse_adam",
        "exact",
        {"history.weight": "alltoall", "tags.weight": "alltoall", "genres.weight": "alltoall"},
    ),
)


@pytest.mark.parametrize(
    ("name", "world_size", "optimizer", "row_updates", "strategies"), VARYING, ids=[name for name, *_ in VARYING]
)
def test_batch_sizes_and_lengths_differ_by_step_and_by_rank(
    name: str, world_size: int, optimizer: str, row_updates: RowUpdates, strategies: dict[str, str]
) -> None:
    workload: Any = WORKLOADS[name]

    _check(world_size, replace(workload, vary=True), optimizer, row_updates, strategies)


class Lookups(nn.Module):
    """A table under a small network; the loss is a sum, so that it has a value on a batch without examples.

    The padding row is not zero, as in a table that was trained without padding: weight decay would move it.
    """

    def __init__(self, dim: int, padding_idx: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.randn(30, dim), freeze=False, padding_idx=padding_idx)
        self.mix = nn.Linear(dim, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return (torch.tanh(self.mix(self.table(ids))) - 0.3).square().sum() / 20


@dataclass(frozen=True)
class LookupsWorkload:
    """Batches of ids of one shape, kind and content."""

    dim: int = 10
    padding_idx: int | None = None
    shape: tuple[int, ...] = (4, 5)
    id_dtype: torch.dtype = torch.int64
    only_id: int | None = None
    some_empty: bool = False
    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Lookups(self.dim, self.padding_idx).to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed((seed * 100 + step) * 10 + rank)
        shape = self.shape
        if self.some_empty and (rank == step % 3 or step % 5 == 4):  # on one rank, at times on all
            shape = (0, *shape[1:])
        ids = torch.randint(30, shape, generator=random)
        if self.only_id is not None and step % 2:
            ids.fill_(self.only_id)
        return (ids.to(self.id_dtype),)


@pytest.mark.parametrize(("optimizer", "row_updates"), SHARDED_BY)
def test_a_batch_is_empty_on_one_rank_or_on_all(optimizer: str, row_updates: RowUpdates) -> None:
    workload = LookupsWorkload(some_empty=True)

    _check(2, workload, optimizer, row_updates, {"table.weight": "alltoall"})


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(LookupsWorkload(only_id=7), id="one id, many times"),
        pytest.param(LookupsWorkload(padding_idx=7, only_id=7), id="nothing but padding"),
        pytest.param(LookupsWorkload(id_dtype=torch.int32), id="int32"),
        pytest.param(LookupsWorkload(shape=(2, 3, 4)), id="3-D"),
        pytest.param(LookupsWorkload(id_dtype=torch.int32, shape=(2, 3, 4), padding_idx=0), id="int32, 3-D, padded"),
        pytest.param(LookupsWorkload(shape=()), id="a single id"),
    ],
)
def test_ids_of_any_kind(workload: Workload) -> None:
    _check(2, workload, "adamw", "lazy", {"table.weight": "alltoall"})


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "widths"), [(1, [1, 0, 0, 0]), (3, [1, 1, 1, 0]), (7, [2, 2, 2, 1])], ids=str)
def test_columns_that_do_not_divide_evenly_among_the_ranks(dim: int, widths: list[int]) -> None:
    owned = [own_columns(dim, 4, rank) for rank in range(4)]
    assert [last - first for first, last in owned] == widths

    _check(4, LookupsWorkload(dim=dim), "adam", "lazy", {"table.weight": "alltoall"})


class ManyUses(nn.Module):
    """One table, read by two layers that share it, by a function, by a bag, and twice with the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 6)
        self.again = nn.Embedding(30, 6)
        self.again.weight = self.table.weight
        self.mix = nn.Linear(6, 6)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        first = self.table(a) * torch.sigmoid(self.again(a))
        second = self.mix(F.embedding(b, self.table.weight)).mean(1)
        third = F.embedding_bag(b, self.table.weight, mode="sum")
        loss: Tensor = (first.mean(1) * second - third).square().mean()
        return loss


@dataclass(frozen=True)
class ManyUsesWorkload:
    """Two batches of ids, of different lengths."""

    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ManyUses().to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed((seed * 100 + step) * 10 + rank)
        return torch.randint(30, (3, 4), generator=random), torch.randint(30, (3, 2), generator=random)


@pytest.mark.parametrize(("optimizer", "row_updates"), SHARDED_BY)
def test_one_table_with_several_uses(optimizer: str, row_updates: RowUpdates) -> None:
    _check(3, ManyUsesWorkload(), optimizer, row_updates, {"table.weight": "alltoall"})


def test_strategies_by_name() -> None:
    asked = {"*": "allreduce", "output.*": "alltoall"}
    strategies = {"embedding.weight": "allreduce", "output.weight": "alltoall"}

    _check(2, WORKLOADS["two_table_lm"], "adagrad", "exact", strategies, asked)


@pytest.mark.parametrize(("num_words", "chosen"), [(60, "allreduce"), (30_000, "alltoall")])
def test_auto_shards_a_table_that_is_large_for_what_a_batch_reads(num_words: int, chosen: str) -> None:
    workload = TwoTableLMWorkload(num_words=num_words)
    strategies = {"embedding.weight": chosen, "output.weight": chosen}

    _check(2, workload, "adagrad", "exact", strategies, "auto")


def test_auto_shards_whatever_sparse_adam_updates() -> None:
    strategies = {"embedding.weight": "alltoall", "output.weight": "alltoall"}

    _check(2, WORKLOADS["two_table_lm"], "sparse_adam", "exact", strategies, "auto")


# -- training loops ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """What a training loop does in a step; every rank, and the reference, does the same.

    Attributes:
        micro_batches: batches whose gradients are summed up.
        max_norm: what the norm of the gradients is clipped to; None: it is left alone.
        norm_type: the order of that norm.
    """

    optimizer: str
    micro_batches: int = 1
    max_norm: float | None = None
    norm_type: float = 2.0


def _reference(workload: Workload, world_size: int, loop: Loop) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters, and the norms before clipping, of a single process with torch's own optimizers."""
    model = workload.make(DTYPE, SEED)
    (optimizer,) = make_optimizers(loop.optimizer, model)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(loop.micro_batches):
            for rank in range(world_size):
                (model(*workload.batches(step * loop.micro_batches + k, rank, SEED)) / world_size).backward()
        if loop.max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), loop.max_norm, loop.norm_type)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def _run_loop(
    rank: int, world_size: int, workload: Workload, loop: Loop
) -> tuple[dict[str, Tensor], list[float], dict[str, str]]:
    model = workload.make(DTYPE, SEED)
    compiled = embrace_fx.compile(model, optimizer=make_optimizers(loop.optimizer, model)[0], strategy="alltoall")
    norms = []
    for step in range(STEPS):
        compiled.optimizer.zero_grad()
        *early, last = range(step * loop.micro_batches, (step + 1) * loop.micro_batches)
        with compiled.no_sync():
            for k in early:
                compiled(*workload.batches(k, rank, SEED)).backward()
        compiled(*workload.batches(last, rank, SEED)).backward()
        if loop.max_norm is not None:
            norms.append(float(compiled.clip_grad_norm_(loop.max_norm, loop.norm_type)))
        compiled.optimizer.step()
    result = trained(compiled)
    return result.parameters, norms, result.strategies


def _check_loop(workload: Workload, world_size: int, loop: Loop) -> list[float]:
    """Compares ranks and reference; returns the norms before clipping."""
    __tracebackhide__ = True
    expected, expected_norms = _reference(workload, world_size, loop)
    strategy = "alltoall" if loop.optimizer == "adagrad" else "allreduce"
    for parameters, norms, strategies in run_ranks(world_size, _run_loop, workload, loop):
        assert set(strategies.values()) == {strategy}
        assert norms == pytest.approx(expected_norms, rel=1e-9)
        assert_same(parameters, expected, DTYPE)
    return expected_norms


@SHARDED_AND_NOT
def test_gradients_accumulate_under_no_sync(optimizer: str) -> None:
    _check_loop(WORKLOADS["two_table_lm"], 2, Loop(optimizer, micro_batches=3))


@SHARDED_AND_NOT
@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.2), (1.0, 1.0), (float("inf"), 0.05)])
def test_the_norm_that_is_clipped_spans_the_sharded_tables(optimizer: str, norm_type: float, max_norm: float) -> None:
    norms = _check_loop(WORKLOADS["bag_recommender"], 3, Loop(optimizer, 1, max_norm, norm_type))

    assert max(norms) > max_norm


def test_accumulated_gradients_are_clipped_as_a_whole() -> None:
    norms = _check_loop(WORKLOADS["two_table_lm"], 2, Loop("adagrad", 2, 0.05))

    assert max(norms) > 0.05


def _schedulers(optimizers: Any) -> list[LRScheduler]:
    return [
        scheduler
        for optimizer in optimizers
        for scheduler in (StepLR(optimizer, 2, 0.5), ExponentialLR(optimizer, 0.9))
    ]


def _train_with_schedulers(rank: int, world_size: int, workload: Workload, optimizer: str) -> dict[str, Tensor]:
    model = workload.make(DTYPE, SEED)
    optimizers = make_optimizers(optimizer, model)
    schedulers: list[LRScheduler] = [StepLR(each, 2, 0.5) for each in optimizers]
    compiled = embrace_fx.compile(model, optimizer=optimizers, strategy="alltoall")
    schedulers += [ExponentialLR(each, 0.9) for each in compiled.optimizer]
    for step in range(STEPS):
        compiled(*workload.batches(step, rank, SEED)).backward()
        for each in compiled.optimizer:
            each.step()
            each.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    return trained(compiled).parameters


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "sparse_adam"])
def test_schedulers_made_before_and_after_compile_both_drive_the_tables(optimizer: str) -> None:
    workload = WORKLOADS["two_table_lm"]
    expected = expected_parameters(2, workload, DTYPE, optimizer, steps=STEPS, make_schedulers=_schedulers)

    for parameters in run_ranks(2, _train_with_schedulers, workload, optimizer):
        assert_same(parameters, expected, DTYPE)


# -- without an optimizer ----------------------------------------------------------------------------------------------


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.clone()
    return gradients


def _gradients_of_both(
    rank: int, world_size: int, workload: Workload
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Gradients after each step: of the compiled model, and of DDP. The second step's come on top of the first's."""
    own, ddps = workload.make(DTYPE, SEED), workload.make(DTYPE, SEED)
    compiled, parallel = embrace_fx.compile(own), DistributedDataParallel(ddps)
    found: list[dict[str, Tensor]] = []
    expected: list[dict[str, Tensor]] = []
    for step in range(2):
        for model, kept, of in ((compiled, found, own), (parallel, expected, ddps)):
            model(*workload.batches(step, rank, SEED)).backward()
            kept.append(_gradients(of))
    assert {each.strategy for each in compiled.plan} == {"allreduce"}
    return found, expected


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_without_an_optimizer_gradients_are_left_in_grad_as_ddp_leaves_them(name: str) -> None:
    for found, expected in run_ranks(2, _gradients_of_both, WORKLOADS[name]):
        for of_step, expected_of_step in zip(found, expected, strict=True):
            assert_same(of_step, expected_of_step, DTYPE)


def _train_by_hand(rank: int, world_size: int, workload: Workload) -> dict[str, Tensor]:
    model = workload.make(DTYPE, SEED)
    compiled = embrace_fx.compile(model)
    for step in range(STEPS):
        compiled(*workload.batches(step, rank, SEED)).backward()
        with torch.no_grad():
            for parameter in compiled.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
        compiled.zero_grad()
    return whole(compiled.named_parameters())


def test_without_an_optimizer_a_hand_written_step_equals_sgd() -> None:
    workload = WORKLOADS["transformer_encoder"]
    expected = expected_parameters(2, workload, DTYPE, "sgd", steps=STEPS)

    for parameters in run_ranks(2, _train_by_hand, workload):
        assert_same(parameters, expected, DTYPE)
