"""One process: its schedule and its timeline, from the first step on, and its sums of gradients."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import embrace_fx
from embrace_fx.capture import structured_trace
from embrace_fx.vocabulary.operation_id import BESIDE, BETWEEN, WHOLE_BACKWARD, WHOLE_FORWARD

SUFFIXES = (".html", ".json", ".svg", ".dot")


def trained(steps: int, *, recorded: bool) -> embrace_fx.CompiledModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 4))
    compiled = embrace_fx.compile(model)
    optimizer = torch.optim.AdamW(compiled.parameters(), 0.01)

    def train() -> None:
        for _ in range(steps):
            compiled(torch.randint(50, (6, 4))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if recorded:
        with compiled.record():
            train()
    else:
        train()
    return compiled


def test_the_schedule_of_one_process_is_its_compute_and_is_saved(tmp_path: Path) -> None:
    compiled = trained(3, recorded=False)
    metrics = compiled.metrics()
    assert sum(ms for name, ms in metrics.items() if name.endswith("_ms") and name != "step_ms") == pytest.approx(
        metrics["step_ms"]
    )
    assert compiled.schedule.steps.compute_order == tuple(map(str, (WHOLE_BACKWARD, BETWEEN, WHOLE_FORWARD)))
    assert compiled.schedule.launch_order == ()
    for suffix in SUFFIXES:
        compiled.schedule.save(tmp_path / f"schedule{suffix}")
        assert (tmp_path / f"schedule{suffix}").stat().st_size > 100


def test_steps_are_recorded_from_the_first_one_on(tmp_path: Path) -> None:
    compiled = trained(4, recorded=True)
    spans = compiled.timeline.spans
    assert {span.operation.id for span in spans} == {WHOLE_BACKWARD, *BESIDE, BETWEEN, WHOLE_FORWARD}
    assert {span.window for span in spans} == {0, 1, 2}
    assert all(span.end_ms > span.start_ms for span in spans)
    for suffix in SUFFIXES:
        compiled.timeline.save(tmp_path / f"timeline{suffix}")
        assert (tmp_path / f"timeline{suffix}").stat().st_size > 100


def test_graphs_reach_torchs_structured_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, str] = {}
    monkeypatch.setattr(structured_trace, "log_text", lambda name, text: told.update({name: str(text())}))
    trained(1, recorded=False)
    assert "embedding_dense_backward" in told["backward"]


def test_recording_no_step_is_told() -> None:
    compiled = embrace_fx.compile(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="No training step ran"), compiled.record():
        pass


def test_an_evaluated_model_has_no_schedule() -> None:
    compiled = embrace_fx.compile(nn.Linear(4, 4))
    with torch.no_grad():
        compiled(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="There is no plan"):
        _ = compiled.schedule


def test_a_single_process_sums_up_what_it_accumulates() -> None:
    """A single process has no bucket in which to accumulate gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(12, 1)).double()
    same = copy.deepcopy(plain)
    compiled = embrace_fx.compile(plain)
    batches = torch.randint(20, (3, 5, 3))

    for number, ids in enumerate(batches):
        with compiled.no_sync() if number < 2 else nullcontext():
            compiled(ids).square().mean().backward()
        same(ids).square().mean().backward()

    for found, expected in zip(plain.parameters(), same.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad, expected.grad)
