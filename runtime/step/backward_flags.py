"""What ranks tell each other of a backward: one tiny AllReduce under it, read at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.runtime.ranks.communicator import Communicator

_NAME = "backward flags"
"""Of the exchange, where a rank that does not come to it is named."""

_BITS = 62
"""Results that one number can name, a bit each."""

FAILED = -1
"""Told in place of how many tensors were written: this rank has no gradients."""

Finish = Callable[[str, Exception | None], Callable[[int], bool]]


def launch_flags(
    scalars: Sequence[Tensor],
    given: Sequence[int],
    written: int,
    communicator: Communicator,
    streams: Streams | None,
) -> Finish:
    """Begins the exchange. Collective.

    Args:
        scalars: the step's scalar results.
        given: the results that this rank's backward starts from, by index; those beyond the bits of a number count as
            such anyway.
        written: how many of the tensors that the backward reads were written since the forward; or `FAILED`.
        streams: of the device that the results are on; None: they are on the host.

    Returns:
        What ends it. Told in words what was written on this rank, and why it failed, it returns a function that says
        whether any rank's backward starts from a result. On every rank it raises
            PeerFailure where a rank has failed,
            RuntimeError where what the backward of any rank reads was written,
            FloatingPointError where a scalar result of any rank is not finite.
    """
    bits = sum(1 << index for index in given if index < _BITS)
    if streams is None or not scalars:
        read = _launch(scalars, bits, written, communicator)
    else:
        read = _launch_on(streams, scalars, bits, written, communicator)

    def finish(names: str, failure: Exception | None) -> Callable[[int], bool]:
        not_finite, writes, starts = read()
        if FAILED in writes:
            raise communicator.failures(failure)
        if ranks := _ranks(writes):
            raise RuntimeError(
                "expected the batch, the results and the parameters to be as the forward left them, in backward(), "
                f"found some that the backward reads written in place since, on rank(s) {ranks} ({names or 'none here'}"
                "). No gradient of this step was kept, on any rank: write copies, and step the optimizer after the "
                "backwards of all calls."
            )
        if ranks := _ranks(not_finite):
            raise FloatingPointError(
                f"expected a finite loss on every rank, in backward(), found nan or inf on rank(s) {ranks}. No "
                "gradient of this step was kept, on any rank: skip the batch, or lower the learning rate."
            )
        of_any = reduce(or_, starts)
        return lambda index: index >= _BITS or bool(of_any >> index & 1)

    return finish


def _ranks(counts: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank, count in enumerate(counts) if count)


def _launch(
    scalars: Sequence[Tensor], bits: int, written: int, communicator: Communicator
) -> Callable[[], list[list[int]]]:
    """By rank: how many scalars are not finite, `written`, `bits`."""
    flags = torch.zeros((3, communicator.world_size), dtype=torch.int64)
    own = [sum(not math.isfinite(scalar.item()) for scalar in scalars), written, bits]
    flags[:, communicator.rank] = torch.tensor(own)
    if communicator.world_size == 1:
        return flags.tolist
    communicator.progress.note(_NAME)
    launched = communicator.all_reduce_(flags, "sum", "ids")
    return lambda: communicator.wait(launched, _NAME).tolist()


def _launch_on(
    streams: Streams, scalars: Sequence[Tensor], bits: int, written: int, communicator: Communicator
) -> Callable[[], list[list[int]]]:
    """Likewise on a device: the host, which enqueues the whole backward meanwhile, waits for the forward's end."""
    there = streams.record("loss ready")
    with streams.on("ids", "backward flags"):
        streams.wait(there)
        streams.keep(*scalars)
        flags = torch.zeros((3, communicator.world_size), dtype=torch.int64, device=scalars[0].device)
        flags[0, communicator.rank] = torch.stack([~scalar.isfinite() for scalar in scalars]).sum()
        flags[1, communicator.rank] = written
        flags[2, communicator.rank] = bits
        if communicator.world_size > 1:
            communicator.wait(communicator.all_reduce_(flags, "sum", "ids"))
        copy, done = streams.to_host(flags), streams.record("backward flags done")
    return lambda: streams.read(done, copy)
