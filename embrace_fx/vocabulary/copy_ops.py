"""Ops that offload a value between the forward and the backward, and reload it.

One op starts a copy and another waits for it, so that compute runs in between. The results of all four ops have the
value's shape and dtype, but only the result of `await_reload` may be read as a tensor.

    forward   h = relu(x); leaving = offload(h); ...; stored = await_offload(leaving)      # the memory of h is free
    backward  coming = reload(stored); ...; h_back = await_reload(coming); ...             # the memory is taken again

`launch` is the copy's id as text, for readers of the graph; the id itself is `node.meta["launch"]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embrace_fx.vocabulary.fake_results import op
from embrace_fx.vocabulary.operation_id import OperationId

OFFLOAD, AWAIT_OFFLOAD = "embrace::offload", "embrace::await_offload"
RELOAD, AWAIT_RELOAD = "embrace::reload", "embrace::await_reload"

COPY_OPS: frozenset[str] = frozenset({OFFLOAD, AWAIT_OFFLOAD, RELOAD, AWAIT_RELOAD})


@op("offload", "(Tensor value, str launch) -> Tensor")
def offload(value: Tensor, launch: str) -> Tensor:
    """Starts copying a value from the device to the host, or from the CPU to a file. Returns a tensor that only
    `await_offload` may read. The value's memory stays allocated until the copy has ended.

    Args:
        launch: the copy's id as text.
    """
    return torch.empty_like(value)


@op("await_offload", "(Tensor leaving, str launch) -> Tensor")
def await_offload(leaving: Tensor, launch: str) -> Tensor:
    """Waits until an offload has ended, and frees the value's memory. Returns a placeholder tensor without memory, from
    which `reload` restores the value.

    Args:
        leaving: the result of `offload`.
        launch: the copy's id as text.
    """
    return torch.empty_like(leaving)


@op("reload", "(Tensor stored, str launch) -> Tensor")
def reload(stored: Tensor, launch: str) -> Tensor:
    """Allocates memory for an offloaded value, and starts copying the value back. Returns a tensor that only
    `await_reload` may read.

    Args:
        stored: the result of `await_offload`.
        launch: the copy's id as text.
    """
    return torch.empty_like(stored)


@op("await_reload", "(Tensor coming, str launch) -> Tensor")
def await_reload(coming: Tensor, launch: str) -> Tensor:
    """Waits until a reload has ended, and returns the value.

    Args:
        coming: the result of `reload`.
        launch: the copy's id as text.
    """
    return torch.empty_like(coming)


def offload_id(value: str) -> OperationId:
    """Returns the id of the copy that offloads a value. `value` is the name of the node that computes it."""
    return OperationId("offload", value, lane="offload")


def reload_id(value: str) -> OperationId:
    """Returns the id of the copy that reloads a value. `value` is the name of the node that computes it."""
    return OperationId("reload", value, lane="reload")
