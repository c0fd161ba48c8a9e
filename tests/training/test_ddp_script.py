"""A script written for DistributedDataParallel, run with its wrapping line changed and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import embrace_fx
from tests.support.cases import long_but
from tests.support.models import TwoTableLMWorkload
from tests.support.ranks import run_ranks
from tests.support.training import SEED, whole, whole_state

STEPS = 6
WORKLOAD = TwoTableLMWorkload()


@dataclass(frozen=True)
class Script:
    """What scripts differ in.

    Attributes:
        made: when the optimizer is, and over whose parameters: "before", "after", or of the "plain" model after.
        apart: the tables have an optimizer of their own.
        added: the tables come to the optimizer by `add_param_group`.
        micro_batches: summed up under `no_sync`.
        scaler: a GradScaler, whose gradients are unscaled before they are clipped.
        clip: "norm", "value" or "": how gradients are clipped.
        resumed: the state of model and optimizer is saved and loaded in the middle.
        ahead: batches are read through `lookahead`, where there is one.
        autocast: the forward runs in bfloat16, parameters are float32. DDP rounds a gradient in other places.
    """

    made: str = "after"
    apart: bool = False
    added: bool = False
    micro_batches: int = 1
    scaler: bool = False
    clip: str = "norm"
    resumed: bool = False
    ahead: bool = False
    autocast: bool = False
    kind: Callable[..., Optimizer] = AdamW

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.autocast else torch.float64

    @property
    def tolerance(self) -> float:
        return 0.05 if self.autocast else 1e-9


def _momentum(groups: Any, lr: float, eps: float) -> Optimizer:
    return SGD(groups, lr=lr, momentum=0.9)


SCRIPTS = {
    "as in every tutorial": Script(),
    "optimizer before": Script(made="before"),
    "optimizer of the plain model": Script(made="plain"),
    "two optimizers": Script(apart=True),
    "two optimizers before": Script(apart=True, made="before"),
    "a param group added": Script(added=True),
    "accumulation": Script(micro_batches=2),
    "accumulation ahead": Script(micro_batches=2, ahead=True),
    "scaler and accumulation": Script(scaler=True, micro_batches=2),
    "clipped by value": Script(clip="value", made="before"),
    "not clipped, ahead": Script(clip="", ahead=True),
    "resumed": Script(resumed=True, ahead=True),
    "fused, resumed": Script(resumed=True, kind=partial(AdamW, fused=True)),
    "bfloat16": Script(autocast=True),
    "bfloat16, accumulation, ahead": Script(autocast=True, micro_batches=2, ahead=True),
    "momentum, scaler": Script(scaler=True, kind=_momentum),
}
DEFAULT = ("as in every tutorial",)


def run_script(rank: int, wrap: Callable[[nn.Module], Any], script: Script) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and norms it logs, and where parameters and optimizer state end."""
    plain = WORKLOAD.make(script.dtype, SEED)
    optimizers = _optimizers(plain, script) if script.made == "before" else []
    model = wrap(plain)
    optimizers = optimizers or _optimizers(plain if script.made == "plain" else model, script)
    schedulers = [CosineAnnealingLR(optimizer, STEPS) for optimizer in optimizers]
    scaler = torch.amp.GradScaler("cpu", enabled=script.scaler, init_scale=16.0)
    log: list[float] = []
    batches = [WORKLOAD.batches(k, rank, SEED) for k in range(STEPS * script.micro_batches)]
    read = model.lookahead(batches) if script.ahead and hasattr(model, "lookahead") else batches
    for k, batch in enumerate(read):
        steps = (k + 1) % script.micro_batches == 0
        with contextlib.nullcontext() if steps else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=script.autocast):
                loss = model(*batch) / script.micro_batches
            scaler.scale(loss).backward()
        log.append(loss.item())
        if not steps:
            continue
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if script.clip == "norm":
            log.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        elif script.clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.001)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            scheduler.step()
        if script.resumed and k == STEPS // 2:
            model.load_state_dict(whole(model.state_dict().items()))
            for optimizer in optimizers:
                state = optimizer.state_dict()
                of_each = {key: whole(each.items()) for key, each in state["state"].items()}
                optimizer.load_state_dict({**state, "state": of_each})
    ends = {name.removeprefix("module."): value for name, value in whole(model.state_dict().items()).items()}
    for optimizer in optimizers:
        ends |= whole_state(plain, optimizer)
    return log, ends


def _optimizers(model: nn.Module, script: Script) -> list[Optimizer]:
    options: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
    named = dict(model.named_parameters())
    tables = [p for name, p in named.items() if name.split(".")[-2] in ("embedding", "output")]
    rest = [p for p in named.values() if not any(p is table for table in tables)]
    if script.apart:
        return [script.kind(rest, **options), script.kind(tables, **options)]
    if script.added:
        optimizer = script.kind(rest, **options)
        optimizer.add_param_group({"params": tables, "lr": 0.02})
        return [optimizer]
    return [script.kind(named.values(), **options)]


def _compare(rank: int, world_size: int, script: Script) -> tuple[Any, Any, list[str]]:
    def wrap(model: nn.Module) -> embrace_fx.CompiledModel:
        compiled.append(embrace_fx.compile(model, strategy="alltoall"))
        return compiled[0]

    compiled: list[embrace_fx.CompiledModel] = []
    with pytest.MonkeyPatch.context() as patch:
        if script.autocast and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            # There torch's own LSTM fails in bfloat16, unless oneDNN is off: processors without AVX-512.
            patch.setattr(torch.backends.mkldnn, "enabled", False)
        found = run_script(rank, wrap, script)
        expected = run_script(rank, DistributedDataParallel, replace(script, ahead=False))
    return found, expected, list(compiled[0].plan.sharded)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("script", long_but(DEFAULT, {name: (script,) for name, script in SCRIPTS.items()}))
def test_a_script_for_ddp_runs_with_its_wrapping_line_changed(script: Script, world_size: int) -> None:
    for (log, ends), (expected_log, expected), sharded in run_ranks(world_size, _compare, script):
        assert len(sharded) == 2
        assert log == pytest.approx(expected_log, rel=script.tolerance)
        assert ends.keys() == expected.keys()
        for name, value in expected.items():
            far, allowed = (ends[name] - value).abs().max(), script.tolerance * value.abs().max()
            assert far <= allowed, f"{name}: differs by {far:.3g}, allowed {allowed:.3g}"
