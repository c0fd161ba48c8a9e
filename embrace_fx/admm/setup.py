"""Prepares the first iteration: checks the input of all ranks, and raises on all if any is invalid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embrace_fx.admm.asynchronous import Asynchronous
from embrace_fx.admm.consensus import Synchronous, add_over_ranks
from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.model import Data, Weights, read_data, read_weights, require, run_forward
from embrace_fx.admm.progress import Best, Stopping, Sums
from embrace_fx.admm.state import State
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import PeerFailure

Parallel = Synchronous | Asynchronous | None

PREACTIVATIONS, OUTPUTS, ROUNDS = 0.5, 0.3, 8
"""Initial root mean squares of a and o; rounds of rescaling [U W b], each of which changes the states."""


@dataclass(frozen=True)
class OwnInputs:
    """The weights and data that this rank passed to `train`.

    Attributes:
        weights: the modules' weights.
        data: the data to train on.
        monitored: the data to evaluate weights on.
        trains: whether this rank trains on `data`; an asynchronous master does not.
    """

    weights: Weights
    data: Data
    monitored: Data
    trains: bool


@dataclass(frozen=True)
class Training:
    """The options of a call of `admm.train`, which must be equal on all ranks. Their meanings are documented there."""

    iterations: int
    batch_size: int
    rescale: bool
    penalties: Penalties
    stopping: Stopping
    parallel: Parallel

    @property
    def is_synchronous(self) -> bool:
        """Whether training is synchronous (ranks wait for each other after each iteration) or in a single process."""
        return not isinstance(self.parallel, Asynchronous)

    def check(self, timeout: timedelta | None) -> None:
        """Raises `ValueError` for invalid options.

        Args:
            timeout: the process group's timeout, or None if it is unknown or there is no group. `patience_s` may be at
                most half of the timeout, because an error after the timeout would not name the late rank.
        """
        require(
            self.iterations >= 0 and self.batch_size >= 1,
            f"admm.train(): iterations is {self.iterations} and batch_size {self.batch_size}. Pass at least 0 "
            "iterations and a batch_size of at least 1.",
        )
        if isinstance(self.parallel, Asynchronous) and timeout is not None:
            limit_s = timeout.total_seconds()
            require(
                self.parallel.patience_s <= limit_s / 2,
                f"admm.Asynchronous(): patience_s is {self.parallel.patience_s:g}, more than half of the process "
                f"group's timeout of {limit_s:g} s. Lower it, or raise the timeout of init_process_group().",
            )

    def shared_values(self, inputs: OwnInputs, *, draws: bool, state: State | None) -> dict[str, str]:
        """Returns name -> text of everything that must be equal on all ranks: the options, the shapes and dtypes of the
        weights, whether targets are per sequence or per step, and whether the call has a timeline and a state.

        Args:
            inputs: this rank's weights and data.
            draws: whether this rank's call asked for a timeline.
            state: the state to resume from, or None.
        """
        return {each.name: str(getattr(self, each.name)) for each in fields(self)} | {
            "weights": ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in inputs.weights.tensors()),
            "a class for": "the last step" if len(inputs.data.y_MB) == 1 else "every step",
            "a timeline": str(draws),
            "a state": str(state is not None and (not self.is_synchronous or state.iteration)),
        }


def training_group(parallel: Parallel, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the process group of the ranks that train together, or None for a single process. Raises `ValueError` if
    the parallel method does not fit the group.

    Args:
        parallel: the parallel method, or None for a single process.
        process_group: the group that the user passed, or None for the default group.
    """
    ready, call = dist.is_available() and dist.is_initialized(), f"admm.train(parallel={parallel})"
    if parallel is None:
        size = dist.get_world_size(process_group) if ready else 1
        require(
            size == 1 and process_group is None,
            f"admm.train() on {size} ranks without parallel= would train a separate model on each. Pass "
            "admm.Synchronous() or admm.Asynchronous().",
        )
        return None
    require(
        ready,
        f"{call}: torch.distributed is not initialized. Call torch.distributed.init_process_group() before, or leave "
        "parallel out.",
    )
    group = process_group if process_group is not None else dist.group.WORLD
    workers = dist.get_world_size(group) - 1
    require(
        not isinstance(parallel, Asynchronous) or parallel.arrivals <= workers,
        f"{call}: arrivals is more than the {workers} workers, all ranks except the master. Start more ranks, or lower "
        "arrivals.",
    )
    return group


