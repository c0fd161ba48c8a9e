"""The emulated device: its queue, its blocks, models that train on it as on one process, and the lab in slow motion."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.device.emulated import Emulated, EmulatedModel
from benchmarks.device.ops import forward
from benchmarks.device.profile import Profile, profile_of
from benchmarks.device.queue import DeviceQueue
from benchmarks.device.stages import run, stages
from benchmarks.lab import __main__ as lab
from benchmarks.lab.cell import Measured
from benchmarks.lab.kept import Kept, Opened
from benchmarks.lab.results import results
from benchmarks.lab.settings import SETTINGS, Setting
from benchmarks.models import MODELS
from benchmarks.models.base import TableModel
from benchmarks.network import Links, Reached
from benchmarks.peers import SYSTEMS
from benchmarks.peers.base import Task
from tests.support.lab import options
from tests.support.ranks import run_ranks

EVERY_MODEL = pytest.mark.parametrize("model", MODELS)
RANKS, STEPS, SLOW = 2, 3, 0.05

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Clock:
    """Time that passes when somebody sleeps, or says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_what_is_submitted_returns_at_once_and_takes_its_turn() -> None:
    clock = Clock()
    queue = DeviceQueue(clock, clock.sleep)

    first, second = queue.submit(5.0), queue.submit(3.0)

    assert clock.slept == []
    assert (first, second) == pytest.approx((100.005, 100.008))
    queue.wait(first)
    assert clock.now == pytest.approx(100.005)  # the second piece is still under way
    queue.wait(second)
    assert clock.now == pytest.approx(100.008)
    queue.wait(first)
    assert clock.now == pytest.approx(100.008)


def test_a_device_that_has_nothing_to_do_stands_still() -> None:
    clock = Clock()
    queue = DeviceQueue(clock, clock.sleep)
    queue.submit(5.0)
    clock.now += 1.0

    assert queue.submit(2.0) == pytest.approx(101.002)
    assert queue.busy_s == pytest.approx(0.007)


def made(model: str, size: str = "tiny") -> TableModel:
    torch.manual_seed(0)
    return MODELS[model][size].make()


@EVERY_MODEL
def test_stages_compute_the_loss_and_have_every_dense_parameter_once(model: str) -> None:
    plain, batch = made(model), MODELS[model]["tiny"].batch(0, 0, 0)
    embeddings = plain.embeddings()
    rows = {name: embeddings[table](ids) for name, (table, ids) in plain.lookups(*batch).items()}

    owned = [parameter for stage in stages(plain) for parameter in stage.parameters]

    assert run(plain, rows, *batch).item() == pytest.approx(plain.loss(rows, *batch).item(), rel=1e-6)
    dense = {id(parameter) for name, parameter in plain.named_parameters() if not name.startswith("tables.")}
    assert len(owned) == len(dense)
    assert {id(parameter) for parameter in owned} == dense


@EVERY_MODEL
@pytest.mark.parametrize("size", ["tiny", "lab"])
def test_every_model_has_a_recorded_profile(model: str, size: str) -> None:
    profile = profile_of(model, size)

    assert [block.name for block in profile.blocks] == [
        stage.name for stage in stages(made(model, "tiny" if size == "tiny" else "lab"))
    ]
    assert profile.blocks[-1].shape == ()
    assert 0 < profile.compute_ms < 1000
    assert all(block.forward_ms > 0 and block.data_gradient_ms >= 0 for block in profile.blocks)


def test_a_profile_of_other_stages_is_refused() -> None:
    times = profile_of("bert", "tiny").blocks

    with pytest.raises(ValueError, match=r"expected a profile of embed.*record it again"):
        EmulatedModel(made("bert"), times[1:], 1.0)
    with pytest.raises(ValueError, match="found none: record it"):
        profile_of("bert", "paper")


@EVERY_MODEL
def test_an_emulated_model_has_the_parameters_and_ordinary_gradients_of_all(model: str) -> None:
    workload = Emulated(model, "tiny", MODELS[model]["tiny"], SLOW)
    torch.manual_seed(0)
    emulated, plain = workload.make(), made(model)
    batch = workload.batch(0, 0, 0)

    sizes = [sorted(tuple(p.shape) for p in each.parameters()) for each in (emulated, plain)]
    assert sizes[0] == sizes[1]
    assert {name for name, _ in emulated.named_parameters() if name.startswith("tables.")} == {
        name for name, _ in plain.named_parameters() if name.startswith("tables.")
    }
    emulated(*batch).backward()
    for name, parameter in emulated.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.count_nonzero(), name


