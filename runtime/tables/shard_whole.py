"""Runs ops that shards do not support on whole tensors, which are gathered from all ranks.

    loss = model(x) + (model.module.words.weight[x] - anchor).square().sum()

Here each rank's loss is its own function of the whole table, so its gradient has all columns. A gradient of this rank's
columns alone would lose the other ranks' share of the mean. Ops that autograd records, and their backwards, therefore
run on whole tensors.

A whole tensor cannot share memory with one rank's part (`tensor.data = part`, `tensor.set_(part)`). If nothing else
refers to the part, as for the result of an expression, the ranks gather it and the tensor gets the result. If something
does, this raises, because a write to one would not show in the other. They share memory if this rank has the whole
table.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from embrace_fx.runtime.tables.local_storage import CopyStorage, LocalStorage
from embrace_fx.runtime.tables.pending_parameters import memory_is_shared
from embrace_fx.runtime.tables.shard_layout import VIEWS, Layout
from embrace_fx.runtime.tables.table_shard import Rule, TableShard, gather_whole
from embrace_fx.vocabulary import proxies

aten = torch.ops.aten


def run_on_gathered(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an op on whole tensors, which are gathered from all ranks. Collective.

    Raises:
        RuntimeError: the op writes into a shard or is a collective. Raised on every rank.
    """
    parts = {id(leaf): leaf for leaf in flatten_call(args, kwargs) if isinstance(leaf, TableShard)}
    first, arguments = next(iter(parts.values())), func._schema.arguments
    named = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    written = [named.get(argument.name) for argument in arguments if argument.is_write]
    if _is_collective(func):
        raise first.refused(f"the collective {func.overloadpacket.__name__}()")
    if any(isinstance(leaf, TableShard) for leaf in pytree.tree_leaves(written)):
        raise first.refused(func._schema.name)
    found = {key: gather_whole(part) for key, part in parts.items()}
    plain_args, plain_kwargs = pytree.tree_map_only(TableShard, lambda part: found[id(part)], (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    is_view = any(
        isinstance(named.get(argument.name), TableShard) for argument in arguments if argument.alias_info is not None
    )
    return as_read_only(first, result, func) if is_view and not is_recorded(func, args, kwargs) else result


def as_read_only(part: TableShard, result: Any, func: Any) -> Any:
    """Wraps the tensors in an op's result as read-only. They are copies, so a write into them would be lost; writes
    raise instead.

    Args:
        part: the gathered shard, for the error message.
        func: the op, for the error message.
    """
    refusal = str(part.refused(f"a write into the result of {func.overloadpacket.__name__}()"))

    def wrap(copy: Tensor) -> TableShard:
        """Wraps one copy as read-only."""
        layout = replace(Layout.of_table(part.spread.name, copy.shape), stride=copy.stride())
        return part.like(CopyStorage(copy, refusal), layout)

    return pytree.tree_map_only(Tensor, wrap, result)


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns an op's arguments as a flat list, with the items of lists, tuples and dicts."""
    given = [*args, *kwargs.values()]
    return given if _LEAVES.issuperset(map(type, given)) else pytree.tree_leaves(given)


_LEAVES = frozenset({TableShard, Tensor, nn.Parameter, bool, int, float, str, type(None), torch.dtype, torch.device})


def is_recorded(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an op belongs to a loss: autograd records it, or a backward runs it."""
    in_backward = torch._C._current_graph_task_id() != -1
    if func._schema.is_mutable or func in _OF_ONE or not (in_backward or torch.is_grad_enabled()):
        return False
    tensors = [leaf for leaf in flatten_call(args, kwargs) if isinstance(leaf, Tensor)]
    return any(not isinstance(each, TableShard) if in_backward else each.requires_grad for each in tensors)


def run_recorded(rule: Rule | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op while autograd records. Uses `rule` if there is one and its result is no shard. Otherwise gathers the
    whole tables, and runs the op on them.

    Args:
        rule: the op's implementation for shards, or None if it has none.
    """
    if rule is not None:
        with torch.no_grad():
            found = rule(func, args, kwargs)
        if found is not NotImplemented and not any(isinstance(each, TableShard) for each in pytree.tree_leaves(found)):
            return found
    return run_on_gathered(func, args, kwargs)


def _is_collective(func: Any) -> bool:
    """Returns whether an op is a collective of c10d, or is called by a function of torch.distributed, for example to
    copy a collective's arguments.
    """
    if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        return True
    callers = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(1)))
    caller = next((file for file in callers if not file.endswith(_BETWEEN)), "")
    return caller.endswith("torch/distributed/distributed_c10d.py")


_BETWEEN = (
    *(str(Path(__file__).with_name(name)) for name in ("table_shard.py", "shard_rules.py", "shard_whole.py")),
    *("torch/_ops.py", "torch/utils/_pytree.py"),
)
"""Files in the call stack between a collective and an op's rule."""

ALIASES = (aten.detach.default, aten.alias.default, aten.detach_.default)
LIKE = (aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default)
RANDOM_LIKE = (
    *(aten.rand_like.default, aten.randn_like.default),
    *(aten.randint_like.default, aten.randint_like.low_dtype),
)
NEW = (
    *(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
    aten.new_empty_strided.default,
)
_OF_ONE = frozenset({*VIEWS, *ALIASES, aten.clone.default, aten._to_copy.default, *LIKE, *NEW, *RANDOM_LIKE})
"""Ops with no other operand, so that the result has the same layout."""


# -- memory that another tensor is to share ----------------------------------------------------------------------------


def memory_to_share(part: TableShard, references: int | None = None) -> Tensor:
    """Returns the tensor whose memory another tensor uses after `tensor.data = part` or `tensor.set_(part)`. It is this
    rank's tensor if this rank has the whole table, otherwise the gathered whole tensor. Collective if the table is
    sharded.

    Args:
        part: the shard.
        references: the shard's reference count during `tensor.data = part`, or None if other code is known to refer to
            the shard.

    Raises:
        RuntimeError: other code refers to the shard or its memory.
    """
    if part.spread.is_alone:
        return part.held.pinned()
    if part.held.unreduced:
        raise part.not_reduced_error("`tensor.data = x` or set_()")
    if references is None or references > _setter_references() or _shares_memory(part):
        raise RuntimeError(
            f"`tensor.data = x` or `tensor.set_(x)`: x is {part.what}, or was computed from it. Each rank has only a "
            "shard of x, so `tensor` cannot share memory with x while x is in use elsewhere. Copy the values on every "
            "rank: `tensor.data.copy_(x)` or `tensor.data = x.clone()`."
        )
    return part.full_tensor()


def _shares_memory(part: TableShard) -> bool:
    """Returns whether anything besides this shard refers to its memory."""
    alone = part.like(LocalStorage(torch.empty(0, device="cpu")))
    if sys.getrefcount(part.held) > sys.getrefcount(alone.held):
        return True
    return not part.held.of_gradient and memory_is_shared([part])


@cache
def _setter_references() -> int:
    """Returns the reference count that a tensor without other references has while it is assigned to another tensor's
    `.data`.
    """
    found = []

    class FailingTensor(Tensor):
        """A tensor subclass on which every op fails."""

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    def count(_: Any, references: int) -> Tensor:
        """Stores the reference count of the assigned tensor. Returns an empty tensor to assign instead."""
        found.append(references)
        return torch.empty(0, device="cpu")

    proxies.share_memory_on_assignment(FailingTensor, count)
    torch.empty(0, device="cpu").data = Tensor._make_wrapper_subclass(FailingTensor, (0,), device=torch.device("cpu"))
    return found[0]


def set_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `set_`, with a shard as the target or the source."""
    tensor, source = args
    if not isinstance(tensor, TableShard):
        return func(tensor, memory_to_share(source))
    tensor.data = source
    return tensor


proxies.share_memory_on_assignment(TableShard, memory_to_share)
