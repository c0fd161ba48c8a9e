"""`train`: what a user calls."""

from __future__ import annotations

from torch import Tensor, nn

from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.loop import Alone, OnIteration, Run, iterate
from embrace_fx.admm.model import read_data, read_weights, write_weights
from embrace_fx.admm.progress import Scores
from embrace_fx.admm.state import State
from embrace_fx.admm.stopping import Stopping
from embrace_fx.runtime.recorder import Recorder


def train(
    rnn: nn.RNN,
    head: nn.Linear,
    data: tuple[Tensor, Tensor],
    *,
    iterations: int = 200,
    penalties: Penalties | None = None,
    stopping: Stopping | None = None,
    validation: tuple[Tensor, Tensor] | None = None,
    state: State | None = None,
    on_iteration: OnIteration | None = None,
) -> State:
    if iterations < 0:
        raise ValueError(f"expected no less than 0 iterations, in admm.train(), found {iterations}.")
    weights = read_weights(rnn, head)
    own = read_data(data, weights, batch_first=rnn.batch_first)
    monitored = (
        read_data(validation, weights, batch_first=rnn.batch_first, name="validation")
        if validation is not None
        else own
    )
    penalties = penalties or Penalties()
    if state is None:
        scores = Scores.of(weights, monitored)
        state = State.begin(weights, own, penalties, scores.loss / scores.targets)
    else:
        state.check_fits(weights, own, penalties)
    run = Run(iterations, stopping or Stopping(), monitored, on_iteration, Recorder())
    iterate(state, own, run, Alone())
    write_weights(state.best.weights, rnn, head)
    return state
