"""`TableShard`: the tensor class for this rank's shard of a table, of its gradient, of its optimizer state, or of a
view.

Contract
    A part has the shape of the whole tensor, so that no op mistakes it for the whole. Each op either returns the result
    for the whole tensor, on every rank that calls it, or raises an error that says what to do. The rule of each op is
    in `embrace_fx.runtime.tables.shard_rules`. Views of a part are parts that share its memory. A part on a single rank
    behaves like any tensor. A parameter stays the same object when it becomes a part, and when it becomes whole again.

Shape legend: V x D the table; V' x d a rank's part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from embrace_fx.runtime.tables.local_storage import LocalStorage
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.vocabulary.proxies import READ_MEMORY, NoStorage, forward_methods

REFUSAL = (
    "saving or sending {} would lose the other ranks' columns. On every rank, call model.full_state_dict() for the "
    "model and embrace_fx.full_state_dict(optimizer) for its optimizer, and save or send the results on one rank. Or "
    "save shards with torch.distributed.checkpoint, or save or send the module inside `with model.whole():`."
)


class TableShard(Tensor):
    """This rank's shard of a tensor. `shape` is the shape of the whole tensor.

    Attributes:
        held: where the shard's elements are stored.
        spread: the layout: which elements of which table each rank has.
        kind: what the tensor is, in words: "", "the gradient of ", "the optimizer's state of ".
        is_sparse: whether a gradient presents itself as the sparse (COO) tensor that autograd would create.
    """

    answer: ClassVar[Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]]
    """Computes an op that has parts among its arguments, by the rules of `shard_rules`."""

    held: LocalStorage
    spread: Layout
    kind: str
    is_sparse: bool = False  # torch's own method would not dispatch to the subclass

    @staticmethod
    def __new__(cls, held: LocalStorage, spread: Layout, kind: str = "", *, sparse: bool = False) -> TableShard:
        made: TableShard = Tensor._make_wrapper_subclass(
            cls, spread.shape, strides=spread.stride, dtype=held.dtype, device=held.device, dispatch_layout=sparse
        )
        made.held, made.spread, made.kind, made.is_sparse = held, spread, kind, sparse
        # Raise on data_ptr(): torch does not dispatch it, and would abort the process.
        torch._C._set_throw_on_mutable_data_ptr(made)
        Tensor.untyped_storage(made).__class__ = NoStorage  # type: ignore[assignment]
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return cls.answer(func, args, kwargs or {})

    def like(self, storage: LocalStorage, layout: Layout | None = None) -> TableShard:
        """Returns another shard of the same table, with another storage."""
        if layout is None:
            return type(self)(storage, self.spread, self.kind, sparse=self.is_sparse)
        return type(self)(storage, layout, self.kind)

    @property
    def what(self) -> str:
        """A description of the tensor for error messages, such as "the gradient of words.weight"."""
        return f"{self.kind}the sharded {self.spread.name}"

    def refused(self, asked: str) -> RuntimeError:
        """Returns the error for an operation that shards do not support."""
        return self.spread.report(
            RuntimeError(
                f"{_without_namespace(asked)} is not supported on {self.what}, because each rank has only a part of "
                "it. On every rank, call .full_tensor(), change the result, and copy_() it back. Or run this code "
                "inside `with model.whole():`, or do not shard the table: "
                f"strategy={{{self.spread.name!r}: 'allreduce'}}."
            )
        )

    def _save_error(self) -> TypeError:
        """Returns the error to raise if a shard is saved or pickled."""
        return self.spread.report(TypeError(REFUSAL.format(f"a part of {self.what}")))

    def not_reduced_error(self, asked: str) -> RuntimeError:
        """Returns the error for an operation that reads a gradient before it is reduced over ranks."""
        return RuntimeError(
            f"{_without_namespace(asked)} cannot read {self.what} yet: under no_sync(), gradients are accumulated but "
            "not averaged over ranks. Read the gradient after the next backward outside of no_sync(), or do not shard "
            f"the table: strategy={{{self.spread.name!r}: 'allreduce'}}."
        )

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        """Returns the whole tensor on every rank, like DTensor's method. Collective."""
        if self.held.unreduced:
            raise self.not_reduced_error("full_tensor()")
        return self.spread.whole(self.held.dense())

    def to_local(self) -> Tensor:
        """Returns this rank's shard as a plain tensor with the same memory, like DTensor's method."""
        return self.held.memory().detach()

    # Override these methods of Tensor, because they do not dispatch an op.

    @property
    def data(self) -> Tensor:
        """This rank's shard without autograd history."""
        found: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        """Replaces the shard's values by the values of another shard, or by this rank's elements of a whole tensor."""
        if isinstance(value, TableShard) and not value.spread.fits(self.spread):
            raise self.spread.report(
                RuntimeError(
                    f"cannot set .data of {self.what} to {value.what}: on each rank, their rows or columns differ. On "
                    "every rank, copy the whole tensor instead: `x.data.copy_(y.full_tensor())`."
                )
            )
        if not isinstance(value, TableShard):
            if value.shape != self.shape:
                raise self.spread.report(
                    RuntimeError(
                        f"cannot set .data of {self.what} to a tensor of shape {tuple(value.shape)}, because the table "
                        f"has shape {tuple(self.shape)}. Assign a full tensor of the table's shape on every rank."
                    )
                )
            value = self.like(LocalStorage(self.spread.cut(value.detach()).clone()))
        self.spread.count_collective_op()
        self.held.dense()  # apply pending updates to the old memory, which other tensors may share
        Tensor.data.__set__(self, value.detach())  # type: ignore[attr-defined]
        self.held = LocalStorage(value.held.memory().detach())

    def tolist(self) -> Any:
        """Returns the values of the whole table as nested lists. Collective."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns the whole table as an array: writable if it shares the shard's memory, read-only if it is a copy.
        Collective if the table is sharded.
        """
        own = self.spread.is_alone
        array = (self.held.memory() if own else self.full_tensor()).numpy(force=force)
        array.flags.writeable = own
        return array

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), spec)

    def apply_(self, function: Callable[[Any], Any]) -> TableShard:
        """Applies a Python function to each of this rank's values, in place."""
        self.held.memory().apply_(function)
        self.held.record_write()
        return self

    def share_memory_(self) -> TableShard:
        """Moves this rank's values into memory that other processes can share."""
        self.held.memory().share_memory_()
        return self

    def is_shared(self) -> bool:
        """Returns whether this rank's values are in shared memory."""
        return bool(self.held.memory().is_shared())

    # Methods that `torch.distributed.checkpoint` calls.

    def __create_write_items__(self, name: str, value: object) -> Any:
        shard = self.to_dtensor()
        return shard.__create_write_items__(name, shard)

    def __create_chunk_list__(self) -> Any:
        return self.to_dtensor().__create_chunk_list__()

    def __get_tensor_shard__(self, index: object) -> Tensor:
        return self.to_local()

    def to_dtensor(self) -> DTensor:
        """Returns this rank's shard as a DTensor with the same memory. Raises if it is not sharded by columns."""
        layout, shape = self.spread, self.shape
        if layout.mesh is None or layout.grid is not None or not layout.is_table:
            raise self.spread.report(
                RuntimeError(
                    f"torch.distributed.checkpoint cannot save shards of {self.what}, because this tensor is not a "
                    "table sharded by columns. Call model.full_state_dict() on every rank, and save the result."
                )
            )
        return DTensor.from_local(
            self.to_local(), layout.mesh, [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1)
        )

    def data_ptr(self) -> int:
        """Returns the address of the memory, or 0 while a state dict is staged for an asynchronous save. Raises if the
        table is sharded.
        """
        return 0 if _is_staged() else self._require_whole("data_ptr()").data_ptr()

    def new_empty(self, *size: Any, **options: Any) -> Tensor:
        """Returns an empty plain tensor, or an empty shard while a state dict is staged for an asynchronous save."""
        return torch.empty_like(self, **options) if _is_staged() else super().new_empty(*size, **options)

    def _require_whole(self, asked: str) -> Tensor:
        """Returns the values if this rank has the whole table. Otherwise raises the error for the operation `asked`."""
        if not self.spread.is_alone:
            raise self.refused(asked)
        return self.held.memory()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self.spread.is_alone:
            return repr(self.held.dense())
        if not self.spread.sharded:
            return f"TableShard(a view of {self.what}, {tuple(self.shape)})"
        return f"TableShard({self.what}, {tuple(self.shape)}, on this rank {self.held.dense()!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TableShard:
        if id(self) not in memo:
            self.spread.count_collective_op()
            copied = self.like(self.held.copied())
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        found: TableShard = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.spread.is_alone:
            raise self._save_error()
        return self.held.dense().__reduce_ex__(protocol)

    def _typed_storage(self) -> NoReturn:
        """Raises, because `torch.save` would save only this rank's shard."""
        raise self._save_error()


