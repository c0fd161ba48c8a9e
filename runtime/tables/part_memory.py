"""Gives the memory of a part to another tensor that is to share it: `tensor.data = part`, `tensor.set_(part)`.

Contract
    A whole tensor cannot share memory with one rank's part. What nobody keeps, as the result of an expression, is put
    together on every rank, and becomes the tensor's; what someone keeps is refused, for writes to one of the two would
    not be seen in the other. Where this rank has all of a table, the two share memory.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.tables.held import Held
from embrace_fx.runtime.tables.part import Part
from embrace_fx.runtime.tables.pending_parameters import share_memory
from embrace_fx.vocabulary import forwarding


def memory_to_share(part: Part, references: int | None = None) -> Tensor:
    """Returns memory for a tensor that is to share a part's. Collective, where ranks have parts.

    Args:
        references: to the part, while `.data =` runs; None: someone keeps it.

    Raises:
        RuntimeError: someone keeps the part, or its memory.
    """
    if part.spread.is_alone:
        return part.held.pinned()
    if part.held.unreduced:
        raise part.not_reduced("a tensor that shares memory")
    if references is None or references > _references_of_setter() or _shares_memory(part):
        raise RuntimeError(
            f"expected, in `tensor.data = x` or set_(), an x that nothing else refers to, found {part.what} (or values "
            "computed from it), of which this rank has only its part: the two could not share memory. Copy x on every "
            "rank, which puts the whole together: `tensor.data.copy_(x)`, or `tensor.data = x.clone()`."
        )
    return part.full_tensor()


def _shares_memory(part: Part) -> bool:
    """Whether anything but this part has its memory."""
    alone = part.like(Held(torch.empty(0, device="cpu")))
    if sys.getrefcount(part.held) > sys.getrefcount(alone.held):
        return True
    return not part.held.of_gradient and share_memory([part])


@cache
def _references_of_setter() -> int:
    """Counts the references to a tensor that nobody keeps, while `.data =` runs."""
    found = []

    class Unkept(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    def count(_: Any, references: int) -> Tensor:
        found.append(references)
        return torch.empty(0, device="cpu")

    forwarding.share_memory(Unkept, count)
    torch.empty(0, device="cpu").data = Tensor._make_wrapper_subclass(Unkept, (0,), device=torch.device("cpu"))
    return found[0]


def set_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Answers `set_` to, or of, a part."""
    tensor, source = args
    if not isinstance(tensor, Part):
        return func(tensor, memory_to_share(source))
    tensor.data = source
    return tensor


forwarding.share_memory(Part, memory_to_share)
