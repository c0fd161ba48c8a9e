"""Sharded tables: where a table's own part lives, and how its rows are updated.

A table's parameter becomes a DTensor (`embrace_fx.runtime.tables.layouts`); on a single process it stays the user's own
tensor. Row ids are those of the part, V' x d: the table's own by columns, id // rows on a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from embrace_fx.runtime.kernels import coalesce
from embrace_fx.runtime.optimizer.row_optimizers import row_optimizer
from embrace_fx.runtime.tables.layouts import as_shard, like, own_part, whole_table
from embrace_fx.vocabulary.exactness import RowUpdates, row_update_blocker

Reader = Callable[[int, int], Tensor]
"""(first column, last column + 1) -> those columns of the initial table."""


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharded or not, outside of autograd."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # with gradients it would go through autograd and DTensor's dispatch
        return tensor.to_local()


def fit_state(state: dict[str, Any], parameter: Tensor, group: dist.ProcessGroup | None) -> None:
    """Of optimizer state (V, D), whole or by columns, made before compile or loaded, keeps what the parameter is, in
    place: of a sharded one this rank's part, of a whole one all of it.

    Collective where the table is on a grid and the state is by columns, and where only the state is sharded.
    """
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            continue
        if isinstance(parameter, DTensor):
            state[key] = like(value, parameter, group)
        elif isinstance(value, DTensor):
            state[key] = whole_table(value, value.device_mesh.get_group())


class RowTable:
    """A table updated by rows: its part on this rank, and the gradients waiting for the next step.

    Args:
        name: the parameter's name.
        parameter: the table's parameter: (V, D), a DTensor where it is sharded.
        optimizer: the user's optimizer that holds the parameter.
        kind: the optimizer class that defines the update.
        row_updates: the semantics the user asked for.

    Attributes:
        rows: the update of its rows.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        optimizer: Optimizer,
        kind: type[Optimizer],
        row_updates: RowUpdates,
    ) -> None:
        self._kind = kind
        self._row_updates = row_updates
        self.name = name
        self.parameter = parameter
        self.optimizer = optimizer
        self.rows = row_optimizer(kind)
        self._pending: list[tuple[Tensor, Tensor]] = []

    @property
    def shape(self) -> torch.Size:
        """Of the whole table, (V, D)."""
        return self.parameter.shape

    @property
    def local(self) -> Tensor:
        """This rank's part, (V', d)."""
        return local_tensor(self.parameter)

    @property
    def version(self) -> int:
        """Counts what is written into this rank's part; what a DTensor's own ops write, its part does not count."""
        count: int = self.parameter._version
        return count + (self.parameter._local_tensor._version if isinstance(self.parameter, DTensor) else 0)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient waits for the next update."""
        return bool(self._pending)

    def add_gradient(self, ids: Tensor, rows: Tensor) -> None:
        """Keeps a coalesced row gradient, ids (K,), rows (K, d), until the next update."""
        self._pending.append((ids, rows))

    def pending(self) -> tuple[Tensor, Tensor] | None:
        """The gradient since the last update, coalesced: (ids (K,), rows (K, d)); None where there was none."""
        if len(self._pending) > 1:
            ids = torch.cat([ids for ids, _ in self._pending])
            rows = torch.cat([rows for _, rows in self._pending])
            merged = coalesce(ids, rows.view(-1), rows.shape[1], -1, 1.0)
            self._pending = [(merged[0], merged[1])]
        return self._pending[0] if self._pending else None

    def is_finite(self) -> bool:
        """Whether the waiting gradient is."""
        pending = self.pending()
        return pending is None or bool(pending[1].isfinite().all())

    def dense_gradient(self, group: dist.ProcessGroup | None) -> Tensor | None:
        """A shard's waiting gradient as that of the whole table (V, D), None where there is none. Collective."""
        gradient = self.pending()
        if gradient is None:
            return None
        ids, rows = gradient
        own = torch.zeros_like(self.local).index_copy_(0, ids, rows)
        assert isinstance(self.parameter, DTensor)
        return whole_table(as_shard(own, self.parameter.shape, self.parameter.device_mesh), group)

    def add_dense_gradient(self, gradient: Tensor) -> None:
        """Keeps, for a shard, this rank's part of a whole table's gradient (V, D) until the next update."""
        assert isinstance(self.parameter, DTensor)
        rows, columns = own_part(gradient.shape, self.parameter.device_mesh)
        of_rows = gradient[rows]
        ids = of_rows.ne(0).any(dim=1).nonzero().view(-1)
        self.add_gradient(ids, of_rows.index_select(0, ids)[:, columns].contiguous())

    def scale_gradient(self, factor: float | Tensor) -> None:
        """Multiplies the waiting gradient, for clipping."""
        self._pending = [(ids, rows * factor) for ids, rows in self._pending]

    def clear_gradient(self) -> None:
        self._pending = []

    def check(self) -> None:
        """Raises where the options of this moment no longer allow row updates: schedulers write them too.

        Raises:
            RuntimeError: with the option that forbids it, before anything was applied.
        """
        blocker = row_update_blocker(self.optimizer, self.param_group(), self._row_updates, kind=self._kind)
        if blocker is not None:
            raise RuntimeError(
                f"expected options under which the sharded table {self.name} can be updated by rows, in "
                f"optimizer.step(), found: {blocker}. Set them before the model's first call, or pass "
                "strategy='allreduce'."
            )

    def update(self) -> None:
        """Applies the waiting gradient once, as the optimizer's class defines it."""
        gradient = self.pending()
        if gradient is None:
            return
        self.apply(*gradient, self.begin_step())
        self.clear_gradient()

    def steps_as_one(self) -> bool:
        """Whether its rows are updated alike: they are all of one table."""
        return True

    def begin_step(self) -> Mapping[str, Any]:
        """Counts one iteration; returns the options of this moment."""
        group = self.param_group()
        self.count_step(group)
        return group

    def count_step(self, group: Mapping[str, Any]) -> None:
        """Counts one iteration under the options of its param group."""
        state = self._state(group)
        self.rows.advance(state)
        self._store(state)

    def apply(self, ids: Tensor, rows: Tensor, options: Mapping[str, Any]) -> None:
        """Updates rows `ids` (K,), sorted and unique, by their gradients (K, d), under the options of their step.

        One step's rows may come in several parts, none in two of them.
        """
        state = self._state(options)
        self.rows.apply(self.local, state, ids, rows, options)
        self._store(state)

    def param_group(self) -> Mapping[str, Any]:
        """The options of this moment."""
        for group in self.optimizer.param_groups:
            if any(parameter is self.parameter for parameter in group["params"]):
                found: Mapping[str, Any] = group
                return found
        raise RuntimeError(
            f"expected the optimizer to hold the table {self.name}, found it in none of its param groups. "
            "Do not remove or replace parameters of an optimizer after compile."
        )

    def make_state(self) -> None:
        """Makes the optimizer's state of the table ahead of its first update, for a checkpoint to be loaded into."""
        self._state(self.param_group())

    def made_state(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's own state of the table, made at its first update."""
        state: dict[str, Any] = self.optimizer.state[self.parameter]
        if not state:
            mesh = self.parameter.device_mesh if isinstance(self.parameter, DTensor) else None
            local = self.local
            for key, value in self.rows.init_state(local, group).items():
                is_part = isinstance(value, Tensor) and value.shape == local.shape
                state[key] = as_shard(value, self.parameter.shape, mesh) if is_part else value
        return state

    def _state(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of it."""
        state = self.made_state(group)
        return {key: local_tensor(v) if isinstance(v, DTensor) else v for key, v in state.items()}

    def _store(self, local_state: Mapping[str, Any]) -> None:
        """Writes back what the update replaced instead of writing into it."""
        state = self.optimizer.state[self.parameter]
        mesh = self.parameter.device_mesh if isinstance(self.parameter, DTensor) else None
        for key, value in local_state.items():
            current = state.get(key)
            if isinstance(current, DTensor):
                continue
            if value is not current:
                is_new_part = mesh is not None and isinstance(value, Tensor) and value.shape == self.local.shape
                state[key] = as_shard(value, self.parameter.shape, mesh) if is_new_part else value
