"""Models with sharded output layers on GPUs train as under DistributedDataParallel on the CPU."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import embrace_fx
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.gpu.needs import gpus, set_sync_debug_mode
from tests.support.heads import HeadModel, HeadWorkload, Predicts
from tests.support.published_heads import HEADS, PublishedHead
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import whole_parameters

pytestmark = pytest.mark.timeout(600)

STEPS = 4
STEADY = 13
"""From here on no step is profiled."""


def _train(model: Any, head: PublishedHead, rank: int, ranks: int, device: str, *, outside: bool) -> list[Tensor]:
    """Returns the losses of training."""
    optimizer, losses = AdamW(model.parameters(), 0.01, eps=1e-3), []
    for step in range(STEPS):
        batch = {name: value.to(device) for name, value in head.batch(step, rank, ranks).items()}
        labels = batch["labels"]
        found = model(**batch) if not outside else model(input_ids=batch["input_ids"])
        if outside:
            flat = found.logits.view(-1, found.logits.size(-1))
            loss = F.cross_entropy(flat, labels.view(-1), reduction="sum") / 5
        else:
            loss = found.loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [each.cpu() for each in losses]


def _same(
    rank: int, ranks: int, name: str, schedule: ScheduleName, backend: str, gpus_used: int, outside: bool
) -> None:
    device = torch.device("cuda", rank % gpus_used)
    torch.cuda.set_device(device)
    head, group = HEADS[name], dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)
    plain, module = head.make(), head.make().to(device)
    compiled = embrace_fx.compile(module, process_group=group, strategy={head.table: "vocabulary"}, schedule=schedule)
    expected = _train(DistributedDataParallel(plain), head, rank, ranks, "cpu", outside=outside)
    found = _train(compiled, head, rank, ranks, str(device), outside=outside)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-9, atol=1e-9)
    parameters = {key: value.cpu() for key, value in whole_parameters(compiled).items()}
    assert_same(parameters, {key: value.detach() for key, value in plain.named_parameters()}, torch.float64)


@gpus(1)
def test_ranks_that_share_a_gpu_over_gloo() -> None:
    run_ranks(2, _same, "gpt2", "none", "gloo", 1, False, timeout_s=500.0)


@gpus(2)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_brief_over_nccl(name: str, outside: bool) -> None:
    run_ranks(2, _same, name, "2d", "nccl", 2, outside, timeout_s=500.0)


@gpus(2)
@pytest.mark.parametrize("name", [name for name in HEADS if name not in ("gpt2", "bert")])
def test_other_models_over_nccl(name: str) -> None:
    run_ranks(2, _same, name, "none", "nccl", 2, False, timeout_s=500.0)


@gpus(4)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_four_gpus(name: str) -> None:
    run_ranks(4, _same, name, "2d", "nccl", 4, False, timeout_s=500.0)


def _waits(rank: int, ranks: int, outside: bool) -> list[str]:
    """Returns where an output layer makes the host wait in a steady step, according to PyTorch's sync debug mode."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    workload = HeadWorkload(kind=Predicts if outside else HeadModel)
    model = workload.make(torch.float64, seed=0).to(device)
    optimizer, group = AdamW(model.parameters(), 0.01), dist.new_group(backend="nccl")
    compiled = embrace_fx.compile(model, process_group=group, strategy={workload.table: "vocabulary"}, schedule="2d")
    words, labels = (each.to(device) for each in workload.batches(0, rank, 0))
    found: list[str] = []

    def look(*args: Any) -> None:
        frames = [Path(frame.filename).stem for frame in traceback.extract_stack()]
        found.extend(frame for frame in frames if frame in ("head", "head_exchange"))

    for step in range(STEADY + 1):
        if step == STEADY:
            warnings.simplefilter("always")
            warnings.showwarning = look  # type: ignore[assignment]
            set_sync_debug_mode("warn")
        loss = compiled(words, labels)
        if outside:
            loss = F.cross_entropy(loss.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == STEADY:
            set_sync_debug_mode("default")
    return found


@gpus(2)
@pytest.mark.parametrize("outside", [False, True])
def test_brief_an_output_layer_waits_once_for_its_positions(outside: bool) -> None:
    assert run_ranks(2, _waits, outside, timeout_s=500.0) == [["head"]] * 2


def _peaks(rank: int, ranks: int) -> dict[str, int]:
    """Returns the peak bytes that a step adds: on one rank alone, sharded, and sharded within a budget."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group, found = dist.new_group(backend="nccl"), {}
    workload = HeadWorkload(num_words=20_001, width=8, reduction="mean")
    words = torch.randint(20_001, (2, 128), generator=torch.Generator().manual_seed(rank)).to(device)
    for name, budget in {"alone": None, "sharded": None, "budget": 0.5}.items():
        model: Any = workload.make(torch.float32, seed=0).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if name != "alone":
            sharded = {workload.table: "vocabulary"}
            model = embrace_fx.compile(model, process_group=group, strategy=sharded, memory_budget=budget)
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            model(words, words).backward()
            torch.cuda.synchronize()
            found[name] = torch.cuda.max_memory_allocated() - before
            optimizer.step()
            optimizer.zero_grad()
        if name != "alone":
            model.close()
    return found


@gpus(2)
def test_brief_logits_hold_no_more_than_one_rank_alone_has_of_them() -> None:
    logits = 256 * 20_001 * 4
    for found in run_ranks(2, _peaks, timeout_s=500.0):
        assert found["alone"] > 2 * logits  # logits, log-softmax and gradient are in memory at once
        assert found["sharded"] < found["alone"]
        assert found["budget"] < logits  # a chunk is an eighth of the logits
