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
    """Running means of the Gram matrices phi phi'. None before the first batch.

    Attributes:
        cell_FF, head_GG: for phi the inputs of the cell, and of the head.
    """

    cell_FF: Tensor | None = None
    head_GG: Tensor | None = None


@dataclass(frozen=True)
class Consensus:
    """The term of the Lagrangian that pulls a rank's weights theta to `target` = z - u: g/2 |theta - target|^2 per
    sequence of a batch, with g = `strength`.
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
    """Returns the weights that fit a batch best, and the updated running means.

    Args:
        weights: the current weights.
        grams: the running means before the batch.
        forward: the forward pass on the batch.
        shifted: its residuals minus multipliers.
        penalties: the penalties of the Lagrangian, and the damping.
        consensus: the pull to the agreed weights, or None in a single process.
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
    """Returns the matrix that minimizes the damped least squares of the residuals `r` for the inputs `phi`.

    Args:
        matrix: the current matrix, to which the damping pulls.
        gram: the running mean of phi phi'.
        phi_RK: the inputs phi of R rows.
        r: the shifted residuals of these rows.
        damping: the damping, relative to the mean square of the inputs.
        pull: (target, strength g) of the pull to the agreed weights, or None.
    """
    slope = phi_RK.t() @ r / len(r)
    diagonal = gram.diagonal()
    added = damping * (diagonal + FLOOR * diagonal.mean())
    if pull is not None:
        target, strength = pull
        slope, added = slope - strength * (matrix - target).t(), added + strength
    factor, _ = torch.linalg.cholesky_ex(gram + torch.diag(added))
    return matrix + torch.cholesky_solve(slope, factor).t()
