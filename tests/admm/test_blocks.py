"""The updates one by one: each is a step down the gradient that autograd finds, by a constant that never overshoots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.admm import blocks
from embrace_fx.admm.bounds import TANH_CURVATURE, squared_norm_bound
from embrace_fx.admm.lagrangian import (
    Residuals,
    Variables,
    lagrangian,
    less_last,
    step_weights,
)
from embrace_fx.admm.model import Weights, write_weights
from tests.admm.problems import Problem, random_problem

BLOCKS = ("o_MBC", "c_C", "V_CH", "b_H", "W_HH", "U_HI", "s_NBH", "a_NBH")
Constant = Tensor | float


def with_block(problem: Problem, name: str, value: Tensor) -> Problem:
    """The same problem with another value of one block."""
    if hasattr(problem.weights, name):
        return replace(problem, weights=replace(problem.weights, **{name: value}))
    return replace(problem, variables=replace(problem.variables, **{name: value}))


def value_of(problem: Problem) -> float:
    return float(lagrangian(problem.weights, problem.variables, problem.data, problem.penalties))


def gradient(problem: Problem, name: str) -> Tensor:
    """By autograd, of the Lagrangian in one block."""
    block = problem.blocks()[name].clone().requires_grad_()
    changed = with_block(problem, name, block)
    total = lagrangian(changed.weights, changed.variables, changed.data, changed.penalties)
    (found,) = torch.autograd.grad(total, block)
    return found


def update(problem: Problem, name: str, step: int) -> tuple[Tensor, Tensor | float]:
    """A block's update, of a state or pre-activation at one step of time, and the constant that it should divide by."""
    weights, v, data, p = problem.weights, problem.variables, problem.data, problem.penalties
    N, M = data.steps, data.y_MB.shape[0]
    r = Residuals.of(weights, v, data)
    ra, rs = less_last(r.ra_NBH, v.l1_BH, p.p1), less_last(r.rs_NBH, v.l2_BH, p.p2)
    ro = less_last(r.ro_MBC, v.l3_BC, p.p3)
    w1, w2 = step_weights(p, p.p1, N, ra), step_weights(p, p.p2, N, ra)
    w3 = step_weights(p, p.p3, M, ra)
    if name == "o_MBC":
        return blocks.updated_outputs(v.o_MBC, ro, data.y_MB, w3), 0.5 + w3
    if name in {"c_C", "b_H"}:
        bias, residual, w = (weights.c_C, ro, w3) if name == "c_C" else (weights.b_H, ra, w1)
        return blocks.updated_bias(bias, residual, w, None), float(w.sum()) * data.sequences
    if name in {"V_CH", "W_HH", "U_HI"}:
        matrix, residual, w, read = {
            "V_CH": (weights.V_CH, ro, w3, v.s_NBH[-M:]),
            "W_HH": (weights.W_HH, ra[1:], w1[1:], v.s_NBH[:-1]),
            "U_HI": (weights.U_HI, ra, w1, data.x_NBI),
        }[name]
        quadratic = blocks.Quadratic.of(read, w)
        return blocks.updated_matrix(matrix, residual, w, read, quadratic, None), quadratic.curvature
    s, a, t = v.s_NBH.clone(), v.a_NBH.clone(), v.a_NBH.tanh()
    if name == "a_NBH":
        target = rs[step] + t[step]
        a[step] = blocks.updated_preactivation(a[step], ra[step], target, float(w1[step]), float(w2[step]))
        return a, w1[step] + w2[step] * (1 + TANH_CURVATURE * target.abs())
    readers: tuple[blocks.Reader, ...] = ()
    beta = 0.0
    for r_BK, matrix, w in (
        (ro[step - N + M] if step >= N - M else None, weights.V_CH, w3),
        (ra[step + 1] if step < N - 1 else None, weights.W_HH, w1),
    ):
        if r_BK is not None:
            weight, norm = float(w[step - N + M] if w is w3 else w[step + 1]), squared_norm_bound(matrix)
            readers += (blocks.Reader(r_BK, matrix, weight, norm),)
            beta += weight * norm
    s[step] = blocks.updated_state(s[step], s[step] - rs[step], float(w2[step]), readers)
    return s, float(w2[step]) + beta


def problems(*, scale: float = 1.0) -> st.SearchStrategy[Problem]:
    shapes = st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 4)])
    return st.builds(lambda seed, shape: random_problem(seed, *shape, scale=scale), st.integers(0, 10**6), shapes)


@pytest.mark.parametrize("name", BLOCKS)
@given(problem=problems(), where=st.floats(0, 0.99))
def test_an_update_is_a_step_down_the_gradient_and_never_increases_the_lagrangian(
    name: str, problem: Problem, where: float
) -> None:
    step = int(where * problem.data.steps)
    new, constant = update(problem, name, step)
    old, slope = problem.blocks()[name], gradient(problem, name)
    if name in {"a_NBH", "s_NBH"}:
        new, old, slope, changed = new[step], old[step], slope[step], new
    else:
        changed = new
    torch.testing.assert_close((old - new) * constant, slope, rtol=1e-7, atol=1e-7)
    before, after = value_of(problem), value_of(with_block(problem, name, changed))
    assert after <= before + 1e-9 * abs(before)
    if float(slope.abs().max()) > 1e-3:
        assert after < before


