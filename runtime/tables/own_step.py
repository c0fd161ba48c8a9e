"""An optimizer's own step, taken over tensors that are not its parameters: some rows of a table, or all of a row space.

Whatever the class computes of an element depends on that element alone (`embrace_fx.vocabulary.exactness`), so that
its step over some rows and their state is its step over the table, as far as these rows go.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from embrace_fx.runtime.kernels import gpu

State = MutableMapping[str, Any]
"""What an optimizer keeps of one parameter: tensors, and a step counter as its class has it."""


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a param group as they are now; schedulers write into the group, and in place into a tensor lr."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def plain_options(group: Mapping[str, Any], but: str = "") -> tuple[tuple[str, Hashable], ...] | None:
    """The options of a param group, to remember by what they decide; None: some are tensors, or other objects.

    Args:
        but: the name of one to leave out.
    """
    found: list[tuple[str, Hashable]] = []
    for name, value in group.items():  # several times a step: without calls
        if name not in ("params", but):
            kinds = map(type, value) if type(value) is tuple else (type(value),)
            if not PLAIN.issuperset(kinds):
                return None
            found.append((name, value))
    return tuple(found)


Decide = TypeVar("Decide", bound=Callable[..., Any])


def by_options(decide: Decide) -> Decide:
    """Remembers what is decided of a class of optimizers and the options of a param group, where these are plain."""

    @lru_cache(maxsize=256)
    def under(kind: Hashable, plain: tuple[tuple[str, Hashable], ...], *rest: Hashable) -> Any:
        return decide(kind, dict(plain), *rest)

    def of(kind: type[Optimizer], options: Mapping[str, Any], *rest: Any) -> Any:
        plain = plain_options(options)
        if plain is None:
            return decide(kind, options, *rest)
        return under(kind, plain, *rest)  # type: ignore[arg-type]  # classes hash

    return cast("Decide", wraps(decide)(of))


PLAIN = frozenset({float, bool, int, str, type(None)})


def same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two steps are of the same options."""
    if one.keys() != other.keys():
        return False
    for key, value in one.items():
        there = other[key]
        is_tensor = isinstance(value, Tensor) and isinstance(there, Tensor)
        if type(value) is not type(there) or not (torch.equal(value, there) if is_tensor else value == there):
            return False
    return True


def takes_sparse(optimizer: Optimizer) -> bool:
    """Whether its class, under the options of this moment, takes sparse gradients (COO)."""
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    return type(optimizer) is SparseAdam or (type(optimizer) in (SGD, Adagrad) and not decays)


def step_groups(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], state: MutableMapping[Any, Any] | None = None
) -> None:
    """The class's own step over other param groups, whose gradients are unscaled.

    The optimizer itself has its own groups all the while: another thread may clear its gradients, or set its rates.

    Args:
        state: in place of the optimizer's own.
    """
    step: Callable[..., Any] = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    before = dict(optimizer.__dict__)
    another: Optimizer = object.__new__(type(optimizer))
    another.__dict__.update({name: value for name, value in before.items() if name not in _OF_ITS_STEP})
    # Without hooks, which a class whose step calls that of its base would run.
    another.__dict__.update({name: OrderedDict() for name in _HOOKS})
    another.__dict__["param_groups"] = list(groups)
    if state is not None:
        another.__dict__["state"] = state
    step(another)
    for name, value in another.__dict__.items():  # what the class counts beside its state
        if name not in _OF_ITS_STEP and name != "state" and before.get(name) is not value:
            optimizer.__dict__[name] = value


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_ITS_STEP = ("param_groups", *_HOOKS, "grad_scale", "found_inf")
"""What belongs to the step that another one is a part of. The last two are a GradScaler's."""


def step_tensor(
    optimizer: Optimizer, options: Mapping[str, Any], values: Tensor, gradient: Tensor, state: Mapping[str, Any]
) -> State:
    """Steps `values` in place by their gradient, both of one shape, with their state, which is returned as it is then.

    Args:
        options: of the param group, as of the step.
        state: of these values; written. Empty before their first step.
    """
    parameter = values.detach()  # the same memory; an nn.Parameter's constructor asks for pending updates
    parameter.grad = gradient if type(optimizer) is not SparseAdam else _sparse(gradient)
    found: Any = defaultdict(dict, {parameter: dict(state)} if state else {})
    step_groups(optimizer, [{**options, "params": [parameter]}], found)
    return dict(found[parameter])


def _sparse(gradient: Tensor) -> Tensor:
    ids = torch.arange(gradient.shape[0], device=gradient.device).unsqueeze(0)
    return torch.sparse_coo_tensor(ids, gradient, gradient.shape, is_coalesced=True, check_invariants=False)


