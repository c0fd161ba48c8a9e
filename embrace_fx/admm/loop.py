"""Iterations in step: of one process, or of ranks that agree after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

from embrace_fx.admm.model import Data
from embrace_fx.admm.operations import FIGURES
from embrace_fx.admm.progress import Progress, Scores, Splits, progress_of
from embrace_fx.admm.state import State
from embrace_fx.admm.stopping import Stopping
from embrace_fx.admm.sweep import Consensus, Sweeper
from embrace_fx.runtime.launch.recorder import Recorder

OnIteration = Callable[[Progress], object]


class Ranks(Protocol):
    """Those that iterate together."""

    def pull(self, state: State) -> Consensus | None:
        """What holds this rank's weights to the others'."""

    def agree(self, state: State) -> None:
        """Makes `agreed` and `duals` anew, from all ranks' weights."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks, by place."""


class Alone:
    """A single process: its weights are the agreed ones."""

    def pull(self, state: State) -> Consensus | None:
        return None

    def agree(self, state: State) -> None:
        state.agreed = state.weights

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)


@dataclass(frozen=True)
class Run:
    """How long a training goes on, what it is judged on, and who is told.

    Attributes:
        iterations: at which it ends; a resumed one counts those before it.
        monitored: data whose loss decides what is kept.
        on_iteration: called after each iteration.
        recorder: told what is done, for timelines.
    """

    iterations: int
    stopping: Stopping
    monitored: Data
    on_iteration: OnIteration | None
    recorder: Recorder


def iterate(state: State, data: Data, run: Run, ranks: Ranks) -> None:
    """Iterates until the run says stop; `state` is brought forward in place."""
    sweeper = Sweeper(data, state.penalties)
    assert state.variables is not None
    start_s = time.perf_counter() - state.elapsed_s
    state.stopped = None
    while state.iteration < run.iterations and state.stopped is None:
        run.recorder.window()
        state.weights, state.variables, residuals = sweeper.iterate(
            state.weights, state.variables, ranks.pull(state), run.recorder.mark
        )
        ranks.agree(state)
        splits = Splits.of(residuals, state.variables, data, state.penalties, state.gap())
        scores = Scores.of(state.agreed, run.monitored)
        run.recorder.mark(FIGURES)
        sums = ranks.sum([*astuple(scores), *astuple(splits)])
        state.iteration += 1
        progress = progress_of(
            state.iteration,
            Scores(*sums[: len(astuple(scores))]),
            Splits(*sums[len(astuple(scores)) :]),
            staleness=0,
            elapsed_s=time.perf_counter() - start_s,
        )
        state.advance(progress, run.stopping)
        if run.on_iteration is not None:
            run.on_iteration(progress)
