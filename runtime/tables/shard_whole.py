"""Runs ops that have no rule for shards on whole tensors, which are gathered from all ranks.

What such an op writes into a shard, each rank writes into its part. A view that has no part on each rank, such as a
flattened one, gathers the whole tensor at each read or write.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from embrace_fx.runtime.tables.local_storage import LocalStorage
from embrace_fx.runtime.tables.pending_parameters import memory_is_shared
from embrace_fx.runtime.tables.shard_layout import Axis
from embrace_fx.runtime.tables.table_shard import Rule, TableShard
from embrace_fx.vocabulary import proxies

aten = torch.ops.aten


class GatheredView(LocalStorage):
    """A view that has no part on each rank, such as a flattened one. Reading it gathers the whole tensor.

    Args:
        base: the shard that is viewed.
        view: function that returns the view of the whole tensor.
        looks: a meta tensor with the shape and dtype of the view.
    """

    def __init__(self, base: TableShard, view: Callable[[Tensor], Tensor], looks: Tensor) -> None:
        super().__init__(looks)
        self.local, self.device, self.base, self.view = None, base.device, base, view

    def dense(self) -> Tensor:
        return self.view(_gather(self.base))

    def stored(self) -> Tensor:
        return self.base.held.stored()

    def memory(self) -> Tensor:
        raise self.base.refused("the memory of a view")

    def copied(self) -> LocalStorage:
        raise self.base.refused("a deep copy of a view")

    def check_write(self) -> None:
        self.base.held.check_write()

    @property
    def unreduced(self) -> bool:
        return self.base.held.unreduced


def run_on_gathered(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an op on whole tensors, which are gathered from all ranks. Each rank keeps its part of the shards that the
    op writes. Collective, except for views.

    Raises `RuntimeError`, on every rank, if the op is a collective, or changes the shape or memory of a shard.
    """
    parts = {id(leaf): leaf for leaf in flatten_call(args, kwargs) if isinstance(leaf, TableShard)}
    sharded = next((part for part in parts.values() if not part.spread.is_alone), None)
    if sharded is not None and _is_collective(func):
        raise sharded.refused(f"the collective {func.overloadpacket.__name__}()")
    if sharded is not None and is_view(func):
        return _make_view(func, args, kwargs)
    arguments = func._schema.arguments
    named = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    written = pytree.tree_leaves([named.get(argument.name) for argument in arguments if argument.is_write])
    written = [leaf for leaf in written if isinstance(leaf, TableShard)]
    wholes, plain = dict[int, Tensor](), dict[int, Tensor]()
    for part in written:
        part.held.check_write()
    for key, part in parts.items():
        base = _base(part)
        if id(base.held) not in wholes:  # views of one shard share the gathered tensor
            shares = base.spread.is_alone and bool(written)
            wholes[id(base.held)] = base.held.pinned().detach() if shares else _gather(base)
        whole = wholes[id(base.held)]
        plain[key] = part.held.view(whole) if isinstance(part.held, GatheredView) else whole
    before = [_metadata(plain[id(part)]) for part in written]
    plain_args, plain_kwargs = pytree.tree_map_only(TableShard, lambda part: plain[id(part)], (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if before != [_metadata(plain[id(part)]) for part in written]:
        raise written[0].refused(func._schema.name)
    for base in map(_base, written):
        if not base.spread.is_alone:
            base.held.memory().copy_(base.spread.cut(wholes[id(base.held)]))
            base.held.record_write()
    shown = {id(plain[id(part)]): part for part in written}
    return pytree.tree_map_only(Tensor, lambda found: shown.get(id(found), found), result)


def _base(part: TableShard) -> TableShard:
    """Returns the shard that a part views, or the part itself if it is no `GatheredView`."""
    return part.held.base if isinstance(part.held, GatheredView) else part


def _gather(part: TableShard) -> Tensor:
    """Returns the whole tensor of a part, with the part's strides. Collective if it is sharded."""
    whole = part.held.dense() if part.spread.is_alone else part.full_tensor()
    if whole.stride() == part.stride():
        return whole
    return torch.empty_strided(part.shape, part.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)


def _metadata(tensor: Tensor) -> tuple[object, ...]:
    """Returns what an op that writes a shard must not change."""
    return tensor.shape, tensor.stride(), tensor.data_ptr()


def _make_view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of a view op, a shard or a list of shards, without gathering anything yet."""
    part: TableShard = args[0]
    rest = args[1:]
    base, earlier = _base(part), part.held.view if isinstance(part.held, GatheredView) else None
    # An offset counts from the start of memory, where a view may not begin.
    if func is aten.as_strided.default and (len(rest) > 2 or kwargs or not base.spread.is_table):
        raise part.refused(func._schema.name)
    looks = func(part.spread.meta(part.dtype), *rest, **kwargs)
    base.held.memory()  # a view of a gradient makes it dense

    def wrap(one: Tensor, pick: Callable[[Any], Tensor]) -> TableShard:
        """Returns the shard that is one of the op's results."""

        def view(whole: Tensor) -> Tensor:
            """Applies the earlier views, and then this one, to the whole tensor."""
            return pick(func(whole if earlier is None else earlier(whole), *rest, **kwargs))

        layout = replace(part.spread.with_axes(tuple(map(Axis.whole, one.shape))), stride=one.stride())
        return part.like(GatheredView(base.like(base.held), view, one), layout)

    if isinstance(looks, Tensor):
        return wrap(looks, lambda found: found)
    return [wrap(each, itemgetter(k)) for k, each in enumerate(looks)]


@cache
def is_view(func: Any) -> bool:
    """Returns whether an op returns views of its first argument."""
    return not func._schema.is_mutable and any(each.alias_info is not None for each in func._schema.returns)


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns an op's arguments as a flat list, with the items of lists, tuples and dicts."""
    given = [*args, *kwargs.values()]
    return given if _LEAVES.issuperset(map(type, given)) else pytree.tree_leaves(given)


_LEAVES = frozenset({TableShard, Tensor, nn.Parameter, bool, int, float, str, type(None), torch.dtype, torch.device})


def is_recorded(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an op belongs to a loss: autograd records it, or a backward runs it."""
    in_backward = torch._C._current_graph_task_id() != -1
    if func._schema.is_mutable or is_view(func) or func in _OF_ONE or not (in_backward or torch.is_grad_enabled()):
        return False
    tensors = [leaf for leaf in flatten_call(args, kwargs) if isinstance(leaf, Tensor)]
    return any(not isinstance(each, TableShard) if in_backward else each.requires_grad for each in tensors)


def run_recorded(rule: Rule | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op while autograd records: by `rule` if its result is no shard, otherwise on gathered whole tensors."""
    if rule is not None:
        with torch.no_grad():
            found = rule(func, args, kwargs)
        if found is not NotImplemented and not any(isinstance(each, TableShard) for each in pytree.tree_leaves(found)):
            return found
    return run_on_gathered(func, args, kwargs)


def _is_collective(func: Any) -> bool:
    """Returns whether an op is a collective of c10d, or one that a function of torch.distributed calls first."""
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
_OF_ONE = frozenset({aten.clone.default, aten._to_copy.default, *LIKE, *NEW, *RANDOM_LIKE})
"""Ops with no other operand, so that the result has the same layout."""


# -- memory that another tensor is to share ----------------------------------------------------------------------------


def memory_to_share(part: TableShard, references: int | None = None) -> Tensor:
    """Returns the tensor whose memory another tensor uses after `tensor.data = part` or `tensor.set_(part)`: this
    rank's tensor if it has the whole table, otherwise the gathered whole tensor. Collective if the table is sharded.

    Args:
        references: the shard's reference count during the assignment, or None if other code refers to the shard.

    Raises `RuntimeError` if other code refers to the shard or its memory.
    """
    if part.spread.is_alone:
        return part.held.pinned()
    if part.held.unreduced:
        raise part.not_reduced_error("`tensor.data = x` or set_()")
    is_view_of = isinstance(part.held, GatheredView)
    if is_view_of or references is None or references > _setter_references() or _shares_memory(part):
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
    """Returns the reference count of a tensor without other references while another tensor's `.data` is set to it."""
    found = []

    class FailingTensor(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    def count(_: Any, references: int) -> Tensor:
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
