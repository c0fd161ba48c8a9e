"""Whether the loss is a number on every rank: one tiny AllReduce under the backward, read at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from embrace_fx.runtime.communicator import Communicator
from embrace_fx.runtime.streams import Streams


def launch_finite_check(
    scalars: Sequence[Tensor], communicator: Communicator, streams: Streams | None
) -> Callable[[], None]:
    """Begins the check of a step's scalar results. Collective.

    Args:
        streams: of the device that the results are on; None: they are on the host.

    Returns: what ends it, and raises FloatingPointError, on every rank, where a scalar of any rank is not finite.
    """
    if streams is None or not scalars:
        count = _count(scalars, communicator)
    else:
        count = _count_on(streams, scalars, communicator)

    def check() -> None:
        bad = [rank for rank, number in enumerate(count()) if number]
        if bad:
            raise FloatingPointError(
                "expected a finite loss on every rank, in backward(), found nan or inf on rank(s) "
                f"{', '.join(map(str, bad))}. No gradient of this step was kept, on any rank: skip the batch, or lower "
                "the learning rate."
            )

    return check


def _count(scalars: Sequence[Tensor], communicator: Communicator) -> Callable[[], list[int]]:
    """Finds how many are not finite, by rank."""
    flags = torch.zeros(communicator.world_size, dtype=torch.int64)
    flags[communicator.rank] = sum(not math.isfinite(scalar.item()) for scalar in scalars)
    if communicator.world_size == 1:
        return flags.tolist
    launched = communicator.all_reduce_(flags, "sum", "ids")
    return lambda: communicator.wait(launched).tolist()


def _count_on(streams: Streams, scalars: Sequence[Tensor], communicator: Communicator) -> Callable[[], list[int]]:
    """Likewise on a device: the host, which enqueues the whole backward meanwhile, waits for the forward's end."""
    there = streams.record("loss ready")
    with streams.on("ids", "finite check"):
        streams.wait(there)
        streams.keep(*scalars)
        flags = torch.zeros(communicator.world_size, dtype=torch.int64, device=scalars[0].device)
        flags[communicator.rank] = torch.stack([~scalar.isfinite() for scalar in scalars]).sum()
        if communicator.world_size > 1:
            communicator.wait(communicator.all_reduce_(flags, "sum", "ids"))
        copy, done = streams.to_host(flags), streams.record("finite check done")
    return lambda: streams.read(done, copy)
