"""Update rules: how one step changes a table's rows with and without a gradient.

    SparseUpdate     rows without a gradient do not change, by the optimizer's own rule or because the user chose "lazy"
    DenseUpdate      all rows are updated at once
    DeferredUpdate   rows without a gradient apply the step when they are next read
    RowWiseUpdate    RowWiseAdagrad: sparse, and the update of a row depends on all of its elements

Contract
    A rule object is one step of one table, with the options of that step. `apply` updates rows early, because they are
    read next. `finish`, called once, updates the other rows with gradients, and those without if the rule changes them.
    Each row is updated once, as if the optimizer had updated the whole table.

Shape legend: V' x d this rank's part of a table; K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from embrace_fx.runtime.tables.history import PredictedUpdate, skipping
from embrace_fx.runtime.tables.local_storage import Rows
from embrace_fx.runtime.tables.own_step import (
    State,
    by_options,
    counters_after,
    hyperparameters,
    is_of_rows,
    put_rows,
    rows_of_state,
    step_rows,
    step_rows_on_device,
    step_tensor,
    with_own_counters,
)
from embrace_fx.vocabulary.exactness import ELEMENT_WISE, Moving, RowUpdates
from embrace_fx.vocabulary.row_wise import RowWiseAdagrad, new_sums

if TYPE_CHECKING:
    from embrace_fx.runtime.tables.table import Table

Options = Mapping[str, Any]
"""The options of a param group in one step."""


class SparseUpdate:
    """One step of a table that changes only rows with a gradient.

    Args:
        table: the table, whose current options the step uses.
    """

    moves_all = False
    """Whether rows without a gradient change, too."""

    def __init__(self, table: Table) -> None:
        self.table, self.optimizer, self.options = table, table.holder, hyperparameters(table.param_group())
        # The bits of a fused kernel's result depend on the elements it updates together.
        self._of_some = {**self.options, "fused": False} if self.options.get("fused") else self.options
        self._counted: State = {}  # step counters after this step

    def apply(self, ids: Tensor, rows: Tensor) -> None:
        """Updates rows with sorted, unique ids (K,) by their gradients (K, d).

        May be called several times in a step, with different rows.
        """
        ids, store = self.table.places(ids, to_write=True), self.table.store
        local, state = store.local, store.state
        if not step_rows_on_device(self.optimizer, self.options, local, state, ids, rows):
            self._counted = step_rows(self.optimizer, self._of_some, local, state, ids, rows) or self._counted

    def finish(self, parts: Sequence[Rows]) -> None:
        """Updates the remaining rows: by gradients, ids (K,) and rows (K, d), or without if the rule does."""
        if self.table.lacks_state:
            self._take_first(parts)
            return
        for ids, rows in parts:
            self.apply(ids, rows)
        self._count()

    def _take_first(self, parts: Sequence[Rows]) -> None:
        """Runs the table's first step, which creates optimizer state for all rows."""
        store = self.table.store
        none = torch.empty(0, dtype=torch.int64, device=store.local.device)
        ids, rows = (torch.cat(each) for each in zip((none, store.local[:0]), *parts, strict=True))
        places, local = store.places(ids, to_write=True), store.local
        state, values = store.state, local.index_select(0, places)
        after = step_tensor(self.optimizer, self._of_some, values, rows, rows_of_state(state, places, len(local)))
        local.index_copy_(0, places, values)
        counters: State = {key: value for key, value in after.items() if not is_of_rows(value, len(ids))}
        if self._of_some is not self.options:
            counters = counters_after(self.optimizer, self.options, local, state)
        store.keep_first({key: value for key, value in after.items() if key not in counters}, places)
        store.keep(counters)

    def _count(self) -> None:
        """Advances the step counters, which all rows share."""
        store = self.table.store
        if self._counted and self._of_some is self.options:
            store.keep(self._counted)
            return
        local, state = store.local, store.state
        if not all(is_of_rows(value, local.shape[0]) for value in state.values()):
            store.keep(counters_after(self.optimizer, self.options, local, state))


class DenseUpdate(SparseUpdate):
    """One step of a table that changes all rows at once."""

    moves_all = True

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._applied: list[Tensor] = []  # the ids that `apply` has updated in this step

    def apply(self, ids: Tensor, rows: Tensor) -> None:
        """Updates some rows before `finish` updates the others."""
        step_rows(self.optimizer, self.options, self.table.store.local, self.table.store.state, ids, rows)
        self._applied.append(ids)

    def finish(self, parts: Sequence[Rows]) -> None:
        """Updates all other rows by one dense step. Rows updated before keep their result."""
        store = self.table.store
        local, state = store.local, store.state
        total, gradient = local.shape[0], torch.zeros_like(local)
        for ids, rows in parts:
            gradient.index_copy_(0, ids, rows)
        done = [(ids, local.index_select(0, ids), rows_of_state(state, ids, total)) for ids in self._applied]
        # Clone the counters until `keep`: in a row space they are the first table's.
        after = step_tensor(self.optimizer, self.options, local, gradient, with_own_counters(state, total))
        for ids, values, of_rows in done:
            local.index_copy_(0, ids, values)
            put_rows(after, of_rows, ids, total)
        store.keep(after)


