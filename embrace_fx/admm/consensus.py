"""Synchronous consensus: ranks iterate on their own sequences and then agree on the weights.

The parallel form of P-ADMMiRNN. Rank i updates its own weights theta_i, starting from the agreed weights z and pulled
to them by g/2 |theta_i - z + u_i|^2. After each iteration

    z = mean of theta_i + u_i     u_i += theta_i - z

The mean is one AllReduce of all weights. Multipliers of constraints stay on their rank. A single process is one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from embrace_fx.admm.model import Data, require
from embrace_fx.admm.operations import AGREE, DUALS, FIGURES
from embrace_fx.admm.progress import Progress, Stopping, Sums
from embrace_fx.admm.state import State
from embrace_fx.admm.update import run_epoch
from embrace_fx.admm.weights import Consensus
from embrace_fx.runtime.launch.recorder import Recorder, Transfer
from embrace_fx.runtime.ranks.communicator import Communicator

OnIteration = Callable[[Progress], object]


@dataclass(frozen=True)
class Synchronous:
    """Options of synchronous training: after each iteration ranks wait for each other and average their weights.

    Attributes:
        strength: the factor g of the quadratic penalty on the difference between a rank's weights and the average. It
            applies to each sequence of a batch.
    """

    strength: float = 0.003

    def __post_init__(self) -> None:
        fits = 0 < self.strength < float("inf")
        require(fits, f"admm.Synchronous(): strength is {self.strength}. Pass a positive number.")


@dataclass(frozen=True)
class Run:
    """The options of a training run.

    Attributes:
        iterations: the total number of iterations.
        batch_size: the number of sequences of a batch.
        stopping: the criteria to stop early.
        monitored: the data to evaluate weights on.
        on_iteration: function to call with each iteration's metrics, or None.
        recorder: records the times of operations for a timeline.
    """

    iterations: int
    batch_size: int
    stopping: Stopping
    monitored: Data
    on_iteration: OnIteration | None
    recorder: Recorder

    def log(self, progress: Progress) -> None:
        """Calls the user's `on_iteration` with the metrics of an iteration (`progress`)."""
        if self.on_iteration is not None:
            self.on_iteration(progress)


def pull_to_agreed(state: State, strength: float) -> Consensus:
    """Returns the penalty that pulls a rank's weights towards z - u, the averaged weights minus the rank's scaled
    multipliers.

    Args:
        state: the rank's state, which has z and u.
        strength: the factor g of the penalty.
    """
    return Consensus(state.agreed.from_flat(state.agreed.flat() - state.duals.flat()), strength)


def contribution(state: State) -> torch.Tensor:
    """Returns a rank's weights plus its scaled multipliers, theta + u, as one vector. The mean over all ranks becomes
    the new averaged weights z.
    """
    return state.weights.flat() + state.duals.flat()


def store_agreed(state: State, z: torch.Tensor) -> None:
    """Stores new averaged weights in a rank's state, and updates its scaled multipliers: u += theta - z, where theta
    are the rank's own weights.

    Args:
        z: the new weights, averaged over ranks, as one vector.
    """
    state.duals = state.duals.from_flat(contribution(state) - z)
    state.agreed = state.agreed.from_flat(z)


def add_over_ranks(communicator: Communicator, values: Sequence[float]) -> list[float]:
    """Returns the sum over all ranks of each number in `values`. Collective."""
    return list(communicator.reduce_scalar(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM).tolist())


def train_synchronously(state: State, data: Data, run: Run, communicator: Communicator, strength: float) -> None:
    """Trains on this rank's data, and averages the weights over ranks after each iteration, until all iterations are
    done or training stops early. Collective.

    Args:
        state: the rank's state, updated in place.
        data: the rank's sequences.
        run: the options of the run.
        strength: the factor g of the penalty on the difference from the average, equal on all ranks.
    """
    recorder, start_s = run.recorder, time.perf_counter() - state.elapsed_s
    state.stopped = None
    while state.iteration < run.iterations and state.stopped is None:
        recorder.begin_window()
        pull = pull_to_agreed(state, strength) if communicator.world_size > 1 else None
        splits = run_epoch(state, data, run.batch_size, pull, recorder.mark)
        _update_agreed(state, communicator, recorder)
        own = Sums.of_model(state.agreed, run.monitored) + splits + Sums.of_disagreement(state.weights, state.agreed)
        recorder.mark(FIGURES)
        everyone = Sums(*add_over_ranks(communicator, astuple(own)))
        state.iteration += 1
        progress = everyone.progress(state.iteration, staleness=0, elapsed_s=time.perf_counter() - start_s)
        state.advance(progress, run.stopping)
        run.log(progress)


def _update_agreed(state: State, communicator: Communicator, recorder: Recorder) -> None:
    """Averages the weights plus scaled multipliers over all ranks, and stores the mean in `state` as the agreed
    weights. Then updates the rank's multipliers. Records the time of the AllReduce. Collective.
    """
    if communicator.world_size == 1:
        state.agreed = state.weights
        return
    summed, world_size = contribution(state), communicator.world_size
    started_s = time.perf_counter()
    with recorder.waiting(AGREE):
        communicator.reduce_scalar(summed, dist.ReduceOp.SUM)
    if recorder.recording is not None:
        sent = 2 * (world_size - 1) * summed.numel() * summed.element_size() // world_size
        recorder.record_transfer(Transfer(AGREE, recorder.recording.window, sent, started_s, time.perf_counter()))
    store_agreed(state, summed / world_size)
    recorder.mark(DUALS)
