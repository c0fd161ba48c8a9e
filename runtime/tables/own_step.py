"""Runs an optimizer's own step on tensors that are not its parameters: on some rows of a table, or on a joined table.

The optimizer is element-wise (`embrace_fx.vocabulary.exactness`): a step on some rows and their state changes them as a
step on the whole table would.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from functools import lru_cache, wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from embrace_fx.runtime.kernels import gpu
from embrace_fx.runtime.kernels.decay import Averages
from embrace_fx.vocabulary.exactness import ELEMENT_WISE
from embrace_fx.vocabulary.row_wise import MEAN_SQUARES, RowWiseAdagrad, new_sums

State = MutableMapping[str, Any]
"""An optimizer's state of one parameter: tensors and the step counter."""


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a param group's current options, without its parameters."""
    found = {**group}
    found.pop("params", None)
    for name, value in found.items():
        if isinstance(value, Tensor):
            found[name] = value.clone()
    return found


def plain_options(group: Mapping[str, Any], except_for: str = "") -> tuple[tuple[str, Hashable], ...] | None:
    """Returns a param group's options without `except_for` as a hashable key, or None if some are not plain values."""
    found: list[tuple[str, Hashable]] = []
    for name, value in group.items():  # a plain loop, because this runs several times per step
        if name not in ("params", except_for):
            kinds = map(type, value) if type(value) is tuple else (type(value),)
            if not PLAIN.issuperset(kinds):
                return None
            found.append((name, value))
    return tuple(found)


Decide = TypeVar("Decide", bound=Callable[..., Any])


def cached_by_options(decide: Decide) -> Decide:
    """Decorates a function of (optimizer class, options, ...) so that its results are cached if all options are plain
    values, such as numbers.
    """

    @lru_cache(maxsize=256)
    def call_cached(optimizer_class: Hashable, plain: tuple[tuple[str, Hashable], ...], *rest: Hashable) -> Any:
        return decide(optimizer_class, dict(plain), *rest)

    def call(optimizer_class: type[Optimizer], options: Mapping[str, Any], *rest: Any) -> Any:
        plain = plain_options(options)
        if plain is None:
            return decide(optimizer_class, options, *rest)
        return call_cached(optimizer_class, plain, *rest)  # type: ignore[arg-type]  # classes hash

    return cast("Decide", wraps(decide)(call))


PLAIN = frozenset({float, bool, int, str, type(None)})


def same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two dicts of optimizer options are equal. Compares tensors by value."""
    if one.keys() != other.keys():
        return False
    for key, value in one.items():
        there = other[key]
        is_tensor = isinstance(value, Tensor) and isinstance(there, Tensor)
        if type(value) is not type(there) or not (torch.equal(value, there) if is_tensor else value == there):
            return False
    return True


def accepts_sparse(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer accepts sparse (COO) gradients with its current options."""
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    return type(optimizer) is SparseAdam or (type(optimizer) in (SGD, Adagrad) and not decays)


def step_groups(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], state: MutableMapping[Any, Any] | None = None
) -> None:
    """Runs an optimizer's own step on `groups`, and on `state` if given, instead of the optimizer's own. The optimizer
    keeps its own groups meanwhile, because another thread may clear gradients or change learning rates.
    """
    before = dict(optimizer.__dict__)
    another: Optimizer = object.__new__(type(optimizer))
    another.__dict__.update(before)
    for name in _OF_ITS_STEP:
        another.__dict__.pop(name, None)
    for name in _HOOKS:  # remove the hooks, which would run again if the step calls its base class's step
        another.__dict__[name] = OrderedDict()
    another.__dict__["param_groups"] = list(groups)
    if state is not None:
        another.__dict__["state"] = state
    for group in groups:
        of_cpu = bool(group["params"]) and group["params"][0].device.type == "cpu"
        if of_cpu and group.get("foreach", "") is None and not group.get("fused"):
            group["foreach"] = False  # the optimizer's own choice for CPU tensors
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    _step_without_wrapper(step, another)
    # Copy attributes that the step has changed, such as counters outside of the state.
    for name, value in another.__dict__.items():
        if name not in _OF_ITS_STEP and name != "state" and before.get(name) is not value:
            optimizer.__dict__[name] = value


