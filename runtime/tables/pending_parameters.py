"""Parameters with pending updates: the first access between calls, steps and backwards applies the updates.

Contract
    Outside of `closed()` blocks, a dense parameter has a class with `__torch_function__`, the storage of a shard has a
    callback, and `optimizer.state` is replaced. Each applies all pending updates before any access to the values.
    Reading a shape, a dtype or `.grad` applies nothing. During a step, nothing is guarded.
    A tensor that shares a parameter's memory (`.data`, `detach()`, a view, a NumPy array) bypasses these guards. If one
    exists, or if a user holds a tensor of the optimizer's state, an update is applied at once instead of deferred.
    Access through a stored `data_ptr()` cannot be detected.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter, sub
from sys import getrefcount
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.tables.local_storage import LocalStorage
from embrace_fx.runtime.tables.pending_state import PendingState
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.modes import outside_of_modes

_WITHOUT_VALUES = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta"),
                *("is_sparse", "is_quantized", "is_leaf", "requires_grad", "grad_fn", "grad_dtype", "output_nr"),
                *("_backward_hooks", "_post_accumulate_grad_hooks", "names"),
            )
            if hasattr(Tensor, name)
        ),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size),
        *(Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex),
        *(Tensor.get_device, Tensor.__len__, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
        *(torch.numel, torch.is_floating_point, torch.is_complex),
        *(getattr(Tensor, name).__set__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks")),
    }
)
"""Functions that read no element of a tensor."""


class PendingParameter(nn.Parameter):
    """A parameter whose optimizer update is pending. The first access to its values applies the update.

    Attributes:
        plain: the parameter's class when no update is pending.
        updates: the group of parameters whose updates are applied together.
        lock: held while updates are applied, and while `.grad` is read or set.
    """

    plain: ClassVar[type[nn.Parameter]]
    updates: ClassVar[UpdateGroup]
    lock: ClassVar[threading.RLock]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.plain(*args, **kwargs)  # constructs an ordinary parameter for `type(parameter)(data)`

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        apply_pending(args, kwargs)
        return func(*args, **kwargs)

    # zero_grad() reads every parameter's `.grad`. A property takes a third of the time that `__torch_function__` takes.

    @property
    def grad(self) -> Any:
        """The gradient, as of a plain parameter. Reading it does not apply the pending update."""
        kind = type(self)
        with kind.lock:
            known, self.__class__ = type(self), kind.plain  # type: ignore[assignment]  # another thread may have applied it
            try:
                return self.grad
            finally:
                self.__class__ = known

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        kind = type(self)
        with kind.lock:
            known, self.__class__ = type(self), kind.plain  # type: ignore[assignment]  # another thread may have applied it
            try:
                self.grad = gradient
            finally:
                self.__class__ = known

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def as_subclass(self, cls: Any) -> Any:
        """Applies the pending update, and returns the parameter as an instance of a tensor subclass."""
        return _apply_pending(self).as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _apply_pending(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _apply_pending(self).__reduce_ex__(protocol)


class UpdateGroup:
    """Parameters whose pending updates are applied together, by the first access to any of them while they are armed.

    Args:
        parameters: function that yields the parameters whose updates may be pending.
        apply: function that applies all pending updates.
        own: function that yields the model's own tensors that share memory with parameters.

    Attributes:
        inside: whether code that applies pending updates itself, such as a step, is running.
        dense: the armed parameters that are not table shards. Their class is a subclass of `PendingParameter`.
        stale: whether the parameters must be armed again, because they may have new pending updates.
        is_open: whether any parameter is armed.
    """

    inside, stale, is_open = False, True, False

    def __init__(
        self,
        parameters: Callable[[], Iterable[nn.Parameter]],
        apply: Callable[[], None],
        lock: threading.RLock,
        own: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._parameters = parameters
        self._apply_now = apply
        self._lock = lock
        self._own = own
        self.states_aside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Returns a context in which optimizers have their own state, to write it."""
        self._kinds: dict[type[nn.Parameter], type[PendingParameter]] = {}
        self.dense: list[nn.Parameter] = []
        self._held: list[LocalStorage] = []
        self._applies = False
        self._opener = 0  # the id of the training thread, whose access applies updates

    def open(self) -> None:
        """Arms the parameters, or applies their updates now if other tensors share their memory."""
        self.stale = False
        parameters = list(self._parameters())
        if parameters and (memory_is_shared(parameters, self._own()) or _any_held_by_torch(parameters)):
            self._apply()
            return
        self._opener, self.is_open = threading.get_ident(), bool(parameters)
        for parameter in parameters:
            if issubclass(type(parameter), PendingParameter):  # the parameter may belong to another model too
                _apply_pending(parameter)
            plain: Any = type(parameter)
            if plain is TableShard:  # a shard is always accessed through its storage
                held: LocalStorage = parameter.held  # type: ignore[attr-defined]
                self._held.append(held)
                held.on_use = self.apply
            else:
                self.dense.append(parameter)
                parameter.__class__ = self._kinds.get(plain) or self._pending_class(plain)

    def _apply(self) -> None:
        """Applies the updates outside of any torch mode, because tracing and transforms read parameters too."""
        with outside_of_modes():
            self._apply_now()

    def _pending_class(self, plain: type[nn.Parameter]) -> type[PendingParameter]:
        """Returns the subclass of `plain` and `PendingParameter` for parameters with pending updates."""
        bases = (PendingParameter,) if plain is nn.Parameter else (PendingParameter, plain)
        its_own = {"plain": plain, "updates": self, "lock": self._lock, "__module__": __name__}
        return self._kinds.setdefault(plain, type(PendingParameter.__name__, bases, its_own))

    def close(self) -> None:
        """Disarms the parameters."""
        with self._lock:
            if self.dense:
                self.disarm_dense()
            for held in self._held:
                held.on_use = None
            self._held.clear()
            self.stale, self.is_open = True, False

    def disarm(self, parameters: Sequence[Any]) -> None:
        """Disarms only these parameters. The caller holds the lock."""
        own = {id(p.held) if type(p) is TableShard else id(p) for p in parameters}
        others, self.dense = self.dense, [p for p in self.dense if id(p) in own]
        self.disarm_dense()
        for held in self._held:
            held.on_use = None if id(held) in own else held.on_use
        self.dense, self._held = [p for p in others if id(p) not in own], [h for h in self._held if id(h) not in own]
        self.is_open = bool(self._held or self.dense)

    def disarm_dense(self) -> None:
        """Disarms the parameters that are not table shards. The caller holds the lock."""
        self.stale = True
        for parameter in self.dense:
            if issubclass(kind := type(parameter), PendingParameter):  # isinstance() would call the metaclass
                parameter.__class__ = kind.plain
        self.dense.clear()
        self.is_open = bool(self._held)

    def apply(self) -> None:
        """Applies the pending updates. Called when an armed parameter is accessed."""
        with self._lock:
            self.stale = True  # arm the parameters again later, because the caller may keep a reference to their memory
            # A step or another thread is already applying the updates.
            if self.inside or self._applies or not self.is_open:
                return
            self._applies = True
            try:
                with self.states_aside():
                    if threading.get_ident() == self._opener:
                        self.close()
                        self._apply()
                        return
                    # In another thread, keep the parameters armed until the updates are applied. The training thread
                    # then waits at its next access, even in zero_grad().
                    with torch._C.DisableTorchFunctionSubclass():
                        self._apply()
                    self.close()
            finally:
                self._applies = False


