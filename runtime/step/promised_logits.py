"""Logits of a sharded output layer that are computed only when they are read. A loss of them is computed from the
shards.

    out = model(ids)                                     # hidden states (.., D), shown as logits (.., V)
    loss = F.cross_entropy(out.view(-1, V), labels)      # each rank computes its columns: the sharded head
    top = out.argmax(-1)                                 # the table is gathered: every rank has to read

Contract
    Shapes, dtypes, views of the leading dimensions and casts are answered without making logits. The cross entropy of
    logits, and the negative log-likelihood of their log-softmax, run the sharded head. Whatever else reads logits makes
    them, of the whole table, with gradients as of any parameter that a loss reads outside of the model. What autograd
    records of logits themselves, as of a custom function, ends in a node that makes them again in the backward.
    All of them are collective: if one rank does any alone, all ranks raise. Without gradients, as in an evaluation, the
    table is gathered for the first read, and kept until it is stepped or written, or the model is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.runtime.kernels.head import apply_steps
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.head_loss import HeadLoss, LossArguments
from embrace_fx.runtime.tables.model_state import GatheredTable, ModelState
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.head import PromisedLogits, last_dtype, steps_from_text, steps_to_text

_STALE = (
    "logits must be read before optimizer.step(), because they are computed when they are first read, and the table {} "
    "has changed since the call. Read the logits earlier, or do not shard the table: strategy={{{!r}: 'allreduce'}}."
)
_SCORED = (
    "the gradient of logits must be requested before the loss is computed, because this loss is otherwise computed "
    "without forming the logits. Call logits.retain_grad() or logits.register_hook() before you compute the loss."
)
_CHANGED = (
    "backward(): a custom autograd function was applied to logits that were modified in place, or that have a gradient "
    "hook or retain_grad(). Apply the function to a copy of the logits: function.apply(logits + 0)."
)


@dataclass(frozen=True)
class LogitsSource:
    """The source of logits, except for their hidden states: the output layer's weight (a table), its bias, and the
    steps that follow the matrix product, such as a scaling.
    """

    promise: PromisedLogits
    state: ModelState
    communicator: Communicator
    steps: int  # of optimizers so far, at the model's call
    version: int  # of the table's shard, at the model's call

    @classmethod
    def of_call(
        cls, promise: PromisedLogits, state: ModelState, communicator: Communicator, *, trains: bool
    ) -> LogitsSource:
        """Returns the source for the logits of a call of the model. Drops the cached copy of the whole table if it is
        outdated, or if a backward may follow the call (`trains`).
        """
        steps, local = communicator.progress.optimizer_steps, state.tables[promise.table].local
        if trains or (promise.table in state.gathered and not state.gathered[promise.table].is_current(local, steps)):
            state.gathered.pop(promise.table, None)
        return cls(promise, state, communicator, steps, local._version)

    def dtype(self, hidden: Tensor) -> torch.dtype:
        """Returns the dtype of logits computed from these hidden states."""
        return last_dtype(self.promise.steps) or hidden.dtype

    def cast(self, dtype: torch.dtype) -> LogitsSource:
        """Returns a source whose logits are cast to `dtype`."""
        steps = steps_to_text([*steps_from_text(self.promise.steps), ("to", 0.0, dtype)])
        return replace(self, promise=replace(self.promise, steps=steps))

    def check(self) -> None:
        """Raises `RuntimeError`, on every rank, if the table has changed since the model's call."""
        table = self.state.tables.get(self.promise.table)
        steps = self.communicator.progress.optimizer_steps
        if table is None or (steps, table.local._version) != (self.steps, self.version):
            raise RuntimeError(_STALE.format(self.promise.table, self.promise.table))

    def parameters(self) -> list[Tensor]:
        """Returns the table and, if there is one, the bias."""
        return [self.state.parameter(name) for name in (self.promise.table, self.promise.bias) if name]

    def compute(self, hidden: Tensor, parameters: Sequence[Tensor] | None = None) -> Tensor:
        """Computes logits (.., V) of hidden states (.., D) from whole parameters, its own unless given. Collective."""
        self.check()
        weight, *bias = self.parameters() if parameters is None else parameters
        if isinstance(weight, TableShard) and not torch.is_grad_enabled():
            weight = self._gather_table(weight)
        if self.promise.narrow is not None:
            weight, bias = weight.to(self.promise.narrow), [each.to(self.promise.narrow) for each in bias]
        with torch.autocast(hidden.device.type, enabled=False):
            return apply_steps(F.linear(hidden, weight, *bias), self.promise.steps)[-1]

    def _gather_table(self, weight: TableShard) -> Tensor:
        """Returns the whole table, gathered from all ranks' shards at the first call (collective) and cached."""
        gathered, name = self.state.gathered, self.promise.table
        if name not in gathered:
            local = self.state.tables[name].local.detach()
            gathered[name] = GatheredTable(weight.full_tensor(), local, self.version, self.steps)
        return gathered[name].whole


