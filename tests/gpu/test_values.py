"""Values on devices, beyond `test_training.py`: other models, optimizers and precisions, two and four ranks."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import embrace_fx
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.gpu.needs import STEPS, gpus, trains_on_gpu
from tests.support.models import MODELS, Workload
from tests.support.question_answering import QuestionAnsweringWorkload
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import SEED, expected_parameters, make_optimizers

pytestmark = pytest.mark.timeout(600)

WORKLOADS: dict[str, Workload] = {**dict(MODELS), "bert": QuestionAnsweringWorkload()}

CASES: list[tuple[str, str, ScheduleName]] = [
    ("tied_lm", "sgd", "none"),
    ("tied_lm", "adamw", "2d"),
    ("bert", "sgd", "horizontal"),
    ("bert", "adamw", "vertical"),
    ("bag_recommender", "sgd", "2d"),
    ("bag_recommender", "adamw", "horizontal"),
    ("two_table_lm", "sgd", "vertical"),
    ("two_table_lm", "adamw", "2d"),
    ("transformer_encoder", "momentum", "none"),
]


@gpus(2)
@pytest.mark.parametrize(("model", "optimizer", "schedule"), CASES)
def test_two_gpus(model: str, optimizer: str, schedule: ScheduleName) -> None:
    workload = WORKLOADS[model]
    expected = expected_parameters(2, workload, torch.float64, optimizer, "exact", STEPS)
    arguments = (workload, schedule, "nccl", 2, None, optimizer)
    for found in run_ranks(2, trains_on_gpu, *arguments, timeout_s=400.0):
        assert_same(found, expected, torch.float64)


PRECISIONS = ("float32", "bfloat16 autocast", "float16 autocast, scaled")


def trains_narrowly(rank: int, world_size: int, precision: str, compiles: bool) -> dict[str, Tensor]:
    """Parameters after a training on one GPU, the host's copies; as the plain model trains, or the compiled one."""
    device, workload = torch.device("cuda", 0), WORKLOADS["transformer_encoder"]
    model = workload.make(torch.float32, seed=SEED).to(device)
    (optimizer,) = make_optimizers("sgd", model)
    called = embrace_fx.compile(model, optimizer=optimizer) if compiles else model
    scaler = torch.amp.GradScaler("cuda", enabled="scaled" in precision)
    autocast = precision.partition(" ")[0] if "autocast" in precision else ""
    for step in range(STEPS):
        batch = [each.to(device) for each in workload.batches(step, 0, SEED)]
        with torch.autocast("cuda", getattr(torch, autocast)) if autocast else nullcontext():
            loss = called(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {name: value.detach().cpu() for name, value in model.named_parameters()}


@gpus(1)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_has_the_values_of_the_plain_model(precision: str) -> None:
    (expected,) = run_ranks(1, trains_narrowly, precision, False, timeout_s=400.0)
    (found,) = run_ranks(1, trains_narrowly, precision, True, timeout_s=400.0)
    bound = 1e-5 if precision == "float32" else 2e-3
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=bound, atol=bound), name
