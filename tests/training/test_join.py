"""Loaders of unequal length under `join`: parameters, buffers and losses as under DDP; torch's own `Join` too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import embrace_fx
from tests.support.ranks import run_ranks, run_ranks_expecting_errors

DTYPE = torch.float64
NUM_IDS, DIM = 12, 4


class Normed(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(NUM_IDS, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.out = nn.Linear(DIM, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.add_(ids.double().mean())
        x = self.norm(self.ids(ids))
        loss: Tensor = (self.out(x) - self.seen).square().mean()
        return loss


def _ids(rank: int, step: int) -> Tensor:
    return torch.randint(NUM_IDS, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


def _trained(rank: int, wrap: Callable[[nn.Module], Any], epoch: Callable[..., None]) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    model = wrap(Normed().to(DTYPE))
    optimizer = SGD(model.parameters(), 0.001)  # more of it, and what differs is lost among large numbers
    for k in range(2):  # the second one with what the first has left
        epoch(rank, model, optimizer, k)
    found = embrace_fx.full_state_dict(model)
    return {name.removeprefix("module."): value.detach().clone() for name, value in found.items()}


def _step(model: Any, optimizer: SGD, ids: Tensor) -> None:
    model(ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def _unequal(rank: int, model: Any, optimizer: SGD, epoch: int, **options: Any) -> None:
    with model.join(**options):
        for k in range(2 + 3 * (rank == epoch)):  # each rank once has more
            _step(model, optimizer, _ids(rank, 10 * epoch + k))


def _divided_by_the_active(rank: int, model: Any, optimizer: SGD, epoch: int) -> None:
    _unequal(rank, model, optimizer, epoch, divide_by_initial_world_size=False)


def _accumulating(rank: int, model: Any, optimizer: SGD, epoch: int) -> None:
    with Join([model]):
        for k in range(2 + rank):
            with model.no_sync():
                model(_ids(rank, 100 + k)).backward()
            _step(model, optimizer, _ids(rank, k))


def _leaving_a_sum(rank: int, model: Any, optimizer: SGD, epoch: int) -> None:
    """The last backward before a rank leaves is under `no_sync`."""
    with model.join():
        for k in range(4 + 2 * rank):
            with model.no_sync() if k % 3 < 2 else contextlib.nullcontext():
                model(_ids(rank, 10 * epoch + k)).backward()
            if k % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()


def _zeroed_first(rank: int, model: Any, optimizer: SGD, epoch: int) -> None:
    """A rank that has left still holds the gradients of its last step."""
    with model.join():
        for k in range(2 + rank):
            optimizer.zero_grad()
            model(_ids(rank, 10 * epoch + k)).backward()
            optimizer.step()


def _looking_ahead(rank: int, model: Any, optimizer: SGD, epoch: int) -> None:
    """A loader that ends early on one rank: what it would have read next is announced as nothing."""
    batches = [_ids(rank, 10 * epoch + k) for k in range(2 + 3 * (rank == epoch))]
    with model.join():
        for ids in model.lookahead(batches) if isinstance(model, embrace_fx.CompiledModel) else batches:
            _step(model, optimizer, ids)


def _hooked(hook: Any) -> Callable[..., None]:
    def epoch(rank: int, model: Any, optimizer: SGD, epoch: int) -> None:
        if epoch == 0:
            model.register_comm_hook(None, hook)
        _unequal(rank, model, optimizer, epoch)

    return epoch


EPOCHS = (_looking_ahead, _unequal, _divided_by_the_active, _accumulating, _zeroed_first)


def _compared(rank: int, world_size: int, epoch: Callable[..., None], options: dict[str, Any]) -> None:
    expected = _trained(rank, DistributedDataParallel, epoch)
    found = _trained(rank, lambda m: embrace_fx.compile(m, **options), epoch)
    torch.testing.assert_close(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("epoch", EPOCHS)
def test_ranks_that_have_run_out_of_batches(epoch: Callable[..., None]) -> None:
    for options in ({"schedule": "none"}, {"strategy": {"ids.weight": "alltoall"}}):
        run_ranks(2, _compared, epoch, options)


def test_a_rank_leaves_out_what_it_has_summed_up() -> None:
    run_ranks(2, _compared, _leaving_a_sum, {"strategy": "allreduce"})


def _leaves_rows(rank: int, world_size: int) -> None:
    _trained(rank, lambda model: embrace_fx.compile(model, strategy={"ids.weight": "alltoall"}), _leaving_a_sum)


def test_rows_that_a_rank_has_summed_up_are_refused_on_all() -> None:
    for error in run_ranks_expecting_errors(2, _leaves_rows):
        assert "to be reduced before a rank leaves join(), found some that wait on rank(s) 0" in str(error)


def _compared_in_a_sequence(rank: int, world_size: int) -> None:
    expected = _trained(rank, lambda m: DistributedDataParallel(nn.Sequential(m)), _unequal)
    found = _trained(
        rank, lambda m: embrace_fx.compile(nn.Sequential(m), strategy={"0.ids.weight": "alltoall"}), _unequal
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.long
def test_parameters_whose_names_begin_with_a_digit() -> None:
    run_ranks(2, _compared_in_a_sequence)


def _third_of_the_sum(_: Any, bucket: Any) -> Any:
    """A user's own hook; returns a future of a tensor."""
    work = dist.all_reduce(bucket.buffer().div_(3), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


_third_of_the_sum.__annotations__ = {}  # DDP wants its own classes there, or none


@pytest.mark.parametrize("hook", [allreduce_hook, _third_of_the_sum])
def test_a_communication_hook_is_called_for_ranks_that_have_run_out(hook: Any) -> None:
    run_ranks(2, _compared_by_hook, hook)


def _compared_by_hook(rank: int, world_size: int, hook: Any) -> None:
    _compared(rank, world_size, _hooked(hook), {"schedule": "none"})


def _stops(rank: int, world_size: int) -> None:
    model = embrace_fx.compile(Normed().to(DTYPE))
    optimizer = SGD(model.parameters(), 0.1)
    with model.join(throw_on_early_termination=True):
        for k in range(2 + rank):
            _step(model, optimizer, _ids(rank, k))


def _has_none(rank: int, world_size: int) -> None:
    model = embrace_fx.compile(Normed().to(DTYPE))
    try:
        _unequal(rank, model, SGD(model.parameters(), 0.1), 0) if rank else _no_batch(model)
    finally:
        dist.barrier()


def _no_batch(model: Any) -> None:
    with model.join():
        pass


def test_all_ranks_stop_where_that_is_asked() -> None:
    errors = run_ranks_expecting_errors(2, _stops)
    assert all("exhausted" in str(error) for error in errors)


def test_a_rank_without_any_batch_is_refused_on_all() -> None:
    errors = run_ranks_expecting_errors(2, _has_none)
    assert all("have no batch at all" in str(error) for error in errors)


def _one_outside_of_join(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = embrace_fx.compile(Normed().to(DTYPE))
    model(_ids(rank, 0)).backward()
    if rank == 0:
        with model.join():
            model(_ids(rank, 1))
    else:
        model(_ids(rank, 1))


def test_a_rank_outside_of_join_is_named() -> None:
    for error in run_ranks_expecting_errors(2, _one_outside_of_join):
        assert "rank 1: it called the model outside of join()" in str(error)
