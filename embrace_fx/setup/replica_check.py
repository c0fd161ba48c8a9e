"""Compares checksums of the values that should be equal on all ranks.

Contract
    Compares the bits of replicated parameters and their optimizer state, the counters of sharded tables, and the
    optimizers' options. Elements of a sharded table are on one rank only and cannot be compared. Buffers are not
    compared, because they may legitimately differ between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.ranks.checksums import checksum, checksum_of_text, diverged
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import DivergedReplicas
from embrace_fx.runtime.tables.model_state import ModelState


def compare_replicas(state: ModelState, optimizers: Sequence[Optimizer], communicator: Communicator) -> None:
    """Compares replicas, after all updates have been applied. Collective.

    Raises:
        DivergedReplicas: replicas differ; on every rank.
    """
    if found := diverged(communicator.gather(_checksums(state, optimizers), dict[str, int])):
        raise DivergedReplicas(found)


def _checksums(state: ModelState, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Maps the name of each value that should be equal on all ranks to its checksum."""
    found: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for what, value in _replicas(state, optimizers):
        if isinstance(value, Tensor):
            tensors[what] = checksum(value)
        else:
            found[what] = checksum_of_text(repr(value))
    by_device: dict[torch.device, list[str]] = {}
    for what, value in tensors.items():
        by_device.setdefault(value.device, []).append(what)
    for names in by_device.values():  # one transfer from each device to the host
        found |= zip(names, torch.stack([tensors[name] for name in names]).tolist(), strict=True)
    return found


def _replicas(state: ModelState, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Any]]:
    """Yields, by name, the values that must be equal on all ranks: parameters, param groups and optimizer state."""
    # A tied parameter counts once, by its first name.
    names = {id(state.parameter(name)): name for name in reversed(state.names)}
    sharded = {id(table.parameter) for table in state.tables.values() if table.layout.mesh is not None}
    for key, name in names.items():
        if key not in sharded and name not in state.ignored:
            yield name, state.parameter(name)
    for k, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        for g, group in enumerate(optimizer.param_groups):
            yield f"param group {g} of optimizer {k} ({kind})", settings_of(group)
        for parameter, of_parameter in optimizer.state.items():
            name = names.get(id(parameter), "")
            for key, value in of_parameter.items() if name and name not in state.ignored else ():
                is_part = isinstance(value, Tensor) and value.dim() > 0 and id(parameter) in sharded
                if not is_part:
                    yield f"{key} of {name} ({kind})", value


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a param group in a comparable form."""
    options = ((key, value) for key, value in group.items() if key != "params")
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in options}
