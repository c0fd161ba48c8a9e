"""Refuses distinct parameters that share memory.

Under DDP, two Parameters on one storage stay equal, because both are written in place. Here they would silently
diverge,
because a table may be sharded and parameters may be updated at different times.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor, nn


def refuse_shared_memory(model: nn.Module) -> None:
    """Raises `ValueError` if a trainable parameter shares memory with another parameter or a buffer."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) in (nn.Parameter, Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta":
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    by_storage.pop(0, None)  # address 0 means a tensor without elements
    for tensors in by_storage.values():
        for (name, one), (other, another) in combinations(tensors, 2):
            if (one.requires_grad or another.requires_grad) and share_memory(one, another):
                raise ValueError(
                    f"compile(): {name} and {other} are two parameters whose memory "
                    f"{'is the same' if _same_view(one, another) else 'overlaps'}: their updates "
                    "would diverge. Make them one Parameter, `model.out.weight = model.words.weight`, "
                    "before the optimizer is made; or give one a copy."
                )


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors on one storage have an element in common.

    >>> table = torch.zeros(4, 6)
    >>> share_memory(table[:, :3], table[:, 3:]), share_memory(table[:, :4], table[:, 3:])
    (False, True)
    """
    (start, stop), (other_start, other_stop) = _extent(one), _extent(other)
    if stop <= other_start or other_stop <= start:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    if one.element_size() != other.element_size():
        return True  # elements of different sizes may overlap
    touched = torch.zeros(max(stop, other_stop) // one.element_size(), dtype=torch.bool, device="cpu")
    touched.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(touched.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _same_view(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are the same view of the same memory."""
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in its storage, and the first byte after its end."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + int(last) + 1) * tensor.element_size()
