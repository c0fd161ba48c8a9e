"""Training loops without an optimizer, and with steps of their own."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from embrace_fx.vocabulary.ops import own_columns
from tests.support.cases import long_but
from tests.support.models import MODELS, Workload
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import SEED

DTYPE = torch.float64
WORKLOADS = dict(MODELS)

# -- without an optimizer ----------------------------------------------------------------------------------------------


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.clone()
    return gradients


def _gradients_of_both(
    rank: int, world_size: int, workload: Workload
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Gradients after each step: of the compiled model, and of DDP, of which a sharded table's are the own columns. The
    second step's come on top of the first's."""
    own, ddps = workload.make(DTYPE, SEED), workload.make(DTYPE, SEED)
    compiled, parallel = embrace_fx.compile(own), DistributedDataParallel(ddps)
    found: list[dict[str, Tensor]] = []
    expected: list[dict[str, Tensor]] = []
    for step in range(2):
        for model, kept, of in ((compiled, found, own), (parallel, expected, ddps)):
            model(*workload.batches(step, rank, SEED)).backward()
            kept.append(_gradients(of))
    for of_step in expected:
        for name in compiled.plan.sharded:
            first, last = own_columns(of_step[name].shape[1], world_size, rank)
            of_step[name] = of_step[name][:, first:last]
    return [{name: gradient + torch.zeros(()) for name, gradient in each.items()} for each in found], expected


@pytest.mark.parametrize(
    "name", long_but(set(WORKLOADS) - {"transformer_encoder"}, {each: (each,) for each in WORKLOADS})
)
def test_without_an_optimizer_gradients_are_left_in_grad_as_ddp_leaves_them(name: str) -> None:
    for found, expected in run_ranks(2, _gradients_of_both, WORKLOADS[name]):
        for of_step, expected_of_step in zip(found, expected, strict=True):
            assert_same(of_step, expected_of_step, DTYPE)


# -- who steps, and who zeroes ---------------------------------------------------------------


def test_a_single_process_sums_up_what_it_accumulates() -> None:
    """There is no bucket that takes the sum along."""
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
