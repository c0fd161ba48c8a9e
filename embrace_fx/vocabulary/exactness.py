"""Decides which optimizers may update sharded tables, and how their steps treat rows without a gradient.

Rules
    A table can be sharded under every *element-wise* optimizer, whose update of an element depends only on that
    element: each rank runs the optimizer's own step on its shard. torch's classes in `ELEMENT_WISE` are element-wise,
    and so is any class with `element_wise = True`. Other optimizers keep tables whole, because no trial could prove
    that a class never clips, skips or adapts by the values of all elements. "exact": the optimizer's own semantics. If
    its formula does not change rows without a gradient or their state (SGD without momentum and weight decay, Adagrad
    without weight decay, SparseAdam), only rows with a gradient are updated. "lazy": rows without a gradient stay
    unchanged under any optimizer, and the step counter advances once per step for the whole table (SparseAdam's
    semantics; the modified Adam of EmbRace, arXiv 2110.09132).
"""

from __future__ import annotations

from typing import Literal

from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from embrace_fx.vocabulary.row_wise import RowWiseAdagrad

RowUpdates = Literal["exact", "lazy"]
"""How a step treats rows without a gradient: the optimizer's own update, or no update."""

RowUpdatesOption = Literal["exact", "sweep", "replay", "lazy"]
"""The user's option. "exact" updates all rows at each step or defers updates, as is predicted to be faster."""


DenseUpdatePolicy = Literal["", "lazy", "sweep", "replay", "either"]
"""How rows without a gradient are updated: never, by the optimizer's formula ("") or the user's choice ("lazy"); all at
each step ("sweep"); each when it is next read ("replay"); or the faster of these two ("either")."""

STILL = ("", "lazy")


def row_update_semantics(option: RowUpdatesOption) -> RowUpdates:
    """Returns how an optimizer's step treats table rows without a gradient: "lazy" (rows do not change) or "exact"
    (rows change as the optimizer itself would change them).

    Args:
        option: the option `row_updates` of `compile`.
    """
    return "lazy" if option == "lazy" else "exact"


ELEMENT_WISE: frozenset[type[Optimizer]] = frozenset(
    {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SparseAdam}
)
"""torch's optimizers that are element-wise under all options."""


def whole_table_reason(optimizer_class: type[Optimizer]) -> str:
    """Returns the reason why an optimizer class needs whole tables, or "" if they can be sharded.

    A user's class is element-wise if it has its own attribute `element_wise = True`. Subclasses do not inherit it.
    """
    if (
        optimizer_class in ELEMENT_WISE
        or optimizer_class is RowWiseAdagrad
        or vars(optimizer_class).get("element_wise")
    ):
        return ""
    if optimizer_class.__module__.startswith("torch.optim.") or "element_wise" in vars(optimizer_class):
        return f"{optimizer_class.__name__} is not element-wise: it needs whole tables"
    return (
        f"{optimizer_class.__name__} does not promise to be element-wise, so tables stay whole; if its update of an "
        f"element depends on that element alone, set {optimizer_class.__name__}.element_wise = True"
    )
