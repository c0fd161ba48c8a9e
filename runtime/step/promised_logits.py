"""Logits of a sharded head that are made when they are read, and whose loss is computed without making them.

    out = model(ids)                                     # hidden states (.., D), shown as logits (.., V)
    loss = F.cross_entropy(out.view(-1, V), labels)      # each rank computes its columns: the sharded head
    top = out.argmax(-1)                                 # the table is gathered: every rank has to read

Contract
    Shapes, dtypes, views of the leading dimensions and casts are answered without making logits. The cross entropy of
    logits, and the negative log-likelihood of their log-softmax, run the sharded head. Whatever else reads logits makes
    them, of the whole table, with gradients as of any parameter that a loss reads outside of the model.
    Both are collective: if one rank does either alone, all ranks raise. Without gradients, as in an evaluation, the
    table is gathered for the first read, and kept until it is stepped or written, or the model is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.runtime.kernels.head import apply_steps
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.head_loss import HeadLoss, LossArguments
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.runtime.tables.part import Part
from embrace_fx.vocabulary.head import PromisedLogits, last_dtype, read, written

_STALE = (
    "logits must be read before optimizer.step(): they are computed when they are read, and their table {} has been "
    "stepped or written since the model was called. Or keep the table whole: strategy={{{!r}: 'allreduce'}}."
)


@dataclass(frozen=True)
class Source:
    """What logits are made of, besides hidden states.

    Attributes:
        steps: the optimizer's steps up to the model's call.
    """

    promise: PromisedLogits
    state: ModelState
    communicator: Communicator
    steps: int
    version: int

    @classmethod
    def of(cls, promise: PromisedLogits, state: ModelState, communicator: Communicator, *, trains: bool) -> Source:
        steps, version = communicator.progress.optimizer_steps, state.tables[promise.table].local._version
        if trains or state.gathered.get(promise.table, ((steps, version),))[0] != (steps, version):
            state.gathered.pop(promise.table, None)
        return cls(promise, state, communicator, steps, version)

    def dtype(self, hidden: Tensor) -> torch.dtype:
        return last_dtype(self.promise.steps) or hidden.dtype

    def cast(self, dtype: torch.dtype) -> Source:
        """Copies it, with a cast behind its steps."""
        steps = written([*read(self.promise.steps), ("to", 0.0, dtype)])
        return replace(self, promise=replace(self.promise, steps=steps))

    def check(self) -> None:
        """Raises `RuntimeError` where the table is not as it was in the model's call; on every rank."""
        table = self.state.tables.get(self.promise.table)
        now = (self.communicator.progress.optimizer_steps, table.local._version if table is not None else -1)
        if now != (self.steps, self.version):
            raise RuntimeError(_STALE.format(self.promise.table, self.promise.table))

    def make(self, hidden: Tensor) -> Tensor:
        """Makes logits of the whole table. Collective."""
        self.check()
        weight, narrow = self._weight(), self.promise.narrow
        bias = self.state.parameter(self.promise.bias) if self.promise.bias else None
        if narrow is not None:
            weight, bias = weight.to(narrow), None if bias is None else bias.to(narrow)  # type: ignore[assignment]
        with torch.autocast(hidden.device.type, enabled=False):
            return apply_steps(F.linear(hidden, weight, bias), self.promise.steps)[-1]

    def _weight(self) -> Tensor:
        """Returns the whole table, or the parameter that yields it to what asks for it."""
        weight, name = self.state.parameter(self.promise.table), self.promise.table
        if torch.is_grad_enabled() or not isinstance(weight, Part):
            return weight
        if name not in self.state.gathered:
            self.state.gathered[name] = (self.steps, self.version), weight.full_tensor()
        return self.state.gathered[name][1]


class Logits(Tensor):
    """Logits (.., V), or their log-softmax, made when they are read.

    Attributes:
        hidden: (.., D), with its graph.
        base: makes them of others, of which they may be a view; None: of `source`.
    """

    hidden: Tensor
    source: Source
    base: Callable[[], Tensor] | None
    parent: Logits | None
    is_log: bool
    made: Tensor | None

    @staticmethod
    def __new__(
        cls: type[Logits],
        hidden: Tensor,
        source: Source,
        base: Callable[[], Tensor] | None = None,
        parent: Logits | None = None,
        *,
        is_log: bool = False,
    ) -> Logits:
        rows = source.state.tables[source.promise.table].shape[0]
        found: Any = Tensor._make_wrapper_subclass(
            cls, (*hidden.shape[:-1], rows), dtype=source.dtype(hidden), device=hidden.device
        )
        found.hidden, found.source, found.base, found.parent = hidden, source, base, parent
        found.is_log, found.made = is_log, None
        return found  # type: ignore[no-any-return]

    def make(self) -> Tensor:
        """Makes them, once; with a graph where the model's call had one, whoever reads them first. Collective."""
        if self.made is None:
            with torch.set_grad_enabled(self.hidden.requires_grad):
                self.made = self.source.make(self.hidden) if self.base is None else self.base()
        return self.made

    @property
    def is_made(self) -> bool:
        """Whether these logits, or those that they are a view of, have been made, and may have been written."""
        return self.made is not None or (self.parent is not None and self.parent.is_made)

    def derived(self, hidden: Tensor, base: Callable[[], Tensor], source: Source | None = None) -> Logits:
        """Returns logits of other hidden states, which are also what `base` makes of these."""
        return Logits(hidden, source or self.source, base, self, is_log=self.is_log)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            return args[0].hidden.requires_grad
        lazily = _LAZY.get(func)
        if lazily is not None and args and isinstance(args[0], Logits) and not args[0].is_made:
            found = lazily(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*_made(args), **_made(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_made(args), **_made(kwargs or {}))


def _made(tree: Any) -> Any:
    return pytree.tree_map_only(Logits, Logits.make, tree)


_FACTS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__),
        *(Tensor.ndimension, Tensor.nelement, torch.is_floating_point, torch.is_complex, torch.numel),
        *(Tensor.element_size, Tensor.__hash__),
    }
)
"""What is answered without logits."""


