"""Rules for optimizers: which may step a table in shards, and what happens to rows without gradient.

Rules
    A table can lie in shards under every *element-wise* optimizer, whose update of an element depends on that element
    alone: the owner of a shard takes the optimizer's own step over all of its rows (a sweep). That is a promise: of
    torch's own classes, and of a class that makes it by `element_wise = True`. Others keep tables whole; no trial could
    show that a class never clips, skips or adapts by what it finds in all elements.
    "exact": the optimizer's own semantics. Where rows without gradient, and their state, stand still of their own
    accord (SGD without momentum and weight decay, Adagrad without weight decay, SparseAdam), only rows with gradient
    are updated.
    "lazy": rows without gradient stand still whatever torch's class says, and the step counter advances once per
    iteration for the whole table (SparseAdam's semantics; the modified Adam of EmbRace, arXiv 2110.09132).
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
"""What a step does to rows without gradient: what the optimizer says, or nothing."""

RowUpdatesOption = Literal["exact", "sweep", "replay", "lazy"]
"""As a user asks for it: "exact" is a sweep or a replay, whichever is predicted to take less time."""


Moving = Literal["", "lazy", "sweep", "replay", "either"]
"""How rows without gradient move: not at all, by the formula, or as the user asked; all at each step, each when it is
read next, or in either way."""

STILL = ("", "lazy")


def semantics(asked: RowUpdatesOption) -> RowUpdates:
    return "lazy" if asked == "lazy" else "exact"


ELEMENT_WISE: frozenset[type[Optimizer]] = frozenset(
    {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SparseAdam}
)
"""torch's optimizers whose update of an element depends on that element alone, whatever their options."""


def needs_whole(kind: type[Optimizer]) -> str:
    """Tells the user why tables stay whole under an optimizer class; "": it can step them in shards.

    A class of one's own promises that its update of an element depends on that element alone by an attribute
    `element_wise` of that class itself: a class derived from it may do anything.
    """
    if kind in ELEMENT_WISE or kind is RowWiseAdagrad or vars(kind).get("element_wise"):
        return ""
    if kind.__module__.startswith("torch.optim.") or "element_wise" in vars(kind):
        return f"{kind.__name__} is not element-wise: it needs whole tables"
    return (
        f"{kind.__name__} does not promise to be element-wise, so tables stay whole; where its update of an element "
        f"depends on that element alone, {kind.__name__}.element_wise = True shards them"
    )