@dataclass(eq=False)
class LogitsState:
    """The state that logits share with views of them, such as slices."""

    before: LogitsState | None  # that of the logits that these are a view of
    value: Tensor | None = None  # None if it has not been computed
    version: int = 0  # of `value` when it was computed
    is_scored: bool = False  # whether a loss of these logits, or of a view, was computed from the shards
    is_hooked: bool = False  # whether user code wants the gradient of the logits

    def chain(self) -> Iterator[LogitsState]:
        """Yields the state of these logits, then that of the logits that they are a view of, and so on."""
        found: LogitsState | None = self
        while found is not None:
            yield found
            found = found.before

    @property
    def is_changed(self) -> bool:
        """Whether user code has modified the logits in place, or has asked for their gradient."""
        return self.is_hooked or (self.value is not None and self.value._version != self.version)


class _LogitsFunction(torch.autograd.Function):
    """Creates logits by `make`. Its backward computes gradients of hidden states and parameters."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Logits], hidden: Tensor, *parameters: Tensor) -> Logits:
        logits = make()
        ctx.save_for_backward(hidden)
        ctx.made, ctx.source, ctx.is_log = logits.made, logits.source, logits.is_log
        return logits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if any(each.is_changed for each in ctx.made.chain()):
            raise RuntimeError(_CHANGED)
        whole = [each.full_tensor() if isinstance(each, TableShard) else each for each in ctx.source.parameters()]
        with torch.enable_grad():
            hidden, *parameters = (each.detach().requires_grad_() for each in (*ctx.saved_tensors, *whole))
            values = ctx.source.compute(hidden, parameters)
            values = values.log_softmax(-1) if ctx.is_log else values
            return (None, *torch.autograd.grad(values, (hidden, *parameters), gradient))


class _ValuesFunction(torch.autograd.Function):
    """Returns the values of logits, and passes gradients of the values on to the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Logits, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Logits(Tensor):
    """Logits (.., V), or their log-softmax, whose values are computed only when they are read."""

    hidden: Tensor  # (.., D), with its autograd graph
    source: LogitsSource
    base: Callable[[], Tensor] | None  # computes the values from other logits; None to compute them from `source`
    is_log: bool
    made: LogitsState
    node: Any  # the autograd node that made the logits; `grad_fn` is another one after another autograd function

    @staticmethod
    def __new__(
        cls: type[Logits],
        hidden: Tensor,
        source: LogitsSource,
        base: Callable[[], Tensor] | None = None,
        before: LogitsState | None = None,
        *,
        is_log: bool = False,
    ) -> Logits:
        rows = source.state.tables[source.promise.table].shape[0]
        hidden = hidden if torch.is_grad_enabled() else hidden.detach()
        inputs = (hidden, *source.parameters()) if hidden.requires_grad else (hidden,)

        def make() -> Logits:
            found: Any = Tensor._make_wrapper_subclass(
                cls, (*hidden.shape[:-1], rows), dtype=source.dtype(hidden), device=hidden.device
            )
            found.hidden, found.source, found.base = hidden, source, base
            found.is_log, found.made = is_log, LogitsState(before)
            return found  # type: ignore[no-any-return]

        found: Logits = _LogitsFunction.apply(make, *inputs)  # type: ignore[no-untyped-call]
        found.node = found.grad_fn
        return found

    def make(self) -> Tensor:
        """Returns the values of the logits as an ordinary tensor. The first call computes them, and is collective."""
        made = self.made
        if made.value is None:
            with torch.inference_mode(mode=False), torch.set_grad_enabled(self.hidden.requires_grad):
                made.value = self.source.compute(self.hidden) if self.base is None else self.base()
            made.version = made.value._version
        if self.grad_fn is not self.node:
            found: Tensor = _ValuesFunction.apply(self, made.value.detach())  # type: ignore[no-untyped-call]
            return found
        return made.value

    @property
    def is_made(self) -> bool:
        """Whether the values of these logits, or of logits that they are a view of, have been computed or changed."""
        return self.grad_fn is not self.node or any(each.value is not None for each in self.made.chain())

    def derived(self, hidden: Tensor, base: Callable[[], Tensor], source: LogitsSource | None = None) -> Logits:
        """Returns logits like a slice of these, computed from other hidden states, or by `base` from the values."""
        return Logits(hidden, source or self.source, base, self.made, is_log=self.is_log)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a traced one would launch within a graph
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _OF_GRADIENTS:
            _on_gradient_request([each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Logits)])
        lazily = _LAZY.get(func)
        if lazily is not None and args and isinstance(args[0], Logits) and not args[0].is_made:
            found = lazily(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*_replace_by_values(args), **_replace_by_values(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_replace_by_values(args), **_replace_by_values(kwargs or {}))


def _on_gradient_request(logits: Sequence[Logits]) -> None:
    """Records that user code wants the gradient of logits. Raises `RuntimeError` if a loss was already computed from
    the shards: it computes no gradient of the logits.
    """
    for each in logits:
        if any(made.is_scored for made in each.made.chain()):
            raise RuntimeError(_SCORED)
        each.made.is_hooked = True


def _replace_by_values(tree: Any) -> Any:
    """Replaces all logits in a tree of arguments by their values. Collective."""
    return pytree.tree_map_only(Logits, Logits.make, tree)


_FACTS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__),
        *(Tensor.ndimension, Tensor.nelement, torch.is_floating_point, torch.is_complex, torch.numel),
        *(Tensor.element_size, Tensor.__hash__),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn")),
    }
)
"""What is answered without logits."""
_OF_GRADIENTS = frozenset({torch.autograd.grad, Tensor.register_hook, Tensor.retain_grad})
"""What asks for the gradient of logits."""


