"""The joint update of a, s and o of all steps: the exact minimum of the Lagrangian linearized about a forward pass.

For given weights, the residuals determine a, s and o, so they can be the unknowns. In them all penalties are squares,
and
only the loss depends on the model: o changes by J times the change of the residuals, where J is the model's Jacobian
with one block per constraint. With g and S the loss's gradient and curvature in o, R = J p^-1 J', and r^ the shifted
residuals before the update,

    new r^ = -p^-1 J' y     (1 + S R) y = g - S J r^

so y, of the outputs' size, is the loss's gradient at the new outputs, and 1 + S R limits the update by the penalties.
S R = 0 would give y = g, which is backpropagation.

If the head reads only the last step, y has C numbers per sequence, and the system is C x C (`solve_last_step`). If it
reads every step, R is not formed: conjugate gradients multiply by it with one backward and one forward pass
(`solve_all_steps`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.model import PerConstraint, Weights

TOLERANCE = 0.01
"""Relative residual at which conjugate gradients stop: two or three pairs of passes."""


class Jacobian:
    """The Jacobian J of an RNN's outputs with respect to the residuals of preactivations, states and outputs. The
    matrix itself is never stored. The methods multiply vectors by it.

    Args:
        weights: the weights of the forward pass about which the RNN is linearized.
        s_NBH: the states of that pass, (time steps, sequences, hidden units).
    """

    def __init__(self, weights: Weights, s_NBH: Tensor) -> None:
        self._W_HH, self._V_CH = weights.W_HH.contiguous(), weights.V_CH.contiguous()
        self._slope_NBH = 1 - s_NBH.square()

    def apply(self, r: PerConstraint) -> Tensor:
        """Returns the product of the Jacobian and residuals, computed by one pass forward in time. Its shape is (M, B,
        C): steps that the head reads, sequences, classes.

        Args:
            r: the residuals.
        """
        moved_NBH, W_t = torch.empty_like(self._slope_NBH), self._W_HH.t()
        for n, slope_BH in enumerate(self._slope_NBH):
            a_BH = torch.addmm(r.a_NBH[n], moved_NBH[n - 1], W_t) if n else r.a_NBH[n]
            torch.addcmul(r.s_NBH[n], slope_BH, a_BH, out=moved_NBH[n])
        return torch.matmul(moved_NBH[-len(r.o_MBC) :], self._V_CH.t()).add_(r.o_MBC)

    def apply_transposed(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Multiplies `y` by the transposed Jacobian, in one pass backward in time. Returns the parts of the product for
        preactivations and for states, each (N, B, H) or (N, K, B, H). The part for outputs is `y` itself.

        Args:
            y: (M, B, C), or (M, K, B, C) for K vectors at once; M steps that the head reads, B sequences, C classes.
        """
        pulled = y @ self._V_CH
        steps, first = len(self._slope_NBH), len(self._slope_NBH) - len(y)
        a, s = (pulled.new_empty(steps, *pulled.shape[1:]) for _ in "as")
        for n in reversed(range(steps)):
            if n == steps - 1:
                s[n] = pulled[-1]
            else:
                torch.matmul(a[n + 1], self._W_HH, out=s[n])
                if n >= first:
                    s[n] += pulled[n - first]
            torch.mul(s[n], self._slope_NBH[n], out=a[n])
        return a, s


def minimize_jointly(
    jacobian: Jacobian, o_MBC: Tensor, y_MB: Tensor, shifted: PerConstraint, penalties: Penalties
) -> PerConstraint:
    """Returns the residuals, minus scaled multipliers, that minimize the Lagrangian of the RNN linearized about a
    forward pass.

    Args:
        jacobian: the Jacobian of the pass.
        o_MBC: the outputs of the pass, (steps that the head reads, sequences, classes).
        y_MB: the target classes, (steps that the head reads, sequences).
        shifted: the residuals before the update, minus scaled multipliers.
        penalties: the factors of the squared residuals.
    """
    q_MBC = o_MBC.softmax(-1)
    g_MBC = q_MBC.scatter_add(-1, y_MB[..., None], q_MBC.new_full((), -1.0).expand(*y_MB.shape, 1))
    solve = solve_last_step if len(o_MBC) == 1 else solve_all_steps
    return solve(jacobian, g_MBC, q_MBC, shifted, penalties)


