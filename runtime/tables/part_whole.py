"""Answers what no part tells by whole tensors, which the ranks gather.

    loss = model(x) + (model.module.words.weight[x] - anchor).square().sum()

Each rank's loss is another function of the whole table, so that its gradient is of the whole table, too. A part of it
would not do: by it a rank has its own columns of its own loss's gradient, and each column takes the mean of all ranks'.
What autograd records of a table is therefore of whole tensors, and so is what a backward does with them.

A whole tensor cannot share memory with one rank's part (`tensor.data = part`, `tensor.set_(part)`). What nobody keeps,
as the result of an expression, is put together on every rank, and becomes the tensor's; what someone keeps is refused,
for writes to one of the two would not be seen in the other. Where this rank has all of a table, they share memory.
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
from embrace_fx.runtime.tables.part import Part, Rule, whole
from embrace_fx.runtime.tables.part_layout import VIEWS, Layout
from embrace_fx.runtime.tables.pending_parameters import share_memory
from embrace_fx.vocabulary import forwarding

aten = torch.ops.aten


def of_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns an op on whole tensors. A view of them is a copy, into which nobody may write. Collective.

    Raises:
        RuntimeError: it writes into a part, or is a collective; on every rank.
    """
    parts = {id(leaf): leaf for leaf in leaves_of(args, kwargs) if isinstance(leaf, Part)}
    first, arguments = next(iter(parts.values())), func._schema.arguments
    named = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    written = [named.get(argument.name) for argument in arguments if argument.is_write]
    if _is_collective(func):
        raise first.refused("a collective: ranks hold different columns")
    if any(isinstance(leaf, Part) for leaf in pytree.tree_leaves(written)):
        raise first.refused(func._schema.name)
    found = {key: whole(part) for key, part in parts.items()}
    plain_args, plain_kwargs = pytree.tree_map_only(Part, lambda part: found[id(part)], (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    is_view = any(
        isinstance(named.get(argument.name), Part) for argument in arguments if argument.alias_info is not None
    )
    return to_be_read(first, result, func) if is_view and not is_of_a_loss(func, args, kwargs) else result


def to_be_read(part: Part, result: Any, func: Any) -> Any:
    """Returns copies of views of a part as parts of which this rank has all, and into which nobody may write."""
    refusal = str(part.refused(f"a write into what {func._schema.name.split('::')[-1]}() makes of it"))

    def read(copy: Tensor) -> Part:
        layout = replace(Layout.of_table(part.spread.name, copy.shape), stride=copy.stride())
        return part.like(CopyStorage(copy, refusal), layout)

    return pytree.tree_map_only(Tensor, read, result)


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Flattens the arguments of an op; without pytree's calls where none is a container, as of most."""
    given = [*args, *kwargs.values()]
    return given if _LEAVES.issuperset(map(type, given)) else pytree.tree_leaves(given)


_LEAVES = frozenset({Part, Tensor, nn.Parameter, bool, int, float, str, type(None), torch.dtype, torch.device})


def is_of_a_loss(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether autograd records an op, or runs it in a backward, on operands that may differ between ranks."""
    in_backward = torch._C._current_graph_task_id() != -1
    if func._schema.is_mutable or func in _OF_ONE or not (in_backward or torch.is_grad_enabled()):
        return False
    tensors = [leaf for leaf in leaves_of(args, kwargs) if isinstance(leaf, Tensor)]
    return any(not isinstance(each, Part) if in_backward else each.requires_grad for each in tensors)


def of_loss(rule: Rule | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns an op that autograd records: by its rule, where that tells of the whole; else on whole tensors."""
    if rule is not None:
        with torch.no_grad():
            found = rule(func, args, kwargs)
        if found is not NotImplemented and not any(isinstance(each, Part) for each in pytree.tree_leaves(found)):
            return found
    return of_whole(func, args, kwargs)


def _is_collective(func: Any) -> bool:
    """Whether a collective asks: an op, or a copy in one whose lists of lists of tensors no dispatcher looks into."""
    if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        return True
    callers = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(1)))
    caller = next((file for file in callers if not file.endswith(_BETWEEN)), "")
    return caller.endswith("torch/distributed/distributed_c10d.py")


_BETWEEN = (
    *(str(Path(__file__).with_name(name)) for name in ("part.py", "part_rules.py", "part_whole.py")),
    *("torch/_ops.py", "torch/utils/_pytree.py"),
)
"""Files that the call of an op goes through."""

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
"""What has no other operand, so that each element of a part of its result is of the same element."""


# -- memory that another tensor is to share ----------------------------------------------------------------------------


def memory_to_share(part: Part, references: int | None = None) -> Tensor:
    """Returns memory for a tensor that is to share a part's. Collective, where ranks have parts.

    Args:
        references: to the part, while `.data =` runs; None: someone keeps it.

    Raises:
        RuntimeError: someone keeps the part, or its memory.
    """
    if part.spread.is_alone:
        return part.held.pinned()
    if part.held.unreduced:
        raise part.not_reduced("a tensor that shares memory")
    if references is None or references > _references_of_setter() or _shares_memory(part):
        raise RuntimeError(
            f"expected, in `tensor.data = x` or set_(), an x that nothing else refers to, found {part.what} (or values "
            "computed from it), of which this rank has only its part: the two could not share memory. Copy x on every "
            "rank, which puts the whole together: `tensor.data.copy_(x)`, or `tensor.data = x.clone()`."
        )
    return part.full_tensor()


def _shares_memory(part: Part) -> bool:
    """Whether anything but this part has its memory."""
    alone = part.like(LocalStorage(torch.empty(0, device="cpu")))
    if sys.getrefcount(part.held) > sys.getrefcount(alone.held):
        return True
    return not part.held.of_gradient and share_memory([part])


@cache
def _references_of_setter() -> int:
    """Counts the references to a tensor that nobody keeps, while `.data =` runs."""
    found = []

    class Unkept(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    def count(_: Any, references: int) -> Tensor:
        found.append(references)
        return torch.empty(0, device="cpu")

    forwarding.share_memory(Unkept, count)
    torch.empty(0, device="cpu").data = Tensor._make_wrapper_subclass(Unkept, (0,), device=torch.device("cpu"))
    return found[0]


def set_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Answers `set_` to, or of, a part."""
    tensor, source = args
    if not isinstance(tensor, Part):
        return func(tensor, memory_to_share(source))
    tensor.data = source
    return tensor


forwarding.share_memory(Part, memory_to_share)
