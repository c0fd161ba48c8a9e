"""Update rules: how one optimizer step changes a table's rows with and without a gradient.

    SparseUpdate     rows without a gradient do not change, by the optimizer's own rule or because the user chose "lazy"
    DenseUpdate      all rows are updated at once
    DeferredUpdate   rows without a gradient apply the step when they are next read

Contract
    A rule object is one step of one table, with the options of that step. `apply` updates rows early, because they are
    read next. `finish`, called once, updates the other rows with gradients, and those without if the rule changes them.
    Each row is updated once, as if the optimizer had updated the whole table.

Shape legend: V' x d this rank's part of a table; K rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from embrace_fx.runtime.tables.history import deferred_steps_class
from embrace_fx.runtime.tables.local_storage import Rows
from embrace_fx.runtime.tables.own_step import (
    State,
    cached_by_options,
    counters_after,
    has_row_values,
    hyperparameters,
    read_state_rows,
    step_rows,
    step_rows_on_device,
    step_tensor,
    with_own_counters,
    write_state_rows,
)
from embrace_fx.vocabulary.exactness import ELEMENT_WISE, DenseUpdatePolicy, RowUpdates
from embrace_fx.vocabulary.row_wise import MEAN_SQUARES, RowWiseAdagrad

if TYPE_CHECKING:
    from embrace_fx.runtime.tables.table import Table


Options = Mapping[str, Any]
"""The options of a param group in one step."""


class SparseUpdate:
    """Applies one optimizer step to a table. Changes only the rows that have a gradient."""

    moves_all = False
    """Whether rows without a gradient change, too."""

    def __init__(self, table: Table) -> None:
        self.table, self.optimizer, self.options = (
            table,
            table.optimizer_of_members,
            hyperparameters(table.param_group()),
        )
        # Disable fused kernels, because their bits depend on which elements they update together.
        self._of_some = {**self.options, "fused": False} if self.options.get("fused") else self.options
        self._counted: State = {}  # step counters after this step
        self._awaited: tuple[Rows, Callable[[], Tensor]] | None = None

    def apply(self, ids: Tensor, rows: Tensor) -> None:
        """Updates rows with sorted, unique ids (K,) by their gradients (K, d). A step may call this repeatedly."""
        is_whole = type(self.optimizer) is not RowWiseAdagrad or rows.shape[1] == self.table.shape[1]
        assert is_whole, "the squares of a shard's rows must be summed over ranks first"
        ids, store = self.table.places(ids, to_write=True), self.table.store
        local, state = store.local, store.state
        if not step_rows_on_device(self.optimizer, self.options, local, state, ids, rows):
            self._counted = step_rows(self.optimizer, self._of_some, local, state, ids, rows) or self._counted

    def finish(self, parts: Sequence[Rows]) -> None:
        """Ends the step: updates the remaining rows with gradients, given as ids (K,) and gradients (K, d). Subclasses
        then update the rows without one.
        """
        if self._awaited is not None:
            (ids, rows), squares = self._awaited
            places, store = self.table.places(ids, to_write=True), self.table.store
            options = {**self.options, MEAN_SQUARES: squares() / self.table.shape[1]}
            step_rows(self.optimizer, options, store.local, store.state, places, rows)
            self._awaited = None
        for ids, rows in parts:
            self.apply(ids, rows)
        self._advance_counters()

    def add_for_finish(self, rows: Rows, squares: Callable[[], Tensor]) -> None:
        """Adds ids (K,) and gradients (K, d) of rows for `finish` to update. RowWiseAdagrad uses this, because it needs
        the sums (K,) of squares over all columns, for which `squares` waits.
        """
        self._awaited = rows, squares

    def _advance_counters(self) -> None:
        """Advances the optimizer's step counters, which all rows share."""
        store = self.table.store
        if self._counted and self._of_some is self.options:
            store.keep(self._counted)
            return
        local, state = store.local, store.state
        if not all(has_row_values(value, local.shape[0]) for value in state.values()):
            store.keep(counters_after(self.optimizer, self.options, local, state))


class DenseUpdate(SparseUpdate):
    """Applies one optimizer step to a table. Changes all rows."""

    moves_all = True

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._applied: list[Tensor] = []  # the ids that `apply` has updated in this step

    def apply(self, ids: Tensor, rows: Tensor) -> None:
        step_rows(self.optimizer, self.options, self.table.store.local, self.table.store.state, ids, rows)
        self._applied.append(ids)

    def finish(self, parts: Sequence[Rows]) -> None:
        """Updates all rows that `apply` has not updated, in one dense step. Rows in no part get a gradient of zeros."""
        store = self.table.store
        local, state = store.local, store.state
        total, gradient = local.shape[0], torch.zeros_like(local)
        for ids, rows in parts:
            gradient.index_copy_(0, ids, rows)
        done = [(ids, local.index_select(0, ids), read_state_rows(state, ids, total)) for ids in self._applied]
        # Run the step on copies of the counters, because those in the state of a joined table are the first table's.
        after = step_tensor(self.optimizer, self.options, local, gradient, with_own_counters(state, total))
        for ids, values, of_rows in done:
            local.index_copy_(0, ids, values)
            write_state_rows(after, of_rows, ids, total)
        store.keep(after)


