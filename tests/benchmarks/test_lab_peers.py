"""Every system trains to the losses of one process that trains on all ranks' batches.

SGD shows a gradient that is added where it should be averaged, Adagrad an update that is made twice for a row; the
optimizer that sees both runs on each model. Systems of other environments run where `make bench-peers` has made these.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.lab.cell import Cell, Close, Closed, Open, Ready
from benchmarks.lab.hosts import Crew, CrewFailed, crew, python_of
from benchmarks.models import MODELS
from benchmarks.network import Links, network
from benchmarks.peers import ENVIRONMENTS, SYSTEMS
from benchmarks.peers.base import Task
from embrace_fx.vocabulary.plan import STRATEGIES
from tests.support.ranks import run_ranks

RANKS, STEPS = 2, 5
TOLERANCE = 1e-4
"""Relative, of a loss. The systems add in other orders; a wrong gradient shows from 1e-2 on at these learning rates."""
LEARNING_RATES = {"sgd": 0.2, "adagrad": 0.05}

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

EVERY_MODEL = pytest.mark.parametrize("model", MODELS)
EVERY_OPTIMIZER = pytest.mark.parametrize("optimizer", LEARNING_RATES)


def test_ranks_of_other_environments_do_without_this_package() -> None:
    hidden = "import sys; sys.modules['embrace_fx'] = None; import benchmarks.lab.rank"

    found = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)

    assert found.returncode == 0, found.stderr


def test_every_strategy_can_be_forced() -> None:
    forced = {name: system.options["strategy"] for name, system in SYSTEMS.items() if name.startswith("forced_")}

    assert forced == {f"forced_{strategy}": strategy for strategy in STRATEGIES}


def task(model: str, optimizer: str) -> Task:
    return Task(MODELS[model]["tiny"], optimizer, LEARNING_RATES[optimizer])


def reference_losses(model: str, optimizer: str) -> list[float]:
    """One process, dense gradients, torch's own optimizer; mean over ranks, by step."""
    what = task(model, optimizer)
    trained = what.model()
    stepping = what.make_optimizer(trained.parameters())
    losses = []
    for step in range(STEPS):
        stepping.zero_grad()
        loss = torch.stack([trained(*what.workload.batch(step, rank, 0)) for rank in range(RANKS)]).mean()
        loss.backward()
        stepping.step()
        losses.append(loss.item())
    return losses


def train(rank: int, world_size: int, system: str, model: str, optimizer: str) -> list[float]:
    what = task(model, optimizer)
    training = SYSTEMS[system].peer().prepare(what)
    losses = training.steps(what.workload.batch(step, rank, 0) for step in range(STEPS))
    found = [loss.item() for loss in losses]
    assert isinstance(training.notes(), str)
    return found


def mean_losses(by_rank: list[list[float]]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*by_rank, strict=True)]


def assert_same_losses(found: list[float], model: str, optimizer: str) -> None:
    expected = reference_losses(model, optimizer)
    assert found == pytest.approx(expected, rel=TOLERANCE)


@EVERY_MODEL
@EVERY_OPTIMIZER
@pytest.mark.parametrize("system", ["ddp", "ddp_sparse"])
def test_ddp_trains_as_one_process(system: str, model: str, optimizer: str) -> None:
    assert_same_losses(mean_losses(run_ranks(RANKS, train, system, model, optimizer)), model, optimizer)


@EVERY_MODEL
@EVERY_OPTIMIZER
@pytest.mark.long
@pytest.mark.parametrize(
    "system", [name for name, system in SYSTEMS.items() if system.made_by == "embrace.EmbraceFx" and system.alone]
)
def test_embrace_fx_trains_as_one_process(system: str, model: str, optimizer: str) -> None:
    assert_same_losses(mean_losses(run_ranks(RANKS, train, system, model, optimizer)), model, optimizer)


def test_ranks_that_are_alone_train_apart() -> None:
    expected = reference_losses("bert", "adagrad")
    for system in ("alone_dense", "alone_sparse", "embrace_alone"):
        found = mean_losses(run_ranks(RANKS, train, system, "bert", "adagrad"))
        assert found[0] == pytest.approx(expected[0])
        assert found[1:] != pytest.approx(expected[1:], rel=TOLERANCE)


@pytest.fixture(scope="module", params=[*ENVIRONMENTS])
def ranks_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Crew]]:
    """The lab's own ranks, for systems that need an environment or a process of their own."""
    environment: str = request.param
    try:
        python_of(environment)
    except CrewFailed as error:
        pytest.skip(str(error))
    logs: Path = tmp_path_factory.mktemp("logs")
    with network(Links(RANKS, 500)) as hosts, crew(hosts, RANKS, environment, logs) as started:
        yield environment, started


OWN_PROCESS = {"project": ["ddp_compiled"]} | {
    environment: [name for name, system in SYSTEMS.items() if system.environment == environment]
    for environment in ENVIRONMENTS
    if environment != "project"
}


@EVERY_MODEL
@EVERY_OPTIMIZER
@pytest.mark.long
@pytest.mark.timeout(600)
def test_systems_in_processes_of_their_own_train_as_one_process(
    ranks_of: tuple[str, Crew], model: str, optimizer: str
) -> None:
    environment, started = ranks_of
    for port, system in enumerate(OWN_PROCESS[environment], start=20_000):
        cell = Cell(model, "tiny", system, optimizer, LEARNING_RATES[optimizer], 0, 500.0, STEPS, port, timeout_s=240)
        ready = started.ask(Open(cell), timeout_s=240)

        assert all(isinstance(rank, Ready) for rank in ready), f"{system}: {ready}"
        assert_same_losses(mean_losses([list(r.losses) for r in ready if isinstance(r, Ready)]), model, optimizer)
        assert started.ask(Close(system), timeout_s=20) == (Closed(),) * RANKS
