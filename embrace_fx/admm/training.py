"""The public function `train`."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import Tensor, nn

from embrace_fx.admm.asynchronous import MASTER, Asynchronous, Master, open_connections, run_worker
from embrace_fx.admm.consensus import OnIteration, Run, train_synchronously
from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.model import write_weights
from embrace_fx.admm.progress import Stopping
from embrace_fx.admm.setup import (
    OwnInputs,
    Parallel,
    Training,
    initial_state,
    prepare_on_all,
    read_inputs,
    training_group,
)
from embrace_fx.admm.state import State
from embrace_fx.admm.timeline import save_timeline
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.ranks.communicator import Communicator


def train(
    rnn: nn.RNN,
    head: nn.Linear,
    data: tuple[Tensor, Tensor],
    *,
    iterations: int = 60,
    batch_size: int = 16,
    penalties: Penalties | None = None,
    rescale: bool = True,
    stopping: Stopping | None = None,
    validation: tuple[Tensor, Tensor] | None = None,
    state: State | None = None,
    parallel: Parallel = None,
    process_group: dist.ProcessGroup | None = None,
    on_iteration: OnIteration | None = None,
    timeline: str | os.PathLike[str] | None = None,
) -> State:
    """Trains a tanh RNN and its head, in place, by the alternating direction method of multipliers.

    An iteration is an epoch. There is no learning rate: the penalties, which need no tuning, determine the size of
    updates. At the end, the modules get the weights with the lowest loss. `nn.RNN`'s two biases become one, in
    `bias_ih_l0`. Source: P-ADMMiRNN (arXiv 2006.05622), with the changes described in `docs/admm.md`.

    Args:
        rnn: one tanh layer in one direction, float32 or float64, with or without `batch_first`.
        head: a linear layer from hidden units to scores of classes.
        data: (inputs, targets). Inputs are (B, N, I), or (N, B, I) without `batch_first`. Targets are int64 classes:
            (B,) if the head classifies a sequence by its last state, or the inputs' first two dimensions if it
            classifies every step (language model). In parallel training, each rank passes its own sequences. The
            asynchronous master does not train on its data.
        iterations: the total number of iterations, including those before a resume. With asynchronous ranks, the number
            of times that the master averages the workers' weights.
        batch_size: the number of sequences per batch. Their order is random, with a seed from torch's global generator.
        penalties, stopping: `Penalties()` and `Stopping()` if None.
        rescale: whether to scale the initial weights for the method (`setup.rescale_weights`). Pass False to continue
            from trained weights.
        validation: data to evaluate weights on, in the form of `data`; the training data if None.
        state: a state to resume from. Unless ranks are asynchronous, results are bitwise equal to those of a training
            without interruption.
        parallel: the parallel method, or None to train in this process alone.
        process_group: the ranks that train together; the default group if None.
        on_iteration: function to call with each iteration's metrics.
        timeline: a file for a picture of all ranks' work, written by rank 0: .svg, .html or .json.

    Returns:
        The state after the last iteration. `state.best` has the weights that the modules got, and `state.stopped` the
            reason for an early end, or None.

    Raises:
        ValueError: an input is not supported.
        PeerFailure: an input of some rank is not supported; raised on every rank in parallel training.
        DeadRank: a rank no longer answers.
        LateRank: an asynchronous worker did not send its weights within `patience_s`.
    """
    asked = Training(iterations, batch_size, rescale, penalties or Penalties(), stopping or Stopping(), parallel)
    communicator = Communicator(training_group(parallel, process_group))

    def prepare() -> OwnInputs:
        """Checks this rank's arguments of `train`, and returns this rank's weights and data. Raises `ValueError` for
        unsupported arguments.
        """
        asked.check(communicator.timeout())
        own = read_inputs(rnn, head, data, validation, asked.is_synchronous or communicator.rank != MASTER)
        if state is not None:
            state.check_fits(own.weights, own.data if own.trains else None, asked.penalties)
        return own

    own = prepare_on_all(
        communicator, prepare, lambda own: asked.shared_values(own, draws=timeline is not None, state=state)
    )
    state = state if state is not None else initial_state(communicator, own, asked.penalties, rescale=rescale)
    run = Run(iterations, batch_size, asked.stopping, own.monitored, on_iteration, Recorder())
    recording = run.recorder.start() if timeline is not None else None
    _train(state, own, run, communicator, parallel)
    write_weights(state.best.weights, rnn, head)
    if timeline is not None and recording is not None:
        save_timeline(timeline, communicator, run.recorder.stop(), in_step=asked.is_synchronous)
    return state


def _train(state: State, inputs: OwnInputs, run: Run, communicator: Communicator, parallel: Parallel) -> None:
    """Runs all training iterations on this rank: alone (`parallel` is None), synchronously, or as master or worker of
    asynchronous training.

    Args:
        state: the state to update, in place.
        inputs: this rank's weights and data.
        run: the options of the run, such as the number of iterations.
    """
    if not isinstance(parallel, Asynchronous):
        train_synchronously(state, inputs.data, run, communicator, parallel.strength if parallel is not None else 0.0)
        return
    lines = open_connections(communicator, inputs.weights.flat())
    if inputs.trains:
        run_worker(state, inputs.data, run, communicator, lines[MASTER], parallel.strength)
    else:
        Master(state, run, communicator, lines, parallel).lead()
