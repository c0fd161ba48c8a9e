"""The GPU's benchmark without a GPU: its whole control flow, the emulated fabric, sections that do not end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import bytes_moved
from benchmarks.gpu.device import CpuStandIn
from benchmarks.gpu.emulated import emulated
from benchmarks.gpu.report import page
from benchmarks.records import read_record
from embrace_fx.cost.links import launch_ms
from embrace_fx.runtime.ranks.gathering import all_gather_single


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_dry_run_executes_every_section(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--output", str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)

    (found,) = tmp_path.glob("gpu-dry-run-*.json.xz")
    results = read_record(found)
    stem = found.with_suffix("").with_suffix("")
    page = stem.with_suffix(".md").read_text()
    outcomes = {name: section["outcome"] for name, section in results["sections"].items()}
    assert outcomes == dict.fromkeys(benchmark.SECTIONS, "done"), page
    assert ended.returncode == 0
    rows = {name: section["rows"] for name, section in results["sections"].items()}
    assert all(row["passed"] for row in [*rows["kernels"], *rows["parity"], *rows["sharing"]] if "passed" in row)
    assert {row["system"] for row in rows["fabric"] if row["kind"] == "step"} == {
        "ddp", "ddp sparse", "embrace none", "embrace horizontal", "embrace vertical", "embrace 2d",
    }  # fmt: skip
    assert all(row["emulated"] for row in rows["fabric"] if "ms" in row)
    assert all(row["kind"] != "left out" for section in rows.values() for row in section)
    assert {path.name for path in stem.iterdir()} == {"trace.json.gz", "timeline.html"}
    assert "Emulated" in page
    assert "EMULATED" in stem.with_suffix(".svg").read_text()


def test_a_section_that_does_not_end_is_cut_off_and_reported(tmp_path: Path) -> None:
    found = benchmark._run_apart("steps", tmp_path, 0.3, dry_run=True)

    assert found["outcome"] == "cut off after 0 s"
    assert found["rows"] == []
    results = {"date": "today", "dry_run": True, "command": "", "seconds": 1.0, "sections": {"steps": found}}
    assert "## steps: cut off" in page(results, None)


def test_the_other_ranks_of_an_emulated_fabric_are_as_this_one() -> None:
    own = torch.arange(128.0)
    with emulated(CpuStandIn(), 4, 100) as fabric:
        reduced, gathered, received = own.clone(), own.new_empty(512), own.new_empty(128)
        dist.all_reduce(reduced)
        all_gather_single(gathered, own)
        work = dist.all_to_all_single(received, own, async_op=True)
        assert work is not None
        work.wait()
        rows = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), own.view(2, 64), (5, 64), check_invariants=False)
        dist.all_reduce(rows)
        objects: list[object] = [None] * 4
        dist.all_gather_object(objects, "same")
        before = fabric.busy_ms["all_reduce"]
        dist.all_reduce(own.clone(), group=dist.new_group([0, 1, 2, 3]))

        assert before == launch_ms(fabric.cluster(), "all_reduce", 512, 4)
        assert fabric.busy_ms["all_reduce"] == 2 * before  # one link, whatever the group
    assert torch.equal(reduced, 4 * own)
    assert torch.equal(gathered, own.repeat(4))
    assert torch.equal(received, own[:32].repeat(4))
    assert torch.equal(rows.to_dense()[[1, 3]], 4 * own.view(2, 64))
    assert objects == ["same"] * 4


def test_bytes_moved() -> None:
    """The floors, by hand, for 10 rows of 4 float32 each."""
    assert bytes_moved.move_columns(10, 4, 4) == 10 * (16 + 16)
    assert bytes_moved.coalesce(10, 7, 4, 4) == 10 * (8 + 16) + 7 * (8 + 16)
    assert bytes_moved.update(10, 4, 4, states=2) == 10 * (8 + 16 + 2 * 16 + 2 * 2 * 16)
