"""A whole iteration: equal to the formulas, downhill, and at rest where everything fits."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.admm.blocks import Quadratic
from embrace_fx.admm.bounds import squared_norm_bound
from embrace_fx.admm.lagrangian import Penalties, Variables, lagrangian
from embrace_fx.admm.model import Data, Weights
from embrace_fx.admm.sweep import Consensus, Sweeper
from tests.admm.problems import random_problem
from tests.admm.reference import Constants, Reference

SHAPES = [(1, 1), (2, 1), (2, 2), (5, 1), (5, 5)]
CONSTANTS = Constants(lambda read, w: Quadratic.of(read, w).curvature, squared_norm_bound)


def tensors(weights: Weights, variables: Variables) -> list[Tensor]:
    return [*weights.tensors(), *(getattr(variables, f.name) for f in fields(variables))]


def summed_squares(weights: Weights, target: Weights) -> float:
    return sum(float((w - t).square().sum()) for w, t in zip(weights.tensors(), target.tensors(), strict=True))


@pytest.mark.parametrize(("steps", "heads"), SHAPES)
@pytest.mark.parametrize("repeats", [1, 5])
def test_iterations_equal_the_formulas(steps: int, heads: int, repeats: int) -> None:
    problem = random_problem(repeats, steps, heads, scale=0.5)
    reference = Reference(problem.weights, problem.variables, problem.data, problem.penalties, CONSTANTS, repeats)
    sweeper = Sweeper(problem.data, problem.penalties, repeats)
    weights, variables = problem.weights, problem.variables
    for _ in range(3):
        weights, variables, _ = sweeper.iterate(weights, variables)
        reference.iterate()
    for found, wanted in zip(tensors(weights, variables), [*reference.weights(), *reference.variables()], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("steps", "heads"), [(1, 1), (25, 1), (25, 25)])
def test_float32_follows_float64(steps: int, heads: int) -> None:
    wide = random_problem(3, steps, heads, scale=0.3)
    wide = replace(wide, penalties=Penalties(0.5, 0.5, 0.5, 0.5))

    def narrow(each: Weights | Variables) -> dict[str, Tensor]:
        return {f.name: getattr(each, f.name).float() for f in fields(each)}

    data = Data(wide.data.x_NBI.float(), wide.data.y_MB)
    weights, variables = Weights(**narrow(wide.weights)), Variables(**narrow(wide.variables))
    wanted = wide.weights, wide.variables
    for _ in range(5):
        weights, variables, _ = Sweeper(data, wide.penalties).iterate(weights, variables)
        wide_weights, wide_variables, _ = Sweeper(wide.data, wide.penalties).iterate(*wanted)
        wanted = wide_weights, wide_variables
    for found, exact in zip(tensors(weights, variables), tensors(*wanted), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(SHAPES),
    scale=st.sampled_from([0.01, 1.0, 10.0]),
    strength=st.sampled_from([None, 0.1, 100.0]),
)
def test_an_iteration_never_increases_the_lagrangian(
    seed: int, shape: tuple[int, int], scale: float, strength: float | None
) -> None:
    """But for the multipliers, whose step goes up: they are held here."""
    problem = random_problem(seed, *shape, scale=scale)
    held = {name: getattr(problem.variables, name) for name in ("l1_BH", "l2_BH", "l3_BC")}
    target = random_problem(seed + 1, *shape).weights
    consensus = Consensus(target, strength) if strength is not None else None

    def value(weights: Weights, variables: Variables) -> float:
        total = float(lagrangian(weights, variables, problem.data, problem.penalties))
        return total + (strength / 2 * summed_squares(weights, target) if strength is not None else 0.0)

    before = value(problem.weights, problem.variables)
    weights, variables, _ = Sweeper(problem.data, problem.penalties).iterate(
        problem.weights, problem.variables, consensus
    )
    assert value(weights, replace(variables, **held)) <= before + 1e-9 * abs(before)


def test_at_rest_where_every_answer_is_right_and_certain() -> None:
    """A model that fits its data with a margin, its own forward pass as variables: nothing moves."""
    problem = random_problem(0, 4, 1)
    weights = replace(problem.weights, c_C=torch.tensor([200.0, 0.0, 0.0], dtype=torch.float64))
    data = Data(problem.data.x_NBI, torch.zeros_like(problem.data.y_MB))
    variables = Variables.of_forward(weights, data)
    wanted = [tensor.clone() for tensor in tensors(weights, variables)]
    found = Sweeper(data, problem.penalties).iterate(weights, variables)
    for new, old in zip(tensors(found[0], found[1]), wanted, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-11)
