"""DDP's communication hooks: the same hook under DDP gives the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import embrace_fx
from tests.support.beside import take_steps
from tests.support.cases import long_but
from tests.support.ranks import run_ranks, run_ranks_expecting_errors
from tests.support.sides import Matching, draw_batch

CALLS: list[tuple[int, bool]] = []
"""Of the hook `clamped`: the index of the bucket, and whether it was the last one."""


def clamped(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Element by element, so that it does not matter which gradients share a bucket; by parameter, in place."""
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        assert gradient.shape == parameter.shape
        gradient.clamp_(-0.02, 0.02)
    CALLS.append((bucket.index(), bucket.is_last()))
    size = dist.get_world_size(group)
    sent: Any = dist.all_reduce(bucket.buffer().div_(size), group=group, async_op=True)
    if not bucket.is_last():
        return sent.get_future()
    return sent.get_future().then(lambda done: done.value()[0].clone())


def unreduced(state: Any, bucket: Any) -> Tensor:
    return bucket.buffer()


HOOKS: dict[str, Callable[..., Any]] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "clamped": clamped,
}


def batch(step: int, rank: int) -> tuple[Tensor, ...]:
    words, items, scale = draw_batch(step, rank)
    return words, items, scale.float()


def train(model: Any, rank: int) -> dict[str, Tensor]:
    optimizer = model.optimizer if isinstance(model, embrace_fx.CompiledModel) else SGD(model.parameters(), lr=0.5)
    take_steps(model, optimizer, [batch(step, rank) for step in range(6)])
    return {name.removeprefix("module."): value.clone() for name, value in embrace_fx.full_state_dict(model).items()}


def plain() -> Matching:
    torch.manual_seed(1)
    return Matching()


def under_another_name(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Renames a hook, because DDP recognizes the bf16 hooks by name and allows them only on GPUs."""

    def renamed(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    renamed.__annotations__.clear()  # DDP checks annotations for its own classes
    return renamed


def train_both(rank: int, world_size: int, name: str, strategy: Any) -> tuple[dict[str, Tensor], ...]:
    hook, model, wrapped = HOOKS[name], plain(), DistributedDataParallel(plain())
    wrapped.register_comm_hook(None, under_another_name(hook))
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), lr=0.5), strategy=strategy)
    compiled.register_comm_hook(None, hook)
    CALLS.clear()
    found = train(compiled, rank)
    assert all(is_last == (index == max(CALLS)[0]) for index, is_last in CALLS)
    told = "reduced by clamped" if name == "clamped" else "are sent as"
    assert (told in compiled.report()) == (name != "allreduce")
    return found, train(wrapped, rank), train(DistributedDataParallel(plain()), rank)


@pytest.mark.parametrize("name", long_but(("fp16", "clamped"), {name: (name,) for name in HOOKS}))
def test_buckets_are_reduced_as_under_ddp(name: str) -> None:
    """Results are equal to the last bit on two ranks, because dividing by two does not round."""
    for found, expected, exact in run_ranks(2, train_both, name, "auto" if name == "clamped" else "allreduce"):
        for parameter, value in expected.items():
            assert torch.equal(found[parameter], value), parameter
        assert any(not torch.equal(exact[each], expected[each]) for each in exact) == (name != "allreduce")


@pytest.mark.parametrize(("name", "within"), [("fp16", 2e-3), pytest.param("bf16", 2e-2, marks=pytest.mark.long)])
def test_rows_travel_as_buckets_do(name: str, within: float) -> None:
    for found, expected, exact in run_ranks(2, train_both, name, "alltoall"):
        for parameter, value in expected.items():
            torch.testing.assert_close(found[parameter], value, rtol=within, atol=within * float(value.abs().max()))
            assert not torch.equal(found[parameter], exact[parameter]), parameter


def register(rank: int, world_size: int, case: str) -> None:
    model = embrace_fx.compile(plain(), strategy="alltoall" if case == "PowerSGD" else "allreduce")
    if case == "called already":
        model(*batch(0, rank)).backward()
    if case == "PowerSGD":
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    if case == "no future":
        model.register_comm_hook(None, unreduced)
        model(*batch(0, rank)).backward()
    if case == "twice":
        model.register_comm_hook(None, HOOKS["fp16"])
    if case == "no function":
        model.register_comm_hook(None, {})  # type: ignore[arg-type]
    if case != "on one rank" or rank == 1:
        model.register_comm_hook(None, HOOKS["fp16"])
    model(*batch(0, rank)).backward()


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("PowerSGD", "Use strategy='auto' or 'allreduce'"),
        pytest.param("no future", "must return a torch.futures.Future of the reduced bucket", marks=pytest.mark.long),
        pytest.param("twice", "fp16_compress_hook is registered already", marks=pytest.mark.long),
        pytest.param("no function", "is not callable", marks=pytest.mark.long),
        ("called already", "Register one hook"),
        ("on one rank", "communication hook is fp16_compress_hook on rank 1, and none"),
    ],
)
def test_other_hooks_are_refused_on_every_rank(case: str, told: str) -> None:
    for error in run_ranks_expecting_errors(2, register, case):
        assert told in str(error)
