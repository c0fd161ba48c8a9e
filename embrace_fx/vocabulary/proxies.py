"""Makes proxy objects call the methods, and share the memory, of the objects that they represent."""

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
"""Tensor methods that read memory without torch's dispatcher."""


def forward_methods(proxy_class: type, names: Iterable[str], find: Callable[[Any, str], Any]) -> None:
    """Adds methods to a proxy class. Each calls the method of the same name on the object that the proxy represents.

    Args:
        find: function of (proxy, method name) that returns the represented object.
    """
    for name in names:
        setattr(proxy_class, name, _forwarding_method(name, find))


def _forwarding_method(name: str, find: Callable[[Any, str], Any]) -> Callable[..., Any]:
    """Returns a method of a proxy that calls the method `name` of the object that the proxy represents.

    Args:
        find: function of (proxy, method name) that returns the represented object.
    """

    def method(proxy: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the represented object's method of the same name."""
        return getattr(find(proxy, name), name)(*args, **kwargs)

    return method


class NoStorage(torch._C.StorageBase):
    """The storage of a tensor without memory of its own. Any use raises `RuntimeError`.

    The name of the class serves as the error message: functions that take a storage reject this one and name its class.
    `Tensor.untyped_storage(tensor)` returns it instead of calling the method of the tensor's class.
    """

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return NoStorage
        raise RuntimeError(NoStorage.__name__)


NoStorage.__name__ = (
    "a sharded tensor, or a gradient that is still being sent, has no memory of its own. Call full_tensor() of the "
    "sharded tensor on every rank, or clone() of the gradient"
)


def share_memory_on_assignment(proxy_class: type[Tensor], find: Callable[[Any, int], Tensor]) -> None:
    """Makes `tensor.data = proxy` share the memory that the proxy represents, for proxies of this class.

    Without this, the assignment copies the proxy's own fields, which have no memory, and the next read aborts the
    process. The assignment cannot be overridden, but it first calls an op that can. The kernel of that op sets the
    proxy's memory.

    Args:
        find: function of (proxy, its reference count during the call) that returns a tensor with the memory.
    """
    _MEMORY_OF[proxy_class] = find


_MEMORY_OF: dict[type[Tensor], Callable[[Any, int], Tensor]] = {}


def _may_share(tensor: Tensor, data: Tensor) -> bool:
    """Returns whether `tensor.data = data` may share memory: torch's own check, extended to proxy classes."""
    find = _MEMORY_OF.get(type(data)) if type(tensor) not in _MEMORY_OF else None
    memory = None if find is None else find(data, sys.getrefcount(data) + data._use_count())  # type: ignore[attr-defined]
    with torch._C._DisableTorchDispatch():
        if memory is not None:
            with torch.inference_mode(data.is_inference()), torch._C._AutoDispatchBelowAutograd():
                torch.ops.aten.set_.source_Tensor(data, memory)
        may: bool = torch.ops.aten._has_compatible_shallow_copy_type.default(tensor, data)
    return may


_LIBRARY = torch.library.Library("aten", "IMPL")  # the kernel is unregistered when this object is freed
_LIBRARY.impl("_has_compatible_shallow_copy_type", _may_share, "PythonTLSSnapshot")