def test_a_block_occupies_the_device_for_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    monkeypatch.setattr("benchmarks.device.ops._occupy", taken.append)
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, requires_grad=True)

    out: Tensor = forward([x], [weight], [2, 5], [1.0, 2.0, 3.0])
    out.sum().backward()

    assert out.shape == (2, 5)
    assert taken == [1.0, 2.0, 3.0]  # the chain's gradient before the weights'


def task(model: str) -> Task:
    return Task(Emulated(model, "tiny", MODELS[model]["tiny"], SLOW), "adagrad", 0.05)


def train(rank: int, world_size: int, system: str, model: str) -> list[float]:
    what = task(model)
    losses = SYSTEMS[system].peer().prepare(what).steps(what.workload.batch(step, rank, 0) for step in range(STEPS))
    return [loss.item() for loss in losses]


def reference_losses(model: str) -> list[float]:
    """One process: all ranks' batches, gradients averaged by autograd's own sum."""
    what = task(model)
    trained: nn.Module = what.model()
    stepping = what.make_optimizer(trained.parameters())
    losses = []
    for step in range(STEPS):
        stepping.zero_grad()
        found = []
        for rank in range(RANKS):
            loss = trained(*what.workload.batch(step, rank, 0))
            loss.backward()
            found.append(loss.item())
        for parameter in trained.parameters():
            assert parameter.grad is not None
            parameter.grad /= RANKS
        stepping.step()
        losses.append(sum(found) / RANKS)
    return losses


LONG_TOO = [pytest.param(model, marks=() if model == "lm" else pytest.mark.long) for model in MODELS]


@pytest.mark.parametrize("model", LONG_TOO)
@pytest.mark.parametrize("system", ["ddp_sparse", "embrace_2d"])
def test_systems_train_an_emulated_model_as_one_process_does(system: str, model: str) -> None:
    by_rank = run_ranks(RANKS, train, system, model)

    assert [sum(each) / RANKS for each in zip(*by_rank, strict=True)] == pytest.approx(
        reference_losses(model), rel=1e-4
    )


def test_slow_motion_stretches_links_and_packets() -> None:
    usual, slow, slower = Links(8, 800.0), Links(8, 800.0, slow=16.0), Links(8, 800.0, slow=32.0)

    assert (usual.carried_mbit, slow.carried_mbit) == (800.0, 50.0)
    assert slow.packet_bytes == slower.packet_bytes < usual.packet_bytes / 8
    assert slow.window_bytes == pytest.approx(800e6 / 8 * 1e-3 / 7, abs=2)  # of 1 ms, for each of 7 others
    assert slow.packet_bytes == pytest.approx(slow.window_bytes / 2, abs=2)
    with pytest.raises(ValueError, match=r"slow to be 1 or more.*found 0.5"):
        Links(2, 160.0, slow=0.5)


def test_a_rate_makes_wire_over_compute_what_was_asked_for() -> None:
    setting = replace(SETTINGS["device"], size="tiny", models=("lm",))
    rates = [setting.rate_mbit("lm", number) for number in range(3)]

    assert rates[0] / rates[1] == pytest.approx(2.0, rel=0.01)
    assert rates[0] / rates[2] == pytest.approx(0.5, rel=0.01)


TINY = replace(
    SETTINGS["device-quick"],
    name="test",
    models=("bert",),
    groups={"main": ("alone_sparse", "ddp_sparse")},
    rounds=1,
    ranks=(RANKS,),
    slow=(2.0,),
    size="tiny",
)


def run_lab(setting: Setting, kept: Kept) -> dict[str, Any]:
    lab.Lab(setting, kept, Console(file=StringIO()), kept.folder / "logs").run()
    return results(setting, kept)


def test_the_lab_measures_in_slow_motion_and_says_what_was_perceived(tmp_path: Path) -> None:
    found = run_lab(TINY, Kept(tmp_path))

    (block,) = found["blocks"]
    assert re.fullmatch(r"bert, 2 ranks, emulated device, k = 2, perceived rate [\d.]+ Mb/s, main", block["title"])
    compute_ms = profile_of("bert", "tiny").compute_ms
    assert block["floors"]["compute_ms"] == compute_ms
    (alone, _) = block["rows"]
    assert alone.step_ms.median > compute_ms
    (measured,) = TINY.blocks()
    raw = Kept(tmp_path).rounds(measured, "alone_sparse")[0].step_ms
    assert raw == pytest.approx(2.0 * alone.step_ms.median)