# -- views and casts, without computing values -------------------------------------------------------------------------


def _reshape(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    """Reshapes the leading dimensions of logits by `func`. `NotImplemented` if the last dimension changes."""
    with torch._C.DisableTorchFunctionSubclass():
        shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1]:
        return NotImplemented
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return logits.derived(hidden, lambda: func(logits.make(), *args, **kwargs))


def _keep_values(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    """Runs an op that changes neither the shape nor the values, such as `clone`."""
    hidden = logits.hidden.detach() if func is Tensor.detach else logits.hidden
    return logits.derived(hidden, lambda: func(logits.make(), *args, **kwargs))


def _index(func: Any, logits: Logits, index: Any) -> Any:
    """Indexes the leading dimensions of logits. `NotImplemented` if the index selects from the last dimension."""
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
    """Casts logits to a floating-point dtype. `NotImplemented` for other dtypes, and for log-softmax values, because
    the cast would be applied before the log-softmax.
    """
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
    """Applies log-softmax. `NotImplemented` unless it is over the last dimension and keeps the dtype."""
    dtype = kwargs.get("dtype")
    if logits.is_log or dim not in (-1, logits.dim() - 1) or args or (dtype is not None and dtype != logits.dtype):
        return NotImplemented
    base, source = (lambda: func(logits.make(), dim, **kwargs)), _in_autocast(logits)
    return Logits(logits.hidden, source, base, logits.made, is_log=True)


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _sharded_loss(  # noqa: PLR0913, PLR0917
    func: Any,
    logits: Logits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Computes the cross entropy of logits, or the negative log-likelihood of log-probabilities, from the shards of the
    output layer. Returns `NotImplemented` if the kind of values does not fit the loss (`func`), or if the shapes,
    labels or options are not supported. Collective.
    """
    is_plain = logits.is_log == (func is F.nll_loss) and not (label_smoothing and weight is not None)
    is_plain = is_plain and size_average is None and reduce is None
    is_plain = is_plain and 0.0 <= label_smoothing <= 1.0
    is_plain = is_plain and (weight is None or (weight.shape == logits.shape[-1:] and not weight.requires_grad))
    labels = isinstance(target, Tensor) and target.dtype == torch.int64 and target.dim() == 1
    if not is_plain or not labels or logits.dim() != 2 or reduction not in _REDUCTIONS:
        return NotImplemented
    source = _in_autocast(logits)
    source.check()
    bias: Tensor | None = source.state.parameter(source.promise.bias) if source.promise.bias else None
    if bias is not None and not logits.hidden.requires_grad:
        bias = bias.detach()
    for made in logits.made.chain():
        made.is_scored = True
    how = _REDUCTIONS[reduction], ignore_index, weight, label_smoothing
    head = LossArguments(source.promise, source.state, source.communicator, *how)
    loss: Tensor = HeadLoss.apply(logits.hidden, bias, head, target)  # type: ignore[no-untyped-call]
    return loss.to(source.dtype(logits.hidden))


def _in_autocast(logits: Logits) -> LogitsSource:
    """Returns the source with which a softmax reads the logits. Under autocast, it casts the logits to float32."""
    enabled = torch.is_autocast_enabled(logits.device.type)
    return logits.source.cast(torch.float32) if enabled and logits.dtype.itemsize < 4 else logits.source


_LAZY: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten), _reshape),
    **dict.fromkeys((Tensor.unsqueeze, Tensor.squeeze, torch.unsqueeze, torch.squeeze), _reshape),
    **dict.fromkeys((Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach), _keep_values),
    **dict.fromkeys((Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type), _cast),
    Tensor.__getitem__: _index,
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), _log_softmax),
    **dict.fromkeys((F.nll_loss, F.cross_entropy), _sharded_loss),
}
"""Function -> what answers it without logits, or says that it cannot."""
