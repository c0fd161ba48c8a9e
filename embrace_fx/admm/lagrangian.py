"""The augmented Lagrangian of the unfolded RNN: variables, penalties, residuals, and its value.

P-ADMMiRNN (arXiv 2006.05622) splits training into small problems by making the pre-activations a, the states s and the
outputs o variables of their own. What the model defines become constraints, with residuals

    ra_n = a_n - U x_n - W s_{n-1} - b     rs_n = s_n - tanh(a_n)     ro_m = o_m - V s_m - c

    L = loss(o, y) + sum_n w_n/2 |r_n|^2 - <l, r at the last step>      over the three kinds of r

Multipliers l exist at the last step only, where the weight w is p1, p2 and p3; the steps before it have a penalty mu.
In each block, L is the paper's function but for the constant -|l|^2 / 2p. Losses are summed over sequences, so that a
penalty means the same whatever their number. `model` has the legend of shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from embrace_fx.admm.model import Data, Weights, run_forward


@dataclass(frozen=True)
class Penalties:
    """How dearly a residual is paid for, per sequence.

    Attributes:
        mu: of all residuals before the last step.
        p1, p2, p3: of ra, rs and ro at the last step.
        dual_step: share of p by which the multipliers move; the paper's language model has a tenth.
    """

    mu: float = 3.0
    p1: float = 1.0
    p2: float = 1.0
    p3: float = 1.0
    dual_step: float = 1.0

    def __post_init__(self) -> None:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        wrong = {name: value for name, value in found.items() if not 0 < value < float("inf")}
        if wrong:
            raise ValueError(f"expected positive, finite penalties and steps, in admm.Penalties(), found {wrong}.")


@dataclass(frozen=True)
class Variables:
    """What a rank keeps of its own sequences. The tensors are updated in place.

    Attributes:
        l1_BH, l2_BH, l3_BC: multipliers of ra, rs and ro at the last step.
    """

    a_NBH: Tensor
    s_NBH: Tensor
    o_MBC: Tensor
    l1_BH: Tensor
    l2_BH: Tensor
    l3_BC: Tensor

    @classmethod
    def of_forward(cls, weights: Weights, data: Data) -> Variables:
        """Those of a forward pass: residuals are zero, and so are multipliers."""
        a_NBH, s_NBH, o_MBC = run_forward(weights, data.x_NBI, data.y_MB.shape[0])
        zeros = torch.zeros_like
        return cls(a_NBH, s_NBH, o_MBC, zeros(a_NBH[-1]), zeros(s_NBH[-1]), zeros(o_MBC[-1]))


@dataclass(frozen=True)
class Residuals:
    """Left side less right side of the constraints."""

    ra_NBH: Tensor
    rs_NBH: Tensor
    ro_MBC: Tensor

    @classmethod
    def of(cls, weights: Weights, variables: Variables, data: Data) -> Residuals:
        return cls(
            residual_a(weights, variables.a_NBH, variables.s_NBH, data.x_NBI),
            variables.s_NBH - variables.a_NBH.tanh(),
            residual_o(weights, variables.o_MBC, variables.s_NBH),
        )


def residual_a(weights: Weights, a_NBH: Tensor, s_NBH: Tensor, x_NBI: Tensor) -> Tensor:
    """ra, (N, B, H). The state before the first step is zero."""
    r_NBH = a_NBH - x_NBI @ weights.U_HI.t() - weights.b_H
    r_NBH[1:] -= s_NBH[:-1] @ weights.W_HH.t()
    return r_NBH


def residual_o(weights: Weights, o_MBC: Tensor, s_NBH: Tensor) -> Tensor:
    """ro, (M, B, C)."""
    return o_MBC - s_NBH[-o_MBC.shape[0] :] @ weights.V_CH.t() - weights.c_C


def less_last(r: Tensor, multiplier: Tensor, penalty: float) -> Tensor:
    """r^ of the formulas: r less l / p at the last step. A new tensor."""
    shifted = r.clone()
    shifted[-1] -= multiplier / penalty
    return shifted


def step_weights(penalties: Penalties, last: float, steps: int, like: Tensor) -> Tensor:
    """w_n by step: mu, and `last` at the last one; (steps, 1, 1), to be multiplied with a residual."""
    w = like.new_full((steps, 1, 1), penalties.mu)
    w[-1] = last
    return w


def lagrangian(weights: Weights, variables: Variables, data: Data, penalties: Penalties) -> Tensor:
    """L, a scalar, summed over sequences. Differentiable in every block."""
    return lagrangian_with(Residuals.of(weights, variables, data), variables, data, penalties)


def lagrangian_with(r: Residuals, variables: Variables, data: Data, penalties: Penalties) -> Tensor:
    """L, where the residuals are known."""
    total = summed_loss(variables.o_MBC, data.y_MB)
    for residual, multiplier, last in (
        (r.ra_NBH, variables.l1_BH, penalties.p1),
        (r.rs_NBH, variables.l2_BH, penalties.p2),
        (r.ro_MBC, variables.l3_BC, penalties.p3),
    ):
        w = step_weights(penalties, last, residual.shape[0], residual)
        total = total + (w / 2 * residual.square()).sum() - (multiplier * residual[-1]).sum()
    return total


def summed_loss(o_MBC: Tensor, y_MB: Tensor) -> Tensor:
    """Cross entropy, summed over sequences and the steps that the head reads."""
    return cross_entropy(o_MBC.flatten(0, 1), y_MB.flatten(), reduction="sum")
