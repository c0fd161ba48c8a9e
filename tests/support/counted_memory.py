"""Memory counted where no allocator keeps statistics: the CPU's.

Every op's results are looked at as they are made. A storage counts from then on until nothing holds it. What an op
allocates and frees while it runs is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from embrace_fx.runtime.tables.table_shard import to_plain


class CountedMemory(TorchDispatchMode):
    """Counts, while active, the bytes of the storages that ops make, on all devices, the host's included.

    Args:
        ignored: tensors that were there before, and what ops return of them.

    Attributes:
        peak_bytes: the most at any time.
        by_op: bytes held after each op, in order.
    """

    def __init__(self, ignored: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.by_op: list[int] = []
        self._ignored = {to_plain(tensor).untyped_storage()._cdata for tensor in ignored}
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def held_bytes(self) -> int:
        """The bytes that are allocated now."""
        for key in [key for key, (reference, _) in self._held.items() if reference.expired()]:
            del self._held[key]
        return sum(size for _, size in self._held.values())

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Remove freed tensors now, before a new tensor can get the address of a freed one.
        self.held_bytes  # noqa: B018
        results = func(*args, **(kwargs or {}))
        for result in pytree.tree_leaves(results):
            if isinstance(result, Tensor) and result.layout == torch.strided:
                self._count(result)
        held = self.held_bytes
        self.by_op.append(held)
        self.peak_bytes = max(self.peak_bytes, held)
        return results

    def _count(self, tensor: Tensor) -> None:
        storage = to_plain(tensor).untyped_storage()
        if storage._cdata not in self._ignored:
            self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
