"""`train`: what a user calls."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import Tensor, nn

from embrace_fx.admm.asynchronous import MASTER, Asynchronous, Master, open_lines, work
from embrace_fx.admm.consensus import OnIteration, Run, train_in_step
from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.model import write_weights
from embrace_fx.admm.progress import Stopping
from embrace_fx.admm.setup import Own, Parallel, Training, begin, group_of, read_own, together
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

    An iteration is an epoch. There is no learning rate: how far a batch moves states and weights follows from
    penalties, which need no tuning. The weights with the lowest loss are left in the modules; `nn.RNN`'s two biases
    become one, in `bias_ih_l0`. Source: P-ADMMiRNN (arXiv 2006.05622), changed as `docs/admm.md` says.

    Args:
        rnn: one tanh layer in one direction, float32 or float64, with or without `batch_first`.
        head: from hidden units to scores of classes.
        data: inputs (B, N, I), or (N, B, I) without `batch_first`, and classes, int64: (B,) where the head judges a
            sequence by its last state, or as the inputs' first two sizes where it judges every step (language model).
            In a parallel training, the rank's own sequences; the asynchronous master's are never trained on.
        iterations: at which training ends; of a resumed one, those before it included. The master's, each an update
            of the agreed weights, where ranks are asynchronous.
        batch_size: sequences that move together, in an order that torch's global generator seeds.
        penalties, stopping: `Penalties()` and `Stopping()` if None.
        rescale: makes the initial weights as large as the method likes them (`start`). False: to train on from what is
            trained already.
        validation: data to judge weights on, as `data`; the training data itself if None.
        state: a state to resume from, to the same bits as without a break but for asynchronous ranks.
        parallel, process_group: how ranks train together, of the default group if None. Without: this process alone.
        on_iteration: called with an iteration's figures.
        timeline: a file to draw all ranks' doings to, by rank 0: .svg, .html or .json.

    Returns: the state after the last iteration: `state.best` is in the modules, `state.stopped` is why it ended early.

    Raises:
        ValueError: for what is not supported; in a parallel training `PeerFailure`, on every rank.
        DeadRank: a rank is gone, by its name.
        LateRank: an asynchronous worker does not arrive within the master's patience.
    """
    asked = Training(iterations, batch_size, rescale, penalties or Penalties(), stopping or Stopping(), parallel)
    communicator = Communicator(group_of(parallel, process_group))

    def prepare() -> Own:
        asked.check(communicator.timeout())
        own = read_own(rnn, head, data, validation, asked.in_step or communicator.rank != MASTER)
        if state is not None:
            state.check_fits(own.weights, own.data if own.trains else None, asked.penalties)
        return own

    own = together(communicator, prepare, lambda own: asked.told(own, draws=timeline is not None, state=state))
    state = state if state is not None else begin(communicator, own, asked.penalties, rescale=rescale)
    run = Run(iterations, batch_size, asked.stopping, own.monitored, on_iteration, Recorder())
    recording = run.recorder.start() if timeline is not None else None
    _train(state, own, run, communicator, parallel)
    write_weights(state.best.weights, rnn, head)
    if timeline is not None and recording is not None:
        save_timeline(timeline, communicator, run.recorder.stop(), in_step=asked.in_step)
    return state


def _train(state: State, own: Own, run: Run, communicator: Communicator, parallel: Parallel) -> None:
    """The iterations of this rank, in its part."""
    if not isinstance(parallel, Asynchronous):
        train_in_step(state, own.data, run, communicator, parallel.strength if parallel is not None else 0.0)
        return
    lines = open_lines(communicator, own.weights.flat())
    if own.trains:
        work(state, own.data, run, communicator, lines[MASTER], parallel.strength)
    else:
        Master(state, run, communicator, lines, parallel).lead()
