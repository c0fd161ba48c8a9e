"""Synchronous consensus: every rank iterates on its own sequences, then all agree on the weights.

P-ADMMiRNN's parallel form. Rank i keeps weights theta_i of its own, which g/2 |theta_i - z + u_i|^2 holds to the agreed
ones, z; after each iteration

    z = mean of theta_i + u_i     u_i += theta_i - z

The mean is one AllReduce of a vector as long as the weights. States, outputs and multipliers never leave their rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from embrace_fx.admm.model import Weights
from embrace_fx.admm.operations import AGREE, DUALS
from embrace_fx.admm.state import State
from embrace_fx.admm.sweep import Consensus
from embrace_fx.runtime.launch.recorder import Recorder, Transfer
from embrace_fx.runtime.ranks.communicator import Communicator

"""The name of the exchange in timelines."""


@dataclass(frozen=True)
class Synchronous:
    """Ranks that wait for each other after each iteration.

    Attributes:
        strength: of the pull to the agreed weights (g), per sequence of a rank, as penalties are.
    """

    strength: float = 0.03

    def __post_init__(self) -> None:
        if not 0 < self.strength < float("inf"):
            raise ValueError(f"expected a positive strength, in admm.Synchronous(), found {self.strength}.")


def pull_of(state: State, strength: float) -> Consensus:
    """What holds a rank's weights to the agreed ones: z - u, with strength g."""
    pairs = zip(state.agreed.tensors(), state.duals.tensors(), strict=True)
    return Consensus(Weights(*(z - u for z, u in pairs)), strength)


def contribution(state: State) -> torch.Tensor:
    """theta + u of a rank as one vector; z is the mean of all ranks'."""
    return state.weights.flat() + state.duals.flat()


def take_agreed(state: State, z: torch.Tensor) -> None:
    """Takes newly agreed weights, and moves the rank's duals: u += theta - z."""
    state.duals = state.duals.unflat(contribution(state) - z)
    state.agreed = state.agreed.unflat(z)


class InStep:
    """All ranks of a communicator, at the same iteration (a `loop.Ranks`).

    Args:
        strength: g, the same on all ranks.
    """

    def __init__(self, communicator: Communicator, strength: float, recorder: Recorder) -> None:
        self._communicator, self._strength, self._recorder = communicator, strength, recorder

    def pull(self, state: State) -> Consensus:
        return pull_of(state, self._strength)

    def agree(self, state: State) -> None:
        summed = contribution(state)
        started_s = time.perf_counter()
        with self._recorder.waiting(AGREE):
            self._communicator.reduce_scalar(summed, dist.ReduceOp.SUM)
        if self._recorder.recording is not None:
            world_size = self._communicator.world_size
            sent = 2 * (world_size - 1) * summed.numel() * summed.element_size() // world_size
            window = self._recorder.recording.window
            ended_s = time.perf_counter()
            self._recorder.transferred(Transfer(AGREE, window, sent, started_s, ended_s))
        take_agreed(state, summed / self._communicator.world_size)
        self._recorder.mark(DUALS)

    def sum(self, values: Sequence[float]) -> list[float]:
        summed = self._communicator.reduce_scalar(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM)
        return list(summed.tolist())