def test_slow_motion_is_refused_where_ranks_compute_on_the_cores() -> None:
    with pytest.raises(ValueError, match="expected a setting of emulated devices"):
        lab.chosen(options(slow=(4.0,)))


def test_elsewhere_one_thing_is_another_and_what_a_target_names_is_measured_besides() -> None:
    setting = SETTINGS["device"]
    blocks = list(setting.blocks())

    first = [block for block in blocks if block.ranks == 8 and block.group == "main"]
    rates = [block for block in blocks if block.group == "few"]
    slower = {(extra.model, extra.ranks, extra.slow) for extra in setting.extra if extra.slow}
    scaled = [block for block in blocks if block.group == "scaling"]
    scaling = [block for block in scaled if (block.model, block.ranks, block.slow) not in slower]
    assert len(scaled) == len(scaling) + len(slower) > len(scaling)
    assert {block.model: block.slow for block in first} == {
        model: setting.slow[0] * (2 if model in setting.slower else 1) for model in setting.models
    }
    assert (len(rates), len(scaling)) == (len(setting.models) * 2, len(setting.models) * (3 + 1))  # other ranks, k
    for block in rates + scaling:
        (own,) = (each for each in first if each.model == block.model)
        places = zip((block.ranks, block.rate_mbit, block.slow), (own.ranks, own.rate_mbit, own.slow), strict=True)
        assert sum(here != there for here, there in places) == 1
    besides = {(block.model, block.ranks, block.rate_mbit, block.group) for block in blocks if block.ranks == 16}
    rate_mbit = setting.rate_mbit("lm", setting.ratios.index(2.0))
    assert {("lm", 16, rate_mbit, "replicas"), ("lm", 16, rate_mbit, "sharded")} <= besides
    assert len(set(blocks)) == len(blocks)


def test_targets_are_told_of_every_k_and_slow_motions_are_compared(tmp_path: Path) -> None:
    """Two ranks of 20 perceived ms, 25 alone at k = 2, 25.5 at k = 4, and 8 ranks that are slower."""
    setting = replace(TINY, groups={"main": ("embrace_none", "embrace_2d")}, elsewhere=("main",))
    setting = replace(setting, ranks=(2, 16), slow=(2.0, 4.0))
    kept = Kept(tmp_path)
    for block in setting.blocks():
        kept.network(block, Reached(block.links, True, "", (block.links.carried_mbit,)))
        for system, perceived_ms in (("embrace_none", 25.0), ("embrace_2d", 20.0 if block.ranks == 2 else 40.0)):
            kept.opened(block, system, Opened(1.0, (1.0,), "", perceived_ms * block.slow * 1.02))
            apart = 1.02 if block.slow == 4.0 else 1.0
            step_ms = perceived_ms * block.slow * apart
            rank = Measured(step_ms, (step_ms,), 100.0, 3.0, 1.0, 0.9, peak_bytes=300, start_bytes=200)
            kept.measured(block, system, 0, {"run": "one"}, (rank,) * block.ranks)

    found = results(setting, kept)

    told = {(target.model, target.what): target for target in found["targets"]}
    rate = f"{setting.rate_mbit('bert', 0):g}"
    agreement = told[f"bert, 2 ranks, {rate} Mb/s", "embrace_2d: perceived steps at k = 2 and 4 are apart by"]
    assert agreement.value is not None
    assert agreement.value.median == pytest.approx(0.02, rel=0.05)
    assert agreement.met
    where = "bert, 2 ranks, wire / compute 1, k = 2"
    ablation = told[where, "embrace_none / embrace_2d"].value
    assert ablation is not None
    assert ablation.median == pytest.approx(1.25)
    predicted = told[where, "prediction of embrace_2d is off by"]
    assert predicted.value is not None
    assert predicted.value.median == pytest.approx(0.02)
    assert predicted.met
    efficiency = told[f"bert, {rate} Mb/s", "efficiency of embrace_2d from 2 (k = 4) to 16 ranks (k = 4)"].value
    assert efficiency is not None
    assert efficiency.median == pytest.approx(0.5)
    row = found["blocks"][0]["rows"][0]
    assert row.cores_busy.median == pytest.approx(2 * 4.0 / (50.0 * (os.cpu_count() or 1)))


def test_profiles_add_up() -> None:
    blocks = profile_of("lm", "tiny").blocks

    assert Profile(blocks).compute_ms == pytest.approx(sum(block.total_ms for block in blocks))
