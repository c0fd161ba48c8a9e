"""Faults that are planted at random are Python, are the same for one seed, and are found or not."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import mutation


def test_faults_of_a_seed_are_the_same_and_change_a_line_of_python() -> None:
    drawn = mutation.draw(80, seed=3)
    assert drawn == mutation.draw(80, seed=3)
    assert {fault.file.partition("/")[0] for fault in drawn} == set(mutation.PRODUCT)
    assert len({fault.kind for fault in drawn}) >= 8
    for fault in drawn:
        text = (mutation.ROOT / fault.file).read_text(encoding="utf-8")
        assert fault.before in text
        assert ast.dump(ast.parse(text.replace(fault.before, fault.after))) != ast.dump(ast.parse(text))
        told = fault.before.lstrip().startswith(('"""', "raise ", "assert "))
        assert not told or fault.kind == "early return"


@pytest.mark.long
def test_a_fault_is_tried_with_the_tests_that_call_its_function(tmp_path: Path) -> None:
    """On ranks too; with those first that call little else."""
    test = "tests/runtime/ranks/test_gathering.py"
    reach = mutation.Runner(tmp_path, [], [], {}).trace([test])
    lines = reach["runtime/ranks/communicator.py"]
    assert test in set().union(*lines.values())
    fault = mutation.Fault("runtime/ranks/communicator.py", min(lines) + 1, "sign", "", "")
    reach["passes/shard.py"][1] = {"tests/passes/test_shard.py"}
    first, *_, last = mutation.callers(fault, reach)
    assert test in first
    assert "tests/passes/test_shard.py" not in first
    assert last == [mutation.AT_LAST]


@pytest.mark.long
def test_a_fault_that_only_ranks_have_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, line = "from __future__ import annotations\n", '    return "backward" if lane == "compute" else lane\n'
    on_ranks = f"{head}import os\nos.register_at_fork(after_in_child=lambda: os._exit(3))\n"  # they are forks
    faults = [
        mutation.Fault("embrace_fx/session/session.py", 1, "", head, on_ranks),
        mutation.Fault("embrace_fx/viz/palette.py", 1, "comparison", line, line.replace("==", "!=")),
        mutation.Fault("embrace_fx/viz/palette.py", 1, "comparison", "no such line", ""),
    ]
    output = tmp_path / "found.json"
    output.write_text(json.dumps({"faults": [asdict(each) for each in faults], "unsound": []}))
    test = "tests/runtime/test_wire.py::test_repeated_ids_travel_once"
    monkeypatch.setattr("sys.argv", ["mutation", "--output", str(output), "--tests", test, "--", "-m", ""])

    mutation.main()

    found = [(each["outcome"], each["found_by"]) for each in json.loads(output.read_text())["faults"]]
    assert found == [("killed", test), ("survived", ""), ("not applicable", "")]
