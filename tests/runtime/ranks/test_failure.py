"""A rank that dies in the middle of a step: the others raise, with its name, wherever the store lives."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import embrace_fx
from embrace_fx.runtime.ranks import failure
from embrace_fx.runtime.ranks.failure import DeadRank, LaunchLog, LivenessCheck, PeerFailure, StuckRank
from embrace_fx.runtime.tables import placement
from tests.support.ranks import GROUP_TIMEOUT_S, RankDied, fresh_ranks

WORLD_SIZE = 3
SECONDS = 6.0
"""How long a rank waits before it asks again: the verdict's host is gone by then."""


class Trigger:
    """Whether this process exits in the next call of `may_exit`."""

    armed = False


@torch.library.custom_op("embrace_fx_tests::may_exit", mutates_args=())
def may_exit(x: Tensor) -> Tensor:
    """Returns a copy of `x`, or exits the process if `Trigger.armed`."""
    if Trigger.armed:
        os._exit(3)
    return x.clone()


@may_exit.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Model(nn.Module):
    """Looks up rows before and after the point of its forward at which the process may exit."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 6)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return (self.table(ids).sum(0) * may_exit(scale)).sum()


def _exit_in_forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    Trigger.armed = True
    model(*batch)


def _killed_in_backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    loss = model(*batch)
    loss.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    loss.backward()


def _store(port: int, *, host: bool) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=host, wait_for_workers=False)  # type: ignore[attr-defined]


def _train_until_death(
    rank: int, world_size: int, victim: int, die: Callable[[nn.Module, tuple[Tensor, Tensor]], None], port: int | None
) -> None:
    failure.PATIENCE_S = 2.0
    hosts = port is None and rank == 0
    store = _store(port or 0, host=hosts) if port is not None or hosts else None
    ports = [store.port if store is not None else 0]
    dist.broadcast_object_list(ports)
    store = store or _store(ports[0], host=False)
    dist.destroy_process_group()
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    torch.manual_seed(0)
    plain = Model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy="alltoall")
    batches = [(torch.arange(5) + rank + step, torch.ones(())) for step in range(4)]
    for step, batch in enumerate(model.lookahead(batches)):
        if rank == victim and step == 2:
            die(model, batch)
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("victim", "die", "store_host"),
    [
        (1, _exit_in_forward, "rank 0"),
        pytest.param(0, _killed_in_backward, "launcher", marks=pytest.mark.long),
        pytest.param(0, _killed_in_backward, "rank 0", marks=pytest.mark.long),
        pytest.param(2, _exit_in_forward, "launcher", marks=pytest.mark.long),
    ],
)
def test_the_living_name_the_dead(
    victim: int, die: Callable[[nn.Module, tuple[Tensor, Tensor]], None], store_host: str
) -> None:
    store = _store(0, host=True) if store_host == "launcher" else None

    outcomes = fresh_ranks(WORLD_SIZE, _train_until_death, victim, die, store.port if store is not None else None)

    death = outcomes[victim]
    assert isinstance(death.exception, RankDied)
    for outcome in outcomes[:victim] + outcomes[victim + 1 :]:
        assert isinstance(outcome.exception, DeadRank), outcome
        message = str(outcome.exception)
        assert f"Rank(s) {victim} no longer answer" in message
        assert "restart the job from a checkpoint" in message
        assert outcome.elapsed_s - death.elapsed_s < GROUP_TIMEOUT_S / 2


def _host_leaves_at_once(rank: int, world_size: int) -> list[int]:
    store = _store(0, host=True) if rank == 0 else None
    ports = [store.port if store is not None else 0]
    dist.broadcast_object_list(ports)
    store = store or _store(ports[0], host=False)
    liveness = LivenessCheck(store, "test", rank, world_size + 1, LaunchLog())  # one rank more, which never answers
    dist.barrier()
    if rank == 0:
        liveness.missing()
        os._exit(0)
    time.sleep(SECONDS)
    return liveness.missing()


@pytest.mark.long
def test_the_verdict_outlives_the_process_that_hosts_the_store() -> None:
    host, other = fresh_ranks(2, _host_leaves_at_once)
    assert isinstance(host.exception, RankDied)
    assert other.result == [2], other


def test_a_rank_that_is_behind_is_named_with_the_launch_that_others_wait_for() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    logs = [LaunchLog() for _ in range(3)]
    for log, launches in zip(logs, (["announcement", "ids"], ["announcement", "ids", "bucket 0"], []), strict=True):
        log.step, log.preparations = 3, 1
        for launch in launches:
            log.record(launch)
    ranks = [LivenessCheck(store, "test", rank, 3, log) for rank, log in enumerate(logs)]
    with pytest.raises(StuckRank) as raised:
        ranks[1].raise_named(RuntimeError("timed out"), "ids")
    assert re.sub(r"test_failure\.py:\d+", "here", str(raised.value)) == (
        "A collective timed out on rank 1: rank 0 has not launched 'bucket 0' of step 2: it is in here, and its last "
        "launch was number 2, 'ids' of step 2; rank 2 has not launched 'ids' of step 2: it is in here, and has not "
        "launched anything (timed out). Check the source lines named here, and restart the job "
        "from a checkpoint."
    )
    for each in ranks:
        each.close()


def test_a_peer_failure_reports_every_rank_that_failed() -> None:
    error = PeerFailure({2: "expected a, found b.", 0: "expected c, found d"})
    assert str(error) == (
        "rank 0: expected c, found d; rank 2: expected a, found b. Nothing of this step was applied, on any rank."
    )


STUCK_TIMEOUT_S = 3.0


def _stand_still(seconds: float) -> None:
    time.sleep(seconds)


def _train_until_one_stands_still(rank: int, world_size: int, where: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=STUCK_TIMEOUT_S))
    plain = Model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy="alltoall", process_group=group)
    batches = [(torch.arange(5) + rank + step, torch.ones(())) for step in range(4)]
    for step, batch in enumerate(model.lookahead(batches)):
        stands = rank == 1 and step == 2
        if stands and where == "before its step":
            _stand_still(2 * STUCK_TIMEOUT_S)
        loss = model(*batch)
        if stands and where == "before its backward":
            _stand_still(2 * STUCK_TIMEOUT_S)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize(("where", "launch"), [("before its step", "'announcement'"), ("before its backward", "'.+'")])
def test_a_rank_that_lives_and_stands_still_is_named_with_its_line(where: str, launch: str) -> None:
    waiting, stuck = fresh_ranks(2, _train_until_one_stands_still, where)
    line = _stand_still.__code__.co_firstlineno + 1
    assert isinstance(waiting.exception, StuckRank), waiting
    expected = rf"rank 1 has not launched {launch} of step 3: it is in test_failure.py:{line}"
    assert re.search(expected, str(waiting.exception))
    assert isinstance(stuck.exception, DeadRank | StuckRank)


def _leave_in(rank: int, world_size: int, where: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    if where == "set-up" and rank == 1:
        time.sleep(1.0)  # the other rank may still be connecting in the test's group
        os._exit(3)
    plain = Model()
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    strategy = embrace_fx.Grid(2, 1) if where == "a grid's state" else "alltoall"
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy=strategy, process_group=group)
    if where == "placement" and rank == 1:
        setattr(placement, "scatter_table", lambda *_: os._exit(3))  # noqa: B010  (it is imported there)
    for step in range(2):
        model(torch.arange(5) + rank + step, torch.ones(())).backward()
        optimizer.step()
    if rank == 1:
        os._exit(3)
    if where == "a grid's state":
        model.state_dict()
    elif where == "the whole state":
        model.full_state_dict()
    elif where == "the optimizer's state":
        embrace_fx.full_state_dict(optimizer)


@pytest.mark.long
@pytest.mark.parametrize("where", ["set-up", "placement", "the optimizer's state", "the whole state", "a grid's state"])
def test_a_rank_that_dies_while_tables_move_is_named(where: str) -> None:
    living, dead = fresh_ranks(2, _leave_in, where)
    assert isinstance(dead.exception, RankDied)
    assert isinstance(living.exception, DeadRank), living
    assert "Rank(s) 1 no longer answer" in str(living.exception)
    assert living.elapsed_s - dead.elapsed_s < GROUP_TIMEOUT_S / 2
