"""The line of held memory: predicted above a schedule, measured above a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import embrace_fx
from embrace_fx.viz import trace
from tests.support.budgets import IDS, make
from tests.support.checkpointed import Block, gradients
from tests.support.inside import pipeline_of


@pytest.mark.long
def test_the_line_stands_above_schedule_and_timeline(tmp_path: Path) -> None:
    compiled = embrace_fx.compile(make(Block))
    gradients(compiled.module, compiled, IDS)
    with compiled.record():
        for _ in range(3):
            gradients(compiled.module, compiled, IDS)

    found: Any = pipeline_of(compiled).step_memory()
    predicted = compiled.schedule.predicted
    assert max(point.held_bytes for point in predicted.memory) == found.peak_bytes
    assert [p.at_ms for p in predicted.memory] == sorted(p.at_ms for p in predicted.memory)
    assert max(p.at_ms for p in predicted.memory) <= max(s.end_ms for s in predicted.spans)
    assert compiled.timeline.memory
    for drawn in (compiled.schedule, compiled.timeline):
        drawn.save(tmp_path / "picture.svg")
        classes = [each.get("class") for each in ElementTree.parse(tmp_path / "picture.svg").iter()]
        assert "memory" in classes
        drawn.save(tmp_path / "trace.json")
        assert '"memory"' in (tmp_path / "trace.json").read_text()
        schedule, timeline = trace.read(tmp_path / "trace.json")
        assert schedule is not None
        assert schedule.predicted.memory == predicted.memory
        assert drawn is compiled.schedule or (timeline is not None and timeline.memory == compiled.timeline.memory)
