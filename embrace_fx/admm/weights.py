"""The update of the weights: least squares of the shifted residuals, on the states that the model computes.

    K <- K + D     D = argmin  n p/2 [mean |r^ - D phi|^2 + tr D (A - G) D']     A = Gb + damping diag Gb

phi is the input of cell or head in the forward pass, not the updated states, which leak the label into the fit. G is
the mean of phi phi' over a batch's n rows, Gb its running mean. The damping keeps weights of nearly constant inputs
(dead pixels, rare characters) from diverging.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.model import ForwardPass, PerConstraint, Weights

DECAY = 0.9
"""Decay of the running mean per batch."""
FLOOR = 1e-3
"""Minimum damping, relative to the mean square, because some inputs are always zero."""


@dataclass(frozen=True)
class Grams:
    """Running means, over batches, of the Gram matrices of the inputs by which weights are multiplied.

    Attributes:
        cell_FF: for the inputs of the RNN cell, (inputs, inputs); None before the first batch.
        head_GG: for the inputs of the head, (inputs, inputs); None before the first batch.
    """

    cell_FF: Tensor | None = None
    head_GG: Tensor | None = None


@dataclass(frozen=True)
class Consensus:
    """The term of the Lagrangian that pulls a rank's weights theta to a target. For each sequence of a batch, it is g/2
    |theta - target|^2.

    Attributes:
        target: the weights averaged over ranks, minus this rank's scaled multipliers.
        strength: the factor g.
    """

    target: Weights
    strength: float


def update_weights(
    weights: Weights,
    grams: Grams,
    forward: ForwardPass,
    shifted: PerConstraint,
    penalties: Penalties,
    consensus: Consensus | None = None,
) -> tuple[Weights, Grams]:
    """Returns new weights, fitted to a batch by damped least squares, and the updated Gram matrices.

    Args:
        weights: the current weights.
        grams: the running means of Gram matrices before the batch.
        forward: the forward pass on the batch.
        shifted: the residuals to fit, minus scaled multipliers.
        penalties: the factors of the squared residuals, and the damping.
        consensus: the penalty that pulls weights to the average over ranks, or None in a single process.
    """
    targets = consensus.target.tensors() if consensus is not None else (None, None)
    matrices, running = [], []
    for matrix, gram, rows, r, p, target in (
        (weights.cell_HF, grams.cell_FF, forward.cell_NBF, shifted.a_NBH, penalties.p1, targets[0]),
        (weights.head_CG, grams.head_GG, forward.head_MBG, shifted.o_MBC, penalties.p3, targets[1]),
    ):
        pull = (target, consensus.strength / (p * len(rows))) if consensus and target is not None else None
        phi_RK = rows.flatten(0, 1)
        found = phi_RK.t() @ phi_RK / len(phi_RK)
        gram = found if gram is None else torch.lerp(found, gram, DECAY)
        matrices.append(fit_matrix(matrix, gram, phi_RK, r.flatten(0, 1), penalties.damping, pull))
        running.append(gram)
    return Weights(*matrices), Grams(*running)


def fit_matrix(
    matrix: Tensor, gram: Tensor, phi_RK: Tensor, r: Tensor, damping: float, pull: tuple[Tensor, float] | None
) -> Tensor:
    """Returns `matrix` plus the change that fits the residuals `r` best, as a linear function of the inputs, by damped
    least squares.

    Args:
        matrix: the current weights, to which the damping pulls.
        gram: the running mean of the inputs' Gram matrix.
        phi_RK: R rows of K inputs.
        r: the residuals to fit, minus scaled multipliers; one row for each row of `phi_RK`.
        damping: the damping, relative to the mean square of each input.
        pull: None, or (target, strength): weights to which the result is pulled, and the factor of this penalty
            relative to the mean squared residual.
    """
    slope = phi_RK.t() @ r / len(r)
    diagonal = gram.diagonal()
    added = damping * (diagonal + FLOOR * diagonal.mean())
    if pull is not None:
        target, strength = pull
        slope, added = slope - strength * (matrix - target).t(), added + strength
    factor, _ = torch.linalg.cholesky_ex(gram + torch.diag(added))
    return matrix + torch.cholesky_solve(slope, factor).t()