def is_of_rows(value: Any, rows: int) -> bool:
    """Whether a part of a table's state has something for each of its rows."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def rows_of_state(state: Mapping[str, Any], ids: Tensor, rows: int) -> State:
    """Copies the state of some rows of a table of `rows` rows, and its counters."""
    found: State = {}
    for key, value in state.items():  # several times a step: without calls
        if not isinstance(value, Tensor):
            found[key] = copy.copy(value)
        elif value.dim() > 0 and value.shape[0] == rows:
            found[key] = value.index_select(0, ids)
        else:
            found[key] = value.clone()
    return found


def with_own_counters(state: Mapping[str, Any], rows: int) -> State:
    """The state of a table of `rows` rows, with counters of its own: a step counts in place."""
    counters = {key: value for key, value in state.items() if isinstance(value, Tensor) and not is_of_rows(value, rows)}
    return {**state, **{key: value.clone() for key, value in counters.items()}}


def put_rows(state: Mapping[str, Any], of_rows: Mapping[str, Any], ids: Tensor, rows: int) -> None:
    """Puts the state of some rows back, without its counters."""
    for key, value in of_rows.items():
        whole = state.get(key)
        if isinstance(whole, Tensor) and whole.dim() > 0 and whole.shape[0] == rows:
            whole.index_copy_(0, ids, value)


_ELEMENTS = 1 << 17
"""Of a block of rows on the host: few enough that what a step makes of them in between stays in cache."""


def step_rows(
    optimizer: Optimizer, options: Mapping[str, Any], local: Tensor, state: Mapping[str, Any], ids: Tensor, rows: Tensor
) -> State:
    """Steps rows `ids` (K,) of a part (V', d) by their gradients (K, d), and of its state all but its counters.

    Returns:
        What the state counts for all rows after the step; nothing where there are no rows.
    """
    total, size = local.shape[0], max(1, _ELEMENTS // max(1, local.shape[1]))
    after: State = {}
    if not len(ids):
        return after
    whole = local.is_cuda or len(ids) <= size
    for some, gradients in [(ids, rows)] if whole else zip(ids.split(size), rows.split(size), strict=True):
        values = local.index_select(0, some)
        after = step_tensor(optimizer, options, values, gradients, rows_of_state(state, some, total))
        local.index_copy_(0, some, values)
        put_rows(state, after, some, total)
    return {key: value for key, value in after.items() if not is_of_rows(state.get(key), total)}


def step_rows_on_device(
    optimizer: Optimizer, options: Mapping[str, Any], local: Tensor, state: Mapping[str, Any], ids: Tensor, rows: Tensor
) -> bool:
    """Steps rows `ids` (K,) of a part (V', d) by their gradients (K, d), with their state but its counters, in place.

    Returns: whether it has; if not, nothing is done.
    """
    kind = type(optimizer)
    if not local.is_cuda or kind not in (SGD, Adagrad, Adam, AdamW, SparseAdam):
        return False
    parts = [part for part in state.values() if isinstance(part, Tensor) and part.dim() > 0]
    if not all(gpu.takes(tensor) for tensor in (local, rows, *parts)):
        return False
    number = float(state["step"]) + 1 if "step" in state else 0.0
    lr, common = options["lr"], {"maximize": options.get("maximize", False)}
    if kind is SGD:
        momentum = state["momentum_buffer"] if options["momentum"] != 0 else None
        names = ("momentum", "weight_decay", "nesterov")
        gpu.sgd_rows(local, momentum, ids, rows, lr=float(lr), **{name: options[name] for name in names}, **common)
    elif kind is Adagrad:
        size = float(lr / (1 + (number - 1) * options["lr_decay"]))
        common |= {"eps": options["eps"], "weight_decay": options["weight_decay"]}
        gpu.adagrad_rows(local, state["sum"], ids, rows, step_size=size, **common)
    else:
        _adam(kind, options, local, state, ids, rows, number)
    return True


def _adam(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    local: Tensor,
    state: Mapping[str, Any],
    ids: Tensor,
    rows: Tensor,
    number: float,
) -> None:
    beta1, beta2 = options["betas"]
    size, rest = options["lr"] / (1 - beta1**number), (1 - beta2**number) ** -0.5
    decay, shrink = options.get("weight_decay", 0.0), 1.0
    if kind is SparseAdam:  # leaves the bias of the second moment out of the term that eps is added to
        size, rest = options["lr"] * math.sqrt(1 - beta2**number) / (1 - beta1**number), 1.0
    elif options["decoupled_weight_decay"]:
        decay, shrink = 0.0, float(1 - options["lr"] * decay)
    gpu.adam_rows(
        local,
        state["exp_avg"],
        state["exp_avg_sq"],
        state["max_exp_avg_sq"] if options.get("amsgrad") else None,
        ids,
        rows,
        step_size=float(size),
        betas=(float(beta1), float(beta2)),
        eps=options["eps"],
        correction=rest,
        weight_decay=decay,
        shrink=shrink,
        maximize=options.get("maximize", False),
    )


def counters_after(optimizer: Optimizer, options: Mapping[str, Any], local: Tensor, state: Mapping[str, Any]) -> State:
    """Takes a step over none of the rows of a part (V', d); returns what its state counts for all of them."""
    after = _step_nothing(optimizer, options, local, state)
    return {key: value for key, value in after.items() if not is_of_rows(value, 0)}


def _step_nothing(optimizer: Optimizer, options: Mapping[str, Any], local: Tensor, state: Mapping[str, Any]) -> State:
    none = torch.empty(0, dtype=torch.int64, device=local.device)
    of_none = rows_of_state(state, none, local.shape[0])
    return step_tensor(optimizer, options, local[:0].clone(), local[:0].clone(), of_none)


def new_state(optimizer: Optimizer, options: Mapping[str, Any], local: Tensor) -> State:
    """Makes the state that a first step over none of the rows of a part (V', d) leaves."""
    return _step_nothing(optimizer, options, local, {})


def makes_state(optimizer: Optimizer, options: Mapping[str, Any], values: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether a step would make state that a table (V, d) does not have: it has to be made for all rows at once."""
    before = _tensors(state)
    return _tensors(_step_nothing(optimizer, options, values, state)) != before


def _tensors(state: Mapping[str, Any]) -> dict[str, bool]:
    return {key: isinstance(value, Tensor) for key, value in state.items()}
