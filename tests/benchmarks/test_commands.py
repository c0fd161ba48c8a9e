"""Each command that a page names runs from end to end, at the smallest size that it has."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.micro.host_time.counters import ROOT, Calls, Thread, count_ops, per_step, room_of
from benchmarks.records import read_record

SIZES = '{"rows": 500, "width": 8, "blocks": 2, "batch": 4, "length": 5, "negatives": 8}'
COMMANDS = {
    "exchanges": "exchanges --ranks 2 --divisor 64 --rounds 1 --cases blocks;0.01 --kept {0}/kept --output {0}",
    "gpu": "gpu --dry-run --output {0}",
    "memory": "memory --model bert --output {0}",
    "eager route": "micro.eager_route --only graph --rounds 1 --output {0}/page.md",
    "first step": "micro.first_step --models transformer --rounds 1 --output {0}",
    "host time": "micro.host_time --models small --rounds 1 --systems ddp_sparse embrace_2d --output {0}",
    "overhead": "micro.overhead --rounds 1 --steps 1 --output {0}",
    "plans": "micro.plans --models small --runs 1 --output {0}/page.md",
    "rounding": "micro.rounding --models recommender --steps 50 --output {0}/page.md",
    "schedules": f"micro.schedules --ranks 2 --rounds 1 --sizes {SIZES.replace(' ', '')} --output {{0}}",
    "small messages": "micro.small_messages --ranks 2 --slow 1",
    "table rounds": "micro.table_rounds",
}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_measures_and_writes(name: str, tmp_path: Path) -> None:
    words = COMMANDS[name].replace("{0}", str(tmp_path)).split()
    command = [sys.executable, "-m", f"benchmarks.{words[0]}", *(word.replace(";", " ") for word in words[1:])]

    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    written = [path for path in tmp_path.rglob("*") if path.suffix in (".md", ".xz")]
    assert written or "--output" not in words
    assert not [path for path in written if path.suffix == ".md" and re.search(r"\bnan\b", path.read_text())]
    records = {path.name.rpartition("-20")[0]: read_record(path) for path in written if path.suffix == ".xz"}
    if name == "exchanges":
        assert all(1.0 <= row["bytes_to_bound"] < 1.35 for row in records["exchanges"]["rows"])
    if name == "host time":
        assert records["host-time"]["found"][0]["counts"]["embrace_2d"]["python_calls"]["runtime/launch"] > 10
    if name == "gpu":
        sections = records["gpu-dry-run"]["sections"]
        assert {each: section["outcome"] for each, section in sections.items()} == dict.fromkeys(gpu.SECTIONS, "done")
        rows = [row for section in sections.values() for row in section["rows"]]
        assert all(row.get("passed", True) and row["kind"] != "left out" for row in rows)


def test_what_a_step_calls_is_counted_by_room_by_op_and_by_thread() -> None:
    calls, gather = Calls(), partial(torch.zeros(50, 8).index_select, 0, torch.zeros(5, dtype=torch.int64))
    calls.install()
    calls.on = True
    room_of("x")
    calls.on = False
    calls.remove()
    found = count_ops(gather, 1)
    before = {1: ("a", Thread(10.0, 4))}
    after = {1: ("a", Thread(30.0, 8)), 2: ("a", Thread(20.0, 4)), 3: ("idle", Thread(0.0, 0))}

    assert calls.by_room["benchmarks/micro"] == 1
    assert (found.by_name["aten::index_select"], found.copied_bytes) == (1, 5 * 8 * 4)
    assert per_step(before, after, 4) == {"a": Thread(10.0, 2)}
    assert room_of(str(ROOT / ".venv" / "lib" / "site-packages" / "torch" / "optim" / "adam.py")) == "torch/optim"