class PendingUpdates:
    """All pending optimizer updates of a model.

    Attributes:
        lock: held while updates are applied, and while parameters are armed or disarmed.
        kinds: the groups of parameters that are armed together.
        states: the objects that replace the states of optimizers while updates are pending.
        inside: the number of `closed()` contexts that are currently active.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.kinds: tuple[UpdateGroup, ...] = ()
        self._optimizers: Callable[[], Iterable[Optimizer]] = tuple
        self.states: list[PendingState] = []
        self._stepped: list[Optimizer] = []  # optimizers with steps that may be pending
        self.inside = 0

    def watch(self, kinds: tuple[UpdateGroup, ...], optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        """Sets the groups of parameters, and a function that returns the optimizers whose states are guarded too."""
        self.kinds, self._optimizers = kinds, optimizers
        for kind in kinds:
            kind.states_aside = self._with_plain_states

    def closed(self, *, grows: bool = True) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which accesses to parameters apply no updates, for code that applies them itself.

        Args:
            grows: whether updates may become pending in the context.
        """
        return _ClosedContext(self, grows)

    def close(self) -> None:
        """Disarms all parameters and optimizer states until the next `open`."""
        with self.lock:
            if self.states:
                self.restore_states()
            for kind in self.kinds:
                kind.close()

    def close_for(self, optimizer: Optimizer) -> None:
        """Disarms the parameters and the state of an optimizer that is about to step. The parameters of other
        optimizers stay armed, because the step may read them.
        """
        if self._stepped == [optimizer] or not self.states:
            self.close()
            return
        with self.lock:
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for kind in filter(attrgetter("is_open"), self.kinds):
                kind.disarm(own)
            for state in [each for each in self.states if each.optimizer is optimizer]:
                state.restore()
            self.states = [each for each in self.states if each.optimizer is not optimizer]

    def open(self) -> None:
        """Arms all parameters and optimizer states, or leaves this to the end of the active `closed()` contexts."""
        with self.lock:
            for kind in self.kinds:
                kind.stale = True
            if not self.inside:
                self.rearm_stale()

    def rearm_stale(self) -> None:
        """Arms the groups of parameters that may have new pending updates. The caller holds the lock."""
        if self.states:
            self.restore_states()
        grown = is_open = False
        for kind in self.kinds:
            if kind.stale:
                if kind.is_open:
                    kind.close()
                kind.open()
                grown |= kind.is_open
            is_open |= kind.is_open
        if grown:
            self._stepped = list(dict.fromkeys(self._optimizers()))
            if _max_references(self._stepped) > _min_references():
                self.apply()  # apply now, because a user's reference to a state tensor would see the old values
                return
        if is_open:
            self._replace_states()

    def _replace_states(self) -> None:
        """Guards the states of optimizers that have stepped by `PendingState` objects."""
        for optimizer in self._stepped:
            self.states.append(PendingState(optimizer, self.apply))

    def restore_states(self) -> None:
        """Puts the optimizers' own states back in place of the `PendingState` objects."""
        states, self.states = self.states, []
        for state in states:
            state.restore()

    @contextlib.contextmanager
    def _with_plain_states(self) -> Iterator[None]:
        """Opens a context in which optimizers have their own states, guarded again after it if updates are pending."""
        self.restore_states()
        try:
            yield
        finally:
            if True in [kind.is_open for kind in self.kinds]:
                self._replace_states()

    def apply(self) -> None:
        """Applies all pending updates of the model."""
        with self.lock:
            for kind in self.kinds:
                kind.apply()
            self.restore_states()


