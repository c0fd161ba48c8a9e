"""Ops of what leaves a step's memory between its forward and its backward: offloaded, and reloaded.

A copy is begun, and awaited elsewhere, so that compute runs meanwhile. All four have the meta data of the value that
they carry; only what `await_reload` yields may be read as a tensor.

    forward   h = relu(x); leaving = offload(h); ...; stored = await_offload(leaving)      # the memory of h is free
    backward  coming = reload(stored); ...; h_back = await_reload(coming); ...             # the memory is taken again

`launch` is how the id of a copy is spelled, for whoever reads the graph; the id itself is `node.meta["launch"]`.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from embrace_fx.vocabulary.fake_results import op
from embrace_fx.vocabulary.operation_id import Kind, OperationId
from embrace_fx.vocabulary.ops import launch_of, op_name

OFFLOAD, AWAIT_OFFLOAD = "embrace::offload", "embrace::await_offload"
RELOAD, AWAIT_RELOAD = "embrace::reload", "embrace::await_reload"

COPY_OPS: frozenset[str] = frozenset({OFFLOAD, AWAIT_OFFLOAD, RELOAD, AWAIT_RELOAD})


@op("offload", "(Tensor value, str launch) -> Tensor")
def _(value: Tensor, launch: str) -> Tensor:
    """Begins to copy a value out of memory; its memory is held until the copy has ended."""
    return torch.empty_like(value)


@op("await_offload", "(Tensor leaving, str launch) -> Tensor")
def _(leaving: Tensor, launch: str) -> Tensor:
    """Stands still until a value has left: what stands for it takes no memory."""
    return torch.empty_like(leaving)


@op("reload", "(Tensor stored, str launch) -> Tensor")
def _(stored: Tensor, launch: str) -> Tensor:
    """Takes memory, and begins to copy a value back into it."""
    return torch.empty_like(stored)


@op("await_reload", "(Tensor coming, str launch) -> Tensor")
def _(coming: Tensor, launch: str) -> Tensor:
    """The value, once it is back."""
    return torch.empty_like(coming)


def offload_id(value: str) -> OperationId:
    """Makes the id of the copy that takes a value, called by its node, out."""
    return OperationId("offload", value, lane="offload")


def reload_id(value: str) -> OperationId:
    """Makes the id of the copy that brings a value back."""
    return OperationId("reload", value, lane="reload")


def compute_up_to(node: fx.Node) -> OperationId:
    """The compute that ends where a copy is begun, or awaited."""
    launch, name = launch_of(node), op_name(node)
    assert launch is not None
    phase: Kind = "forward" if name in (OFFLOAD, AWAIT_OFFLOAD) else "backward"
    ends = f"the end of {launch}" if name in (AWAIT_OFFLOAD, AWAIT_RELOAD) else f"{launch}"
    return OperationId(phase, f"up to {ends}")
