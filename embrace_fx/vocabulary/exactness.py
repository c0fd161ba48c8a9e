"""Rules for optimizers: which may step a table in shards, and what happens to rows without gradient.

Rules
    A table can lie in shards under every *element-wise* optimizer, whose update of an element depends on that element
    alone: the owner of a shard takes the optimizer's own step over all of its rows (a sweep). That is a promise: of
    torch's own classes, and of a class that makes it by `element_wise = True`. Others keep tables whole; no trial could
    show that a class never clips, skips or adapts by what it finds in all elements.
    "exact": the optimizer's own semantics. Where rows without gradient, and their state, stand still of their own
    accord (SGD without momentum and weight decay, Adagrad without weight decay, SparseAdam), only rows with gradient
    are updated.
    "lazy": rows without gradient stand still whatever the optimizer says, where its update is known by rows, and the
    step counter advances once per iteration for the whole table (SparseAdam's semantics; the modified Adam of EmbRace,
    arXiv 2110.09132).

Options that only choose among kernels of one formula (`foreach`, `fused`) have no part in these rules: a row update is
its own kernel, equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor
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

RowUpdates = Literal["exact", "lazy"]
"""What a step does to rows without gradient: what the optimizer says, or nothing."""

RowUpdatesOption = Literal["exact", "sweep", "replay", "lazy"]
"""As a user asks for it: "exact" is a sweep or a replay, whichever is predicted to take less time."""


def semantics(asked: RowUpdatesOption) -> RowUpdates:
    return "lazy" if asked == "lazy" else "exact"


ELEMENT_WISE: frozenset[type[Optimizer]] = frozenset(
    {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SparseAdam}
)
"""torch's optimizers whose update of an element depends on that element alone, whatever their options."""


def is_element_wise(kind: type[Optimizer]) -> bool:
    """Whether a class promises that its update of an element depends on that element alone.

    A class of one's own does so by an attribute `element_wise` of that class itself: a class derived from it may do
    anything.
    """
    return kind in ELEMENT_WISE or bool(vars(kind).get("element_wise"))


def not_element_wise(kind: type[Optimizer]) -> str:
    """Tells the user why tables stay whole under an optimizer class."""
    if kind.__module__.startswith("torch.optim.") or "element_wise" in vars(kind):
        return f"{kind.__name__} is not element-wise: it needs whole tables"
    return (
        f"{kind.__name__} does not promise to be element-wise, so tables stay whole; where its update of an element "
        f"depends on that element alone, {kind.__name__}.element_wise = True shards them"
    )


_ADAM = frozenset(
    {
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "fused",
        "decoupled_weight_decay",
    }
)

KNOWN_OPTIONS: Mapping[type[Optimizer], frozenset[str]] = MappingProxyType(
    {
        SGD: frozenset(
            {
                "lr",
                "momentum",
                "dampening",
                "weight_decay",
                "nesterov",
                "maximize",
                "foreach",
                "differentiable",
                "fused",
            }
        ),
        Adagrad: frozenset(
            {
                "lr",
                "lr_decay",
                "eps",
                "weight_decay",
                "initial_accumulator_value",
                "foreach",
                "maximize",
                "differentiable",
                "fused",
            }
        ),
        Adam: _ADAM,
        AdamW: _ADAM,
        SparseAdam: frozenset({"lr", "betas", "eps", "maximize"}),
    }
)
"""The optimizers whose update is known by rows, and every option of theirs that the row update accounts for."""


def row_update_blocker(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    row_updates: RowUpdates,
    *,
    kind: type[Optimizer] | None = None,
) -> str | None:
    """Tells why the tables of a param group cannot be updated by rows with the required semantics.

    The answer can change while training, because schedulers write momentum, betas and weight decay too: asking again
    costs a few comparisons and reads no tensor.

    Args:
        optimizer: the user's optimizer.
        group: the param group that holds the table.
        row_updates: "exact" or "lazy", see the head of this module.
        kind: the class that defines the update, where `optimizer` is an instance of a class derived from it that
            does not change the update; its own class otherwise. Derived classes are not known: they may do anything.

    Returns:
        None where row updates are legal, else the reason in one line.
    """
    kind = kind or type(optimizer)
    if kind not in KNOWN_OPTIONS:
        return f"{kind.__name__} is not known to update rows"
    # Torch adds `differentiable` to the defaults of any optimizer that loads a state dict.
    if unknown := sorted(optimizer.defaults.keys() - KNOWN_OPTIONS[kind] - {"differentiable"}):
        return f"{kind.__name__} has options that are not known to update rows: {', '.join(unknown)}"
    return (
        _unsupported_option(group, kind)
        or _unsupported_value(optimizer, group, kind)
        or (_moving_option(group, kind) if row_updates == "exact" else None)
    )


def _unsupported_option(group: Mapping[str, Any], kind: type[Optimizer]) -> str | None:
    """The option whose promise a row update cannot keep."""
    name = kind.__name__
    if group.get("differentiable"):
        return f"{name} with differentiable=True needs gradients through the update; row updates run outside autograd"
    if group.get("capturable"):
        return f"{name} with capturable=True is to be recorded in a CUDA graph; the number of rows changes every step"
    if isinstance(group["lr"], Tensor) and group["lr"].requires_grad:
        return f"{name} has an lr that requires grad; row updates run outside autograd"
    known = KNOWN_OPTIONS[kind]
    for option, value in group.items():
        if option in known and option != "lr" and _holds_a_tensor(value):
            return f"{name} has a tensor as {option}; row updates read it on the host, pass a float"
    return None


def _holds_a_tensor(value: object) -> bool:
    """Whether an option, or one of a pair of them, is a tensor."""
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value))


def _unsupported_value(optimizer: Optimizer, group: Mapping[str, Any], kind: type[Optimizer]) -> str | None:
    """The value of an option that has no meaning row by row, or that torch itself would not use."""
    if kind is SGD and group["momentum"] != 0 and group["dampening"] != 0:
        # torch leaves the first gradient undamped. By rows that is each row's first, of which torch's state keeps no
        # record: a zero buffer may be a row never touched or one whose momentum happens to be zero.
        return f"SGD with dampening={group['dampening']} treats a row's first gradient apart, which no state records"
    if kind is Adagrad and group["initial_accumulator_value"] != optimizer.defaults["initial_accumulator_value"]:
        # torch initialises every sum from the constructor's value and never reads the group's.
        return (
            f"Adagrad ignores initial_accumulator_value={group['initial_accumulator_value']} of a param group; "
            "pass it to the constructor"
        )
    return None


def _moving_option(group: Mapping[str, Any], kind: type[Optimizer]) -> str | None:
    """The options by which rows without gradient, or their state, move."""
    moving = []
    if kind in (Adam, AdamW):
        # Without gradient the averages decay, and the row follows the first of them.
        moving.append("betas")
    moving += [option for option in ("momentum", "weight_decay") if group.get(option, 0) != 0]
    if not moving:
        return None
    options = " and ".join(f"{option}={group[option]}" for option in moving)
    return (
        f"{kind.__name__} with {options} moves every row at each step, also rows without gradient; "
        "row_updates='lazy' would let those stand still"
    )
