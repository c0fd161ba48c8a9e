"""The lab end to end, at tiny sizes: cells on real ranks, what is kept, what is said, how it ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.lab import __main__ as lab
from benchmarks.lab.block import RANK_BYTES, BlockRun
from benchmarks.lab.cell import Cell, Close, Closed, Failed, Measured, Open, Ready, Record, Turn
from benchmarks.lab.hosts import Crew, CrewFailed, crew, python_of
from benchmarks.lab.kept import Kept, fingerprint
from benchmarks.lab.report import write
from benchmarks.lab.results import results
from benchmarks.lab.settings import GROUPS, SETTINGS, Block, Setting
from benchmarks.models import MODELS
from benchmarks.network import Links, network
from benchmarks.peers import SYSTEMS
from benchmarks.peers.base import Recorded
from benchmarks.records import read_record
from tests.support.lab import options

RANKS = 2
TINY = replace(
    SETTINGS["quick"],
    name="test",
    models=("bert",),
    groups={"pair": ("alone_sparse", "ddp_sparse")},
    rounds=2,
    ranks=(RANKS,),
    rates_mbit=(500.0,),
    turn_ms=5.0,
    size="tiny",
)
BERT = Block("bert", RANKS, 500.0, "pair")
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    logs = tmp_path_factory.mktemp("logs")
    with network(Links(RANKS, 500)) as hosts, crew(hosts, RANKS, "project", logs) as started:
        yield started


def cell(system: str = "ddp_sparse", port: int = 20_100, **changes: object) -> Cell:
    return replace(TINY.cell(BERT, system, port), **changes)  # type: ignore[arg-type]


def opened(ranks: Crew, cell: Cell) -> Ready:
    answers = ranks.ask(Open(cell), PATIENCE_S)
    assert isinstance(answers[0], Ready), answers
    return answers[0]


def test_systems_take_turns_and_go_on_where_they_were(ranks: Crew) -> None:
    first = opened(ranks, cell(warm_up_steps=4))
    opened(ranks, cell("alone_sparse", port=20_101))
    found = ranks.ask(Turn("ddp_sparse", 3), PATIENCE_S)
    of_other = ranks.ask(Turn("alone_sparse", 2), PATIENCE_S)
    again = ranks.ask(Turn("ddp_sparse", 1), PATIENCE_S)

    assert len(first.losses) == 4
    assert first.first_step_s * 1e3 > first.step_ms > 0
    for rank in found:
        assert isinstance(rank, Measured)
        assert len(rank.each_step_ms) == 3
        assert rank.step_ms == pytest.approx(sum(rank.each_step_ms) / 3)
        assert rank.peak_bytes > rank.start_bytes > 0
        assert rank.sent_bytes > 10_000
    for rank in of_other:
        assert isinstance(rank, Measured)
        assert rank.sent_bytes < 1000  # acknowledgements of the barrier before
    assert all(isinstance(rank, Measured) for rank in again)
    for system in ("ddp_sparse", "alone_sparse"):
        assert ranks.ask(Close(system), PATIENCE_S) == (Closed(),) * RANKS
    assert ranks.versions["torch"]


def test_between_its_turns_a_system_is_stopped(ranks: Crew) -> None:
    opened(ranks, cell(port=20_102))

    sessions = [pid for rank in children(os.getpid()) for pid in children(rank)]
    deadline = time.monotonic() + PATIENCE_S
    while {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in sessions} != {"T"}:
        assert time.monotonic() < deadline
    assert len(sessions) == RANKS
    ranks.ask(Close("ddp_sparse"), PATIENCE_S)
    assert not any(children(rank) for rank in children(os.getpid()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority")
def test_threads_that_communicate_come_before_the_one_that_computes(ranks: Crew) -> None:
    opened(ranks, cell(port=20_111))

    for pid in [pid for rank in children(os.getpid()) for pid in children(rank)]:
        threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
        priorities = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
        own = priorities.pop(pid)
        assert own >= 0
        assert -10 in priorities.values()
    ranks.ask(Close("ddp_sparse"), PATIENCE_S)


def test_a_system_that_fails_is_reported_and_the_next_one_opens(ranks: Crew) -> None:
    (found,) = ranks.ask(Open(cell(optimizer="no such", port=20_103)), PATIENCE_S)

    assert isinstance(found, Failed)
    assert "KeyError: 'no such'" in found.reason
    assert "prepare" in found.details
    opened(ranks, cell(port=20_104))
    ranks.ask(Close("ddp_sparse"), PATIENCE_S)


def test_a_system_without_a_recorder_records_nothing(ranks: Crew) -> None:
    opened(ranks, cell(port=20_105))

    assert ranks.ask(Record("ddp_sparse", 1), PATIENCE_S) == (Recorded(),) * RANKS
    ranks.ask(Close("ddp_sparse"), PATIENCE_S)


@pytest.mark.long
def test_embrace_fx_records_its_timeline(ranks: Crew) -> None:
    opened(ranks, cell("embrace_2d", port=20_106, warm_up_steps=13))

    (found, _) = ranks.ask(Record("embrace_2d", 4), PATIENCE_S)
    assert isinstance(found, Recorded)
    assert found.figures["source"] == "profile"
    assert found.figures["steps"]["compute_order"]
    assert found.figures["measured"]["step_ms"] > 0
    assert "<svg" in found.picture
    ranks.ask(Close("embrace_2d"), PATIENCE_S)


@pytest.mark.long
def test_a_turn_that_takes_too_long_is_ended(ranks: Crew) -> None:
    opened(ranks, cell(timeout_s=20, port=20_107))
    (found,) = ranks.ask(Turn("ddp_sparse", 1_000_000), 20)

    assert isinstance(found, Failed)
    assert "still busy after 20 s" in found.reason
    opened(ranks, cell(port=20_108))
    ranks.ask(Close("ddp_sparse"), PATIENCE_S)


@pytest.mark.long
def test_a_rank_that_dies_ends_the_turn_for_all(ranks: Crew) -> None:
    opened(ranks, cell(timeout_s=PATIENCE_S, port=20_109))
    victim = next(pid for rank in children(os.getpid()) for pid in children(rank))
    killing = threading.Timer(1.0, os.kill, (victim, signal.SIGKILL))
    killing.start()
    started = time.monotonic()
    (found,) = ranks.ask(Turn("ddp_sparse", 1_000_000), PATIENCE_S)
    killing.join()

    assert isinstance(found, Failed)
    assert "the rank's process died with exit status -9" in found.reason
    assert time.monotonic() - started < PATIENCE_S / 2
    opened(ranks, cell(port=20_110))
    ranks.ask(Close("ddp_sparse"), PATIENCE_S)


def children(pid: int) -> list[int]:
    """Of a process, those that run ranks of the lab."""
    found = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [child for child in found if b"benchmarks.lab.rank" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.long
def test_ranks_that_cannot_start_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lab.hosts.python_of", lambda _: Path(sys.executable))

    with (
        network(Links(RANKS, 500)) as hosts,
        pytest.raises(CrewFailed, match=r"(?s)exit status 1.*KeyError: 'nowhere'"),
        crew(hosts, RANKS, "nowhere", tmp_path),
    ):
        pass


def test_an_environment_that_was_not_made_is_named() -> None:
    with pytest.raises(CrewFailed, match="found none: run `make bench-peers`"):
        python_of("nowhere")


def run_lab(setting: Setting, kept: Kept, minutes: float = 10) -> dict[str, Any]:
    logs = kept.folder / "logs"
    lab.Lab(setting, kept, Console(file=StringIO()), logs, time.monotonic() + minutes * 60).run()
    return results(setting, kept)


@pytest.mark.long
def test_a_run_is_written_and_not_measured_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept")
    first = run_lab(TINY, kept)
    page = write(first, tmp_path / "results")

    data = read_record(page.with_suffix(".json.xz"))
    (block,) = data["blocks"]
    assert block["complete"]
    assert block["failures"] == {}
    assert [row["rounds"] for row in block["rows"]] == [2, 2]
    assert block["rows"][1]["exposed_ms"] is not None
    assert block["floors"]["bytes_per_rank"] > 0
    assert block["rounds"]["ddp_sparse"]["1"]["load"] > 0
    assert data["configuration"]["rates_mbit"] == [500.0]
    assert "Partial" not in page.read_text()

    assert run_lab(TINY, kept, minutes=0) == first  # no time to measure anything
    more = run_lab(replace(TINY, rounds=3), kept, minutes=0)
    assert more["blocks"][0]["rounds"] == first["blocks"][0]["rounds"]
    assert more["missing"] == [BERT.title]


def test_no_system_is_opened_that_the_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lab.block.available_bytes", lambda: RANKS * RANK_BYTES - 1)
    failed = []

    run = BlockRun(
        TINY,
        BERT,
        Kept(tmp_path),
        crews={},
        run_id="",
        describe=lambda _: None,
        advance=lambda: None,
        say=lambda _: None,
        fail=lambda system, reason, _: failed.append((system, reason)),
        unlimited=nullcontext,
    )
    run.measure([(0, "ddp_sparse")], until=float("inf"))

    ((system, reason),) = failed
    assert system == "ddp_sparse"
    assert "expected 0.6 GiB of memory for 2 more processes" in reason


def test_what_is_measured_depends_on_the_setting_but_not_on_how_much_of_it() -> None:
    assert fingerprint(replace(TINY, rounds=3, ranks=(2, 4), groups={})) == fingerprint(TINY)
    assert fingerprint(replace(TINY, optimizer="sgd")) != fingerprint(TINY)


@pytest.mark.long
def test_systems_of_an_environment_that_is_not_there_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SYSTEMS, "ddp", replace(SYSTEMS["ddp"], environment="nowhere"))
    setting = replace(TINY, groups={"pair": ("ddp", "ddp_sparse")}, rounds=1)

    (block,) = run_lab(setting, Kept(tmp_path))["blocks"]

    assert list(block["failures"]) == ["ddp"]
    assert "make bench-peers" in block["failures"]["ddp"]
    assert [row.system for row in block["rows"]] == ["ddp_sparse"]
    assert not block["complete"]


def test_blocks_come_by_rate_then_ranks_and_the_ablation_is_of_the_first() -> None:
    full = SETTINGS["full"]
    blocks = list(full.blocks())

    assert [block[:4] for block in blocks[:6]] == [(model, 8, 200.0, "replicas") for model in full.models] + [
        ("lm", 8, 200.0, "shards")
    ]
    assert list(dict.fromkeys((b.ranks, b.rate_mbit) for b in blocks)) == [
        (ranks, rate) for rate in (200.0, 2000.0) for ranks in (8, 4, 2)
    ]
    assert {b[:3] for b in blocks if b.group == "ablation"} == {(model, 8, 200.0) for model in MODELS}
    fewer = {b.group for b in blocks if b.ranks < 8}
    assert fewer == {"together"}
    assert set(full.systems(Block("lm", 4, 200.0, "together"))) == {*GROUPS["replicas"], *GROUPS["shards"]}
    measured = {system for each in (full, SETTINGS["strategies"]) for group in each.groups.values() for system in group}
    assert measured == set(SYSTEMS)


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a model of lm.*found nothing"):
        lab.chosen(options(models=("lm", "nothing")))
    with pytest.raises(ValueError, match=r"expected a group of replicas.*found copies"):
        lab.chosen(options(groups=("copies",)))


def test_a_part_of_a_setting_is_shown_with_all_that_is_kept_of_it() -> None:
    part = lab.chosen(options(models=("bert",), groups=("shards",), ranks=(4,), rates_mbit=(200.0,)))
    full = SETTINGS["full"]

    assert list(part.blocks()) == [Block("bert", 4, 200.0, "together")]
    assert set(part.systems(*part.blocks())) == set(GROUPS["shards"])
    assert list(lab.whole(part, full).blocks()) == list(full.blocks())
    own = lab.chosen(options(systems=("ddp", "embrace_2d"), ranks=(2,)))
    assert own.groups == {"chosen": ("ddp", "embrace_2d")}
    assert Block("lm", 2, 2000.0, "chosen") in list(lab.whole(own, full).blocks())


def test_the_ablation_is_measured_elsewhere_only_if_named() -> None:
    def measured(**changes: Any) -> set[tuple[int, str]]:
        setting = lab.chosen(options(**changes))
        return {(block.ranks, system) for block in setting.blocks() for system in setting.systems(block)}

    assert {ranks for ranks, system in measured() if system == "embrace_vertical"} == {8}
    assert {ranks for ranks, system in measured(groups=("ablation",)) if system == "embrace_vertical"} == {8, 4, 2}
