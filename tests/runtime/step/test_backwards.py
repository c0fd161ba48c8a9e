"""What a user may ask of a backward, and what is refused, compiled under "2d"; more is in `tests.support.scenarios`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import SGD, Adagrad, Adam, Optimizer

import embrace_fx
from tests.support.cases import long_but
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.scenarios.batches import DIM, TwoTasks, two_tasks_batch
from tests.support.training import SEED, whole_parameters

DTYPE = torch.float64


class Loop:
    """A compiled model and its optimizers."""

    def __init__(self, make: Callable[[nn.Module], Sequence[Optimizer]], **options: Any) -> None:
        torch.manual_seed(SEED)
        self.plain = TwoTasks().to(DTYPE)
        self.optimizers = make(self.plain)
        self.model: Any = embrace_fx.compile(self.plain, optimizer=self.optimizers, strategy="alltoall", **options)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _adagrad(model: nn.Module) -> list[Optimizer]:
    return [Adagrad(model.parameters(), 0.1, eps=1e-3)]


def _some_results_by_rows(rank: int, world_size: int) -> None:
    """Checks that a lazy table and its step count stay unchanged if no loss depends on the table."""
    loop = Loop(lambda model: [Adam(model.parameters(), 0.01)], row_updates="lazy")
    for step in range(3):
        a, b = loop.model(*two_tasks_batch(rank, step))
        (a + b if step == 0 else a).backward()
        loop.step()
    state = loop.optimizers[0].state_dict()["state"]
    steps = {name: float(state[k]["step"]) for k, (name, _) in enumerate(loop.plain.named_parameters())}
    assert steps == {
        **dict.fromkeys(("ids.weight", "trunk.weight", "trunk.bias", "first.weight", "first.bias"), 3.0),
        **dict.fromkeys(("second.weight", "second.bias", "extra.weight"), 1.0),
    }
    assert {d.strategy for d in loop.model.plan if d.is_table} == {"alltoall"}


@pytest.mark.long
def test_a_sharded_table_stands_still_where_no_loss_is_of_it() -> None:
    run_ranks(2, _some_results_by_rows)


class Shifted(nn.Module):
    """A model in which the gradient of `shift` equals the gradient of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.shift = nn.Parameter(torch.zeros(DIM))

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear(x_BD).sum(0) + self.shift


def _keep_the_given(rank: int, world_size: int) -> None:
    """Checks that a backward does not change the gradients that its caller passes."""
    torch.manual_seed(SEED)
    model = Shifted().to(DTYPE)
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1))
    given, (_, x_BD) = torch.ones(DIM, dtype=DTYPE), two_tasks_batch(rank, 0)
    with compiled.no_sync():
        compiled(x_BD).backward(given)
        compiled(x_BD).backward(given)
    assert model.shift.grad is not None
    assert torch.equal(model.shift.grad, 2 * given)
    model.shift.grad.mul_(3)
    assert torch.equal(given, torch.ones_like(given))


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_backward_is_given_is_not_written(world_size: int) -> None:
    run_ranks(world_size, _keep_the_given)


def _write_the_batch(loop: Loop, batch: tuple[Tensor, Tensor]) -> None:
    a, b = loop.model(*batch)
    batch[1].zero_()
    (a + b).backward()


def _write_a_result(loop: Loop, batch: tuple[Tensor, Tensor]) -> None:
    class Exp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, 1, dtype=DTYPE)

        def forward(self, x_BD: Tensor) -> Tensor:
            return torch.exp(self.linear(x_BD))

    result = embrace_fx.compile(Exp(), route="graph")(batch[1])
    result.detach().mul_(2)
    result.sum().backward()


def _step_between(loop: Loop, batch: tuple[Tensor, Tensor]) -> None:
    first, second = loop.model(*batch), loop.model(*batch)
    sum(first).backward()
    loop.step()
    sum(second).backward()


def _write_parameters(loop: Loop, batch: tuple[Tensor, Tensor]) -> None:
    a, b = loop.model(*batch)
    with torch.no_grad():
        loop.model.trunk.weight.mul_(0.5)
        loop.model.first.weight.mul_(0.5)
    (a + b).backward()


def _differentiate_twice(loop: Loop, batch: tuple[Tensor, Tensor]) -> None:
    x = batch[1].requires_grad_()
    torch.autograd.grad(loop.model(batch[0], x)[0], x, create_graph=True)


