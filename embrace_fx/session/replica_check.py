"""Compares checksums of what all ranks should hold alike, in an announcement.

Contract
    What is compared are bits: of parameters and optimizer state that every rank holds whole, of the counters of sharded
    tables, and of the optimizers' options. The rows of a sharded table lie on one rank each: there is nothing to
    compare them with. Nor are buffers compared, which a training step may leave different until the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from embrace_fx.planning.replanning import Calls
from embrace_fx.runtime.ranks.checksums import checksum, checksum_of_text
from embrace_fx.setup.agreement import settings_of
from embrace_fx.setup.setting import Setting


def have_replicas_compared(setting: Setting, calls: Calls, synchronize: Callable[[], None]) -> None:
    """Has the coming announcement compare them, where it is time.

    Args:
        synchronize: applies every update: ranks may have applied more or less of the last step.
    """
    if is_due(setting):
        synchronize()
        calls.checksums = checksums_of_replicas(setting)


def is_due(setting: Setting) -> bool:
    """Tells whether the coming step is one of those whose replicas are compared."""
    every, announcements = setting.options.check_replicas, setting.announcements
    return every is not None and announcements.made % every == 0 and announcements.communicator.world_size > 1


def checksums_of_replicas(setting: Setting) -> dict[str, int]:
    """Maps the name of each value that all ranks should have alike to its checksum. Reads every replica once."""
    found: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for what, value in _replicas(setting):
        if isinstance(value, Tensor):
            tensors[what] = checksum(value)
        else:
            found[what] = checksum_of_text(repr(value))
    by_device: dict[torch.device, list[str]] = {}
    for what, value in tensors.items():
        by_device.setdefault(value.device, []).append(what)
    for names in by_device.values():  # one read of each device
        found |= zip(names, torch.stack([tensors[name] for name in names]).tolist(), strict=True)
    return found


def _replicas(setting: Setting) -> Iterator[tuple[str, Any]]:
    state = setting.state
    names = {id(state.parameter(name)): name for name in reversed(state.names)}  # a tied one by its first name
    sharded = {id(table.parameter) for table in state.tables.values() if table.place.mesh is not None}
    for key, name in names.items():
        if key not in sharded and name not in state.ignored:
            yield name, state.parameter(name)
    for k, optimizer in enumerate(setting.stepping.holders.optimizers):
        kind = type(optimizer).__name__
        for g, group in enumerate(optimizer.param_groups):
            yield f"param group {g} of optimizer {k} ({kind})", settings_of(group)
        for parameter, of_parameter in optimizer.state.items():
            name = names.get(id(parameter), "")
            for key, value in of_parameter.items() if name and name not in state.ignored else ():
                is_part = isinstance(value, Tensor) and value.dim() > 0 and id(parameter) in sharded
                if not is_part:
                    yield f"{key} of {name} ({kind})", value