def _step_without_wrapper(step: Any, optimizer: Optimizer) -> None:
    """Runs an optimizer's `step` with gradients disabled, without the overhead of torch's decorator for this."""
    switches = getattr(getattr(step, "__code__", None), "co_name", "") == "_use_grad"
    if not switches or optimizer.defaults["differentiable"]:
        step(optimizer)
        return
    had_gradients = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        step.__wrapped__(optimizer)
    finally:
        torch._C._set_grad_enabled(had_gradients)


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_ITS_STEP = ("param_groups", *_HOOKS, "grad_scale", "found_inf")
"""Attributes of the enclosing step, not copied. The last two belong to GradScaler."""


def step_tensor(
    optimizer: Optimizer, options: Mapping[str, Any], values: Tensor, gradient: Tensor, state: Mapping[str, Any]
) -> State:
    """Runs one optimizer step on `values` in place. Returns their new optimizer state.

    Args:
        state: the optimizer state of `values`, changed in place. Empty before the first step.
    """
    parameter = values.detach()  # shares memory; the constructor of nn.Parameter would apply pending updates
    parameter.grad = gradient if type(optimizer) is not SparseAdam else _to_sparse(gradient)
    found: Any = defaultdict(dict, {parameter: dict(state)} if state else {})
    step_groups(optimizer, [{**options, "params": [parameter]}], found)
    return dict(found[parameter])


def _to_sparse(gradient: Tensor) -> Tensor:
    """Returns a dense gradient as a sparse (COO) tensor with all rows."""
    ids = torch.arange(gradient.shape[0], device=gradient.device).unsqueeze(0)
    return torch.sparse_coo_tensor(ids, gradient, gradient.shape, is_coalesced=True, check_invariants=False)


def has_row_values(value: Any, rows: int) -> bool:
    """Returns whether an entry of optimizer state has one value, or one row of values, for each of a table's rows."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def read_state_rows(state: Mapping[str, Any], ids: Tensor, rows: int) -> State:
    """Copies the rows `ids` (K,) of the state of a table with `rows` rows, and the step counters."""
    found: State = {}
    for key, value in state.items():  # inlined, because this runs several times per step
        if not isinstance(value, Tensor):
            found[key] = copy.copy(value)
        elif value.dim() > 0 and value.shape[0] == rows:
            found[key] = value.index_select(0, ids)
        else:
            found[key] = value.clone()
    return found


def with_own_counters(state: Mapping[str, Any], rows: int) -> State:
    """Returns a table's optimizer state with copies of the step counters, which a step increments in place."""
    counters = {
        key: value for key, value in state.items() if isinstance(value, Tensor) and not has_row_values(value, rows)
    }
    return {**state, **{key: value.clone() for key, value in counters.items()}}


def write_state_rows(state: Mapping[str, Any], of_rows: Mapping[str, Any], ids: Tensor, rows: int) -> None:
    """Writes the state `of_rows` of the rows `ids` back into the table's state, except the step counters."""
    for key, value in of_rows.items():
        whole = state.get(key)
        if isinstance(whole, Tensor) and whole.dim() > 0 and whole.shape[0] == rows:
            whole.index_copy_(0, ids, value)


_ELEMENTS = 1 << 17
"""Elements per block of rows on the host, small enough for a step's temporaries to stay in cache."""


