"""What comes before the first iteration: everybody's input is checked, and the ranks agree or all of them refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embrace_fx.admm.asynchronous import Asynchronous
from embrace_fx.admm.consensus import Synchronous
from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.model import Data, Weights, read_data, read_weights
from embrace_fx.admm.progress import Scores
from embrace_fx.admm.state import State
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import PeerFailure

Parallel = Synchronous | Asynchronous | None


@dataclass(frozen=True)
class Own:
    """What a rank brings along.

    Attributes:
        monitored: data that weights are judged on.
        trains: whether the rank has variables; an asynchronous master has none.
    """

    weights: Weights
    data: Data
    monitored: Data
    trains: bool


def group_of(parallel: Parallel, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks that train together; None for a single process.

    Raises:
        ValueError: where it does not say how several ranks are to train, or there are too few of them.
    """
    ready = dist.is_available() and dist.is_initialized()
    if parallel is None:
        size = dist.get_world_size(process_group) if ready else 1
        if size > 1 or process_group is not None:
            raise ValueError(
                f"expected parallel=admm.Synchronous() or admm.Asynchronous(), in admm.train() on {size} ranks, found "
                "None, which would train a model of its own on each. Say how they are to train together."
            )
        return None
    if not ready:
        raise ValueError(
            f"expected torch.distributed to be initialised, in admm.train(parallel={parallel}), found that it is not. "
            "Call torch.distributed.init_process_group() before, or leave parallel out."
        )
    group = process_group if process_group is not None else dist.group.WORLD
    workers = dist.get_world_size(group) - 1
    if isinstance(parallel, Asynchronous) and not parallel.arrivals <= workers:
        raise ValueError(
            f"expected no more arrivals than workers, all ranks but the master, in admm.train(parallel={parallel}), "
            f"found {workers} workers. Start more ranks, or lower arrivals."
        )
    return group


def check_patience(communicator: Communicator, parallel: Parallel) -> None:
    """Raises ValueError where messages would time out, with no name to blame, before the master's patience ends."""
    timeout = communicator.timeout()
    if isinstance(parallel, Asynchronous) and timeout is not None and parallel.patience_s > timeout.total_seconds() / 2:
        raise ValueError(
            f"expected a patience_s of at most half the process group's timeout, {timeout.total_seconds():g} s, in "
            f"admm.Asynchronous(), found {parallel.patience_s:g}. Lower it, or raise the timeout of "
            "init_process_group()."
        )


def read_own(
    rnn: nn.RNN,
    head: nn.Linear,
    data: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor] | None,
    trains: bool,
) -> Own:
    """Copies of the modules' weights, and the data as it is used.

    Raises:
        ValueError: for what is not supported.
    """
    weights = read_weights(rnn, head)
    own = read_data(data, weights, batch_first=rnn.batch_first)
    judged = own
    if validation is not None:
        judged = read_data(validation, weights, batch_first=rnn.batch_first, name="validation")
        if (judged.y_MB.shape[0] == judged.steps) != (own.y_MB.shape[0] == own.steps):
            raise ValueError(
                "expected validation with a class per sequence, or per step, as the data has, in admm.train(), found "
                "the other."
            )
    return Own(weights, own, judged, trains)


def together(communicator: Communicator, prepare: Callable[[], Own], asked: Callable[[Own], dict[str, str]]) -> Own:
    """Calls `prepare` on every rank, and raises on all ranks where it raises on one. Collective.

    Args:
        asked: what all ranks must ask for alike, by name.

    Raises:
        PeerFailure: a rank's input is not supported, or ranks ask for different things; on all ranks.
        Exception: in a single process, whatever `prepare` raises.
    """
    if communicator.world_size == 1:
        return prepare()
    own, wishes, failure = None, None, None
    try:
        own = prepare()
        wishes = asked(own)
    except Exception as error:  # whatever keeps this rank from taking part, the others must know
        failure = f"{type(error).__name__}: {error}"
    everyone = communicator.gather((failure, wishes), tuple[str | None, dict[str, str] | None])
    failures = {rank: text for rank, (text, _) in enumerate(everyone) if text is not None}
    able = {rank: theirs for rank, (_, theirs) in enumerate(everyone) if theirs is not None}
    first = min(able, default=0)
    for rank, theirs in able.items():
        other = [f"{name} {theirs[name]}, not {value}" for name, value in able[first].items() if theirs[name] != value]
        if other:
            failures[rank] = f"expected to be asked for the same as rank {first}, found {'; '.join(other)}"
    if failures or own is None:
        raise PeerFailure(failures)
    return own


def begin(communicator: Communicator, own: Own, penalties: Penalties) -> State:
    """A new training from rank 0's weights. Collective."""
    flat = own.weights.flat()
    communicator.broadcast([flat])
    weights = own.weights.unflat(flat)
    scores = Scores.of(weights, own.monitored)
    sums = torch.tensor([scores.loss, scores.targets], dtype=torch.float64)
    loss, targets = communicator.reduce_scalar(sums, dist.ReduceOp.SUM).tolist()
    return State.begin(weights, own.data if own.trains else None, penalties, loss / targets)


def mean_sequences(communicator: Communicator, own: Own) -> float:
    """Of the ranks that train. Collective."""
    sums = torch.tensor([own.data.sequences, 1] if own.trains else [0, 0], dtype=torch.float64)
    sequences, ranks = communicator.reduce_scalar(sums, dist.ReduceOp.SUM).tolist()
    return float(sequences / ranks)
