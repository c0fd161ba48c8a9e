"""One iteration: every block backward in time, then in the opposite order forward in time, then the multipliers.

    backward   o, c, V, then s_n, a_n for n = N-1 .. 0, then b, W, U
    forward    U, W, b, then a_n, s_n for n = 0 .. N-1, then V, c, o

Backward, what the loss wants reaches the first step within one sweep, as the gradient does in back-propagation through
time; forward, what the inputs say reaches the last one. No gradient passes through more than one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embrace_fx.admm.blocks import (
    Pull,
    Quadratic,
    Reader,
    moved_multiplier,
    updated_bias,
    updated_matrix,
    updated_outputs,
    updated_preactivation,
    updated_state,
)
from embrace_fx.admm.bounds import squared_norm_bound
from embrace_fx.admm.lagrangian import Penalties, Residuals, Variables, less_last, residual_a, residual_o, step_weights
from embrace_fx.admm.model import Data, Weights
from embrace_fx.admm.operations import BACKWARD_SWEEP, FORWARD_SWEEP, MULTIPLIERS
from embrace_fx.vocabulary.operation_id import OperationId

REPEATS = 5
"""The paper takes one step. More cost little, as they do not read the data; with many the loss turns up earlier."""


@dataclass(frozen=True)
class Consensus:
    """What pulls this rank's weights to the others': the target z - u, and g."""

    target: Weights
    strength: float


class Sweeper:
    """Iterates on one rank's sequences.

    Args:
        data: does not change, so U's problem is set up once.
        repeats: steps that V, W and U take in each of their updates.
    """

    def __init__(self, data: Data, penalties: Penalties, repeats: int = REPEATS) -> None:
        x_NBI, heads = data.x_NBI, data.y_MB.shape[0]
        self.data, self.penalties, self.repeats = data, penalties, repeats
        self.w1_N11 = step_weights(penalties, penalties.p1, data.steps, x_NBI)
        self.w2_N11 = step_weights(penalties, penalties.p2, data.steps, x_NBI)
        self.w3_M11 = step_weights(penalties, penalties.p3, heads, x_NBI)
        self.of_inputs = Quadratic.of(x_NBI, self.w1_N11)

    def iterate(
        self,
        weights: Weights,
        variables: Variables,
        consensus: Consensus | None = None,
        mark: Callable[[OperationId], None] = lambda operation: None,
    ) -> tuple[Weights, Variables, Residuals]:
        """One iteration.

        Args:
            variables: a, s and o are updated in place.
            mark: told of each part when it is done.

        Returns: weights and variables after it, and the residuals that moved the multipliers.
        """
        with torch.no_grad():
            weights = self._head_blocks(weights, variables, consensus)
            self._through_time(weights, variables, backward=True)
            weights = self._recurrent_blocks(weights, variables, consensus)
            mark(BACKWARD_SWEEP)
            weights = self._recurrent_blocks(weights, variables, consensus, forward=True)
            self._through_time(weights, variables, backward=False)
            weights = self._head_blocks(weights, variables, consensus, forward=True)
            mark(FORWARD_SWEEP)
            residuals = Residuals.of(weights, variables, self.data)
            moved = self._moved(variables, residuals)
            mark(MULTIPLIERS)
        return weights, moved, residuals

    def _head_blocks(
        self, weights: Weights, variables: Variables, consensus: Consensus | None, forward: bool = False
    ) -> Weights:
        """o, c, V, or the other way round. Other blocks stand still meanwhile: r^ is carried along, not made anew."""
        s_MBH = variables.s_NBH[-self.data.y_MB.shape[0] :]
        r_MBC = less_last(residual_o(weights, variables.o_MBC, variables.s_NBH), variables.l3_BC, self.penalties.p3)
        for block in ("V", "c", "o") if forward else ("o", "c", "V"):
            if block == "o":
                o_MBC = updated_outputs(variables.o_MBC, r_MBC, self.data.y_MB, self.w3_M11)
                r_MBC += o_MBC - variables.o_MBC
                variables.o_MBC.copy_(o_MBC)
            elif block == "c":
                c_C = updated_bias(weights.c_C, r_MBC, self.w3_M11, _pull(consensus, "c_C"))
                r_MBC -= c_C - weights.c_C
                weights = replace(weights, c_C=c_C)
            else:
                quadratic, pull = Quadratic.of(s_MBH, self.w3_M11), _pull(consensus, "V_CH")
                V_CH = updated_matrix(weights.V_CH, r_MBC, self.w3_M11, s_MBH, quadratic, pull, self.repeats)
                r_MBC -= s_MBH @ (V_CH - weights.V_CH).t()
                weights = replace(weights, V_CH=V_CH)
        return weights

    def _recurrent_blocks(
        self, weights: Weights, variables: Variables, consensus: Consensus | None, forward: bool = False
    ) -> Weights:
        """b, W, U, or the other way round, with r^ carried along."""
        x_NBI, s_NBH, w_N11 = self.data.x_NBI, variables.s_NBH, self.w1_N11
        r_NBH = less_last(residual_a(weights, variables.a_NBH, s_NBH, x_NBI), variables.l1_BH, self.penalties.p1)
        for block in ("U", "W", "b") if forward else ("b", "W", "U"):
            if block == "b":
                b_H = updated_bias(weights.b_H, r_NBH, w_N11, _pull(consensus, "b_H"))
                r_NBH -= b_H - weights.b_H
                weights = replace(weights, b_H=b_H)
            elif block == "W":
                read, w, pull = s_NBH[:-1], w_N11[1:], _pull(consensus, "W_HH")
                W_HH = updated_matrix(weights.W_HH, r_NBH[1:], w, read, Quadratic.of(read, w), pull, self.repeats)
                r_NBH[1:] -= s_NBH[:-1] @ (W_HH - weights.W_HH).t()
                weights = replace(weights, W_HH=W_HH)
            else:
                pull = _pull(consensus, "U_HI")
                U_HI = updated_matrix(weights.U_HI, r_NBH, w_N11, x_NBI, self.of_inputs, pull, self.repeats)
                r_NBH -= x_NBI @ (U_HI - weights.U_HI).t()
                weights = replace(weights, U_HI=U_HI)
        return weights

    def _through_time(self, weights: Weights, variables: Variables, backward: bool) -> None:
        """s_n and a_n of all steps, one after the other: each reads what its neighbour in time has just become."""
        penalties, last = self.penalties, self.data.steps - 1
        first_head = self.data.steps - self.data.y_MB.shape[0]
        a_NBH, s_NBH = variables.a_NBH, variables.s_NBH
        driven_NBH = self.data.x_NBI @ weights.U_HI.t() + weights.b_H
        driven_NBH[last] += variables.l1_BH / penalties.p1
        shift_BH = variables.l2_BH / penalties.p2
        wanted_MBC = variables.o_MBC - weights.c_C
        wanted_MBC[-1] -= variables.l3_BC / penalties.p3
        norm_V, norm_W = squared_norm_bound(weights.V_CH), squared_norm_bound(weights.W_HH)
        w1, w2 = ([float(w) for w in each.flatten()] for each in (self.w1_N11, self.w2_N11))
        w3 = [float(w) for w in self.w3_M11.flatten()]

        def step_state(n: int) -> None:
            readers: tuple[Reader, ...] = ()
            if n >= first_head:
                r_BC = wanted_MBC[n - first_head] - s_NBH[n] @ weights.V_CH.t()
                readers += (Reader(r_BC, weights.V_CH, w3[n - first_head], norm_V),)
            if n < last:
                r_BH = a_NBH[n + 1] - driven_NBH[n + 1] - s_NBH[n] @ weights.W_HH.t()
                readers += (Reader(r_BH, weights.W_HH, w1[n + 1], norm_W),)
            tanh_BH = a_NBH[n].tanh()
            s_NBH[n] = updated_state(s_NBH[n], tanh_BH + shift_BH if n == last else tanh_BH, w2[n], readers)

        def step_preactivation(n: int) -> None:
            r_BH = a_NBH[n] - driven_NBH[n]
            if n:
                r_BH.addmm_(s_NBH[n - 1], weights.W_HH.t(), alpha=-1)
            s_BH = s_NBH[n] - shift_BH if n == last else s_NBH[n]
            a_NBH[n] = updated_preactivation(a_NBH[n], r_BH, s_BH, w1[n], w2[n])

        order: Iterable[int] = range(last, -1, -1) if backward else range(last + 1)
        for n in order:
            for step in (step_state, step_preactivation) if backward else (step_preactivation, step_state):
                step(n)

    def _moved(self, variables: Variables, residuals: Residuals) -> Variables:
        p, share = self.penalties, self.penalties.dual_step
        return replace(
            variables,
            l1_BH=moved_multiplier(variables.l1_BH, residuals.ra_NBH[-1], p.p1, share),
            l2_BH=moved_multiplier(variables.l2_BH, residuals.rs_NBH[-1], p.p2, share),
            l3_BC=moved_multiplier(variables.l3_BC, residuals.ro_MBC[-1], p.p3, share),
        )


def _pull(consensus: Consensus | None, name: str) -> Pull | None:
    target: Tensor
    if consensus is None:
        return None
    target = getattr(consensus.target, name)
    return Pull(target, consensus.strength)
