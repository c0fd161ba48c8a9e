"""What `.grad` of a sharded table is: a tensor of the shape of this rank's part, ids and rows inside.

Contract
    Code that looks at gradients between backward and step works on it as on any gradient, and on all ranks: what is
    asked of the whole (a norm, a sum, whether all is finite) is reduced over the ranks, so that every rank asks for it.
    What changes it in place (scaling, clamping, zeroing, noise) changes what the step applies.
    A gradient that is still on its way is waited for at its first use.
    Whatever keeps the number of elements (a copy, a product, a view) is again a part of a table's gradient.

Shape legend: V' x d this rank's part of the table; K rows with gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.held_gradient import HeldGradient

aten = torch.ops.aten


class RowGradient(Tensor):
    """A part of a table's gradient.

    Attributes:
        held: what it holds.
    """

    held: HeldGradient

    @staticmethod
    def __new__(cls, held: HeldGradient) -> RowGradient:
        made: RowGradient = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        made.held = held
        return made

    @classmethod
    def of(cls, dense: Tensor, communicator: Communicator | None) -> RowGradient:
        """One with all elements (V', d)."""
        held = HeldGradient(dense, communicator)
        held.set_dense(dense)
        return cls(held)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        answer = _ANSWERS.get(func)
        if answer is not None and isinstance(args[0], RowGradient | list | tuple):
            found = answer(func, args, kwargs)
            if found is not NotImplemented:
                return found
        if func._schema.name.startswith("aten::_foreach_"):
            return _each(func, args, kwargs)
        return _densely(func, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RowGradient({self.held.dense()!r})"

    # What reads memory without the dispatcher.

    def numpy(self, *, force: bool = False) -> Any:
        return self.held.dense().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.held.dense().__array__(dtype)

    def tolist(self) -> Any:
        return self.held.dense().tolist()

    def data_ptr(self) -> int:
        return self.held.dense().data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGradient:
        return RowGradient(self.held.copied())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.dense().__reduce_ex__(protocol)


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    return RowGradient(args[0].held)


def _clone(func: Any, args: Any, kwargs: Any) -> Any:
    return RowGradient(args[0].held.copied())


def _zero(func: Any, args: Any, kwargs: Any) -> Any:
    args[0].held.set_zero()
    return args[0]


def _scaled(func: Any, args: Any, kwargs: Any) -> Any:
    """`mul_` and `div_` by a number."""
    self, factor = args[0], args[1]
    if isinstance(factor, Tensor) and (factor.dim() > 0 or isinstance(factor, RowGradient)):
        return NotImplemented
    out_of_place = aten.mul if "mul" in func._schema.name else aten.div
    self.held.map(lambda values: out_of_place(values, factor).to(values.dtype))
    return self


def _clamped(func: Any, args: Any, kwargs: Any) -> Any:
    """Clamping that leaves zero zero."""
    self, *bounds = args
    name = func._schema.name
    lowest, highest = {
        "aten::clamp_": (*bounds, None, None)[:2],
        "aten::clamp_min_": (bounds[0], None),
        "aten::clamp_max_": (None, bounds[0]),
    }[name]
    lowest, highest = kwargs.get("min", lowest), kwargs.get("max", highest)
    if any(isinstance(bound, Tensor) for bound in (lowest, highest)):
        return NotImplemented
    if (lowest is not None and lowest > 0) or (highest is not None and highest < 0):
        return NotImplemented
    self.held.map(lambda values: values.clamp(lowest, highest))
    return self


def _added(func: Any, args: Any, kwargs: Any) -> Any:
    """`add_` of another gradient in rows."""
    self, other = args[0], args[1]
    if not isinstance(other, RowGradient) or other.held.is_dense or self.held.is_dense or kwargs:
        return NotImplemented
    self.held.add_rows(*other.held.rows())
    return self


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    """`linalg.vector_norm` of all elements, over the ranks."""
    held, order = args[0].held, args[1] if len(args) > 1 else kwargs.get("ord", 2)
    whole = len(args) <= 2 or args[2] is None or len(args[2]) == len(held.shape)
    if not whole or kwargs.get("dim") is not None:
        return NotImplemented
    total = held.norm(float(order))
    keeps = kwargs.get("keepdim", args[3] if len(args) > 3 else False)
    total = total.to(kwargs.get("dtype") or held.dtype)
    return total.view([1] * len(held.shape)) if keeps else total


_SUM, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN


def _whole_sum(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].held.reduce(func(args[0].held.values(), *args[1:], **kwargs), _SUM)


def _whole_mean(func: Any, args: Any, kwargs: Any) -> Any:
    return aten.sum.default(args[0], **kwargs) / max(1, args[0].held.elements())


def _whole_extreme(func: Any, args: Any, kwargs: Any) -> Any:
    """`max`, `min`, `any`, `all`: of a rank without columns, what changes no other's."""
    if len(args) > 1 and args[1]:
        return NotImplemented
    held, largest = args[0].held, func._schema.name in ("aten::max", "aten::amax", "aten::any")
    dense = held.dense()
    if dense.numel():
        own = func(dense)
    elif dense.dtype == torch.bool:
        own = torch.tensor(not largest, device=dense.device)
    else:
        own = torch.full((), float("-inf") if largest else float("inf"), dtype=dense.dtype, device=dense.device)
    if own.dtype != torch.bool:
        return held.reduce(own, _MAX if largest else _MIN)
    return held.reduce(own.to(torch.int32), _MAX if largest else _MIN).to(torch.bool)


def _dot(func: Any, args: Any, kwargs: Any) -> Any:
    one, other = args
    if not isinstance(one, RowGradient) or not isinstance(other, RowGradient):
        return NotImplemented
    return one.held.reduce(func(one.held.dense(), other.held.dense()), _SUM)


def _unscaled(func: Any, args: Any, kwargs: Any) -> Any:
    """GradScaler's: unscales, and finds out whether all is finite on every rank."""
    gradients, found_inf, inverse_scale = args
    parts = [g for g in gradients if isinstance(g, RowGradient)]
    plain = [g for g in gradients if not isinstance(g, RowGradient)]
    values = [part.held.values().clone() for part in parts]
    func([*plain, *values], found_inf, inverse_scale)
    for part, changed in zip(parts, values, strict=True):
        part.held.map(lambda _, changed=changed: changed)  # type: ignore[misc]
    parts[0].held.reduce(found_inf, _MAX)


def _refused(func: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        "expected gradients of sharded tables to be used one by one, between backward and step, found one in "
        f"{func._schema.name}, joined with others: each rank has only its part of it. Ask each gradient for its norm, "
        "sum or maximum, or pass strategy='allreduce' for tables whose whole gradient is needed."
    )


_ANSWERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.detach_.default: lambda func, args, kwargs: args[0],
    aten.clone.default: _clone,
    aten.zero_.default: _zero,
    aten.mul_.Tensor: _scaled,
    aten.mul_.Scalar: _scaled,
    aten.div_.Tensor: _scaled,
    aten.div_.Scalar: _scaled,
    aten.clamp_.default: _clamped,
    aten.clamp_min_.default: _clamped,
    aten.clamp_max_.default: _clamped,
    aten.add_.Tensor: _added,
    aten.linalg_vector_norm.default: _norm,
    aten.sum.default: _whole_sum,
    aten.mean.default: _whole_mean,
    aten.count_nonzero.default: _whole_sum,
    **dict.fromkeys(
        (
            *(aten.max.default, aten.min.default, aten.amax.default, aten.amin.default),
            *(aten.any.default, aten.all.default),
        ),
        _whole_extreme,
    ),
    aten.dot.default: _dot,
    aten.vdot.default: _dot,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
    aten.cat.default: _refused,
    aten.stack.default: _refused,
}
"""What is answered without making the gradient dense, or over all ranks."""


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """A `_foreach_` op: of plain tensors at once, of gradients in rows one by one."""
    tensors = args[0]
    name = func._schema.name.removeprefix("aten::_foreach_")
    single = getattr(aten, {"norm": "linalg_vector_norm"}.get(name, name))
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    parts = sorted({k for each in lists for k, value in enumerate(each) if isinstance(value, RowGradient)})
    rest = [k for k in range(len(tensors)) if k not in parts]

    def of(value: Any, chosen: Sequence[int]) -> Any:
        is_list = isinstance(value, list | tuple) and len(value) == len(tensors)
        return [value[k] for k in chosen] if is_list else value

    found: list[Any] = [None] * len(tensors)
    if rest:
        results = func(*(of(value, rest) for value in args), **{key: of(v, rest) for key, v in kwargs.items()})
        for k, result in zip(rest, results or (), strict=False):
            found[k] = result
    for k in parts:
        own = [of(value, [k])[0] if isinstance(value, list | tuple) else value for value in args]
        named = {key: of(v, [k])[0] if isinstance(v, list | tuple) else v for key, v in kwargs.items()}
        found[k] = single(*own, **named)
    return None if name.endswith("_") else found


def _densely(func: Any, args: Any, kwargs: Any) -> Any:
    """Any other op, on all elements; what it writes is what the gradient holds from then on."""
    helds: list[HeldGradient] = []

    def dense(gradient: RowGradient) -> Tensor:
        helds.append(gradient.held)
        return gradient.held.dense()

    written = [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    changed = [g for g in pytree.tree_leaves(written) if isinstance(g, RowGradient)]
    for gradient in changed:  # a step may have taken the tensor it holds
        gradient.held.set_dense(gradient.held.dense().clone())
    plain_args, plain_kwargs = pytree.tree_map_only(RowGradient, dense, (args, kwargs))
    given = {id(t): t for t in pytree.tree_leaves((plain_args, plain_kwargs)) if isinstance(t, Tensor)}
    result = func(*plain_args, **plain_kwargs)
    of = {id(gradient.held.dense()): gradient for gradient in changed}
    communicator, elements = helds[0].communicator, helds[0].shape.numel()

    def wrap(found: Any) -> Any:
        if id(found) in of:
            return of[id(found)]
        if not isinstance(found, Tensor) or id(found) in given:
            return found
        if found.dim() == 0 and func is not aten.select.int:
            _refuse_whole(func)
        return RowGradient.of(found, communicator) if found.dim() and found.numel() == elements else found

    return pytree.tree_map(wrap, result)


def _refuse_whole(func: Any) -> None:
    raise RuntimeError(
        "expected of the gradient of a sharded table what can be told over ranks (norm, sum, mean, max, min, any, all, "
        f"count_nonzero), between backward and step, found {func._schema.name}: this rank has only its part. Compute "
        "it from these, or pass strategy='allreduce' for the table."
    )