class DeferredUpdate(SparseUpdate):
    """One step of a table that rows without a gradient defer until they are next read."""

    moves_all = True

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._history = table.history
        self._history.begin(self.optimizer, self.options)

    def apply(self, ids: Tensor, rows: Tensor) -> None:
        """Applies the steps that these rows have skipped, and then this one."""
        places, store = self.table.places(ids, to_write=True), self.table.store
        local, state = store.local, store.state
        self._history.take(places, local, state)
        self._counted = step_rows(self.optimizer, self.options, local, state, places, rows) or self._counted
        self._history.took(places)

    def finish(self, parts: Sequence[Rows]) -> None:
        """Updates the remaining rows with a gradient, and records the step as deferred for all others."""
        for ids, rows in parts:
            self.apply(ids, rows)
        self._history.record(self.options)
        self._count()
        self._history.shorten()


class RowWiseUpdate(SparseUpdate):
    """A step of RowWiseAdagrad. `finish` also updates rows of shards, whose squares must be summed over ranks."""

    _squares: Callable[[], Tensor] | None = None

    def wait_for(self, rows: Rows, squares: Callable[[], Tensor]) -> None:
        """Adds rows of a shard for `finish`. `squares` waits for their sums of squares over all columns (K,)."""
        self._rows, self._squares = rows, squares

    def finish(self, parts: Sequence[Rows]) -> None:
        """Steps the rows with their squares, summed over ranks if a shard holds only some columns."""
        if (squares := self._squares) is not None:
            self._squares = None
            self._update(*self._rows, squares())
        for ids, rows in parts:
            assert rows.shape[1] == self.table.shape[1], "the squares of a shard's rows must be summed over ranks first"
            self._update(ids, rows, rows.square().sum(1))

    def _update(self, ids: Tensor, rows: Tensor, squares: Tensor) -> None:
        """Updates rows by gradients (K, d) and their sums of squares over all columns (K,)."""
        store, options = self.table.store, self.options
        ids = store.places(ids, to_write=True)
        local, state = store.local, store.state  # each property joins all tables of a row space
        if not state:
            state = {"sum": new_sums(local, dict(options))}
            store.keep(state)
        sums = state["sum"].index_select(0, ids).add_(squares / self.table.shape[1])
        state["sum"].index_copy_(0, ids, sums)
        steps = options["lr"] * rows / sums.sqrt_().add_(options["eps"]).unsqueeze(1)
        local.index_copy_(0, ids, local.index_select(0, ids).sub_(steps))


# -- which rule --------------------------------------------------------------------------------------------------------


@by_options
def dense_update_policy(kind: type[Optimizer], options: Options, row_updates: RowUpdates, dtype: torch.dtype) -> Moving:
    """Returns how an optimizer class with these options updates rows without a gradient."""
    if kind in (SparseAdam, RowWiseAdagrad):
        return "lazy" if kind is SparseAdam else ""
    if kind in ELEMENT_WISE and steps_rows(options):
        momentum = kind is SGD and options["momentum"] != 0
        # With dampening, torch does not dampen a row's first gradient, and no state records which rows had one.
        if row_updates == "lazy" and not (momentum and options["dampening"] != 0):
            return "lazy"
        if kind in (SGD, Adagrad) and not momentum and options["weight_decay"] == 0:
            return ""
    return "sweep" if skipping(kind, options, dtype) is None else "either"


def steps_rows(options: Options) -> bool:
    """Returns whether a step can update single rows, which it cannot if it is differentiable or capturable."""
    lr = options["lr"]
    return not (options.get("differentiable") or options.get("capturable")) and not (
        isinstance(lr, Tensor) and lr.requires_grad
    )


# -- predicted steps ---------------------------------------------------------------------------------------------------


def predict_update(table: Table, ids: Tensor, rows: Tensor) -> PredictedUpdate:
    """Computes the next step of copies of rows (K, d) with ids (K,), as if they had no gradient."""
    rows, options = rows.clone(), hyperparameters(table.param_group())
    state = rows_of_state(table.store.state, table.places(ids), len(table.store.local))
    after = step_tensor(table.holder, options, rows, torch.zeros_like(rows), state)
    return PredictedUpdate(options, ids, rows, after)
