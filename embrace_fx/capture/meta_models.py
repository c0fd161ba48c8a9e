"""Lets models on the meta device be captured as if they were on the CPU.

A model as large as a paper's does not fit into the memory of the machine that plans for it. On the meta device it takes
no memory, but many operations have no kernel there (recurrent layers under autocast), and the batch is elsewhere. Fake
tensors have a device and take no memory, and capture needs no values of parameters.
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
    """Whether any parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers()))


@contextlib.contextmanager
def as_on_cpu(model: nn.Module, batch: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Makes a twin of `model` with fake tensors on the CPU as parameters and buffers, and a batch to capture it with.

    Tied parameters stay tied. The twin can be captured inside the context.
    """
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    twin = copy.deepcopy(model)  # on the meta device: no memory is copied
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with fake_mode, torch.no_grad():
                own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(own, requires_grad=tensor.requires_grad) if is_parameter else own
        return made[id(tensor)]

    for module in twin.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                setattr(module, name, fake(tensor))  # recurrent layers update their own list of weights
    leaves = pytree.tree_map_only(Tensor, lambda leaf: fake_mode.from_tensor(leaf, static_shapes=True), batch)
    with fake_mode:
        yield twin, leaves
