"""Layouts of gradients, as autograd makes them and as torch's optimizers take them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

_TAKE_ROWS = (SGD, Adagrad, SparseAdam)
"""Classes of torch that take gradients of layout COO."""


def in_other_layouts(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields the parameters whose gradients an optimizer's class does not take as they are, and what it takes."""
    kind = type(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse and kind not in _TAKE_ROWS:
                yield parameter, gradient.to_dense()
            elif gradient is not None and gradient.layout == torch.strided and kind is SparseAdam:
                yield parameter, gradient.to_sparse(1)