# -- views and casts ---------------------------------------------------------------------------------------------------


def _reshaped(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    """Answers a change of the leading shape."""
    with torch._C.DisableTorchFunctionSubclass():
        shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1] or not logits.hidden.numel():
        return NotImplemented
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return logits.derived(hidden, lambda: func(logits.make(), *args, **kwargs))


def _same(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    return logits.derived(logits.hidden, lambda: func(logits.make(), *args, **kwargs))


def _detached(func: Any, logits: Logits) -> Any:
    return logits.derived(logits.hidden.detach(), lambda: func(logits.make()))


def _indexed(func: Any, logits: Logits, index: Any) -> Any:
    """Answers an index into the leading dimensions."""
    indices = index if isinstance(index, tuple) else (index,)
    behind = indices[next((k for k, each in enumerate(indices) if each is Ellipsis), -1) + 1 :]
    has_ellipsis = any(each is Ellipsis for each in indices)
    masks = [each for each in indices if isinstance(each, Tensor) and each.dtype == torch.bool]
    taken = sum(each is not None and each is not Ellipsis for each in indices) + sum(mask.dim() - 1 for mask in masks)
    reaches_last = bool(behind) and behind[-1] is not None if has_ellipsis else taken >= logits.dim()
    if reaches_last and not (isinstance(indices[-1], slice) and indices[-1] == slice(None)):
        return NotImplemented
    return logits.derived(logits.hidden[index], lambda: func(logits.make(), index))


def _cast(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    """Answers a cast, which no log-softmax commutes with."""
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty((0,), dtype=logits.dtype, device=logits.device)
        found = func(like, *args, **kwargs)
    if found.device != logits.device or not found.is_floating_point():
        return NotImplemented
    if found.dtype == logits.dtype:
        return logits
    if logits.is_log:
        return NotImplemented
    source = logits.source.cast(found.dtype)
    return logits.derived(logits.hidden, lambda: func(logits.make(), *args, **kwargs), source)


# -- losses ------------------------------------------------------------------------------------------------------------


def _log_softmax(func: Any, logits: Logits, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype")
    if logits.is_log or dim not in (-1, logits.dim() - 1) or args or (dtype is not None and dtype != logits.dtype):
        return NotImplemented
    with_log = logits.derived(logits.hidden, lambda: func(logits.make(), dim, **kwargs), _in_autocast(logits))
    with_log.is_log = True
    return with_log


def _nll_loss(func: Any, logits: Logits, target: Any, *args: Any, **kwargs: Any) -> Any:
    return _loss(logits, target, *args, **kwargs) if logits.is_log else NotImplemented


def _cross_entropy(func: Any, logits: Logits, target: Any, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if logits.is_log else _loss(logits, target, *args, **kwargs)


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _loss(
    logits: Logits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Computes the loss of logits by the sharded head, where labels are indices. Collective."""
    is_plain = size_average is None and reduce is None and not (label_smoothing and weight is not None)
    is_plain = is_plain and (weight is None or not weight.requires_grad)
    labels = isinstance(target, Tensor) and target.dtype == torch.int64 and target.dim() == 1
    if not is_plain or not labels or logits.dim() != 2 or reduction not in _REDUCTIONS:
        return NotImplemented
    source = _in_autocast(logits)
    source.check()
    bias = source.state.parameter(source.promise.bias) if source.promise.bias else None
    how = _REDUCTIONS[reduction], ignore_index, weight, label_smoothing
    head = LossArguments(source.promise, source.state, source.communicator, *how)
    loss: Tensor = HeadLoss.apply(logits.hidden, bias, head, target)  # type: ignore[no-untyped-call]
    return loss.to(source.dtype(logits.hidden))


def _in_autocast(logits: Logits) -> Source:
    """Returns the source of logits as a softmax reads them: under autocast, in float32."""
    enabled = torch.is_autocast_enabled(logits.device.type)
    return logits.source.cast(torch.float32) if enabled and logits.dtype.itemsize < 4 else logits.source


_LAZY: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten), _reshaped),
    **dict.fromkeys((Tensor.unsqueeze, Tensor.squeeze, torch.unsqueeze, torch.squeeze), _reshaped),
    **dict.fromkeys((Tensor.contiguous, Tensor.clone, torch.clone), _same),
    **dict.fromkeys((Tensor.detach,), _detached),
    **dict.fromkeys((Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type), _cast),
    Tensor.__getitem__: _indexed,
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), _log_softmax),
    F.nll_loss: _nll_loss,
    F.cross_entropy: _cross_entropy,
}
"""Function -> what answers it without logits, or says that it cannot."""
