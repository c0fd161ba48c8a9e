"""Decides which optimizers may step a table in shards, and what a step does to rows without gradient.

Rules
    A table can be sharded under every *element-wise* optimizer, whose update of an element depends on that element
    alone: the owner of a shard takes the optimizer's own step over all of its rows (a sweep). torch's own classes in
    `ELEMENT_WISE` promise this, and any class with `element_wise = True`. Others keep tables whole, because no trial
    could show that a class never clips, skips or adapts by the values of all elements.
    "exact": the optimizer's own semantics. Where its formula leaves rows without gradient and their state unchanged
    (SGD without momentum and weight decay, Adagrad without weight decay, SparseAdam), only rows with gradient are
    updated.
    "lazy": rows without gradient stay unchanged under any optimizer, and the step counter advances once per step for
    the whole table (SparseAdam's semantics; the modified Adam of EmbRace, arXiv 2110.09132).
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
"""What a step does to rows without gradient: the optimizer's own update, or nothing."""

RowUpdatesOption = Literal["exact", "sweep", "replay", "lazy"]
"""The user's option: "exact" is a sweep or a replay, whichever is predicted to be faster."""


Moving = Literal["", "lazy", "sweep", "replay", "either"]
"""How rows without gradient are updated: never, by the formula (""), or by request ("lazy"); all at each step
("sweep"), each when it is next read ("replay"), or as is faster ("either")."""

STILL = ("", "lazy")


def semantics(asked: RowUpdatesOption) -> RowUpdates:
    return "lazy" if asked == "lazy" else "exact"


ELEMENT_WISE: frozenset[type[Optimizer]] = frozenset(
    {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SparseAdam}
)
"""torch's optimizers whose update of an element depends on that element alone, under all options."""


def needs_whole(kind: type[Optimizer]) -> str:
    """Explains why tables stay whole under an optimizer class; "": it can step them in shards.

    A user's class promises to be element-wise by an attribute `element_wise` of that class itself, which classes
    derived from it do not inherit.
    """
    if kind in ELEMENT_WISE or kind is RowWiseAdagrad or vars(kind).get("element_wise"):
        return ""
    if kind.__module__.startswith("torch.optim.") or "element_wise" in vars(kind):
        return f"{kind.__name__} is not element-wise: it needs whole tables"
    return (
        f"{kind.__name__} does not promise to be element-wise, so tables stay whole; where its update of an element "
        f"depends on that element alone, set {kind.__name__}.element_wise = True"
    )
