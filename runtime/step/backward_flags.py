"""Checks at the end of a backward that all ranks have succeeded, by exchanging a few numbers (flags) while it runs.

On the host it is gathered, in one message's time; an AllReduce's ring would take 2 (N-1) of them, one after the other,
each behind the gradients on their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.runtime.ranks.communicator import Communicator

_NAME = "backward flags"
"""Of the exchange, where a rank that does not come to it is named."""

FAILED = -1
"""Sent in place of the number of written tensors by a rank that has no gradients."""

Finish = Callable[[str, Exception | None, Callable[[], bool]], tuple[int, ...]]


def launch_flags(
    scalars: Sequence[Tensor],
    used: Sequence[int],
    written: int,
    communicator: Communicator,
    streams: Streams | None,
) -> Finish:
    """Starts exchanging the flags of a backward. Flags are numbers by which each rank tells the others whether its
    backward has succeeded. Collective.

    Args:
        scalars: the step's scalar results, which must be finite.
        used: the parameters that the backward reaches, encoded by `UsedParameters.words`.
        written: the number of tensors that the backward reads and that were written since the forward, or `FAILED`.
        streams: the streams of the results' device, or None if they are on the host.

    Returns:
        A function that waits for the flags of all ranks: `_finish`, from its third argument on.
    """
    if streams is None or not scalars:
        read = _exchange_flags(scalars, used, written, communicator)
    else:
        read = _exchange_flags_on_device(streams, scalars, used, written, communicator)
    return partial(_finish, read, communicator)


def _finish(
    read: Callable[[], list[int]],
    communicator: Communicator,
    names: str,
    failure: Exception | None,
    is_harmless: Callable[[], bool],
) -> tuple[int, ...]:
    """Waits for the flags of all ranks, and returns the sums of `used` over ranks.

    Args:
        read: waits for the flags. Returns, in one list, for each rank the number of scalars that are not finite, for
            each rank `written`, and the sums of `used` over ranks.
        names: the names of the tensors written on this rank.
        failure: the error that ended the backward on this rank, or None.
        is_harmless: returns whether this rank's gradients are valid although a scalar result is not finite.

    Raises:
        PeerFailure: a rank has failed. This and the other errors are raised on every rank.
        RuntimeError: a rank has written tensors that the backward reads.
        FloatingPointError: a scalar result of a rank is not finite, and neither are its gradients.
    """
    flags, size = read(), communicator.world_size
    not_finite, writes, counts = flags[:size], flags[size : 2 * size], flags[2 * size :]
    if not any(writes) and not any(not_finite):
        return tuple(counts)
    if FAILED in writes:
        communicator.check_none_failed(failure)
    if ranks := _list_ranks(writes):
        raise RuntimeError(
            "backward(): tensors that it needs (of the batch, results or parameters) were written in place after "
            f"the forward, on rank(s) {ranks} (on this rank: {names or 'none'}). No rank kept a gradient of this "
            "step. Write to copies, and call optimizer.step() only after the backward of every forward."
        )
    harmless = communicator.gather(is_harmless(), bool)
    if ranks := _list_ranks([0 if each else count for each, count in zip(harmless, not_finite, strict=True)]):
        raise FloatingPointError(
            f"backward(): the loss is nan or inf on rank(s) {ranks}. No rank kept a gradient of this step. "
            "Skip the batch, or lower the learning rate."
        )
    return tuple(counts)


def _list_ranks(counts: Sequence[int]) -> str:
    """Returns the ranks whose entry in `counts` is not zero, as text separated by commas."""
    return ", ".join(str(rank) for rank, count in enumerate(counts) if count)


def _exchange_flags(
    scalars: Sequence[Tensor], used: Sequence[int], written: int, communicator: Communicator
) -> Callable[[], list[int]]:
    """Starts exchanging the flags of a backward, as `launch_flags`. Returns the function `read` of `_finish`."""
    own = [len(scalars) - sum(map(math.isfinite, map(Tensor.item, scalars))), written, *used]
    communicator.progress.record(_NAME)
    launched = communicator.gather_equal(torch.tensor(own, dtype=torch.int64, device="cpu"), "ids")

    def read() -> list[int]:
        flags = communicator.wait(launched, _NAME)
        return [*flags[:, :2].t().flatten().tolist(), *flags[:, 2:].sum(0).tolist()]

    return read


def _exchange_flags_on_device(
    streams: Streams, scalars: Sequence[Tensor], used: Sequence[int], written: int, communicator: Communicator
) -> Callable[[], list[int]]:
    """Does the same as `_exchange_flags`, for scalars on a device. To read the flags, the host waits for the forward,
    which computes the scalars, but not for the backward.
    """
    size, rank = communicator.world_size, communicator.rank
    there = streams.record("loss ready")
    with streams.on("ids", "backward flags"):
        streams.wait(there)
        streams.keep(*scalars)
        own = [0] * (2 * size)
        own[size + rank] = written
        flags = streams.to_device(torch.tensor([*own, *used], device="cpu"))
        values = torch.stack(list(scalars))
        # Count the values that are not finite: for them, value - value is nan.
        torch.sum((values - values).ne(0), dim=0, out=flags[rank])
        communicator.wait(communicator.all_reduce_(flags, "sum", "ids"))
        copy, done = streams.to_host(flags), streams.record("backward flags done")
    return lambda: streams.read(done, copy)
