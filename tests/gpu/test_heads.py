"""Models with sharded output layers on GPUs train as under DistributedDataParallel on the CPU."""

from __future__ import annotations

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
from tests.gpu.needs import gpus
from tests.support.published_heads import HEADS, PublishedHead
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import whole_parameters

pytestmark = pytest.mark.timeout(600)

STEPS = 4


def _train(model: Any, head: PublishedHead, rank: int, ranks: int, device: str, *, outside: bool) -> list[Tensor]:
    """Returns losses."""
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