def step_rows(
    optimizer: Optimizer, options: Mapping[str, Any], local: Tensor, state: Mapping[str, Any], ids: Tensor, rows: Tensor
) -> State:
    """Runs one optimizer step on the rows `ids` (K,) of a shard `local` (V', d), with gradients `rows` (K, d), in
    place. Does not change the step counters in `state`. Returns the counters after the step; {} if there are no rows.
    """
    total, size = local.shape[0], max(1, _ELEMENTS // max(1, local.shape[1]))
    after: State = {}
    if not len(ids):
        return after
    # Given mean squares belong to all rows at once.
    whole = local.is_cuda or len(ids) <= size or MEAN_SQUARES in options
    for some, gradients in [(ids, rows)] if whole else zip(ids.split(size), rows.split(size), strict=True):
        values = local.index_select(0, some)
        after = step_tensor(optimizer, options, values, gradients, read_state_rows(state, some, total))
        local.index_copy_(0, some, values)
        write_state_rows(state, after, some, total)
    return {key: value for key, value in after.items() if not has_row_values(state.get(key), total)}


def step_rows_on_device(
    optimizer: Optimizer, options: Mapping[str, Any], local: Tensor, state: Mapping[str, Any], ids: Tensor, rows: Tensor
) -> bool:
    """Runs the step of `step_rows` with a CUDA kernel. Returns False, and changes nothing, if no kernel supports it."""
    kind = type(optimizer)
    if not local.is_cuda or kind not in (SGD, Adagrad, Adam, AdamW, SparseAdam):
        return False
    parts = [part for part in state.values() if isinstance(part, Tensor) and part.dim() > 0]
    if not all(map(gpu.supports, (local, rows, *parts))):
        return False
    number = float(state["step"]) + 1 if "step" in state else 0.0
    if kind is SGD:
        gpu.sgd_rows(local, state["momentum_buffer"] if options["momentum"] != 0 else None, ids, rows, options)
    elif kind is Adagrad:
        step_size = float(options["lr"] / (1 + (number - 1) * options["lr_decay"]))
        gpu.adagrad_rows(local, state["sum"], ids, rows, options, step_size)
    else:
        greatest = state["max_exp_avg_sq"] if options.get("amsgrad") else None
        averages = Averages(state["exp_avg"], state["exp_avg_sq"], greatest)
        gpu.adam_rows(local, averages, ids, rows, _adam_step(kind, options, number))
    return True


def _adam_step(optimizer_class: type[Optimizer], options: Mapping[str, Any], step_count: float) -> gpu.AdamStep:
    """Returns the coefficients of step number `step_count`, counted from 1, of Adam, AdamW or SparseAdam."""
    beta1, beta2 = options["betas"]
    size, rest = options["lr"] / (1 - beta1**step_count), (1 - beta2**step_count) ** -0.5
    decay, shrink = options.get("weight_decay", 0.0), 1.0
    if optimizer_class is SparseAdam:  # its eps is added to the second moment before bias correction
        size, rest = options["lr"] * math.sqrt(1 - beta2**step_count) / (1 - beta1**step_count), 1.0
    elif options["decoupled_weight_decay"]:
        decay, shrink = 0.0, float(1 - options["lr"] * decay)
    betas = float(beta1), float(beta2)
    return gpu.AdamStep(float(size), betas, options["eps"], rest, decay, shrink, options.get("maximize", False))


def counters_after(optimizer: Optimizer, options: Mapping[str, Any], local: Tensor, state: Mapping[str, Any]) -> State:
    """Returns the step counters after an optimizer step that updates no rows. Changes nothing in place."""
    none = torch.empty(0, dtype=torch.int64, device=local.device)
    of_none = read_state_rows(state, none, local.shape[0])
    after = step_tensor(optimizer, options, local[:0].clone(), local[:0].clone(), of_none)
    return {key: value for key, value in after.items() if not has_row_values(value, 0)}


@cached_by_options
def state_names(optimizer_class: type[Optimizer], options: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the state entries that a class needs, or none if `first_state` does not support it."""
    if optimizer_class not in ELEMENT_WISE and optimizer_class is not RowWiseAdagrad:
        return frozenset()
    return frozenset(_state_of_row(optimizer_class, options, options, torch.zeros((1, 1), device="cpu")))


def first_state(optimizer: Optimizer, options: Mapping[str, Any], local: Tensor) -> State:
    """Returns the state of a shard (V', d) before the first step, for `ELEMENT_WISE` classes and RowWiseAdagrad."""
    row = local.new_zeros((1, *local.shape[1:]))
    found = _state_of_row(type(optimizer), options, optimizer.defaults, row)
    return {k: v.expand(local.shape[: v.dim()]).clone() if has_row_values(v, 1) else v for k, v in found.items()}


def _state_of_row(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], defaults: Mapping[str, Any], row: Tensor
) -> Mapping[str, Any]:
    """Returns the optimizer state that an optimizer creates in its first step, for a parameter of one row.

    Args:
        defaults: the optimizer's attribute `defaults`.
        row: zeros (1, d).
    """
    if optimizer_class is RowWiseAdagrad:
        return {"sum": new_sums(row, options)}
    if optimizer_class is SGD:  # missing momentum is equivalent to zeros
        return {"momentum_buffer": row} if options["momentum"] != 0 else {}
    if optimizer_class is SparseAdam:
        return {"step": 0, "exp_avg": row, "exp_avg_sq": row}
    row.grad = torch.zeros_like(row)
    made: Any = object.__new__(optimizer_class)
    made.__dict__.update(state=defaultdict(dict), defaults=defaults)
    lists = [list[Any]() for _ in range(len(signature(made._init_group).parameters) - 1)]
    made._init_group({**options, "params": [row]}, *lists)
    found: State = made.state[row]
    return found