def _go_back_to_parameters(loop: Loop, batch: tuple[Tensor, Tensor]) -> None:
    found = sum(loop.model(*batch))
    found.backward(inputs=list(loop.model.parameters()))
    loop.step()


WRITTEN = "written in place after the forward, on rank.s. 0, 1"
REFUSED: dict[str, tuple[Callable[[Loop, tuple[Tensor, Tensor]], None], str]] = {
    "the batch written": (_write_the_batch, rf"{WRITTEN} \(on this rank: a tensor of the batch\)"),
    "a result written": (_write_a_result, rf"{WRITTEN} \(on this rank: a result\)"),
    "a step between": (_step_between, WRITTEN),
    "parameters written": (_write_parameters, rf"{WRITTEN} \(.*first\.weight"),
    "create_graph": (_differentiate_twice, "cannot be differentiated again"),
    "a backward to parameters": (_go_back_to_parameters, "a call of the model waits for its backward"),
}


def _refuse(rank: int, world_size: int, name: str) -> None:
    fault, message = REFUSED[name]
    loop = Loop(_adagrad)
    sum(loop.model(*two_tasks_batch(rank, 0))).backward()
    loop.step()
    with pytest.raises(RuntimeError, match=message):
        fault(loop, two_tasks_batch(rank, 1))


@pytest.mark.parametrize("name", long_but(("the batch written",), {name: (name,) for name in REFUSED}))
def test_what_would_be_a_wrong_gradient_is_refused(name: str) -> None:
    run_ranks(2, _refuse, name)


@pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning")
def test_distributed_autograd_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc")
    model = embrace_fx.compile(nn.Linear(2, 1))
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        with dist_autograd.context(), pytest.raises(RuntimeError, match=r"torch\.distributed\.autograd\.context"):
            model(torch.ones(2))
        model(torch.ones(2)).backward()
    finally:
        rpc.shutdown(graceful=False)


def _go_on(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """Trains with and without a failing backward after each step. Returns the parameters of both models."""
    loops = [Loop(_adagrad) for _ in range(2)]
    for step in range(3):
        for faulty, loop in enumerate(loops):
            sum(loop.model(*two_tasks_batch(rank, step))).backward()
            loop.step()
            if faulty:
                with pytest.raises(RuntimeError, match=WRITTEN):
                    _write_the_batch(loop, two_tasks_batch(rank, 50 + step))
    return [whole_parameters(loop.model) for loop in loops]


@pytest.mark.long
def test_training_goes_on_after_a_refusal() -> None:
    for expected, found in run_ranks(2, _go_on):
        assert_same(found, expected, DTYPE)


def _two_orders(rank: int, world_size: int, *, alike: bool) -> str:
    """Two calls before their backwards, which one rank runs in the other order; then steps as usual."""
    loops = [Loop(_adagrad) for _ in range(2)]
    loop, undisturbed = loops
    first, second = (sum(loop.model(*two_tasks_batch(rank, step))) for step in range(2))
    told = ""
    try:
        for loss in (first, second) if alike or rank else (second, first):
            loss.backward()
    except embrace_fx.PeerFailure as failure:
        told = str(failure)
        for optimizer in loop.optimizers:
            optimizer.zero_grad()
    del first, second
    if alike:
        return told
    for step in range(3):
        for each in loops:
            sum(each.model(*two_tasks_batch(rank, step))).backward()
            each.step()
    assert_same(whole_parameters(loop.model), whole_parameters(undisturbed.model), DTYPE)
    return told


@pytest.mark.long
@pytest.mark.parametrize("alike", [True, False])
def test_backwards_of_several_calls_come_in_one_order_on_all_ranks(alike: bool) -> None:
    for told in run_ranks(2, partial(_two_orders, alike=alike)):
        assert ("rank 1: ranks run the backwards of several calls in different orders" in told) == (not alike)
        assert ("in the backward of the call 1 before the last one" in told) == (not alike)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")  # warned by torch
def test_gradients_that_are_to_be_differentiated_again_are_there_and_raise_where_they_are() -> None:
    model = nn.Linear(2, 1)
    compiled = embrace_fx.compile(model)
    compiled(torch.ones(3, 2)).square().sum().backward(create_graph=True)
    found = model.weight.grad
    assert found is not None
    assert found.requires_grad
    (expected,) = torch.autograd.grad(model(torch.ones(3, 2)).square().sum(), model.weight)
    torch.testing.assert_close(found.detach(), expected)
    with pytest.raises(RuntimeError, match=r"route='eager'"):
        found.sum().backward()
