"""Chooses where a model's values are offloaded to (a directory, or a GPU's host), and measures the speed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial

import torch

from embrace_fx.cost.links import Compute
from embrace_fx.passes.memory.copy_placement import NO_COPIES, CopyRate
from embrace_fx.runtime.launch.streams import choose_streams
from embrace_fx.runtime.memory.copies import Copies, FileCopies, Measured, PinnedCopies
from embrace_fx.runtime.probe.pace import measure_pace
from embrace_fx.setup.context import Context


def set_up_offloading(context: Context, compute: Compute) -> tuple[Copies | None, CopyRate]:
    """Prepares offloading of values saved for the backward. Returns the object that copies them, and the rate of copies
    on the slowest rank. Collective, unless there is no place to copy to; then returns (None, `NO_COPIES`).

    Args:
        compute: the assumed speed of compute. Only the ratios of its time estimates are right, so the rate is expressed
            in these estimated milliseconds.
    """
    options, devices = context.options, {parameter.device for parameter in context.model.parameters()}
    device = next(iter(devices), torch.device("cpu"))
    streams = choose_streams(device) if len(devices) == 1 else None
    make: Callable[[], FileCopies | PinnedCopies]
    if streams is not None:
        make = partial(PinnedCopies, streams)
    elif options.spill_to is not None:
        make = partial(FileCopies, options.spill_to)
    else:
        return None, NO_COPIES
    copies: FileCopies | PinnedCopies | None = None
    own, failure = (0.0, 0.0), None
    try:
        copies = make()
        (rate, start_ms), times = copies.measure(device), measure_pace(device, compute, copies.synchronize)
        own = rate / times, start_ms * times
    except (ValueError, RuntimeError, OSError) as error:
        failure = error
    context.communicator.check_none_failed(failure)
    threads, host = torch.get_num_threads(), socket.gethostname()
    everyone = context.communicator.gather((own, host, threads), tuple[Measured, str, int])
    rates, starts = zip(*(speed for speed, _, _ in everyone), strict=True)
    computing = sum(each for _, name, each in everyone if name == host)
    shares = isinstance(copies, FileCopies) and computing >= len(os.sched_getaffinity(0))
    return copies, CopyRate(min(rates), max(starts), 1.0 / threads if shares else 0.0)