class DeferredUpdate(SparseUpdate):
    """Applies one optimizer step to a table. Rows that have no gradient defer the step until they are next read."""

    moves_all = True

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._history = table.history
        self._history.begin(self.optimizer, self.options)

    def apply(self, ids: Tensor, rows: Tensor) -> None:
        """Applies the steps that the rows `ids` (K,) have deferred, then this step with gradients `rows` (K, d)."""
        places, store = self.table.places(ids, to_write=True), self.table.store
        local, state = store.local, store.state
        self._history.apply_open(places, local, state)
        self._counted = step_rows(self.optimizer, self.options, local, state, places, rows) or self._counted
        self._history.record_applied(places)

    def finish(self, parts: Sequence[Rows]) -> None:
        """Updates the remaining rows with gradients, and records the step as deferred for all other rows."""
        for ids, rows in parts:
            self.apply(ids, rows)
        self._history.record(self.options)
        self._advance_counters()


# -- which rule --------------------------------------------------------------------------------------------------------


@cached_by_options
def dense_update_policy(
    optimizer_class: type[Optimizer], options: Options, row_updates: RowUpdates, dtype: torch.dtype
) -> DenseUpdatePolicy:
    """Returns how an optimizer with these options updates rows without a gradient: "" if its formula does not change
    them, "lazy" if the user (by `row_updates`) or the optimizer chooses not to, "sweep" if they must be updated in each
    step, "either" if their updates may also be deferred until the rows are next read.
    """
    if optimizer_class in (SparseAdam, RowWiseAdagrad):
        return "lazy" if optimizer_class is SparseAdam else ""
    if optimizer_class in ELEMENT_WISE and can_step_rows(options):
        if row_updates == "lazy":
            return "lazy"
        if optimizer_class in (SGD, Adagrad) and not options.get("momentum") and options["weight_decay"] == 0:
            return ""
    return "sweep" if deferred_steps_class(optimizer_class, options, dtype) is None else "either"


def can_step_rows(options: Options) -> bool:
    """Returns whether a step with these options can update single rows: not if it is differentiable or capturable, or
    dampens momentum.
    """
    lr = options["lr"]
    if options.get("differentiable") or options.get("capturable") or (isinstance(lr, Tensor) and lr.requires_grad):
        return False
    # With dampening, torch does not dampen a row's first gradient, and no state records which rows had one.
    return not (options.get("dampening") and options.get("momentum"))


def not_deferrable_error(table: str, optimizer_class: type[Optimizer]) -> str:
    """Returns the error text for an optimizer whose updates of rows without a gradient cannot be deferred."""
    return (
        f"table_memory: {optimizer_class.__name__} with these options changes every row of {table} in each step, but "
        "only some rows are in memory. Use SGD without dampening, Adam or AdamW (weight decay decoupled or none), "
        "Adagrad or RMSprop without weight decay, RowWiseAdagrad, or row_updates='lazy'; or leave the table out of "
        "table_memory."
    )


class KnownOptimizers:
    """The optimizers known to update a model's parameters, in the order of registration. Holds weak references.

    Attributes:
        on_new: called with each new optimizer.
    """

    def __init__(self) -> None:
        self.on_new: Callable[[Optimizer], None] = lambda optimizer: None
        self._known: list[weakref.ref[Optimizer]] = []

    @property
    def optimizers(self) -> list[Optimizer]:
        """The known optimizers that still exist."""
        return [optimizer for known in self._known if (optimizer := known()) is not None]

    def has(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer has been registered."""
        return weakref.ref(optimizer) in self._known

    def add(self, optimizer: Optimizer) -> bool:
        """Registers an optimizer. Returns False if it was registered before."""
        if self.has(optimizer):
            return False
        self._known.append(weakref.ref(optimizer))
        self.on_new(optimizer)
        return True

    def find(self, parameter: Tensor) -> list[tuple[Optimizer, Mapping[str, Any]]]:
        """Returns (optimizer, param group) for each optimizer that updates a parameter."""
        return [
            (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            if any(p is parameter for p in group["params"])
        ]

    def dense_update_policy(self, parameter: Tensor, row_updates: RowUpdates) -> DenseUpdatePolicy:
        """Returns how a table's optimizer updates rows that have no gradient under the user's option `row_updates`. If
        no optimizer is registered for the table, or several are, assumes one that changes all rows, unless the option
        is "lazy".
        """
        held = self.find(parameter)
        if len(held) == 1:
            (optimizer, group) = held[0]
            return dense_update_policy(type(optimizer), group, row_updates, parameter.dtype)
        if row_updates == "lazy":
            return ""
        can_rest = all(deferred_steps_class(type(each), group, parameter.dtype) is not None for each, group in held)
        return "either" if can_rest else "sweep"
