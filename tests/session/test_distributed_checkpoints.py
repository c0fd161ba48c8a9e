"""`torch.distributed.checkpoint`: saved while training goes on, loaded on other ranks and grids, or never whole."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import SGD, Adam

import embrace_fx
from embrace_fx.passes.planner.asked_strategies import Strategy
from tests.support.beside import take_steps
from tests.support.failing import draw_batch, make_model
from tests.support.ranks import run_ranks
from tests.support.tagger import Scorer
from tests.support.training import whole_parameters, whole_state


def batch_of(step: int, rank: int, ranks: int) -> tuple[Tensor, ...]:
    """Returns a rank's part of a batch of 12 examples, which is the same batch on 1 to 4 ranks."""
    parts = [draw_batch(step, k) for k in range(3)]
    whole = [torch.cat(each) for each in zip(*parts, strict=True)]
    return tuple(each[rank::ranks] for each in whole)


class Run:
    def __init__(self, strategy: Strategy) -> None:
        self.plain = make_model()
        self.optimizer = Adam(self.plain.parameters(), lr=0.05, eps=1e-3)
        self.model: Any = embrace_fx.compile(self.plain, optimizer=self.optimizer, strategy=strategy)

    def train(self, rank: int, ranks: int, steps: range) -> None:
        batches = self.model.lookahead([batch_of(step, rank, ranks) for step in steps])
        take_steps(self.model, self.optimizer, batches)

    def stored(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.plain, self.optimizer)
        return {"model": weights, "optimizer": state}

    def load(self, path: Path) -> None:
        stored = self.stored()
        load(stored, checkpoint_id=path)
        set_state_dict(
            self.plain, self.optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"]
        )


def save_while_training(rank: int, ranks: int, path: Path, strategy: Strategy) -> tuple[Any, Any]:
    """Returns the parameters and the state when they were saved, and after further training."""
    writers = dist.new_group()
    run = Run(strategy)
    run.train(rank, ranks, range(3))
    before = whole_parameters(run.model) | whole_state(run.model, run.optimizer)
    saving: Any = async_save(run.stored(), checkpoint_id=path, process_group=writers)
    run.train(rank, ranks, range(3, 9))
    saving.result()
    return before, whole_parameters(run.model) | whole_state(run.model, run.optimizer)


def load_and_train(rank: int, ranks: int, path: Path, strategy: Strategy) -> tuple[Any, Any]:
    run = Run(strategy)
    run.train(rank, ranks, range(20, 21))
    run.load(path)
    found = whole_parameters(run.model) | whole_state(run.model, run.optimizer)
    run.train(rank, ranks, range(3, 9))
    return found, whole_parameters(run.model) | whole_state(run.model, run.optimizer)


def check(saved_on: tuple[int, Strategy], loaded_on: tuple[int, Strategy], path: Path) -> None:
    ranks, strategy = saved_on
    ((before, after), *others) = run_ranks(ranks, save_while_training, path, strategy)
    for _, other in others:
        assert all(torch.equal(other[name], value) for name, value in after.items())
    ranks, strategy = loaded_on
    for found, end in run_ranks(ranks, load_and_train, path, strategy):
        for name, value in before.items():
            assert torch.equal(found[name], value), name
        for name, value in after.items():
            torch.testing.assert_close(end[name], value, rtol=1e-9, atol=1e-12, msg=name)


LAYOUTS: list[tuple[int, Strategy]] = [
    (1, "auto"),
    (2, "alltoall"),
    (2, embrace_fx.Grid(2, 1)),
    (3, "alltoall"),
    (4, "alltoall"),
    (4, embrace_fx.Grid(2, 2)),
    (4, embrace_fx.Grid(4, 1)),
]


@pytest.mark.long
@pytest.mark.parametrize("loaded_on", LAYOUTS, ids=str)
@pytest.mark.parametrize("saved_on", LAYOUTS, ids=str)
def test_from_any_ranks_and_grid_to_any(
    saved_on: tuple[int, Strategy], loaded_on: tuple[int, Strategy], tmp_path: Path
) -> None:
    check(saved_on, loaded_on, tmp_path / "saved")


ROWS, WIDTH = 100_000, 120
WHOLE_BYTES = 4 * ROWS * WIDTH


class Peak:
    """The most memory of its own that this process has while it is entered, beyond what it had before."""

    def __enter__(self) -> Peak:
        self._before = self.most = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.grown_bytes = self.most - self._before

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])


def large(seed: int, rows: int, width: int) -> Scorer:
    """Returns a model that consists almost entirely of one table."""
    torch.manual_seed(seed)
    return Scorer(rows, width)


def export_and_import(rank: int, ranks: int, directory: Path, rows: int, width: int) -> tuple[int, int]:
    """Returns how much memory an export takes, and how much an import takes."""
    plain = large(1 + rank, rows, width)
    optimizer: Any = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy={"words.weight": "alltoall"})
    take_steps(model, optimizer, [(torch.arange(5) + 7 * step + rank,) for step in range(2)])
    model.synchronize()
    gc.collect()
    with Peak() as exporting:
        embrace_fx.save_full_state_dict(model, directory / "trained.pt")
    embrace_fx.save_full_state_dict(optimizer, directory / "optimizer.pt")
    expected, state = model.full_state_dict(), embrace_fx.full_state_dict(optimizer)
    written = torch.load(directory / "trained.pt")
    assert written.keys() == expected.keys()
    assert all(type(value) is Tensor and torch.equal(value, expected[name]) for name, value in written.items())
    of_optimizer = torch.load(directory / "optimizer.pt")
    assert of_optimizer["param_groups"] == state["param_groups"]
    assert torch.equal(of_optimizer["state"][0]["momentum_buffer"], state["state"][0]["momentum_buffer"])
    del expected, state, written, of_optimizer
    gc.collect()
    with Peak() as importing:
        model.load_state_dict(torch.load(directory.parent / "plain.pt", mmap=True))
        optimizer.load_state_dict(torch.load(directory / "optimizer.pt", mmap=True))
    found = model.full_state_dict()
    plainly = torch.load(directory.parent / "plain.pt")
    assert all(torch.equal(found[name], value) for name, value in plainly.items())
    model(torch.arange(5)).backward()
    optimizer.step()
    return exporting.grown_bytes, importing.grown_bytes


def test_one_file_of_everything_is_written_and_read(tmp_path: Path) -> None:
    torch.save(large(9, 50, 5).state_dict(), tmp_path / "plain.pt")
    run_ranks(2, export_and_import, tmp_path / "new", 50, 5)
    assert {each.name for each in (tmp_path / "new").iterdir()} == {"trained.pt", "optimizer.pt"}


@pytest.mark.long
def test_one_file_of_everything_is_written_and_read_by_ranks_that_never_hold_it_whole(tmp_path: Path) -> None:
    torch.save(large(9, ROWS, WIDTH).state_dict(), tmp_path / "plain.pt")
    for exporting_bytes, importing_bytes in run_ranks(2, export_and_import, tmp_path / "new", ROWS, WIDTH):
        assert exporting_bytes < 0.3 * WHOLE_BYTES
        assert importing_bytes < 0.8 * 2 * WHOLE_BYTES  # each rank loads half of the table and of its momentum
