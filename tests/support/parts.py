"""Parts made by hand, and what is asked of them next to the same of the whole tensor."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.held import Held, HeldGradient
from embrace_fx.runtime.tables.layouts import mesh_of
from embrace_fx.runtime.tables.part import Part
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.vocabulary.plan import Grid

REFUSED = "expected "
"""How an error of ours begins."""

Made = Callable[[Tensor], Part]


class Parts:
    """Makes this rank's parts of whole tensors of two dimensions."""

    def __init__(self, grid: Grid | None = None) -> None:
        self.communicator = Communicator(dist.group.WORLD)
        self._mesh = mesh_of(self.communicator, "cpu", grid)

    def _of(self, whole: Tensor) -> Layout:
        return Layout.of_table("t.weight", whole.shape, self._mesh, weakref.ref(self.communicator))

    def parameter(self, whole: Tensor) -> Part:
        """As of a table."""
        layout = self._of(whole)
        made: Any = nn.Parameter(Part(Held(layout.cut(whole).clone()), layout), requires_grad=False)
        return made  # type: ignore[no-any-return]

    def gradient(self, whole: Tensor) -> Part:
        """In rows: those that are not zero."""
        layout = self._of(whole)
        local = layout.cut(whole).contiguous()
        held = HeldGradient(local, layout)
        ids = torch.arange(local.shape[0])
        held.add_rows(ids, local.clone())
        return Part(held, layout, "the gradient of ")

    def state(self, whole: Tensor) -> Part:
        """As an optimizer makes it of a parameter."""
        made: Any = torch.zeros_like(self.parameter(whole)).copy_(whole)
        return made  # type: ignore[no-any-return]

    def close(self) -> None:
        self.communicator.close()


def whole_of(value: Any) -> Any:
    """The same with parts put together. Collective."""
    return pytree.tree_map_only(Part, Part.full_tensor, value)


def asked(make: Callable[[], Any], deed: Callable[[Any], Any]) -> tuple[str, Any]:
    """What a deed answers of a tensor, and the tensor after it; or its error. Collective."""
    tensor = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            answer = deed(tensor)
        except Exception as error:
            kind = "refused" if str(error).startswith(REFUSED) else "error"
            return kind, f"{type(error).__name__}: {error}"
        return "answer", (whole_of(answer), whole_of(tensor))


def differs(found: Any, expected: Any) -> str:
    """How an answer differs from that of the whole; empty: it does not."""
    ours, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} values, not {len(theirs)}"
    for one, other in zip(ours, theirs, strict=True):
        if not isinstance(other, Tensor):
            alike = math.isclose(one, other, rel_tol=1e-9) if isinstance(other, float) else repr(one) == repr(other)
            if type(one) is not type(other) or not alike:
                return f"{one!r}, not {other!r}"
        elif not isinstance(one, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
            return f"{getattr(one, 'shape', one)} {getattr(one, 'dtype', '')}, not {other.shape} {other.dtype}"
        elif not _close(one.to_dense().resolve_conj(), other.to_dense().resolve_conj()):
            return f"{one}, not {other}"
    return ""


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True)
