"""Pictures of a schedule and a timeline: what is in each file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from embrace_fx import viz
from embrace_fx.viz import trace
from embrace_fx.viz.picture import Picture
from embrace_fx.vocabulary.picture_facts import PictureFacts, StepEstimate, TablePlace
from embrace_fx.vocabulary.schedule import Dependence, MemoryAt, Operation, Schedule, Span, StepGraph, Timeline
from tests.support import timelines
from tests.support.golden import check_golden
from tests.support.pictures import compute, saved

SVG = "{http://www.w3.org/2000/svg}"


def test_suffix_decides_and_an_unknown_one_is_an_error(tmp_path: Path, schedule: Schedule) -> None:
    with pytest.raises(ValueError, match=r"'picture\.png' has no suffix.*\.html"):
        viz.save(tmp_path / "picture.png", schedule=schedule)
    assert not list(tmp_path.iterdir())
    viz.save(tmp_path / "picture.SVG", schedule=schedule)
    assert (tmp_path / "picture.SVG").read_text().startswith("<svg")


@pytest.mark.parametrize("suffix", [".svg", ".json", ".dot"])
def test_golden(tmp_path: Path, suffix: str) -> None:
    """Two blocks and two tables on one rank, of a predicted step and of a measured step that holds memory."""
    small = timelines.schedule(blocks=timelines.BLOCKS[:2], chunks=1)
    held = tuple(MemoryAt(0, at_ms, nbytes << 20) for at_ms, nbytes in ((0.0, 0), (3.0, 5), (9.0, 2), (30.0, 4)))
    measured = replace(timelines.timeline(small, world_size=1), memory=held)
    text = saved(tmp_path, suffix, small, None if suffix == ".dot" else measured)
    check_golden(f"picture_{suffix[1:]}", text.replace("><", ">\n<").replace("}, {", "},\n{"))


FACTS = PictureFacts(
    7.5,
    tuple(StepEstimate(ranks, 9.0 + ranks, ranks / 4) for ranks in (2, 3, 64)),
    (
        TablePlace("softmax", (900, 64), "alltoall", ("columns 0 to 31", "columns 32 to 63"), 230_400, 0.6, 0.25),
        TablePlace("embedding", (9, 64), "allreduce", ("all of it",), 2304, 0.05, 0.125),
    ),
)


def test_golden_of_what_is_told(tmp_path: Path) -> None:
    """The figures as text, and the data of the page, of three ranks, three windows, held memory, and facts besides."""
    small = timelines.schedule("horizontal", timelines.BLOCKS[:3], chunks=1)
    measured = timelines.timeline(small, world_size=3, windows=3, slower=0.9)
    points = tuple(MemoryAt(rank, 7.0 * k, (rank + 1) * k << 20) for rank in range(3) for k in (1, 3, 2))
    drawn = viz.DrawnTimeline.from_timeline(replace(measured, memory=points), small, lambda: FACTS)
    drawn.save(tmp_path / "page.html")
    (data,) = re.findall(r'id="data"[^>]*>(.*?)</script>', (tmp_path / "page.html").read_text(encoding="utf-8"), re.S)
    found = json.loads(data, parse_float=lambda digits: float(f"{float(digits):.6g}"))
    told = json.dumps({key: of for key, of in found.items() if key not in ("dependences", "glossary")})
    check_golden("picture_page", f"{viz.DrawnSchedule.from_schedule(small)}\n{drawn}\n" + told.replace("}, ", "},\n"))


@pytest.mark.parametrize("suffix", [".html", ".json", ".svg", ".dot"])
def test_nothing_to_draw_is_an_error(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ValueError, match="There is nothing to draw"):
        viz.save(tmp_path / f"picture{suffix}")
    with pytest.raises(ValueError, match="The measured timeline has 0 spans"):
        viz.save(tmp_path / f"picture{suffix}", timeline=Timeline((), (), 2))


def test_drawn_data_is_the_same_data(tmp_path: Path, schedule: Schedule, timeline: Timeline) -> None:
    drawn, measured = viz.DrawnSchedule.from_schedule(schedule), viz.DrawnTimeline.from_timeline(timeline, schedule)
    assert isinstance(drawn, Schedule)
    assert isinstance(measured, Timeline)
    assert drawn.digest() == schedule.digest()
    assert drawn.diagnostics() == schedule.diagnostics()
    assert measured.diagnostics() == timeline.diagnostics()
    for suffix in viz.SUFFIXES:
        measured.save(tmp_path / f"picture{suffix}")
        assert (tmp_path / f"picture{suffix}").read_text() == saved(tmp_path, suffix, schedule, timeline)
        drawn.save(tmp_path / f"alone{suffix}")
        assert (tmp_path / f"alone{suffix}").read_text() == saved(tmp_path, suffix, schedule)


def test_still_pictures_show_the_last_two_windows(schedule: Schedule) -> None:
    panel = Picture(None, timelines.timeline(schedule, windows=5)).panels[0]
    assert panel.origin_ms == panel.starts_ms[3]
    shown = [s for s in panel.timeline.spans if s.window >= 3]
    assert panel.shown_ms == (
        min(s.start_ms for s in shown) - panel.origin_ms,
        max(s.end_ms for s in shown) - panel.origin_ms,
    )


def test_a_tick_at_the_edge_has_no_number_beyond_it(tmp_path: Path) -> None:
    text = saved(tmp_path, ".svg", timeline=Timeline((compute("forward 0", 0, 10),), (), 1))
    assert re.findall(r'class="tick">(\d+)<', text) == ["0", "2", "4", "6", "8"]


@pytest.mark.parametrize("drawn", ["schedule", "timeline"])
def test_held_memory_is_a_line_above_its_steps(
    tmp_path: Path, schedule: Schedule, timeline: Timeline, drawn: str
) -> None:
    points = tuple(MemoryAt(0, at_ms, held << 20) for at_ms, held in ((0.0, 0), (3.0, 5), (9.0, 2)))
    if drawn == "schedule":
        schedule = replace(schedule, predicted=replace(schedule.predicted, memory=points))
    measured = replace(timeline, memory=points) if drawn == "timeline" else None
    root = ET.fromstring(saved(tmp_path, ".svg", schedule, measured))
    assert [line.get("class") for line in root.iter(f"{SVG}polyline")] == ["memory"]
    (tmp_path / "trace.json").write_text(saved(tmp_path, ".json", schedule, measured))
    found, also = trace.read_trace(tmp_path / "trace.json")
    assert found is not None
    assert (also.memory if also is not None else found.predicted.memory) == points


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed on this machine")
def test_graphviz_reads_any_name(tmp_path: Path) -> None:
    names = ('backward "a\\b"', "backward <b>", "backward c -> d")
    steps = StepGraph(
        tuple(Operation(name, "backward", "compute", 1.0) for name in names),
        (Dependence(names[0], names[1]), Dependence(names[2], names[0], 1)),
        names,
    )
    predicted = Timeline(tuple(Span(o, 0, 0, k, k + 1) for k, o in enumerate(steps.operations)), (), 1)
    viz.save(tmp_path / "odd.dot", schedule=Schedule("none", (), steps, predicted))
    done = subprocess.run(
        ["dot", "-Tjson0", str(tmp_path / "odd.dot")], capture_output=True, text=True, check=True, timeout=60
    )
    read = json.loads(done.stdout)
    lines = [node["label"].partition("\\n")[0].replace("\\\\", "\\") for node in read["objects"]]
    assert lines == list(names)
    assert {(edge["tail"], edge["head"]) for edge in read["edges"]} == {(0, 1), (1, 2), (2, 0)}