class _ClosedContext(contextlib.AbstractContextManager[None]):
    def __init__(self, updates: PendingUpdates, grows: bool) -> None:
        self._updates, self._grows = updates, grows

    def __enter__(self) -> None:
        updates = self._updates
        with updates.lock:
            updates.inside += 1
            if updates.states:
                updates.restore_states()
            for kind in updates.kinds:
                kind.inside = True
                if kind.dense:
                    kind.disarm_dense()

    def __exit__(self, *_: object) -> None:
        updates = self._updates
        with updates.lock:
            updates.inside -= 1
            for kind in updates.kinds:
                kind.inside = updates.inside > 0
                kind.stale |= self._grows and not kind.is_open
            if not updates.inside:
                updates.rearm_stale()


def memory_is_shared(parameters: Sequence[Tensor], own: Iterable[Tensor] = ()) -> bool:
    """Returns whether tensors other than the model's `own`, or processes, may access the memory of these parameters."""
    counts: dict[int, int] = {}
    holders: dict[int, int] = {}
    nobodys: Any = torch.empty(0, device="cpu")
    tensors: list[Any] = [*[p.held.local if isinstance(p, TableShard) else p for p in parameters], *own, nobodys]
    for tensor in tensors:  # this loop is a hot path: it runs for every parameter in every step
        if tensor.is_sparse:  # any tensor may share memory with the values of a sparse one
            return True
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and storage.is_shared():
            return True
        address = storage._cdata
        counts[address] = counts.get(address, 0) + 1
        # Add the reference counts of C++ and of Python.
        holders[address] = torch._C._storage_Use_Count(address) + getrefcount(storage)
    alone: int = holders[address]  # the count for an unshared tensor
    return bool(max(map(sub, holders.values(), counts.values())) >= alone)


