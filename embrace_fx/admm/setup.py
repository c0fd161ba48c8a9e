"""Prepares the first iteration: checks everybody's input; the ranks agree, or all of them refuse."""

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
from embrace_fx.admm.model import Data, Weights, expect, read_data, read_weights, run_forward
from embrace_fx.admm.progress import Best, Stopping, Sums
from embrace_fx.admm.state import State
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import PeerFailure

Parallel = Synchronous | Asynchronous | None

PREACTIVATIONS, OUTPUTS, ROUNDS = 0.5, 0.3, 8
"""Root mean squares of a and o that training starts from; rounds of rescaling [U W b], with which states change."""


@dataclass(frozen=True)
class Own:
    """A rank's own part of a training. Weights are judged on `monitored`; an asynchronous master does not train."""

    weights: Weights
    data: Data
    monitored: Data
    trains: bool


@dataclass(frozen=True)
class Training:
    """Options of a call of `train`, which must be alike on all ranks."""

    iterations: int
    batch_size: int
    rescale: bool
    penalties: Penalties
    stopping: Stopping
    parallel: Parallel

    @property
    def in_step(self) -> bool:
        return not isinstance(self.parallel, Asynchronous)

    def check(self, timeout: timedelta | None) -> None:
        """Raises ValueError for what makes no sense, with messages that time out after `timeout`."""
        fits, found = self.iterations >= 0 and self.batch_size >= 1, f"{self.iterations} and {self.batch_size}"
        expect(fits, "no less than 0 iterations, of batches of at least 1, in admm.train()", found, "Raise them.")
        if isinstance(self.parallel, Asynchronous) and timeout is not None:  # else it ends with no name to blame
            limit_s = timeout.total_seconds()
            fits, found = self.parallel.patience_s <= limit_s / 2, f"{self.parallel.patience_s:g}"
            wanted = f"a patience_s of at most half the process group's timeout, {limit_s:g} s, in admm.Asynchronous()"
            expect(fits, wanted, found, "Lower it, or raise the timeout of init_process_group().")

    def told(self, own: Own, *, draws: bool, state: State | None) -> dict[str, str]:
        """Describes, by name, what ranks compare: the options, and their own data and state."""
        return {each.name: str(getattr(self, each.name)) for each in fields(self)} | {
            "weights": ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in own.weights.tensors()),
            "a class for": "the last step" if len(own.data.y_MB) == 1 else "every step",
            "a timeline": str(draws),
            "a state": str(state is not None and (not self.in_step or state.iteration)),
        }


def group_of(parallel: Parallel, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks that train together; None for a single process. ValueError where that is not said, or cannot be."""
    ready, call = dist.is_available() and dist.is_initialized(), f"in admm.train(parallel={parallel})"
    if parallel is None:
        size = dist.get_world_size(process_group) if ready else 1
        expect(
            size == 1 and process_group is None,
            f"parallel=admm.Synchronous() or admm.Asynchronous(), in admm.train() on {size} ranks",
            "None, which would train a model of its own on each",
            "Say how they are to train together.",
        )
        return None
    remedy = "Call torch.distributed.init_process_group() before, or leave parallel out."
    expect(ready, f"torch.distributed to be initialised, {call}", "that it is not", remedy)
    group = process_group if process_group is not None else dist.group.WORLD
    workers = dist.get_world_size(group) - 1
    expect(
        not isinstance(parallel, Asynchronous) or parallel.arrivals <= workers,
        f"no more arrivals than workers, all ranks but the master, {call}",
        f"{workers} workers",
        "Start more ranks, or lower arrivals.",
    )
    return group


def read_own(
    rnn: nn.RNN, head: nn.Linear, data: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor] | None, trains: bool
) -> Own:
    """Copies of the modules' weights, and the data as it is used; ValueError for what is not supported."""
    weights = read_weights(rnn, head)
    own = judged = read_data(data, weights, batch_first=rnn.batch_first)
    if validation is not None:
        judged = read_data(validation, weights, batch_first=rnn.batch_first, name="validation")
        every_step, alike = (len(each.y_MB) == len(each.x_NBI) for each in (judged, own))
        wanted = "validation with a class per sequence, or per step, as the data has, in admm.train()"
        expect(every_step == alike, wanted, "the other", "Give it in the data's form.")
    return Own(weights, own, judged, trains)


def together(communicator: Communicator, prepare: Callable[[], Own], asked: Callable[[Own], dict[str, str]]) -> Own:
    """Calls `prepare` on every rank, and raises PeerFailure on all where it raises on one. Collective.

    Args:
        asked: what all ranks must ask for alike, by name.
    """
    if communicator.world_size == 1:
        return prepare()
    own, failure = None, None
    try:
        own = prepare()
    except Exception as error:  # whatever keeps this rank from taking part, the others must know
        failure = error
    communicator.check_none_failed(failure)
    assert own is not None
    first, *others = communicator.gather(asked(own), dict[str, str])
    failures = {}
    for rank, theirs in enumerate(others, start=1):
        if other := [f"{name} {theirs[name]}, not {value}" for name, value in first.items() if theirs[name] != value]:
            failures[rank] = f"expected to be asked for the same as rank 0, found {'; '.join(other)}"
    if failures:
        raise PeerFailure(failures)
    return own


def begin(communicator: Communicator, own: Own, penalties: Penalties, *, rescale: bool) -> State:
    """A new training from rank 0's weights, in an order of batches that torch's global generator seeds. Collective."""
    add = partial(add_over_ranks, communicator)
    flat, seed = own.weights.flat(), torch.randint(2**31, (1,))
    communicator.broadcast([flat])
    communicator.broadcast([seed])
    weights, data = own.weights.unflat(flat), own.data if own.trains else None
    scores = Sums.of(weights, own.monitored)
    loss, targets = add([scores.loss, scores.targets])
    start = rescaled(weights, data, add) if rescale else weights
    return State.begin(start, data, penalties, Best(0, loss / targets, weights), int(seed))


def rescaled(weights: Weights, data: Data | None, add: Callable[[Sequence[float]], Sequence[float]]) -> Weights:
    """Scales [U W b] to a root mean square of `PREACTIVATIONS`, then [V c] to one of `OUTPUTS`. Collective.

    Starts that differ by a factor become the same. `data` is a rank's, if it trains; `add` sums over ranks, by place.
    """
    for rounds in reversed(range(ROUNDS + 1)):
        squares, count = 0.0, 0
        if data is not None:
            forward = run_forward(weights, data.x_NBI, len(data.y_MB))
            values = forward.cell_NBF @ weights.cell_HF.t() if rounds else forward.o_MBC
            squares, count = float(values.double().square().sum()), values.numel()
        squares, numbers = add([squares, count])
        if squares > 0:  # of weights that are all zero there is nothing to rescale
            factor = (PREACTIVATIONS if rounds else OUTPUTS) / (squares / numbers) ** 0.5
            cell, head = (factor, 1.0) if rounds else (1.0, factor)
            weights = Weights(weights.cell_HF * cell, weights.head_CG * head)
    return weights