@pytest.mark.parametrize("name", BLOCKS[1:])
@given(problem=problems(), where=st.floats(0, 0.99))
def test_what_fits_stays(name: str, problem: Problem, where: float) -> None:
    """A forward pass fits every constraint, so without multipliers nothing but o has a reason to move."""
    fitting = replace(problem, variables=Variables.of_forward(problem.weights, problem.data))
    new, _ = update(fitting, name, int(where * problem.data.steps))
    torch.testing.assert_close(new, fitting.blocks()[name], rtol=0, atol=1e-13)


@given(seed=st.integers(0, 10**6))
def test_outputs_stay_where_the_multiplier_balances_the_loss(seed: int) -> None:
    problem = random_problem(seed, 3, 1)
    v = Variables.of_forward(problem.weights, problem.data)
    slope = v.o_MBC[-1].softmax(-1)
    slope[torch.arange(problem.data.sequences), problem.data.y_MB[-1]] -= 1
    balanced = replace(problem, variables=replace(v, l3_BC=slope))
    new, _ = update(balanced, "o_MBC", 0)
    torch.testing.assert_close(new, v.o_MBC, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["b_H", "c_C", "V_CH", "W_HH", "U_HI"])
@given(problem=problems(), strength=st.floats(1e-3, 1e3))
def test_a_pulled_weight_is_a_step_down_the_gradient_with_the_pull(
    name: str, problem: Problem, strength: float
) -> None:
    weights, v, data, p = problem.weights, problem.variables, problem.data, problem.penalties
    old = problem.blocks()[name]
    pull = blocks.Pull(torch.randn(old.shape, dtype=old.dtype, generator=torch.Generator().manual_seed(1)), strength)
    r = Residuals.of(weights, v, data)
    r_, w, read = {
        "b_H": (less_last(r.ra_NBH, v.l1_BH, p.p1), step_weights(p, p.p1, data.steps, r.ra_NBH), None),
        "c_C": (less_last(r.ro_MBC, v.l3_BC, p.p3), step_weights(p, p.p3, len(r.ro_MBC), r.ra_NBH), None),
        "V_CH": (
            less_last(r.ro_MBC, v.l3_BC, p.p3),
            step_weights(p, p.p3, len(r.ro_MBC), r.ra_NBH),
            v.s_NBH[-len(r.ro_MBC) :],
        ),
        "W_HH": (
            less_last(r.ra_NBH, v.l1_BH, p.p1)[1:],
            step_weights(p, p.p1, data.steps, r.ra_NBH)[1:],
            v.s_NBH[:-1],
        ),
        "U_HI": (less_last(r.ra_NBH, v.l1_BH, p.p1), step_weights(p, p.p1, data.steps, r.ra_NBH), data.x_NBI),
    }[name]
    if read is None:
        new = blocks.updated_bias(old, r_, w, pull)
        constant = float(w.sum()) * data.sequences + strength
    else:
        quadratic = blocks.Quadratic.of(read, w)
        new = blocks.updated_matrix(old, r_, w, read, quadratic, pull)
        constant = quadratic.curvature + strength
    slope = gradient(problem, name) + strength * (old - pull.target)
    torch.testing.assert_close((old - new) * constant, slope, rtol=1e-7, atol=1e-7 * max(1.0, strength))

    def pulled(value: Tensor) -> float:
        return value_of(with_block(problem, name, value)) + strength / 2 * float((value - pull.target).square().sum())

    assert pulled(new) <= pulled(old) + 1e-9 * abs(pulled(old))


def test_a_matrix_that_reads_nothing_stays() -> None:
    """W of sequences of one step, without a pull: there is no curvature to divide by."""
    empty, weights = torch.zeros(0, 4, 5), torch.zeros(0, 1, 1)
    matrix = torch.ones(5, 5)
    quadratic = blocks.Quadratic.of(empty, weights)
    assert quadratic.curvature == 0.0
    assert torch.equal(blocks.updated_matrix(matrix, empty, weights, empty, quadratic, None), matrix)


def test_residuals_are_what_the_model_leaves() -> None:
    """By the model's own modules: where a, s and o come from them, every residual is zero."""
    problem = random_problem(0, 4, 4, dtype=torch.float32)
    weights: Weights = problem.weights
    rnn = torch.nn.RNN(3, 5)
    head = torch.nn.Linear(5, 3)
    write_weights(weights, rnn, head)
    with torch.no_grad():
        s_NBH, _ = rnn(problem.data.x_NBI)
        fitting = replace(problem.variables, s_NBH=s_NBH, a_NBH=s_NBH.atanh(), o_MBC=head(s_NBH))
    r = Residuals.of(weights, fitting, problem.data)
    for residual in (r.ra_NBH[s_NBH.abs() < 0.99], r.rs_NBH, r.ro_MBC):
        assert float(residual.abs().max()) < 1e-4