forward_methods(
    TableShard,
    ["map_", "map2_", *(name for name in READ_MEMORY if name not in ("numpy", "__array__", "tolist", "data_ptr"))],
    lambda part, name: part._require_whole(f"{name}()"),
)


def _without_namespace(asked: str) -> str:
    """Returns `mul()` for the op `aten::mul`, and any other text unchanged."""
    return f"{asked.rsplit('::', maxsplit=1)[-1]}()" if "::" in asked else asked


def _is_staged() -> bool:
    """Returns whether a caller stages a state dict for an asynchronous save, which copies shards unchanged."""
    return sys._getframe(2).f_globals.get("__name__") in _STAGING


_STAGING = ("torch.distributed.checkpoint._state_dict_stager", "torch.distributed._state_dict_utils")

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(op, args, kwargs) -> the op's result, with parts among the arguments; NotImplemented to try another rule."""


def become_shard(parameter: nn.Parameter, local: Tensor, layout: Layout) -> None:
    """Turns a parameter into this rank's shard of a table, in place."""
    part = TableShard(LocalStorage(local), layout)
    _swap(parameter, nn.Parameter(part, parameter.requires_grad), layout.name)


def become_whole(parameter: nn.Parameter, whole: Tensor, name: str) -> None:
    """Turns a shard into the whole parameter, in place. Errors name the table `name`."""
    _swap(parameter, nn.Parameter(whole, parameter.requires_grad), name)


