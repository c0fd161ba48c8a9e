"""The joint move: equal to a dense solve, downhill, at rest where all fits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.admm import states
from embrace_fx.admm.lagrangian import lagrangian
from embrace_fx.admm.model import PerConstraint, run_forward
from embrace_fx.admm.states import Jacobian, minimize_jointly
from tests.admm import reference
from tests.admm.problems import Problem, random_problem

SHAPES = [(1, 1), (2, 1), (2, 2), (5, 1), (5, 5)]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets conjugate gradients run until they have converged."""
    monkeypatch.setattr(states, "TOLERANCE", 1e-13)


def moved(problem: Problem, residuals: PerConstraint | None = None) -> PerConstraint:
    """Returns the shifted residuals after a move from a forward pass, or from these residuals of a, s and o."""
    data, penalties = problem.data, problem.penalties
    shifted = -problem.multipliers if residuals is None else residuals + -problem.multipliers
    forward = run_forward(problem.weights, data.x_NBI, len(data.y_MB), residuals)
    slopes_from = forward.s_NBH if residuals is None else forward.s_NBH - residuals.s_NBH
    return minimize_jointly(Jacobian(problem.weights, slopes_from), forward.o_MBC, data.y_MB, shifted, penalties)


def zeros_like(each: PerConstraint) -> PerConstraint:
    return PerConstraint(*map(torch.zeros_like, each.tensors()))


def assert_close(found: PerConstraint, wanted: PerConstraint, tolerance: float = 1e-8) -> None:
    for value, other in zip(found.tensors(), wanted.tensors(), strict=True):
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("steps", "heads"), SHAPES)
def test_a_move_is_the_dense_minimum_of_all_constraints(steps: int, heads: int) -> None:
    problem = random_problem(steps, steps, heads)
    residuals = random_problem(steps + 1, steps, heads, scale=0.2).multipliers
    for start in (None, residuals):
        at = start if start is not None else zeros_like(problem.multipliers)
        shifted = at + -problem.multipliers
        wanted = reference.joint_move(problem.weights, problem.data, at, shifted, problem.penalties)
        assert_close(moved(problem, start), wanted)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from([*SHAPES, (25, 1), (25, 25)]))
def test_a_move_lowers_the_lagrangian_and_the_states_are_where_no_gradient_is_left(
    seed: int, shape: tuple[int, int]
) -> None:
    """By autograd, at fixed weights: the gradient in s is what rounding leaves, whatever the tolerance."""
    problem = random_problem(seed, *shape, scale=0.5)
    weights, data, penalties, multipliers = problem.weights, problem.data, problem.penalties, problem.multipliers

    def value(residuals: PerConstraint) -> Tensor:
        return reference.lagrangian(weights, data, residuals, multipliers, penalties)

    shifted = moved(problem)
    residuals = shifted + multipliers
    before, after = value(zeros_like(residuals)), value(residuals)
    assert after < before
    o_MBC = run_forward(weights, data.x_NBI, len(data.y_MB), residuals).o_MBC
    torch.testing.assert_close(lagrangian(o_MBC, data.y_MB, shifted, penalties), after)
    assert float(gradient_in_states(problem, residuals, shifted).abs().max()) < 1e-10


def gradient_in_states(problem: Problem, residuals: PerConstraint, shifted: PerConstraint) -> Tensor:
    """Of the quadratic penalties and the head's, in s_n with a and o held: what reads s_n balances what made it."""
    weights, data, penalties = problem.weights, problem.data, problem.penalties
    forward = run_forward(weights, data.x_NBI, len(data.y_MB), residuals)
    s_NBH = forward.s_NBH.clone().requires_grad_()
    U, W, b, V, c = reference.split(weights, data.x_NBI.shape[2])
    before_NBH = torch.cat([torch.zeros_like(s_NBH[:1]), s_NBH[:-1]])
    held_a = (forward.cell_NBF @ weights.cell_HF.t() + residuals.a_NBH).detach()
    ra = held_a - data.x_NBI @ U.t() - before_NBH @ W.t() - b
    rs = s_NBH - held_a.tanh()
    ro = forward.o_MBC - s_NBH[-len(data.y_MB) :] @ V.t() - c
    l1, l2, l3 = problem.multipliers.tensors()
    total = (
        penalties.p1 * (ra - l1).square().sum()
        + penalties.p2 * (rs - l2).square().sum()
        + penalties.p3 * (ro - l3).square().sum()
    ) / 2
    (found,) = torch.autograd.grad(total, s_NBH)
    return found
