"""Gives an object that stands for another one methods that call the other one's, and its memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

READ_MEMORY = (
    "numpy",
    "__array__",
    "tolist",
    "data_ptr",
    "const_data_ptr",
    "untyped_storage",
    "storage",
    "__dlpack__",
)
"""Methods of a tensor that read its memory without torch's dispatcher."""


def forward(kind: type, names: Iterable[str], find: Callable[[Any, str], Any]) -> None:
    """Gives a class methods that call the same methods of the objects that its instances stand for.

    Args:
        find: (instance, name of the method) -> the object that it stands for.
    """
    for name in names:
        setattr(kind, name, _forwarded(name, find))


def _forwarded(name: str, find: Callable[[Any, str], Any]) -> Callable[..., Any]:
    def method(itself: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(find(itself, name), name)(*args, **kwargs)

    return method


class NoStorage(torch._C.StorageBase):
    """Class of the storage of a tensor that has no memory of its own, so that no other tensor is given that storage.

    torch asks no class in `Tensor.untyped_storage(part)`; what then takes a storage refuses this one by its name.
    """

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return NoStorage
        raise RuntimeError(NoStorage.__name__)


NoStorage.__name__ = (
    "a shard, or a gradient in flight, has no memory of its own: call full_tensor() of a shard, on every rank, or "
    "clone() of a gradient"
)


def share_memory(kind: type[Tensor], find: Callable[[Any, int], Tensor]) -> None:
    """Has `tensor.data = stand_in` share the memory of what an instance of a class stands for.

    The setter asks no class: it copies the stand-in's own fields, which have no memory, and the next read of the tensor
    would end the process. It asks one op before whether it may; there the stand-in gets that memory.

    Args:
        find: (instance, references to it meanwhile, from Python and C++) -> a tensor with the memory.
    """
    _MEMORY_OF[kind] = find


_MEMORY_OF: dict[type[Tensor], Callable[[Any, int], Tensor]] = {}


def _may_share(tensor: Tensor, data: Tensor) -> bool:
    """Answers `_has_compatible_shallow_copy_type`, where one of the two is of a class that dispatches."""
    find = _MEMORY_OF.get(type(data)) if type(tensor) not in _MEMORY_OF else None
    memory = None if find is None else find(data, sys.getrefcount(data) + data._use_count())  # type: ignore[attr-defined]
    with torch._C._DisableTorchDispatch():
        if memory is not None:
            with torch.inference_mode(data.is_inference()), torch._C._AutoDispatchBelowAutograd():
                torch.ops.aten.set_.source_Tensor(data, memory)
        may: bool = torch.ops.aten._has_compatible_shallow_copy_type.default(tensor, data)
    return may


_LIBRARY = torch.library.Library("aten", "IMPL")  # its kernels last as long as it does
_LIBRARY.impl("_has_compatible_shallow_copy_type", _may_share, "PythonTLSSnapshot")
