"""Replaces the user's own collectives in a forward by functional ones, and refuses those that no graph can hold.

Dynamo traces `torch.distributed`'s functions as torch's functional ops, such as `_c10d_functional.all_reduce` and its
wait. The replacements have the gradients of eager mode: collectives that write into their arguments have none (their
results are constants for autograd), those of `torch.distributed.nn` have the documented ones.

rewrite: dist.all_reduce(m)                 -> r = all_reduce(m.detach(), "sum", "0"); w = wait_tensor(r); m.copy_(w)
         y = dist.nn.functional.all_gather(x)  -> r = all_gather_into_tensor(x, N, "0"); y = wait_tensor(r).unbind(0)

They stay in the order of the program, on the process groups that the forward names.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, fx
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable, UserFunctionVariable

from embrace_fx.capture.errors import CaptureError
from embrace_fx.vocabulary.ops import USERS_LAUNCHES, op_name

_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

Group = Any  # a process group; None: the default one


# ---- collectives that write into their arguments ----


def _all_reduce(tensor: Tensor, op: str = "sum", group: Group = None, async_op: bool = False) -> None:
    _write(tensor, functional.all_reduce(tensor.detach(), op, _of(group)))


def _broadcast(
    tensor: Tensor, src: int | None = None, group: Group = None, async_op: bool = False, group_src: int | None = None
) -> None:
    _write(tensor, functional.broadcast(tensor.detach(), _source(src, group_src, group), _of(group)))


def _all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> None:
    gathered = functional.all_gather_single(input_tensor.detach(), 0, _of(group))
    _write(output_tensor, gathered.view(output_tensor.shape))


def _all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False) -> None:
    for into, part in zip(tensor_list, _gathered(tensor.detach(), group), strict=True):
        _write(into, part)


def _reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: str = "sum", group: Group = None, async_op: bool = False
) -> None:
    parts = dist.get_world_size(group) * (output.shape[0] if output.dim() else 1)
    own = input.detach().reshape(parts, *output.shape[1:])
    _write(output, functional.reduce_scatter_single(own, op, 0, _of(group)).view(output.shape))


def _reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: str = "sum", group: Group = None, async_op: bool = False
) -> None:
    _reduce_scatter_tensor(output, torch.stack(input_list).flatten(0, 1), op, group)


def _all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> None:
    _differentiable_all_to_all_single(output, input.detach(), output_split_sizes, input_split_sizes, group)


def _write(into: Tensor, value: Tensor) -> None:
    """Writes as a collective does, unseen by autograd."""
    with torch.no_grad():
        into.detach().copy_(value)


# ---- collectives with a gradient ----


def _differentiable_all_reduce(tensor: Tensor, op: str = "sum", group: Group = dist.group.WORLD) -> Tensor:
    found: Tensor = functional.all_reduce(tensor, op, _of(group))
    return found


def _differentiable_all_gather(tensor: Tensor, group: Group = dist.group.WORLD) -> tuple[Tensor, ...]:
    return tuple(_gathered(tensor, group))


def _differentiable_reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: str = "sum", group: Group = dist.group.WORLD
) -> Tensor:
    parts = torch.stack(input_list)
    found: Tensor = functional.reduce_scatter_single(parts, op, 0, _of(group))
    found = found.view(output.shape)
    _write(output, found.detach())
    return found


def _differentiable_all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = dist.group.WORLD,
) -> Tensor:
    given = input.contiguous()
    found: Tensor = functional.all_to_all_single(given, output_split_sizes, input_split_sizes, _of(group))
    _write(output, found.detach())
    return found


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, src: int, group: Group) -> Tensor:
        ctx.src, ctx.group = src, group
        found: Tensor = functional.broadcast(tensor, src, group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        found = functional.all_reduce(gradient.contiguous(), "sum", ctx.group)
        return found if dist.get_rank(ctx.group) == ctx.src else torch.zeros_like(found), None, None


def _differentiable_broadcast(tensor: Tensor, src: int, group: Group = dist.group.WORLD) -> Tensor:
    found: Tensor = _Broadcast.apply(tensor, _source(src, None, group), _of(group))  # type: ignore[no-untyped-call]
    return found


# ---- helpers ----


def _gathered(tensor: Tensor, group: Group) -> Sequence[Tensor]:
    """Gathers the tensors, of one shape, of all ranks of a group."""
    flat = functional.all_gather_single(tensor.contiguous().unsqueeze(0), 0, _of(group))
    return flat.unbind(0)


def _of(group: Group) -> Any:
    """Returns the group, or the default one for None."""
    return group or dist.group.WORLD


def _source(src: int | None, group_src: int | None, group: Group) -> int:
    """Returns the source's rank in the group."""
    if group_src is not None:
        return group_src
    return dist.get_group_rank(_of(group), src or 0)


