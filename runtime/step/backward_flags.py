"""Checks at the end of a backward that all ranks have succeeded, by exchanging a few numbers (flags) while it runs.

They are gathered, in one message's time; an AllReduce's ring would take 2 (N-1) of them, one after the other, each
behind the gradients on their way. If scalars are on a device, the host waits for the forward, which computes them, but
not for the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from embrace_fx.runtime.launch.streams import choose_streams
from embrace_fx.runtime.ranks.communicator import Communicator

_NAME = "backward flags"
"""Of the exchange, where a rank that does not come to it is named."""

FAILED = -1
"""Sent in place of the number of written tensors by a rank that has no gradients."""

Finish = Callable[[str, Exception | None, Callable[[], bool]], tuple[int, ...]]


def launch_flags(scalars: Sequence[Tensor], used: Sequence[int], written: int, communicator: Communicator) -> Finish:
    """Starts exchanging the flags of a backward. Flags are numbers by which each rank tells the others whether its
    backward has succeeded. Collective.

    Args:
        scalars: the step's scalar results, which must be finite, on the host or on one device.
        used: the parameters that the backward reaches, encoded by `UsedParameters.words`.
        written: the number of tensors that the backward reads and that were written since the forward, or `FAILED`.

    Returns:
        A function that waits for the flags of all ranks: `_finish`, from its third argument on.
    """
    flags = torch.tensor([0, written, *used], dtype=torch.int64, device="cpu")
    streams = choose_streams(scalars[0].device) if scalars else None
    if streams is None:
        flags[0] = len(scalars) - sum(map(math.isfinite, map(Tensor.item, scalars)))
        communicator.progress.record(_NAME)
        launched = communicator.gather_equal(flags, "ids")
        return partial(_finish, lambda: communicator.wait(launched, _NAME).tolist(), communicator)
    there = streams.record("loss ready")
    with streams.on("ids", _NAME):
        streams.wait(there)
        streams.keep(*scalars)
        flags, values = streams.to_device(flags), torch.stack(list(scalars))
        # Count the values that are not finite: for them, value - value is nan.
        torch.sum((values - values).ne(0), dim=0, out=flags[0])
        copy = streams.to_host(communicator.wait(communicator.gather_equal(flags, "ids")))
        done = streams.record("backward flags done")
    return partial(_finish, partial(streams.read, done, copy), communicator)


def _finish(
    read: Callable[[], list[list[int]]],
    communicator: Communicator,
    names: str,
    failure: Exception | None,
    is_harmless: Callable[[], bool],
) -> tuple[int, ...]:
    """Waits for the flags of all ranks, and returns the sums of `used` over ranks.

    Args:
        read: waits for the flags. Returns for each rank the number of scalars that are not finite, `written`, and
            `used`, in one list.
        names: the names of the tensors written on this rank.
        failure: the error that ended the backward on this rank, or None.
        is_harmless: returns whether this rank's gradients are valid although a scalar result is not finite.

    Raises:
        PeerFailure: a rank has failed. This and the other errors are raised on every rank.
        RuntimeError: a rank has written tensors that the backward reads.
        FloatingPointError: a scalar result of a rank is not finite, and neither are its gradients.
    """
    not_finite, writes, *of_used = zip(*read(), strict=True)
    counts = tuple(map(sum, of_used))
    if not any(writes) and not any(not_finite):
        return counts
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
    return counts


def _list_ranks(counts: Sequence[int]) -> str:
    """Returns the ranks whose entry in `counts` is not zero, as text separated by commas."""
    return ", ".join(str(rank) for rank, count in enumerate(counts) if count)
