"""Finds the buffers that must be broadcast before a forward.

Contract
    Analysis only. DDP sends rank 0's buffers to all ranks before every forward. A buffer needs that only where training
    has changed it and the forward's results depend on it: BatchNorm's running statistics, for one, are written in
    training and read in evaluation, or by a frozen layer.
"""

from __future__ import annotations

import torch
from torch import fx

from embrace_fx.vocabulary.graph import Buffer, Result, TrainingGraph, reached, written_by

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_TRAINING = 5  # op -> position of its argument `training`


def mutated_buffers(graph: TrainingGraph) -> tuple[str, ...]:
    """Returns the buffers that the forward changes."""
    written = written_by(graph.module)
    return tuple(role.name for _, role in graph.inputs() if isinstance(role, Buffer) and role in written)


def read_buffers(graph: TrainingGraph) -> tuple[str, ...]:
    """Returns the buffers that the forward's results depend on."""
    results = {node for node, role in graph.outputs() if isinstance(role, Result)}
    return tuple(
        role.name
        for node, role in graph.inputs()
        if isinstance(role, Buffer) and not results.isdisjoint(_readers(node))
    )


def _readers(buffer: fx.Node) -> set[fx.Node]:
    """Returns the nodes that depend on a buffer."""
    return reached((user for user in buffer.users if not _ignores_statistics(user)), lambda node: node.users)


def _ignores_statistics(node: fx.Node) -> bool:
    """Returns whether a node is BatchNorm in training, which updates the running statistics but does not use them."""
    return node.target is _BATCH_NORM and node.args[_TRAINING] is True