_STANDS_FOR: dict[Any, Any] = {
    dist.all_reduce: _all_reduce,
    dist.broadcast: _broadcast,
    dist.all_gather: _all_gather,
    dist.all_gather_into_tensor: _all_gather_into_tensor,
    dist.distributed_c10d._all_gather_base: _all_gather_into_tensor,
    dist.reduce_scatter: _reduce_scatter,
    dist.reduce_scatter_tensor: _reduce_scatter_tensor,
    dist.distributed_c10d._reduce_scatter_base: _reduce_scatter_tensor,
    dist.all_to_all_single: _all_to_all_single,
    differentiable.all_reduce: _differentiable_all_reduce,
    differentiable.all_gather: _differentiable_all_gather,
    differentiable.reduce_scatter: _differentiable_reduce_scatter,
    differentiable.all_to_all_single: _differentiable_all_to_all_single,
    differentiable.broadcast: _differentiable_broadcast,
}
for _new, _like in (("all_gather_single", _all_gather_into_tensor), ("reduce_scatter_single", _reduce_scatter_tensor)):
    if hasattr(dist, _new):  # newer torch has these names
        _STANDS_FOR[getattr(dist, _new)] = _like


class _Rewritten(CollectiveFunctionRewriteVariable):
    """A function of torch.distributed, as Dynamo sees it."""

    def call_function(self, tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> Any:
        given = inspect.signature(self.fn).bind(*args, **kwargs).arguments
        asynchronous = given.get("async_op")
        if asynchronous is not None and asynchronous.as_python_constant():
            raise CaptureError(
                f"torch.distributed.{getattr(self.fn, '__name__', '')} with async_op=True has no place in a graph"
            )
        if "op" in given:
            given["op"] = VariableTracker.build(tx, _spelled(given["op"]))
        return self.replacement_var.call_function(tx, [], dict(given))


def _spelled(op: Any) -> str:
    value = getattr(op, "value", None)
    found = functional.REDUCE_OP_TO_STR.get(value) if isinstance(value, dist.ReduceOp.RedOpType) else None
    if found is None:
        raise CaptureError(f"a reduction by {value} has no place in a graph")
    return str(found)


@contextlib.contextmanager
def collectives_traced() -> Iterator[None]:
    """Opens a context in which Dynamo traces a forward's collectives with the gradients of eager mode."""
    kind = CollectiveFunctionRewriteVariable
    can_rewrite, create = kind.__dict__["can_rewrite"], kind.__dict__["create"]

    def is_known(variable: Any) -> bool:
        return inspect.isfunction(variable) and variable in _STANDS_FOR

    def rewritten(tx: Any, old_fn: Any, source: Any, **options: Any) -> _Rewritten:
        new = _STANDS_FOR[old_fn]
        new_source = AttrSource(tx.import_source(__name__), new.__name__)
        replacement = UserFunctionVariable(new, source=new_source, **options)
        return _Rewritten(old_fn, replacement_var=replacement, source=source, **options)

    kind.can_rewrite, kind.create = staticmethod(is_known), staticmethod(rewritten)  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.can_rewrite, kind.create = can_rewrite, create  # type: ignore[method-assign]


def check_collectives(graph: fx.Graph) -> None:
    """Raises `CaptureError` where a traced graph communicates other than by a collective of all ranks of a group."""
    for node in graph.nodes:
        name = op_name(node)
        is_wait = name == "_c10d_functional::wait_tensor"
        if name.partition("::")[0] in _NAMESPACES and name not in USERS_LAUNCHES and not is_wait:
            raise CaptureError(f"the forward communicates by {name}, which has no place in a graph")