def solve_last_step(
    jacobian: Jacobian, g_MBC: Tensor, q_MBC: Tensor, shifted: PerConstraint, penalties: Penalties
) -> PerConstraint:
    """Returns the residuals, minus scaled multipliers, that minimize the linearized Lagrangian for a head that reads
    only the last step. Solves a C x C system for each sequence, with the loss's Hessian S = diag(q) - q q'.

    Args:
        jacobian, shifted, penalties: as for `minimize_jointly`.
        g_MBC: the gradient of the loss with respect to the outputs.
        q_MBC: the softmax of the outputs.
    """
    (N, B, H), C = shifted.a_NBH.shape, g_MBC.shape[2]
    unit_CC = torch.eye(C, dtype=g_MBC.dtype, device=g_MBC.device)
    Ja, Js = (
        block_NCBH.permute(2, 1, 0, 3).reshape(B, C, N * H)
        for block_NCBH in jacobian.apply_transposed(unit_CC[None, :, None].expand(1, C, B, C))
    )
    ra, rs = (r.transpose(0, 1).reshape(B, N * H, 1) for r in (shifted.a_NBH, shifted.s_NBH))
    R_BCC = unit_CC / penalties.p3 + Ja @ Ja.mT / penalties.p1 + Js @ Js.mT / penalties.p2
    e_BC = (Ja @ ra + Js @ rs)[..., 0] + shifted.o_MBC[0]
    S_BCC = torch.diag_embed(q_MBC[0]) - q_MBC[0, :, :, None] * q_MBC[0, :, None]
    y_BC = torch.linalg.solve(unit_CC + S_BCC @ R_BCC, g_MBC[0] - (S_BCC @ e_BC[..., None])[..., 0])
    a, s = ((y_BC[:, None] @ block)[:, 0].view(B, N, H).transpose(0, 1) for block in (Ja, Js))
    return PerConstraint(a / -penalties.p1, s / -penalties.p2, (y_BC / -penalties.p3)[None])


def solve_all_steps(
    jacobian: Jacobian, g_MBC: Tensor, q_MBC: Tensor, shifted: PerConstraint, penalties: Penalties
) -> PerConstraint:
    """Returns the residuals, minus scaled multipliers, that minimize the linearized Lagrangian for a head that reads
    every step.

    Solves (1 + E' R E) v = -E' (J r^ + R g) by conjugate gradients for each sequence. J is the Jacobian, R = J p^-1 J'
    with the penalties p, r^ is `shifted`, and g is the loss's gradient. E factors the loss's Hessian as E E': it is
    diag(sqrt(q)) times a projection. The residuals follow from y = g + E v.

    Args:
        jacobian, g_MBC, q_MBC, shifted, penalties: as for `solve_last_step`.
    """
    root_MBC = q_MBC.sqrt()

    def project(v_MBC: Tensor) -> Tensor:
        """Projects `v_MBC` onto the orthogonal complement of `root_MBC`, the square root of the softmax, separately for
        each step and sequence.
        """
        return v_MBC - root_MBC * (root_MBC * v_MBC).sum(-1, keepdim=True)

    def residuals(y_MBC: Tensor) -> PerConstraint:
        """Returns the shifted residuals of all constraints for dual variables `y_MBC`: -J' y, divided by the penalties'
        factors.
        """
        a, s = jacobian.apply_transposed(y_MBC)
        return PerConstraint(a / -penalties.p1, s / -penalties.p2, y_MBC / -penalties.p3)

    def dot(v_MBC: Tensor, w_MBC: Tensor) -> Tensor:
        """Returns the dot product of `v_MBC` and `w_MBC` for each sequence, (1, B, 1)."""
        return (v_MBC * w_MBC).sum((0, 2), keepdim=True)

    y_MBC = g_MBC
    left_MBC = project(root_MBC * (jacobian.apply(residuals(y_MBC)) - jacobian.apply(shifted)))
    step_MBC, square = left_MBC, dot(left_MBC, left_MBC)
    enough, tiny = TOLERANCE**2 * square, torch.finfo(square.dtype).tiny
    for _ in range(root_MBC.shape[0] * root_MBC.shape[2]):
        if bool((square <= enough).all()):
            break
        moved_MBC = root_MBC * project(step_MBC)
        product_MBC = step_MBC - project(root_MBC * jacobian.apply(residuals(moved_MBC)))
        length = square / dot(step_MBC, product_MBC).clamp_min(tiny)
        y_MBC = y_MBC + length * moved_MBC
        left_MBC = left_MBC - length * product_MBC
        before, square = square, dot(left_MBC, left_MBC)
        step_MBC = left_MBC + square / before.clamp_min(tiny) * step_MBC
    return residuals(y_MBC)