def _swap(parameter: nn.Parameter, other: nn.Parameter, name: str) -> None:
    """Swaps the contents of two parameters, like `torch.utils.swap_tensors`, but allows other references to them."""
    gradient, parameter.grad = parameter.grad, None
    # Keep attributes that users have set on the parameter.
    own = {key: value for key, value in vars(parameter).items() if key not in _OF_A_PART}
    if parameter.requires_grad and parameter._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(partial(_raise_stale_backward, name))
    parameter.__class__, other.__class__ = other.__class__, parameter.__class__
    parameter.__dict__, other.__dict__ = other.__dict__, parameter.__dict__
    torch._C._swap_tensor_impl(parameter, other)
    vars(parameter).update(own)
    parameter.grad = gradient


def _raise_stale_backward(name: str, gradients: object) -> NoReturn:
    """Raises, as a hook of autograd, for the loss of a table that has been sharded or unsharded since."""
    raise RuntimeError(
        f"backward(): the loss was computed from {name} before the table was sharded or made whole, which replaced the "
        "parameter's memory. Call the model first, and then compute the loss."
    )


_OF_A_PART = ("held", "spread", "kind", "is_sparse", "_is_param")


def to_plain(tensor: Tensor) -> Tensor:
    """Returns a shard as a plain tensor of this rank's elements, or any other tensor unchanged."""
    return tensor.held.memory() if isinstance(tensor, TableShard) else tensor.detach()


def gather_rows(part: TableShard) -> Iterator[tuple[int, Tensor]]:
    """Gathers a table block by block, so that no rank holds all of it. Yields (first row, whole rows) of each block, on
    every rank. Collective.
    """
    (rows, columns), local = part.spread.axes, part.held.dense()
    every = rows.own.step
    size = every * max(1, _BLOCK_ELEMENTS // max(1, columns.size * every))
    for first in range(0, rows.size, size):
        count = min(size, rows.size - first)
        block = replace(rows, size=count, own=range(rows.own.start, count, every))
        own = local[first // every :][: len(block.own)]
        yield first, part.spread.with_axes((block, columns)).whole(own)


_BLOCK_ELEMENTS = 1 << 20


def cut_own_shard(value: Tensor, layout: Layout) -> Tensor:
    """Returns this rank's shard (V', d) of a table's values, which may be whole or sharded. Tensors of another shape
    than the table are returned unchanged. Collective if the values are sharded in another layout than `layout`.
    """
    if value.shape != layout.shape:
        return value
    if isinstance(value, TableShard) and value.spread.fits(layout):
        return value.held.dense()
    if isinstance(value, TableShard) and value.spread.is_table and layout.shape[0]:
        (rows, columns), found = layout.axes, []
        for first, block in gather_rows(value):
            found.append(block[(rows.own.start - first) % rows.own.step :: rows.own.step, columns.index].clone())
        return torch.cat(found)
    if isinstance(value, DTensor) and value.placements == (Shard(1),) and layout.mesh == value.device_mesh:
        local: Tensor = value.to_local()  # a DTensor of the same table, sharded by columns over the same ranks
        return local
    return layout.cut(gather_whole(value)).contiguous()


def gather_whole(value: Any) -> Any:
    """Gathers a shard or DTensor from all ranks: collective. Returns other values unchanged."""
    return value.full_tensor() if isinstance(value, TableShard | DTensor) else value
