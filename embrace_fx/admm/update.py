"""An iteration: an epoch of random batches, each with a joint update of a, s and o, then of multipliers and weights.

    forward      a, s and o from the weights: all residuals are zero
    states       joint update of a, s and o (`states`)
    multipliers  l -= r, at every step of the batch's sequences, kept until their next batch
    weights      least squares of the residuals on the states of the forward pass (`weights`)

States and weights are both updated from the same point, so that neither is fitted to the other's last update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embrace_fx.admm.lagrangian import lagrangian
from embrace_fx.admm.model import Data, run_forward
from embrace_fx.admm.operations import FORWARD, STATES, WEIGHTS
from embrace_fx.admm.progress import Sums
from embrace_fx.admm.state import State
from embrace_fx.admm.states import Jacobian, minimize_jointly
from embrace_fx.admm.weights import Consensus, update_weights
from embrace_fx.vocabulary.operation_id import OperationId

Mark = Callable[[OperationId], None]


def run_epoch(
    state: State, data: Data, batch_size: int, consensus: Consensus | None = None, mark: Mark = lambda operation: None
) -> Sums:
    """Runs one epoch on a rank, and updates its weights, multipliers and Gram matrices in place.

    Args:
        state: the rank's state.
        data: the rank's sequences.
        batch_size: the number of sequences of a batch.
        consensus: the penalty that pulls weights to the average over ranks, or None in a single process.
        mark: called with each finished operation of a batch's update, for a timeline.

    Returns:
        The sums, over all batches, of the Lagrangian and of squared residuals. Those for loss and accuracy are 0.
    """
    state.weights = state.agreed
    generator = torch.Generator().manual_seed(state.seed + state.iteration)
    order_B = torch.randperm(data.sequences, generator=generator).to(data.x_NBI.device)
    with torch.no_grad():
        left = sum(_update_on_batch(state, data, chosen_B, consensus, mark) for chosen_B in order_B.split(batch_size))
    assert isinstance(left, Tensor)
    after, ra, rs, ro = left.tolist()
    (heads, sequences), states = data.y_MB.shape, float(len(data.x_NBI) * data.sequences * len(state.weights.cell_HF))
    outputs = float(heads * sequences * len(state.weights.head_CG))
    return Sums(lagrangian=after, sequences=float(sequences), ra=ra, rs=rs, states=states, ro=ro, outputs=outputs)


def _update_on_batch(state: State, data: Data, chosen_B: Tensor, consensus: Consensus | None, mark: Mark) -> Tensor:
    """Updates the weights, multipliers and Gram matrices in `state` by one batch. Returns a float64 tensor of 4
    numbers: the Lagrangian after the update of the residuals, and the sums of squared residuals of preactivations,
    states and outputs.

    Args:
        chosen_B: the indices of the batch's sequences in `data`.
        consensus, mark: as for `run_epoch`.
    """
    assert state.multipliers is not None
    batch, multipliers = data.at(chosen_B), state.multipliers.at(chosen_B)
    heads = len(batch.y_MB)
    forward = run_forward(state.weights, batch.x_NBI, heads)
    mark(FORWARD)
    jacobian = Jacobian(state.weights, forward.s_NBH)
    shifted = minimize_jointly(jacobian, forward.o_MBC, batch.y_MB, -multipliers, state.penalties)
    residuals = shifted + multipliers
    moved = run_forward(state.weights, batch.x_NBI, heads, residuals)
    state.multipliers.set_at(chosen_B, -shifted)
    mark(STATES)
    state.weights, state.grams = update_weights(
        state.weights, state.grams, forward, shifted, state.penalties, consensus
    )
    mark(WEIGHTS)
    after = lagrangian(moved.o_MBC, batch.y_MB, shifted, state.penalties)
    return torch.stack([after, *(r.square().sum() for r in residuals.tensors())]).double()
