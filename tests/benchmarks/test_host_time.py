"""Where a step's processor time goes: what is counted is what has happened."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.micro.host_time import __main__ as host_time
from benchmarks.micro.host_time.counters import ROOT, Calls, Thread, count_ops, per_step, room_of, threads_now


def test_the_kernel_tells_what_a_thread_of_a_name_has_run() -> None:
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait()
        while threads_now()[threading.get_native_id()][1].cpu_ms < 30:
            pass
        done.set()
        go.clear()
        go.wait(5)

    thread = threading.Thread(target=work, name="worker under test", daemon=True)
    thread.start()
    begun.wait()
    before = threads_now()
    go.set()
    done.wait()
    found = per_step(before, threads_now(), 10)
    go.set()
    thread.join()

    assert found["worker under test"].cpu_ms >= 2.5  # 30 ms less what it had run before, over ten steps


def test_sums_are_told_per_step_and_threads_of_one_name_together() -> None:
    before = {1: ("a", Thread(10.0, 4))}
    after = {1: ("a", Thread(30.0, 8)), 2: ("a", Thread(20.0, 4)), 3: ("idle", Thread(0.0, 0))}

    assert per_step(before, after, 4) == {"a": Thread(10.0, 2)}


def test_rooms_are_folders_of_the_project_or_of_a_package() -> None:
    assert room_of(str(ROOT / "embrace_fx" / "session" / "session.py")) == "embrace_fx/session"
    assert room_of(str(ROOT / "runtime" / "ranks" / "groups.py")) == "runtime/ranks"
    assert room_of(str(ROOT / ".venv" / "lib" / "site-packages" / "torch" / "optim" / "adam.py")) == "torch/optim"
    assert room_of(torch.__file__) == "torch"
    assert room_of("<string>") == "python"


def test_python_calls_are_counted_by_room_while_they_are_asked_for() -> None:
    calls = Calls()
    calls.install()
    room_of("x")
    calls.on = True
    room_of("x")
    room_of("x")
    calls.on = False
    calls.remove()

    assert calls.by_room["benchmarks/micro"] == 2


def test_ops_of_every_thread_are_counted_with_the_bytes_that_copies_write() -> None:
    rows = torch.zeros(50, 8)

    def train() -> None:
        thread = threading.Thread(target=lambda: rows.index_select(0, torch.zeros(5, dtype=torch.int64)))
        thread.start()
        thread.join()
        torch.empty(3, 4).copy_(torch.zeros(3, 4, dtype=torch.float64))
        rows.index_select(1, torch.zeros(3, dtype=torch.int64))

    found = count_ops(train, 1)

    assert found.by_name["aten::index_select"] == 2
    assert found.copied_bytes == (5 * 8 + 3 * 4 + 50 * 3) * 4
    assert found.allocations >= 3


@pytest.mark.long
@pytest.mark.parametrize("what", ["time", "count"])
def test_two_ranks_of_the_small_model_are_measured(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    found = host_time.measure(what, "small", "embrace_2d_lazy", 2)

    if what == "time":
        assert found["threads"]["MainThread"]["cpu_ms"] > 0.5
        assert found["threads"]["embrace_fx launcher"]["waits"] > 0
    else:
        assert found["python_calls"]["runtime/launch"] > 10
        assert found["ops"]["by_name"]["aten::index_select"] >= 2


def test_only_the_systems_that_are_asked_for_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, str]] = []

    def measure(what: str, model: str, system: str, ranks: int) -> dict[str, Any]:
        measured.append((what, system))
        ops = {"calls": 1.0, "allocations": 1.0, "copied_bytes": 1.0, "by_name": {"aten::mul": 1.0}}
        counts = {"python_calls": {"torch": 1.0}, "lock_calls": 1.0, "ops": ops}
        return {"threads": {"MainThread": {"cpu_ms": 1.0, "waits": 1}}} if what == "time" else counts

    monkeypatch.setattr(host_time, "measure", measure)
    host_time.compare("bert", 2, 1, ["ddp", "embrace_eager"])

    assert measured == [(what, system) for what in ("time", "count") for system in ("ddp", "embrace_eager")]
