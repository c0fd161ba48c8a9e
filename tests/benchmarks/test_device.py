"""The emulated device: its queue, and its blocks."""

from __future__ import annotations

import pytest
import torch

from benchmarks.device.emulated import Emulated, EmulatedModel
from benchmarks.device.profile import profile_of
from benchmarks.device.queue import DeviceQueue
from benchmarks.device.stages import run, stages
from benchmarks.models import MODELS

SLOW = 0.05

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def test_what_is_submitted_returns_at_once_and_takes_its_turn() -> None:
    now = [100.0]
    queue = DeviceQueue(lambda: now[-1], lambda seconds: now.append(now[-1] + seconds))
    first, second = queue.submit(5.0), queue.submit(3.0)
    assert (first, second, *now) == pytest.approx((100.005, 100.008, 100.0))
    queue.wait(first)
    assert now[-1] == pytest.approx(100.005)  # the second piece is still under way
    now.append(101.0)
    assert queue.submit(2.0) == pytest.approx(101.002)  # it has stood still meanwhile
    assert queue.busy_s == pytest.approx(0.010)


@pytest.mark.parametrize("model", MODELS)
def test_blocks_are_the_models_own_and_occupy_the_device_for_a_recorded_time(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, batch = MODELS[model]["tiny"], MODELS[model]["tiny"].batch(0, 0, 0)
    torch.manual_seed(0)
    plain, emulated = tiny.make(), Emulated(model, "tiny", tiny, SLOW).make()
    rows = {name: plain.embeddings()[table](ids) for name, (table, ids) in plain.lookups(*batch).items()}

    assert run(plain, rows, *batch).item() == pytest.approx(plain.loss(rows, *batch).item(), rel=1e-6)
    dense = [parameter for name, parameter in plain.named_parameters() if not name.startswith("tables.")]
    owned = [parameter for stage in stages(plain) for parameter in stage.parameters]
    assert sorted(map(id, owned)) == sorted(map(id, dense))  # each once
    for size in ("tiny", "lab"):
        blocks = profile_of(model, size).blocks
        assert [block.name for block in blocks] == [stage.name for stage in stages(MODELS[model][size].make())]
        assert all(block.forward_ms > 0 and block.data_gradient_ms >= 0 for block in blocks)
    taken: list[float] = []
    monkeypatch.setattr("benchmarks.device.ops._occupy", taken.append)
    emulated(*batch).backward()
    assert sum(taken) == pytest.approx(SLOW * profile_of(model, "tiny").compute_ms, rel=0.01)
    for name, parameter in emulated.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.count_nonzero(), name
    with pytest.raises(ValueError, match=r"expected a profile of .*record it again"):
        EmulatedModel(plain, profile_of(model, "tiny").blocks[1:], 1.0)
