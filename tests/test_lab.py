"""The lab end to end, at tiny sizes: cells on real ranks, what is kept, what is said, how it ends."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import lab
from benchmarks.lab_cell import Cell, Failed
from benchmarks.lab_hosts import ROOT, Crew, CrewFailed, crew, python_of
from benchmarks.network import Links, network
from benchmarks.peers import SYSTEMS

RANKS = 2
TINY = replace(
    lab.SETTINGS["quick"],
    name="test",
    matrix={"bert": ("alone_sparse", "ddp_sparse")},
    rounds=2,
    ranks=RANKS,
    rate_mbit=500.0,
    size="tiny",
)
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    logs = tmp_path_factory.mktemp("logs")
    with network(Links(RANKS, 500)) as hosts, crew(hosts, RANKS, "project", logs) as started:
        yield started


def cell(system: str = "ddp_sparse", port: int = 20_100, **changes: object) -> Cell:
    return replace(TINY.cell("bert", system, port), **changes)  # type: ignore[arg-type]


def test_a_cell_is_measured_on_every_rank(ranks: Crew) -> None:
    found = ranks.run(cell(warm_up_steps=2, steps=3))

    assert not isinstance(found, Failed), found
    for rank in found:
        assert len(rank.losses) == 5
        assert rank.step_ms == pytest.approx(sum(rank.each_step_ms) / 3)
        assert len(rank.each_step_ms) == 3
        assert rank.first_step_s * 1e3 > min(rank.each_step_ms)
        assert rank.peak_bytes > rank.start_bytes > 0
        assert rank.sent_bytes > 0
    assert ranks.versions["torch"]


def test_ranks_that_are_alone_send_nothing(ranks: Crew) -> None:
    found = ranks.run(cell("alone_sparse", port=20_101))

    assert not isinstance(found, Failed), found
    assert max(rank.sent_bytes for rank in found) < 1000  # acknowledgements of the barrier before


def test_a_system_that_fails_is_reported_and_the_next_cell_runs(ranks: Crew) -> None:
    found = ranks.run(cell(optimizer="no such", port=20_102))

    assert isinstance(found, Failed)
    assert "KeyError: 'no such'" in found.reason
    assert "prepare" in found.details
    assert not isinstance(ranks.run(cell(port=20_103)), Failed)


@pytest.mark.long
def test_a_cell_that_takes_too_long_is_ended(ranks: Crew) -> None:
    found = ranks.run(cell(steps=100_000, timeout_s=2, port=20_104))

    assert isinstance(found, Failed)
    assert "still busy after 2 s" in found.reason
    assert not isinstance(ranks.run(cell(port=20_105)), Failed)


@pytest.mark.long
def test_a_rank_that_dies_ends_the_cell_for_all(ranks: Crew) -> None:
    def kill_one() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (measuring := [pid for rank in children(os.getpid()) for pid in children(rank)]):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        os.kill(measuring[0], signal.SIGKILL)

    killing = threading.Thread(target=kill_one)
    killing.start()
    started = time.monotonic()
    found = ranks.run(cell(steps=100_000, timeout_s=PATIENCE_S, port=20_106))
    killing.join()

    assert isinstance(found, Failed)
    assert "the rank's process died with exit status -9" in found.reason
    assert time.monotonic() - started < PATIENCE_S / 2
    assert not isinstance(ranks.run(cell(port=20_107)), Failed)


def children(pid: int) -> list[int]:
    """Of a process, those that run ranks of the lab."""
    found = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [child for child in found if b"benchmarks.lab_rank" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.long
def test_ranks_that_cannot_start_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lab_hosts.python_of", lambda _: Path(sys.executable))

    with (
        network(Links(RANKS, 500)) as hosts,
        pytest.raises(CrewFailed, match=r"(?s)exit status 1.*KeyError: 'nowhere'"),
        crew(hosts, RANKS, "nowhere", tmp_path),
    ):
        pass


def test_an_environment_that_was_not_made_is_named() -> None:
    with pytest.raises(CrewFailed, match="found none: run `make bench-peers`"):
        python_of("nowhere")


def run_lab(setting: lab.Setting, kept: Path, minutes: float = 10) -> lab.Lab:
    run = lab.Lab(setting, Console(file=StringIO()), kept)
    run.run(time.monotonic() + minutes * 60)
    return run


@pytest.mark.long
def test_a_run_is_written_and_not_measured_again(tmp_path: Path) -> None:
    first = run_lab(TINY, tmp_path / "kept")
    page = lab.write(first.results(), tmp_path / "results")

    assert first.failures == {}
    data = json.loads(page.with_suffix(".json").read_text())
    assert data["complete"]
    assert [row["rounds"] for row in data["models"]["bert"]["rows"]] == [2, 2]
    assert data["models"]["bert"]["floor"]["bytes_per_rank"] > 0
    assert data["models"]["bert"]["rounds"]["ddp_sparse"]["1"]["load"] > 0
    assert data["configuration"]["rate_mbit"] == 500
    assert page.with_name(f"{page.stem}-bert.svg").exists()
    assert "Partial" not in page.read_text()

    again = run_lab(TINY, tmp_path / "kept", minutes=0)  # no time to measure anything
    assert again.cells == first.cells
    more = run_lab(replace(TINY, rounds=3), tmp_path / "kept", minutes=0)
    assert more.cells == first.cells
    assert not more.results()["complete"]
    assert run_lab(replace(TINY, steps=3), tmp_path / "kept", minutes=0).cells == {}


@pytest.mark.long
def test_systems_of_an_environment_that_is_not_there_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SYSTEMS, "ddp", replace(SYSTEMS["ddp"], environment="nowhere"))
    setting = replace(TINY, matrix={"bert": ("ddp", "ddp_sparse")}, rounds=1)

    results = run_lab(setting, tmp_path).results()

    assert list(results["models"]["bert"]["failures"]) == ["ddp"]
    assert "make bench-peers" in results["models"]["bert"]["failures"]["ddp"]
    assert [row.system for row in results["models"]["bert"]["rows"]] == ["ddp_sparse"]
    assert not results["complete"]


def test_rounds_take_turns() -> None:
    matrix = {"lm": ("ddp", "embrace_2d"), "bert": ("ddp",)}
    order = list(replace(TINY, matrix=matrix).cells())

    assert order[:3] == [(0, "lm", "ddp"), (0, "lm", "embrace_2d"), (0, "bert", "ddp")]
    assert order[3:] == [(1, model, system) for _, model, system in order[:3]]


def test_options_that_do_not_exist_are_refused() -> None:
    options = argparse.Namespace(setting="quick", models="lm,nothing", systems=None)

    with pytest.raises(ValueError, match=r"expected a model of lm.*found nothing"):
        lab.chosen(options)


@pytest.mark.long
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_writes_what_it_has_and_leaves_nothing_behind(
    tmp_path: Path, ending: signal.Signals
) -> None:
    mark = f"LAB_OF={tmp_path}"
    options = ["--models=bert", "--systems=ddp_sparse", "--ranks=2", "--size=tiny", "--rounds=500"]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.lab", "quick", *options, "--output", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "LAB_OF": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any("ms per step" in line for line in process.stdout)  # reads on until the first cell
        namespaces = {found for pid in pids_with(mark) for found in namespaces_of(pid)}
        process.send_signal(ending)
        rest, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 130
    assert "interrupted: what was measured is kept" in rest
    (page,) = tmp_path.glob("*.md")
    assert "**Partial:**" in page.read_text()
    deadline = time.monotonic() + PATIENCE_S
    while pids_with(mark) or (namespaces - namespaces_of(os.getpid())) & all_namespaces():
        assert time.monotonic() < deadline, f"left behind: {pids_with(mark)}"
        time.sleep(0.1)


def pids_with(mark: str) -> list[int]:
    """Running processes whose environment has a variable, this one not among them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_text(errors="replace"):
                found.append(int(entry.name))
        except OSError:  # it is gone, or another user's
            continue
    return found


def namespaces_of(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/task").glob("*/ns/net"):
        try:
            found.add(os.readlink(entry))
        except OSError:
            continue
    return found


def all_namespaces() -> set[str]:
    return {found for entry in Path("/proc").glob("[0-9]*") for found in namespaces_of(int(entry.name))}