def is_held_by_torch(parameter: Tensor) -> bool:
    """Returns whether C++ code of torch, such as a TorchScript module, refers to a parameter."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node if parameter.requires_grad else None
    uses: int = parameter._use_count()  # type: ignore[attr-defined]
    return uses > (1 if node is None else 2)


def _any_held_by_torch(parameters: Sequence[Any]) -> bool:
    """Returns whether C++ code of torch, except autograd's gradient accumulator, refers to any of the parameters."""
    return max([parameter._use_count() for parameter in parameters if type(parameter) is not TableShard], default=0) > 2


def _max_references(optimizers: Iterable[Any]) -> int:
    """Returns the highest reference count of any tensor in the optimizers' states."""
    most = 0
    for optimizer in optimizers:  # this loop is a hot path: it runs for every parameter in every step
        for state in optimizer.state.values():
            for value in state.values():
                if (count := getrefcount(value)) > most and isinstance(value, Tensor) and value.dim():
                    most = count
    return most


@cache
def _min_references() -> int:
    """Returns the reference count of a tensor in an optimizer's state that nothing else refers to."""
    return _max_references([SimpleNamespace(state={"": {"": torch.empty(1, device="cpu")}})])


def is_gradient_referenced(parameter: nn.Parameter) -> bool:
    """Returns whether anything besides the parameter refers to its gradient or to the gradient's memory."""
    other = nn.Parameter(torch.empty(0, device="cpu"))
    other.grad = torch.empty(0, device="cpu")
    gradient, alone = parameter.grad, other.grad
    assert gradient is not None
    return getrefcount(gradient) > getrefcount(alone) or memory_is_shared([gradient])


_IN_A_GRAPH = (
    "an update of the last optimizer.step() is still pending, and cannot be applied inside torch.compile("
    "fullgraph=True) or a control flow operator such as torch.cond. Call model.synchronize() first."
)


@torch.compiler.disable(reason=_IN_A_GRAPH)  # type: ignore[untyped-decorator]  # tracing would skip the update
def _apply_pending(parameter: Any) -> Any:
    """Applies the pending updates of a parameter, and returns the parameter."""
    kind = type(parameter)
    if issubclass(kind, PendingParameter):  # otherwise another thread has applied them
        kind.updates.apply()
    return parameter


def apply_pending(*values: Any) -> None:
    """Applies the pending updates of all parameters in `values`, also in nested lists, tuples and dicts."""
    for parameter in list(_pending_in(values)):
        _apply_pending(parameter)


def _pending_in(value: Any) -> Iterator[PendingParameter]:
    """Yields the parameters with pending updates in a value."""
    if isinstance(value, PendingParameter):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _pending_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _pending_in(each)
