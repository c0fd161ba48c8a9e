"""A batch written from the formulas, slowly: one sequence at a time, every constraint in one dense system.

Nothing is shared with the package but its data classes. The joint move is the minimum of the Lagrangian's quadratic
model in all residuals at once, by a dense solve; Jacobian, gradient and curvature are autograd's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.model import Data, PerConstraint, Weights


def split(weights: Weights, inputs: int) -> tuple[Tensor, ...]:
    """Returns U, W, b, V and c."""
    K, head = weights.cell_HF, weights.head_CG
    return K[:, :inputs], K[:, inputs:-1], K[:, -1], head[:, :-1], head[:, -1]


def outputs(weights: Weights, x_NI: Tensor, r: PerConstraint) -> Tensor:
    """Returns the output o (M, C) of one sequence. The `r` are the residuals of a, s and o, each (steps, size)."""
    U, W, b, V, c = split(weights, x_NI.shape[1])
    s, states = torch.zeros(len(W), dtype=W.dtype), []
    for x, ra, rs in zip(x_NI, r.a_NBH, r.s_NBH, strict=True):
        s = torch.tanh(U @ x + W @ s + b + ra) + rs
        states.append(s)
    heads = len(r.o_MBC)
    return torch.stack([V @ s + c + ro for s, ro in zip(states[-heads:], r.o_MBC, strict=True)])


def cut(flat: Tensor, like: PerConstraint) -> PerConstraint:
    sizes = [each.numel() for each in like.tensors()]
    pieces = zip(flat.split(sizes), like.tensors(), strict=True)
    return PerConstraint(*(piece.view(each.shape) for piece, each in pieces))


def lagrangian(
    weights: Weights, data: Data, residuals: PerConstraint, multipliers: PerConstraint, penalties: Penalties
) -> Tensor:
    """Returns the Lagrangian, summed over sequences, computed only by operations that autograd can differentiate."""
    total = torch.zeros((), dtype=weights.cell_HF.dtype)
    for i in range(data.sequences):
        r, multiplier = (PerConstraint(*(e[:, i] for e in each.tensors())) for each in (residuals, multipliers))
        o_MC = outputs(weights, data.x_NBI[:, i], r)
        total = total + torch.nn.functional.cross_entropy(o_MC, data.y_MB[:, i], reduction="sum")
        for residual, own, p in zip(
            r.tensors(), multiplier.tensors(), (penalties.p1, penalties.p2, penalties.p3), strict=True
        ):
            total = total + p / 2 * (residual - own).square().sum()
    return total


def joint_move(
    weights: Weights, data: Data, residuals: PerConstraint, shifted: PerConstraint, penalties: Penalties
) -> PerConstraint:
    """Returns new shifted residuals, by solving one dense system over all constraints of each sequence."""
    found = []
    for i in range(data.sequences):
        r, shift = (PerConstraint(*(e[:, i] for e in each.tensors())) for each in (residuals, shifted))
        flat = torch.cat([e.flatten() for e in r.tensors()])
        x_NI, y_M = data.x_NBI[:, i], data.y_MB[:, i]

        def o_of(z: Tensor, x_NI: Tensor = x_NI, r: PerConstraint = r) -> Tensor:
            return outputs(weights, x_NI, cut(z, r)).flatten()

        def loss(o: Tensor, y_M: Tensor = y_M) -> Tensor:
            return torch.nn.functional.cross_entropy(o.view(len(y_M), -1), y_M, reduction="sum")

        J = torch.autograd.functional.jacobian(o_of, flat)
        o = o_of(flat)
        g, S = torch.autograd.functional.jacobian(loss, o), torch.autograd.functional.hessian(loss, o)
        p = torch.cat(
            [
                torch.full((e.numel(),), weight, dtype=flat.dtype)
                for e, weight in zip(r.tensors(), (penalties.p1, penalties.p2, penalties.p3), strict=True)
            ]
        )
        old = torch.cat([e.flatten() for e in shift.tensors()])
        step = torch.linalg.solve(J.t() @ S @ J + torch.diag(p), -(J.t() @ g + p * old))
        found.append(cut(old + step, shift))
    return PerConstraint(*(torch.stack(each, 1) for each in zip(*(f.tensors() for f in found), strict=True)))
