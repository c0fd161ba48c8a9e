"""Captures a model on the meta device as if it were on the CPU.

A large model may not fit into the memory of the machine that plans for it. On the meta device it uses no memory, but
many operations have no meta kernel (recurrent layers under autocast), and the batch is on another device. Fake tensors
have a device and use no memory, and a capture needs no parameter values.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree


def is_on_meta(model: nn.Module) -> bool:
    """Returns whether any parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers()))


@contextlib.contextmanager
def on_fake_cpu(model: nn.Module, batch: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Opens a context that yields a copy of a model on the meta device, and a batch, both with fake CPU tensors, so
    that the model can be captured.

    Tied parameters stay tied. The copy and the batch are valid only inside the context.
    """
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    twin = copy.deepcopy(model)  # copies no memory, because the model is on the meta device
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        """Returns a fake CPU tensor or parameter with the shape of a meta tensor. Always returns the same one for the
        same meta tensor.
        """
        if id(tensor) not in made:
            with fake_mode, torch.no_grad():
                own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(own, requires_grad=tensor.requires_grad) if is_parameter else own
        return made[id(tensor)]

    for module in twin.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                setattr(module, name, fake(tensor))  # `setattr` lets recurrent layers update their own list of weights
    leaves = pytree.tree_map_only(Tensor, lambda leaf: fake_mode.from_tensor(leaf, static_shapes=True), batch)
    with fake_mode:
        yield twin, leaves