def read_inputs(
    rnn: nn.RNN, head: nn.Linear, data: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor] | None, trains: bool
) -> OwnInputs:
    """Reads this rank's inputs: copies the modules' weights and converts the data. Raises `ValueError` for unsupported
    input.

    Args:
        rnn, head, data: as for `train`.
        validation: data to evaluate weights on; `data` if None.
        trains: whether this rank trains on `data`; an asynchronous master does not.
    """
    weights = read_weights(rnn, head)
    own = judged = read_data(data, weights, batch_first=rnn.batch_first)
    if validation is not None:
        judged = read_data(validation, weights, batch_first=rnn.batch_first, name="validation")
        every_step, alike = (len(each.y_MB) == len(each.x_NBI) for each in (judged, own))
        require(
            every_step == alike,
            "admm.train(): of data and validation, one has a class per sequence and the other a class per step. Use "
            "one form for both.",
        )
    return OwnInputs(weights, own, judged, trains)


def prepare_on_all(
    communicator: Communicator, prepare: Callable[[], OwnInputs], shared_values: Callable[[OwnInputs], dict[str, str]]
) -> OwnInputs:
    """Calls `prepare` on every rank, and returns this rank's result. Collective. Raises `PeerFailure` on all ranks if
    `prepare` raises on one, or if ranks differ in a shared value.

    Args:
        shared_values: returns name -> text of the settings that must be equal on all ranks.
    """
    if communicator.world_size == 1:
        return prepare()
    own, failure = None, None
    try:
        own = prepare()
    except Exception as error:  # the other ranks must learn of any error
        failure = error
    communicator.check_none_failed(failure)
    assert own is not None
    first, *others = communicator.gather(shared_values(own), dict[str, str])
    failures = {}
    for rank, theirs in enumerate(others, start=1):
        if other := [f"{name} {theirs[name]}, not {value}" for name, value in first.items() if theirs[name] != value]:
            failures[rank] = f"the call of admm.train() differs from rank 0's: {'; '.join(other)}"
    if failures:
        raise PeerFailure(failures)
    return own


def initial_state(communicator: Communicator, inputs: OwnInputs, penalties: Penalties, *, rescale: bool) -> State:
    """Returns the state of a new training. All ranks get rank 0's weights. They also get a seed for the order of
    batches, which rank 0 draws from torch's global generator. Collective.

    Args:
        inputs: this rank's weights and data.
        penalties, rescale: as for `train`.
    """
    add = partial(add_over_ranks, communicator)
    flat, seed = inputs.weights.flat(), torch.randint(2**31, (1,))
    communicator.broadcast([flat])
    communicator.broadcast([seed])
    weights, data = inputs.weights.from_flat(flat), inputs.data if inputs.trains else None
    scores = Sums.of_model(weights, inputs.monitored)
    loss, targets = add([scores.loss, scores.targets])
    start = rescale_weights(weights, data, add) if rescale else weights
    return State.begin(start, data, penalties, Best(0, loss / targets, weights), int(seed))


def rescale_weights(weights: Weights, data: Data | None, add: Callable[[Sequence[float]], Sequence[float]]) -> Weights:
    """Scales initial weights so that preactivations and outputs have root mean squares that suit ADMM. Returns the
    scaled weights. Collective.

    First the RNN's weights are scaled until preactivations have the root mean square `PREACTIVATIONS`. Then the head's
    weights are scaled until outputs have `OUTPUTS`. Initial weights that differ only by a factor give the same result.

    Args:
        weights: the initial weights.
        data: this rank's data, or None if it does not train.
        add: returns the sum over ranks of each number in a sequence.
    """
    for rounds in reversed(range(ROUNDS + 1)):
        squares, count = 0.0, 0
        if data is not None:
            forward = run_forward(weights, data.x_NBI, len(data.y_MB))
            values = forward.cell_NBF @ weights.cell_HF.t() if rounds else forward.o_MBC
            squares, count = float(values.double().square().sum()), values.numel()
        squares, numbers = add([squares, count])
        if squares > 0:  # weights that are all zero cannot be rescaled
            factor = (PREACTIVATIONS if rounds else OUTPUTS) / (squares / numbers) ** 0.5
            cell, head = (factor, 1.0) if rounds else (1.0, factor)
            weights = Weights(weights.cell_HF * cell, weights.head_CG * head)
    return weights
