"""The weights' least squares: the minimum that the formula names, by autograd, with and without a pull to others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embrace_fx.admm.model import Pass, Weights, run_forward
from embrace_fx.admm.weights import FLOOR, KEPT, Consensus, Grams, moved_weights
from tests.admm.problems import Problem, random_problem


def forward_of(problem: Problem) -> Pass:
    return run_forward(problem.weights, problem.data.x_NBI, len(problem.data.y_MB))


@pytest.mark.parametrize("strength", [None, 0.3])
@pytest.mark.parametrize(("steps", "heads"), [(1, 1), (4, 1), (25, 25)])
def test_no_gradient_is_left(steps: int, heads: int, strength: float | None) -> None:
    """Of n p/2 [mean |r^ - D phi|^2 + tr D (A - G) D'] + B g/2 |K + D - target|^2."""
    problem, target = random_problem(steps, steps, heads), random_problem(9, 1, 1).weights
    forward, r, p = forward_of(problem), problem.multipliers, problem.penalties
    running = Grams(torch.eye(9, dtype=torch.float64), 2 * torch.eye(6, dtype=torch.float64))
    consensus = Consensus(target, strength) if strength is not None else None
    weights, grams = moved_weights(problem.weights, running, forward, r, p, consensus)

    def value(
        matrix: Tensor, old: Tensor, kept: Tensor, rows: Tensor, residual: Tensor, p: float, to: Tensor
    ) -> Tensor:
        phi, rr = rows.flatten(0, 1), residual.flatten(0, 1)
        gram = phi.t() @ phi / len(phi)
        mean = KEPT * kept + (1 - KEPT) * gram
        extra = torch.diag(problem.penalties.damping * (mean.diagonal() + FLOOR * mean.diagonal().mean()))
        D = matrix - old
        fit = (rr - phi @ D.t()).square().sum() / len(phi) + torch.trace(D @ (mean + extra - gram) @ D.t())
        pull = problem.data.sequences * strength / 2 * (matrix - to).square().sum() if strength is not None else 0.0
        return len(phi) * p / 2 * fit + pull

    for new, old, kept, rows, residual, penalty, to in (
        (weights.cell_HF, problem.weights.cell_HF, running.cell_FF, forward.cell_NBF, r.a_NBH, p.p1, target.cell_HF),
        (weights.head_CG, problem.weights.head_CG, running.head_GG, forward.head_MBG, r.o_MBC, p.p3, target.head_CG),
    ):
        assert kept is not None
        at = new.clone().requires_grad_()
        (slope,) = torch.autograd.grad(value(at, old, kept, rows, residual, penalty, to), at)
        assert float(slope.abs().max()) < 1e-9
        start = old.clone().requires_grad_()
        (steep,) = torch.autograd.grad(value(start, old, kept, rows, residual, penalty, to), start)
        assert float(steep.abs().max()) > 1e-3
    gram = forward.cell_NBF.flatten(0, 1).t() @ forward.cell_NBF.flatten(0, 1) / forward.cell_NBF.flatten(0, 1).shape[0]
    assert grams.cell_FF is not None
    torch.testing.assert_close(grams.cell_FF, KEPT * torch.eye(9, dtype=torch.float64) + (1 - KEPT) * gram)


def test_the_first_batch_is_its_own_running_mean() -> None:
    problem = random_problem(0, 3, 1)
    forward = forward_of(problem)
    _, grams = moved_weights(problem.weights, Grams(), forward, problem.multipliers, problem.penalties)
    phi = forward.head_MBG.flatten(0, 1)
    assert grams.head_GG is not None
    torch.testing.assert_close(grams.head_GG, phi.t() @ phi / len(phi))


def test_an_input_that_is_always_zero_keeps_its_weights() -> None:
    problem = random_problem(0, 3, 1)
    problem.data.x_NBI[..., 1] = 0
    weights, _ = moved_weights(problem.weights, Grams(), forward_of(problem), problem.multipliers, problem.penalties)
    assert torch.equal(weights.cell_HF[:, 1], problem.weights.cell_HF[:, 1])
    assert not torch.equal(weights.cell_HF[:, 0], problem.weights.cell_HF[:, 0])


def test_a_strong_pull_holds_weights_at_the_target() -> None:
    problem = random_problem(0, 3, 1)
    target = Weights(*(w + 1 for w in problem.weights.tensors()))
    weights, _ = moved_weights(
        problem.weights, Grams(), forward_of(problem), problem.multipliers, problem.penalties, Consensus(target, 1e9)
    )
    for found, wanted in zip(weights.tensors(), target.tensors(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
