"""Graphs as text, compared, and as drawings."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch import nn

import embrace_fx
from embrace_fx.passes.overlap.order import OrderCompute
from embrace_fx.passes.pipeline import CompiledGraph, run_passes
from embrace_fx.viz import drawing
from embrace_fx.viz.drawing import fold_nodes
from embrace_fx.viz.graphs import Graphs
from embrace_fx.vocabulary.graph import PHASES
from embrace_fx.vocabulary.ops import LAUNCHES, SUBMISSIONS, op_name
from tests.support.golden import check_golden
from tests.support.hand_built_graphs import dense_graph, overlapped_graph, two_tables_graph
from tests.support.language_models import captured, passes_of
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def compiled() -> CompiledGraph:
    return run_passes(captured(), (*passes_of(), OrderCompute(("words.weight",))))


@pytest.fixture(scope="module")
def graphs(compiled: CompiledGraph) -> Graphs:
    return Graphs(compiled.graphs, compiled.phases)


def test_what_a_pass_has_changed_as_a_diff(graphs: Graphs) -> None:
    found = graphs.diff("narrow_exchange", "reduce_gradients")
    assert found.startswith("--- narrow_exchange\n+++ reduce_gradients\n")
    assert any(line.startswith("+") and "pack_bucket" in line for line in found.splitlines())
    assert not any(line.startswith("-") and "embedding" in line for line in found.splitlines()[2:])
    assert graphs.diff("captured", "captured") == ""
    with pytest.raises(KeyError):
        graphs.diff("captured", "nothing")


def test_passes_over_phases_are_compared_by_phases(graphs: Graphs) -> None:
    found = graphs.diff("submit_gradients_early", "order_compute")
    assert "submit_gradients" in found
    assert "+" in graphs.diff("shard_tables", "order_compute")


def test_a_folded_graph_has_each_launch_once_and_all_else_in_blocks(graphs: Graphs) -> None:
    parts = {phase: graphs[phase] for phase in PHASES}
    cells = fold_nodes(parts)
    nodes = [node for module in parts.values() for node in module.graph.nodes]
    launches = [node for node in nodes if op_name(node) in SUBMISSIONS | LAUNCHES]
    assert [cell.nodes[0] for cell in cells if cell.lane != "compute"] == launches
    folded = [node for cell in cells for node in cell.nodes]
    assert folded == [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
    assert all(before < k for k, cell in enumerate(cells) for before in cell.after)
    assert {cell.lane for cell in cells} == {"compute", "ids", "embedding", "dense", "delayed"}


def test_drawings(graphs: Graphs, tmp_path: Path) -> None:
    graphs.save(tmp_path / "new" / "graphs.svg")
    graphs.save(tmp_path / "sharded.svg", "shard_tables")
    for name in ("new/graphs.svg", "sharded.svg"):
        ET.parse(tmp_path / name)
    assert "words.weight prior" in (tmp_path / "new" / "graphs.svg").read_text()


LAYS_OUT = """#!/bin/sh
printf '<?xml version="1.0"?>\\n<svg width="9pt" options="%s">' "$*"
/bin/cat
printf '</svg>'
"""


def test_drawings_with_and_without_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    parts = {"joint": dense_graph().module, **overlapped_graph().phases, "tables": two_tables_graph().module}
    boxes = drawing.svg(parts, 'of "a" < b')
    told = [boxes]
    for script in (LAYS_OUT, "#!/bin/sh\nexit 1\n"):
        (tmp_path / "dot").write_text(script)
        (tmp_path / "dot").chmod(0o755)
        told.append(drawing.svg(parts, 'of "a" < b'))
    assert told.pop() == boxes  # Graphviz has failed
    check_golden("drawings", "\n\n".join(told))


def test_what_cannot_be_drawn_is_refused(graphs: Graphs, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.svg or \.dot"):
        graphs.save(tmp_path / "graphs.png")
    with pytest.raises(ValueError, match="there is no graph yet"):
        Graphs().save(tmp_path / "graphs.svg")
    with pytest.raises(KeyError):
        graphs.save(tmp_path / "graphs.svg", "nothing")


def test_what_each_pass_took_is_known(compiled: CompiledGraph) -> None:
    assert set(compiled.ms) == set(compiled.graphs) - {"captured", *PHASES}
    assert all(ms >= 0 for ms in compiled.ms.values())
    assert "shard_tables" in compiled.describe_times()


def test_what_runs_as_python() -> None:
    torch.manual_seed(0)
    model = embrace_fx.compile(nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 1)))
    with pytest.raises(ValueError, match="run a training step first"):
        Graphs().source("backward")
    model(torch.randint(10, (3, 2))).sum().backward()
    text = model.graphs.source("backward")
    compile(text, "backward", "exec")
    assert "aten.embedding_dense_backward" in text
    with pytest.raises(ValueError, match="'forward'"):
        model.graphs.source("sideways")


@pytest.mark.long
def test_a_line_that_launches_names_its_launch() -> None:
    assert all(run_ranks(2, _source_of_two_ranks))


def _source_of_two_ranks(*_: int) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 1))
    compiled = embrace_fx.compile(model, strategy="alltoall", schedule="2d")
    compiled(torch.randint(10, (3, 2))).sum().backward()
    lines = compiled.graphs.source("backward").splitlines()
    sent = [line for line in lines if "RowGradient.submit_gradients" in line]
    assert sent[0].endswith("# 0.weight prior")
    return True
