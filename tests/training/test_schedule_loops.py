"""Every training loop that a user may write trains under "2d" with lookahead as it does without the compiler.

The loops of `tests.support.loops` and `state_loops` first, then two models that train together, two optimizers that
share a bucket, and what is refused.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

import embrace_fx
from embrace_fx.cost import links as cost
from tests.support.cases import long_but
from tests.support.loops import LOOPS, WARNED, Loop
from tests.support.ranks import reset_torch_state, run_ranks
from tests.support.reference import assert_same
from tests.support.sides import DIM, DTYPE, CompiledSide, Matching, Side, draw_batches
from tests.support.state_loops import STATE_LOOPS
from tests.support.training import SEED, whole_parameters

ALL_LOOPS = LOOPS | STATE_LOOPS
TIMEOUT_S = 280.0

pytestmark = pytest.mark.timeout(300)

OPTIMIZERS: Mapping[str, Callable[[nn.Module], Optimizer]] = {
    "adagrad": lambda model: Adagrad(model.parameters(), lr=0.1, eps=1e-3),
    "sgd": lambda model: SGD(model.parameters(), lr=0.3),
}


@contextlib.contextmanager
def _finely_cut() -> Iterator[None]:
    """Buckets and chunks of a few elements: a model this small would be one of each."""
    chunk_bytes, bucket_bytes = cost.chunk_bytes, cost.bucket_bytes
    cost.chunk_bytes = lambda *arguments, **options: 160
    cost.bucket_bytes = lambda *arguments, **options: 400
    try:
        yield
    finally:
        cost.chunk_bytes, cost.bucket_bytes = chunk_bytes, bucket_bytes


@dataclass(frozen=True)
class Outcome:
    """What a loop has made on one side of one rank."""

    parameters: dict[str, Tensor]
    log: list[float]
    warnings: list[str]


def _run_loop(side: Side, run: Loop, rank: int) -> Outcome:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Sparse invariant checks")
        run(side, rank)
    return Outcome(whole_parameters(side.model), side.log, [str(each.message) for each in caught])


def _run_both(rank: int, world_size: int, names: list[str], optimizer: str) -> dict[str, tuple[Outcome, Outcome]]:
    found = {}
    with _finely_cut():
        for name in names:
            reset_torch_state()
            try:
                expected = _run_loop(Side(OPTIMIZERS[optimizer]), ALL_LOOPS[name], rank)
                found[name] = expected, _run_loop(CompiledSide(OPTIMIZERS[optimizer]), ALL_LOOPS[name], rank)
            except BaseException as error:
                error.add_note(f"in the loop: {name}")
                raise
    return found


def _check_loops(world_size: int, names: list[str], optimizer: str) -> None:
    __tracebackhide__ = True
    for by_name in run_ranks(world_size, _run_both, names, optimizer, timeout_s=TIMEOUT_S):
        for name, (expected, found) in by_name.items():
            assert_same(found.parameters, expected.parameters, DTYPE)
            assert found.log == pytest.approx(expected.log, rel=1e-9), name
            assert len(found.warnings) == (name in WARNED), (name, found.warnings)
            assert all("expected the batch that lookahead() yielded" in text for text in found.warnings)


@pytest.mark.parametrize(
    "name", long_but(("backwards without step", "batches moved"), {name: (name,) for name in ALL_LOOPS})
)
def test_a_loop_trains_as_without_the_compiler(name: str) -> None:
    _check_loops(2, [name], "adagrad")


@pytest.mark.long
@pytest.mark.parametrize("name", ALL_LOOPS)
@pytest.mark.parametrize(("world_size", "optimizer"), [(3, "sgd"), (4, "adagrad")])
def test_a_loop_trains_as_without_the_compiler_on_more_ranks(name: str, world_size: int, optimizer: str) -> None:
    _check_loops(world_size, [name], optimizer)


# -- loops of other models ---------------------------------------------------------------------------------------------


class Generator(nn.Module):
    """From a kind to an example of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(20, DIM)
        self.mix = nn.Linear(DIM, DIM)

    def forward(self, kinds_B: Tensor) -> Tensor:
        found: Tensor = self.mix(self.kinds(kinds_B))
        return found


class Critic(nn.Module):
    """How real examples of a kind look."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(20, DIM)
        self.judge = nn.Linear(DIM, 1)

    def forward(self, x_BD: Tensor, kinds_B: Tensor) -> Tensor:
        return F.softplus(self.judge(torch.tanh(x_BD + self.kinds(kinds_B)))).mean()


def _train_against_each_other(rank: int, world_size: int, *, compiled: bool) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    generator: nn.Module = Generator().to(DTYPE)
    critic: nn.Module = Critic().to(DTYPE)
    plain = generator, critic
    of_generator, of_critic = (Adagrad(model.parameters(), 0.1) for model in plain)
    if compiled:
        generator = embrace_fx.compile(generator, optimizer=of_generator, strategy="alltoall")
        critic = embrace_fx.compile(critic, optimizer=of_critic, strategy="alltoall")

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        if not compiled:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world_size
        optimizer.step()

    for k in range(6):
        random = torch.Generator().manual_seed(10 * k + rank)
        kinds = torch.randint(20, (5,), generator=random)
        real = torch.randn(5, DIM, generator=random, dtype=DTYPE)
        of_critic.zero_grad()
        (critic(real, kinds) - critic(generator(kinds).detach(), kinds)).backward()
        step(critic, of_critic)
        of_generator.zero_grad()
        critic(generator(kinds), kinds).backward()
        step(generator, of_generator)
    return {
        f"{type(of).__name__} {name}": value
        for of, model in zip(plain, (generator, critic), strict=True)
        for name, value in whole_parameters(model).items()
    }


def _compare_adversaries(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with _finely_cut():
        return tuple(_train_against_each_other(rank, world_size, compiled=c) for c in (False, True))  # type: ignore[return-value]


def test_two_compiled_models_train_against_each_other() -> None:
    for expected, found in run_ranks(2, _compare_adversaries):
        assert_same(found, expected, DTYPE)


def _step_in_turn(rank: int, world_size: int, *, compiled: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Two optimizers over parameters of one bucket: the first steps every time, the second every other time."""
    torch.manual_seed(SEED)
    plain: Any = Matching().to(DTYPE)
    often = Adagrad(plain.second.parameters(), 0.1)
    seldom = SGD([p for name, p in plain.named_parameters() if not name.startswith("second")], 0.1)
    model = embrace_fx.compile(plain, optimizer=(often, seldom), strategy="alltoall") if compiled else plain
    norms = []
    for step, batch in enumerate(draw_batches(rank)):
        model(*batch).backward()
        if not compiled:
            for parameter in plain.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
        often.step()
        often.zero_grad()
        norms.append(float(plain.first.weight.grad.norm()))
        if step % 2:
            seldom.step()
            seldom.zero_grad()
    return whole_parameters(model), norms


def _compare_turns(rank: int, world_size: int) -> list[tuple[dict[str, Tensor], list[float]]]:
    return [_step_in_turn(rank, world_size, compiled=compiled) for compiled in (False, True)]


@pytest.mark.long
def test_two_optimizers_that_share_a_bucket_step_in_turn() -> None:
    for (expected, expected_norms), (found, norms) in run_ranks(2, _compare_turns):
        assert norms == pytest.approx(expected_norms, rel=1e-9)
        assert_same(found, expected, DTYPE)
