"""The updates of the blocks: pure functions, each of which leaves the Lagrangian no higher than it found it.

Every function returns the block's new value, from the current values of all others. o, and V, W, U by sums, treat all
steps at once; s and a take one step of time, all sequences at once, because neighbours in time read each other. Where a
problem has no closed solution the step is linearised, with a constant of `bounds`.

r^ is a residual less l / p at the last step (`lagrangian.less_last`); w its weight by step. A `Pull` adds
g/2 |theta - (z - u)|^2 to a weight's problem: what holds ranks together (`consensus`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embrace_fx.admm.bounds import SOFTMAX_CURVATURE, TANH_CURVATURE, largest_eigenvalue_bound


@dataclass(frozen=True)
class Pull:
    """Towards a target, a tensor of the weight's shape, with strength g per unit of squared distance, halved."""

    target: Tensor
    strength: float


def updated_outputs(o_MBC: Tensor, ro_MBC: Tensor, y_MB: Tensor, w_M11: Tensor) -> Tensor:
    """o -= [softmax(o) - y + w ro^] / k, with ro^ of the current o."""
    slope = o_MBC.softmax(-1)
    slope.scatter_add_(2, y_MB[..., None], slope.new_full((), -1.0).expand(*y_MB.shape, 1))
    return o_MBC - (slope + w_M11 * ro_MBC) / (SOFTMAX_CURVATURE + w_M11)


def updated_bias(bias: Tensor, r: Tensor, w: Tensor, pull: Pull | None) -> Tensor:
    """b or c, exactly: the weighted mean of what the residual's other terms leave for it.

    Args:
        r: r^ with the current bias, (steps, B, size).
    """
    weight = float(w.sum()) * r.shape[1]
    slope = -(w * r).sum((0, 1))
    if pull is not None:
        slope = slope + pull.strength * (bias - pull.target)
        weight += pull.strength
    return bias - slope / weight


@dataclass(frozen=True)
class Quadratic:
    """A matrix's problem but for its slope.

    Attributes:
        gram: sum of w read read' over all steps and sequences.
        curvature: tau, at least its largest eigenvalue.
    """

    gram: Tensor
    curvature: float

    @classmethod
    def of(cls, read: Tensor, w: Tensor) -> Quadratic:
        """Args: what the matrix is multiplied with, (steps, B, columns), and the weights by step."""
        rows = (read * w.sqrt()).flatten(0, 1)
        gram = rows.t() @ rows
        return cls(gram, largest_eigenvalue_bound(gram))


def updated_matrix(
    matrix: Tensor, r: Tensor, w: Tensor, read: Tensor, quadratic: Quadratic, pull: Pull | None, repeats: int = 1
) -> Tensor:
    """V, W or U: a step along sum w r^ read', divided by the curvature, taken `repeats` times.

    After a change D of the matrix that sum has become smaller by D gram, so that only the first step reads the data.

    Args:
        r: r^ with the current matrix, (steps, B, rows).
        read: what the matrix is multiplied with, (steps, B, columns).
        quadratic: that of the same `read` and `w`.
    """
    slope = (w * r).flatten(0, 1).t() @ read.flatten(0, 1)
    strength = pull.strength if pull is not None else 0.0
    if quadratic.curvature + strength == 0.0:
        return matrix
    updated = matrix
    for _ in range(repeats):
        step = slope - (updated - matrix) @ quadratic.gram
        if pull is not None:
            step = step - strength * (updated - pull.target)
        updated = updated + step / (quadratic.curvature + strength)
    return updated


@dataclass(frozen=True)
class Reader:
    """Who reads a state: the head, or the next step.

    Attributes:
        r_BK: its r^ with the current state.
        matrix_KH: what it multiplies the state with.
        weight: of its residual.
        squared_norm: at least the matrix's squared spectral norm.
    """

    r_BK: Tensor
    matrix_KH: Tensor
    weight: float
    squared_norm: float


def updated_state(s_BH: Tensor, tanh_a_BH: Tensor, w: float, readers: tuple[Reader, ...]) -> Tensor:
    """s_n: the exact minimum of its own residual and of the readers' residuals linearised.

    [w (tanh a + l2/p2) + beta s + sum over readers of w' matrix' r^] / (w + beta), beta = sum w' |matrix|^2.

    Args:
        tanh_a_BH: tanh(a_n), plus l2 / p2 at the last step.
        w: weight of rs_n.
    """
    beta = sum(reader.weight * reader.squared_norm for reader in readers)
    total = w * tanh_a_BH + beta * s_BH
    for reader in readers:
        total.addmm_(reader.r_BK, reader.matrix_KH, alpha=reader.weight)
    return total / (w + beta)


def updated_preactivation(a_BH: Tensor, ra_BH: Tensor, s_BH: Tensor, w1: float, w2: float) -> Tensor:
    """a_n -= [w1 ra^ - w2 rs^ (1 - tanh^2 a)] / k, k by element.

    The second derivative of (s - tanh a)^2 / 2 is (1 - t^2)(1 - 3 t^2) + 2 s t (1 - t^2) with t = tanh a, so at most
    1 + |s| max|tanh''|.

    Args:
        ra_BH: ra^ with the current a.
        s_BH: s_n, less l2 / p2 at the last step.
        w1, w2: weights of ra_n and rs_n.
    """
    t_BH = a_BH.tanh()
    slope = w1 * ra_BH - w2 * (s_BH - t_BH) * (1 - t_BH.square())
    return a_BH - slope / (w1 + w2 * (1 + TANH_CURVATURE * s_BH.abs()))


def moved_multiplier(multiplier: Tensor, r: Tensor, penalty: float, share: float) -> Tensor:
    """l -= share p r, with r of the last step."""
    return torch.add(multiplier, r, alpha=-share * penalty)
