"""Pictures say what was found, and nothing where nothing was: ratios, single steps, held memory, narrow screens."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn

import embrace_fx
from embrace_fx import viz
from embrace_fx.runtime.memory.resident import bytes_in_use
from embrace_fx.viz.graphs import Graphs
from embrace_fx.viz.picture import Picture
from embrace_fx.vocabulary.picture_facts import PictureFacts, StepEstimate
from embrace_fx.vocabulary.schedule import Operation, Schedule, Span, StepGraph, Timeline, Wait
from tests.support.golden import check_golden
from tests.support.pictures import compute
from tests.support.ranks import run_ranks


def with_wait(ms: float) -> Timeline:
    spans = (compute("backward a", 0, 4), compute("forward a", 6, 8))
    return Timeline(spans, (Wait("bucket 0", "dense", 0, 0, 4, 4 + ms),), 1)


def test_nothing_is_divided_by_a_prediction_of_nothing() -> None:
    """A predicted wait of zero is about 1e-14 after a sum of floats."""
    predicted = with_wait(1e-14)
    operations = tuple(span.operation for span in predicted.spans)
    steps = StepGraph(operations, (), tuple(o.name for o in operations))
    picture = Picture(Schedule("2d", (), steps, predicted), with_wait(1.5))
    assert picture.ratios()["exposed dense"] == ""
    assert picture.ratios()["step"] == "1.00"
    assert "000000" not in str(viz.DrawnTimeline.from_timeline(with_wait(1.5), picture.schedule))


def with_bucket(ms: float) -> Timeline:
    bucket = Operation("bucket 0", "all_reduce", "dense", ms, sent_bytes=100)
    return replace(with_wait(ms), spans=(*with_wait(ms).spans, Span(bucket, 0, 0, 4, 4 + ms)))


def test_links_that_are_slower_than_predicted_slow_ddp_too() -> None:
    predicted = with_bucket(0.5)
    operations = tuple(span.operation for span in predicted.spans)
    steps = StepGraph(operations, (), tuple(o.name for o in operations))
    picture = Picture(
        Schedule("2d", (), steps, predicted), with_bucket(100), PictureFacts(0.25, (StepEstimate(2, 10.0, 0.25),), ())
    )
    exposed = {part.label: part.value for part in picture.bars()[-1].parts}["exposed AllReduce"]
    assert exposed == pytest.approx(0.25 * 200)
    assert picture.ratios()["exposed dense"] == "200"


def test_memory_in_use_is_that_of_tensors_and_not_of_a_heap() -> None:
    """What is freed and taken again shows, small blocks and large ones; the resident set shows neither."""
    cpu = torch.device("cpu")
    for elements in (10_000, 10_000_000):
        torch.zeros(elements)  # grows the heap now, so that the measured allocation does not
        before = bytes_in_use(cpu)
        held = torch.zeros(elements)
        grown = bytes_in_use(cpu) - before
        assert held.nbytes <= grown < held.nbytes + 2**16
        del held


def records_one_step(rank: int, ranks: int, schedule: Any) -> str:
    """Returns what rank 0 computes in the step, in this order."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(4000, 16), nn.Flatten(), nn.Linear(64, 4))
    model = embrace_fx.compile(plain, strategy={"0.weight": "alltoall"}, schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    inputs = [torch.arange(24).view(6, 4) + 9 * step + rank for step in range(5)]
    batches = iter(model.lookahead(inputs) if schedule == "2d" else inputs)

    def step() -> None:
        model(next(batches)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with model.record():
        step()
    if schedule == "auto":  # otherwise collectives of a step may end in the next one
        assert model.metrics()["sent_bytes"] == pytest.approx(model.plan.sent_bytes_per_step, rel=0.05)
    found = Picture(None, model.timeline).panels[0]
    assert {span.rank for span in model.timeline.spans} == set(range(ranks))
    kinds = {span.operation.kind for span in model.timeline.spans}
    assert {"backward", "forward"} <= kinds
    assert ranks == 1 or "lookups" in kinds, "what the forward fetches, too"
    first = [phase.label for phase in found.phases if phase.rank == 0]
    assert first[:2] == ["forward t", "backward t"]
    step_ms = found.diagnostics.step_ms
    assert step_ms == pytest.approx(
        max(s.end_ms for s in model.timeline.spans if s.rank == 0) - found.origin_ms, rel=0.5
    )
    assert "<svg" in model.timeline._repr_html_()
    spans = sorted((span for span in model.timeline.spans if span.rank == 0), key=lambda span: span.start_ms)
    return "\n".join(name for name, _ in groupby(s.operation.name for s in spans if s.operation.is_compute))


@pytest.mark.parametrize(("ranks", "schedule"), [(1, "auto"), (2, "auto"), (2, "2d")])
def test_a_single_step_is_recorded_from_its_forward_on(ranks: int, schedule: str) -> None:
    first, *_ = run_ranks(ranks, records_one_step, schedule)
    if schedule == "2d":
        check_golden("viz_recorded_step", first)


def small_graphs() -> Graphs:
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    for node in module.graph.nodes:
        node.meta["val"] = torch.zeros(3)
    return Graphs({"captured": module})


@pytest.mark.parametrize("laid_out", [True, False])
def test_graphs_are_laid_out_or_listed_with_all_their_words(laid_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphviz draws arrow heads; where it is not there, a table names what each block needs, and cuts no name."""
    if laid_out and shutil.which("dot") is None:
        pytest.skip("Graphviz is not installed on this machine")
    if not laid_out:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    drawn = small_graphs()._repr_html_()
    root = ET.fromstring(drawn)
    assert "max-width:100%" in str(root.get("style"))
    assert "prefers-color-scheme:dark" in drawn
    (label,) = [each.text or "" for each in root.iter() if each.tag.endswith("text") and "ops" in (each.text or "")]
    assert label == "captured: 2 ops (_0, _1)"
    assert "…" not in drawn
