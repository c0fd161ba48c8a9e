"""Compares, in an announcement, checksums of the values that should be equal on all ranks.

Contract
    Bits are compared: of parameters and optimizer state that every rank holds whole, of the counters of sharded tables,
    and of the optimizers' options. Rows of a sharded table are on one rank only and cannot be compared. Buffers are
    not compared, because a training step may leave them different until the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.ranks.checksums import checksum, checksum_of_text
from embrace_fx.session.plan_in_use import PlanInUse
from embrace_fx.setup.agreement import settings_of
from embrace_fx.setup.setting import Setting


def compare_replicas_if_due(setting: Setting, planned: PlanInUse) -> None:
    """Makes the next announcement compare replicas, if it is time."""
    every, announcements = setting.options.check_replicas, setting.announcements
    if every is not None and announcements.made % every == 0 and announcements.communicator.world_size > 1:
        planned.synchronize()  # ranks may have applied different parts of the last step
        planned.calls.checksums = _checksums(setting)


def _checksums(setting: Setting) -> dict[str, int]:
    """Maps the name of each value that should be equal on all ranks to its checksum; reads every replica once."""
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
    names = {id(state.parameter(name)): name for name in reversed(state.names)}  # tied parameters by their first name
    sharded = {id(table.parameter) for table in state.tables.values() if table.layout.mesh is not None}
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
