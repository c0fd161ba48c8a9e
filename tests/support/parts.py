"""Parts made by hand, and what is asked of them next to the same of the whole tensor."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import embrace_fx
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.gradient_storage import GradientStorage
from embrace_fx.runtime.tables.local_storage import LocalStorage
from embrace_fx.runtime.tables.shard_layout import Layout, make_mesh
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.plan import Grid

REFUSED = "the sharded "
"""What an error of ours says of the tensor."""


class Parts:
    """Makes this rank's shards of whole matrices."""

    def __init__(self, grid: Grid | None = None) -> None:
        self.communicator = Communicator(dist.group.WORLD)
        self._mesh = make_mesh(self.communicator, "cpu", grid)

    def _of(self, whole: Tensor) -> Layout:
        return Layout.of_table("t.weight", whole.shape, self._mesh, weakref.ref(self.communicator))

    def parameter(self, whole: Tensor) -> TableShard:
        """Returns the shard of a table."""
        layout = self._of(whole)
        return nn.Parameter(TableShard(LocalStorage(layout.cut(whole).clone()), layout), requires_grad=False)  # type: ignore[return-value]

    def gradient(self, whole: Tensor) -> TableShard:
        """Returns the shard of a gradient that is stored as its nonzero rows, with two gradients of each."""
        layout = self._of(whole)
        local = layout.cut(whole).contiguous()
        held = GradientStorage(local, layout)
        ids = layout.cut(whole.any(1, keepdim=True).expand_as(whole)).any(1).nonzero().view(-1)
        for order in (ids, ids.flip(0)):
            held.add_rows(order, local[order] / 2)
        return TableShard(held, layout, "the gradient of ")

    def state(self, whole: Tensor) -> TableShard:
        """Returns the shard of an optimizer's state, made from a parameter."""
        return torch.zeros_like(self.parameter(whole)).copy_(whole)  # type: ignore[return-value]

    def close(self) -> None:
        self.communicator.close()


class Shown:
    """Trains a model with tables of these shapes. Its methods return shards from state dicts."""

    def __init__(self, shapes: Iterable[torch.Size]) -> None:
        tables = {shape: nn.Embedding(shape[0], shape[1], dtype=torch.float64) for shape in sorted(set(shapes))}
        self._names = {shape: f"{number}.weight" for number, shape in enumerate(tables)}
        self.model = embrace_fx.compile(_Tables(tables.values()), strategy="alltoall")
        self._optimizer = torch.optim.Adam(self.model.parameters())
        self.model(torch.zeros(1, dtype=torch.int64)).backward()
        self._optimizer.step()

    def parameter(self, whole: Tensor) -> TableShard:
        """Returns a shard from the model's state dict."""
        name = self._names[whole.shape]
        self.model.load_state_dict({name: whole}, strict=False)
        return self.model.state_dict()[name]

    def state(self, whole: Tensor) -> TableShard:
        """Returns a shard from the optimizer's state dict."""
        number = int(self._names[whole.shape].split(".")[0])
        return self._optimizer.state_dict()["state"][number]["exp_avg"].copy_(whole)

    def kept(self, whole: Tensor) -> TableShard:
        """Returns a shard from the optimizer's `state`."""
        self.state(whole)
        number = int(self._names[whole.shape].split(".")[0])
        return self._optimizer.state[self.model.module.get_parameter(f"{number}.weight")]["exp_avg"]

    def close(self) -> None:
        self.model.close()


class _Tables(nn.Sequential):
    def __init__(self, tables: Iterable[nn.Embedding]) -> None:
        super().__init__(*tables)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([table(ids).square().sum() for table in self]).sum()


def whole_of(value: Any) -> Any:
    """Returns the value with all shards gathered into whole tensors. Collective."""
    return pytree.tree_map_only(TableShard, TableShard.full_tensor, value)


def asked(make: Callable[[], Any], deed: Callable[[Any], Any]) -> tuple[str, Any]:
    """Returns the answer of `deed` and the tensor after it, or the error that `deed` raised. Collective."""
    tensor = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            answer = deed(tensor)
        except Exception as error:
            kind = "refused" if REFUSED in str(error) else "error"
            return kind, f"{type(error).__name__}: {error}"
        return "answer", (whole_of(answer), whole_of(tensor))


def differs(found: Any, expected: Any, rtol: float = 1e-6) -> str:
    """Returns how an answer differs from that of the whole tensor, or "" if it does not."""
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
        elif not _close(one.to_dense().resolve_conj(), other.to_dense().resolve_conj(), rtol):
            return f"{one}, not {other}"
    return ""


def _close(one: Tensor, other: Tensor, rtol: float) -> bool:
    if other.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if not other.is_floating_point() or not other.numel():
        return torch.equal(one, other)
    largest = float(other.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(one, other, rtol=rtol, atol=rtol * max(largest, 1e-3), equal_nan=True)
