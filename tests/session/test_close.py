"""What a compiled model takes, it gives back: by `close()`, and when nothing refers to it any more."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam

import embrace_fx
from embrace_fx.runtime.tables.table_shard import TableShard
from tests.support.ranks import close_pool, run_ranks
from tests.support.words import words_batch, words_model

MODELS = 3
KINDS = ("Session", "Communicator", "CommPipeline", "Words", "Parameter")


def taken() -> dict[str, int]:
    """What this process holds of what every model needs, the model itself among it."""
    gc.collect()
    deadline_s, alike = time.monotonic() + 10.0, 0
    while alike < 3 and time.monotonic() < deadline_s:
        before = _threads(), _descriptors()
        time.sleep(0.2)  # joined threads and sockets of an earlier test may need time to disappear
        alike = alike + 1 if before == (_threads(), _descriptors()) else 0
    return {
        "threads": _threads(),
        "descriptors": _descriptors(),
        "groups": len(dist.distributed_c10d._world.pg_map),  # get_pg_count() counts ended groups too
        "models": sum(type(each).__name__ in KINDS for each in gc.get_objects()),
    }


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def train(rank: int) -> embrace_fx.CompiledModel:
    plain = words_model()
    model = embrace_fx.compile(plain, optimizer=SGD(plain.parameters(), lr=0.1), strategy="alltoall")
    for batch in model.lookahead([words_batch(step, rank) for step in range(3)]):
        model.optimizer.zero_grad()
        model(*batch).backward()
        model.optimizer.step()
    return model  # has gradients, and updates that wait for the next call


def train_and_drop(rank: int, world_size: int, close: bool) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    train(rank).close()  # the first model starts threads that remain, such as autograd's
    before, within = taken(), {}
    for _ in range(MODELS):
        model = train(rank)
        within = taken()
        if close:
            model.close()
        del model
    return before, within, taken()


@pytest.mark.long
@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_models_in_a_row_leave_nothing_behind(close: bool) -> None:
    close_pool()  # resources of earlier tests could be freed in the middle
    for before, within, after in run_ranks(2, train_and_drop, close):
        assert {what: count for what, count in within.items() if count <= before[what]} == {}
        assert after == before


def close_and_go_on(rank: int, world_size: int) -> tuple[str, dict[str, Tensor], dict[str, Tensor], int]:
    train(rank).close()  # the first model starts threads that remain, such as a progress bar's
    threads = threading.active_count()
    model = train(rank)
    expected = {name: _whole(value) for name, value in model.state_dict().items()}
    model.close()
    model.close()  # closing twice is allowed
    with pytest.raises(RuntimeError) as caught:
        model(*words_batch(0, rank))
    found = {name: _whole(value) for name, value in model.state_dict().items()}
    return str(caught.value), expected, found, threading.active_count() - threads


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, TableShard) else tensor.clone()


def test_a_closed_model_keeps_its_state_and_says_that_it_is_closed() -> None:
    for message, expected, found, threads in run_ranks(2, close_and_go_on):
        assert "This compiled model is closed" in message
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert threads == 0


def drop_and_read(
    rank: int, world_size: int, strategy: Literal["alltoall", "allreduce"], rows: Literal["exact", "replay"]
) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """A state after training, by a model that is closed and by one that is dropped; and what another compile() says."""
    states, plains = [], []
    for closed in (True, False):
        torch.manual_seed(0)
        plains.append(words_model())
        model = embrace_fx.compile(plains[-1], strategy=strategy, schedule="2d", row_updates=rows)
        optimizer = (Adam if rows == "replay" else SGD)(plains[-1].parameters(), lr=0.1)
        for batch in (words_batch(step, rank) for step in range(3)):
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
        if closed:
            model.close()
        else:
            del model
            gc.collect()
        states.append({name: _whole(value) for name, value in plains[-1].state_dict().items()})
    message = ""
    try:
        embrace_fx.compile(plains[-1]).close()
    except ValueError as refused:
        message = str(refused)
    return states[0], states[1], message


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        pytest.param("alltoall", "exact", marks=pytest.mark.long),
        ("alltoall", "replay"),
        pytest.param("allreduce", "exact", marks=pytest.mark.long),
    ],
)
def test_no_update_is_lost_where_the_compiled_model_is_closed_or_dropped(
    strategy: Literal["alltoall", "allreduce"], rows: Literal["exact", "replay"]
) -> None:
    for closed, dropped, message in run_ranks(2, drop_and_read, strategy, rows):
        assert closed.keys() == dropped.keys()
        assert all(torch.equal(closed[name], dropped[name]) for name in closed)
        assert message == ""  # a second `compile` works although no reference to the first result is left
