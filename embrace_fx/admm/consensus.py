"""Training in step: ranks iterate on their own sequences, then agree on the weights. A process alone is one rank.

P-ADMMiRNN's parallel form. Rank i moves weights theta_i of its own from the agreed ones, z, held to them by
g/2 |theta_i - z + u_i|^2; after each iteration

    z = mean of theta_i + u_i     u_i += theta_i - z

The mean is one AllReduce of a vector as long as the weights. Multipliers of constraints never leave their rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from embrace_fx.admm.model import Data, expect
from embrace_fx.admm.operations import AGREE, DUALS, FIGURES
from embrace_fx.admm.progress import Progress, Stopping, Sums
from embrace_fx.admm.state import State
from embrace_fx.admm.update import iterate
from embrace_fx.admm.weights import Consensus
from embrace_fx.runtime.launch.recorder import Recorder, Transfer
from embrace_fx.runtime.ranks.communicator import Communicator

OnIteration = Callable[[Progress], object]


@dataclass(frozen=True)
class Synchronous:
    """Ranks that wait for each other after each iteration, pulled to what they agree on with `strength` (g).

    It is per sequence of a batch, as penalties are.
    """

    strength: float = 0.003

    def __post_init__(self) -> None:
        wanted = "a positive strength, in admm.Synchronous()"
        expect(0 < self.strength < float("inf"), wanted, str(self.strength), "Change it.")


@dataclass(frozen=True)
class Run:
    """The length of a training, the `monitored` data that its weights are judged on, and the callback that is told."""

    iterations: int
    batch_size: int
    stopping: Stopping
    monitored: Data
    on_iteration: OnIteration | None
    recorder: Recorder

    def log(self, progress: Progress) -> None:
        if self.on_iteration is not None:
            self.on_iteration(progress)


def pull_of(state: State, strength: float) -> Consensus:
    """The pull that holds a rank's weights to the agreed ones: z - u, with strength g."""
    return Consensus(state.agreed.unflat(state.agreed.flat() - state.duals.flat()), strength)


def contribution(state: State) -> torch.Tensor:
    """theta + u of a rank as one vector; z is the mean of all ranks'."""
    return state.weights.flat() + state.duals.flat()


def take_agreed(state: State, z: torch.Tensor) -> None:
    """Takes newly agreed weights, and moves the rank's duals: u += theta - z."""
    state.duals = state.duals.unflat(contribution(state) - z)
    state.agreed = state.agreed.unflat(z)


def add_over_ranks(communicator: Communicator, values: Sequence[float]) -> list[float]:
    """Sums of all ranks' numbers, by place. Collective."""
    return list(communicator.reduce_scalar(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM).tolist())


def train_in_step(state: State, data: Data, run: Run, communicator: Communicator, strength: float) -> None:
    """Trains until the run stops, and brings `state` forward in place. `strength` is g, the same on all ranks."""
    recorder, start_s = run.recorder, time.perf_counter() - state.elapsed_s
    state.stopped = None
    while state.iteration < run.iterations and state.stopped is None:
        recorder.window()
        pull = pull_of(state, strength) if communicator.world_size > 1 else None
        splits = iterate(state, data, run.batch_size, pull, recorder.mark)
        _agree(state, communicator, recorder)
        own = Sums.of(state.agreed, run.monitored) + splits + Sums.between(state.weights, state.agreed)
        recorder.mark(FIGURES)
        everyone = Sums(*add_over_ranks(communicator, astuple(own)))
        state.iteration += 1
        progress = everyone.progress(state.iteration, staleness=0, elapsed_s=time.perf_counter() - start_s)
        state.advance(progress, run.stopping)
        run.log(progress)


def _agree(state: State, communicator: Communicator, recorder: Recorder) -> None:
    if communicator.world_size == 1:
        state.agreed = state.weights
        return
    summed, world_size = contribution(state), communicator.world_size
    started_s = time.perf_counter()
    with recorder.waiting(AGREE):
        communicator.reduce_scalar(summed, dist.ReduceOp.SUM)
    if recorder.recording is not None:
        sent = 2 * (world_size - 1) * summed.numel() * summed.element_size() // world_size
        recorder.transferred(Transfer(AGREE, recorder.recording.window, sent, started_s, time.perf_counter()))
    take_agreed(state, summed / world_size)
    recorder.mark(DUALS)
