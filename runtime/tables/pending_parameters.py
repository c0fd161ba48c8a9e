"""Parameters an update of which is still to come, between calls, steps and backwards: whoever uses one finds it done.

Contract
    Between `closed()` blocks the class of a dense one is one that torch asks before it calls a function of it, and the
    memory of a table's part has a guard: whoever reads or writes one, by whichever reference, finds every update
    applied, and nothing that left ahead is used unseen. What only asks for a shape, a dtype or `.grad` waits for
    nothing. So it is with `optimizer.state`. The guard of a part lets a step pass, and stays.
    A tensor that shares a parameter's memory (`.data`, `detach()`, a view, a NumPy array) can be used without a word
    to the parameter. Where one is there when an update would begin to wait, the update is applied at that moment; so it
    is where someone holds a tensor of the optimizer's state.
    Memory that is reached by no tensor (a kept `data_ptr()`) is nobody's to see.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import sub
from sys import getrefcount
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.tables.local_storage import LocalStorage
from embrace_fx.runtime.tables.part import Part
from embrace_fx.runtime.tables.pending_state import PendingState
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
"""Functions that look at no element of a tensor."""


class PendingParameter(nn.Parameter):
    """A parameter an update of which is on its way: any use applies it first. One class for each `Updates`.

    Attributes:
        plain: the class it is of at other times.
        updates: those of it and of others.
        lock: held while updates are applied, and gradients with them.
    """

    plain: ClassVar[type[nn.Parameter]]
    updates: ClassVar[Updates]
    lock: ClassVar[threading.RLock]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.plain(*args, **kwargs)  # `type(parameter)(data)`

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

    # An optimizer that clears gradients asks each parameter for its own: as itself, at a third of a function's cost.

    @property
    def grad(self) -> Any:
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
        return _apply(self).as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _apply(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _apply(self).__reduce_ex__(protocol)


class Updates:
    """Pending updates of some parameters, which are applied together.

    Args:
        parameters: yields those whose values are to come, or have been read ahead.
        apply: applies every update, and has what left ahead looked at before it is used.
        lock: of the model.
        own: yields tensors of the model's own that share memory of parameters.

    Attributes:
        inside: a step runs, which knows what is pending.
        dense: parameters of another class meanwhile.
        stale: more may be pending than what is watched, or someone may hold memory of it.
        is_open: something is watched.
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
        """Has optimizers hold their own state, while it is written."""
        self._kinds: dict[type[nn.Parameter], type[PendingParameter]] = {}
        self.dense: list[nn.Parameter] = []
        self._held: list[LocalStorage] = []
        self._applies = False
        self._opener = 0  # the thread that goes on with training

    def open(self) -> None:
        """Has any use of a parameter apply what is pending, from now on; at once, if memory of one is shared."""
        self.stale = False
        parameters = list(self._parameters())
        if parameters and (share_memory(parameters, self._own()) or _are_held_by_torch(parameters)):
            self._apply()
            return
        self._opener, self.is_open = threading.get_ident(), bool(parameters)
        for parameter in parameters:
            if issubclass(type(parameter), PendingParameter):  # of another model, too
                _apply(parameter)
            plain: Any = type(parameter)
            if plain is Part:  # every way to its memory leads by what holds it
                held: LocalStorage = parameter.held  # type: ignore[attr-defined]
                self._held.append(held)
                held.on_use = self.apply
            else:
                self.dense.append(parameter)
                parameter.__class__ = self._kinds.get(plain) or self._kind(plain)

    def _apply(self) -> None:
        """Applies what is pending, as at any other time: traces and transforms read parameters too."""
        with outside_of_modes():
            self._apply_now()

    @contextlib.contextmanager
    def _applying(self) -> Iterator[None]:
        self._applies = True
        try:
            yield
        finally:
            self._applies = False

    def _kind(self, plain: type[nn.Parameter]) -> type[PendingParameter]:
        bases = (PendingParameter,) if plain is nn.Parameter else (PendingParameter, plain)
        its_own = {"plain": plain, "updates": self, "lock": self._lock, "__module__": __name__}
        made = self._kinds[plain] = type(PendingParameter.__name__, bases, its_own)
        return made

    def close(self) -> None:
        """Makes parameters what they were."""
        with self._lock:
            if self.dense:
                self.pass_by()
            for held in self._held:
                held.on_use = None
            self._held.clear()
            self.stale, self.is_open = True, False

    def pass_by(self) -> None:
        """Lets a step use parameters; called with the lock held."""
        self.stale = True
        for parameter in self.dense:
            if issubclass(kind := type(parameter), PendingParameter):  # its metaclass would be asked for instances
                parameter.__class__ = kind.plain
        self.dense.clear()
        self.is_open = bool(self._held)

    def apply(self) -> None:
        """Applies what is pending, for a user of a parameter."""
        with self._lock:
            self.stale = True  # whoever uses it may keep its memory
            if self.inside or self._applies or not self.is_open:  # a step, or some thread, is applying them
                return
            with self.states_aside(), self._applying():
                if threading.get_ident() == self._opener:
                    self.close()
                    self._apply()
                    return
                # Training goes on meanwhile: it must find what it has to wait for, the gradients that it clears, too.
                with torch._C.DisableTorchFunctionSubclass():
                    self._apply()
                self.close()


class PendingUpdates:
    """All of one model's.

    Attributes:
        lock: held while any is applied, or begins or ends to be pending.
        kinds: the updates.
        states: what stands in for optimizers' states.
        inside: number of `closed` that go on.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.kinds: tuple[Updates, ...] = ()
        self._optimizers: Callable[[], Iterable[Optimizer]] = tuple
        self.states: list[PendingState] = []
        self._stepped: list[Optimizer] = []  # optimizers whose steps may be pending
        self.inside = 0

    def watch(self, kinds: tuple[Updates, ...], optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        """Watches parameters of these kinds, and the state of optimizers whose steps may be to be applied."""
        self.kinds, self._optimizers = kinds, optimizers
        for kind in kinds:
            kind.states_aside = self._states_aside

    def closed(self, *, grows: bool = True) -> contextlib.AbstractContextManager[None]:
        """Has parameters be what they are at other times, for who knows what is pending.

        Args:
            grows: whether more may be pending at the end.
        """
        return _Closed(self, grows)

    def close(self) -> None:
        """Watches nothing, until `open`."""
        with self.lock:
            if self.states:
                self.leave_states()
            for kind in self.kinds:
                kind.close()

    def open(self) -> None:
        """Watches all that is pending, where no `closed` goes on."""
        with self.lock:
            for kind in self.kinds:
                kind.stale = True
            if not self.inside:
                self.watch_stale()

    def watch_stale(self) -> None:
        """Watches what may have grown since it was watched; called with the lock held."""
        if self.states:
            self.leave_states()
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
            if _most_holders(self._stepped) > _fewest_holders():
                self.apply()  # who holds a tensor of a state reads and writes it unseen
                return
        if is_open:
            self._take_states()

    def _take_states(self) -> None:
        for optimizer in self._stepped:
            self.states.append(PendingState(optimizer, self.apply))

    def leave_states(self) -> None:
        states, self.states = self.states, []
        for state in states:
            state.leave()

    @contextlib.contextmanager
    def _states_aside(self) -> Iterator[None]:
        self.leave_states()
        try:
            yield
        finally:
            if True in [kind.is_open for kind in self.kinds]:
                self._take_states()

    def apply(self) -> None:
        """Applies all that is pending, for whoever looks."""
        with self.lock:
            for kind in self.kinds:
                kind.apply()
            self.leave_states()


class _Closed(contextlib.AbstractContextManager[None]):
    """A time at which parameters are what they are; `grows` as `closed` says."""

    def __init__(self, updates: PendingUpdates, grows: bool) -> None:
        self._updates, self._grows = updates, grows

    def __enter__(self) -> None:
        updates = self._updates
        with updates.lock:
            updates.inside += 1
            if updates.states:
                updates.leave_states()
            for kind in updates.kinds:
                kind.inside = True
                if kind.dense:
                    kind.pass_by()

    def __exit__(self, *_: object) -> None:
        updates = self._updates
        with updates.lock:
            updates.inside -= 1
            for kind in updates.kinds:
                kind.inside = updates.inside > 0
                kind.stale |= self._grows
            if not updates.inside:
                updates.watch_stale()


def share_memory(parameters: Sequence[Tensor], own: Iterable[Tensor] = ()) -> bool:
    """Whether memory of parameters can be read or written by other tensors than these, or by other processes."""
    counts: dict[int, int] = {}
    holders: dict[int, int] = {}
    nobodys: Any = torch.empty(0, device="cpu")
    tensors: list[Any] = [*[p.held.local if isinstance(p, Part) else p for p in parameters], *own, nobodys]
    for tensor in tensors:  # at every step, of every parameter: without calls
        if tensor.is_sparse:  # its values may be held by any number of tensors
            return True
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and storage.is_shared():
            return True
        address = storage._cdata
        counts[address] = counts.get(address, 0) + 1
        holders[address] = torch._C._storage_Use_Count(address) + getrefcount(storage)  # in C++, in Python
    alone: int = holders[address]  # one tensor, and what asking takes
    return bool(max(map(sub, holders.values(), counts.values())) >= alone)


def is_held_by_torch(parameter: Tensor) -> bool:
    """Whether torch's C++ holds a parameter, as a TorchScript module does, and reads it without a word to its class."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node if parameter.requires_grad else None
    uses: int = parameter._use_count()  # type: ignore[attr-defined]
    return uses > (1 if node is None else 2)


def _are_held_by_torch(parameters: Sequence[Any]) -> bool:
    """As `is_held_by_torch` of any, whose nodes may be there; parts are asked by whoever holds them."""
    return max([parameter._use_count() for parameter in parameters if type(parameter) is not Part], default=0) > 2


def _most_holders(optimizers: Iterable[Any]) -> int:
    """Counts the references to the tensor of their state that has most."""
    most = 0
    for optimizer in optimizers:  # at every step, of every parameter
        for state in optimizer.state.values():
            for value in state.values():
                if (count := getrefcount(value)) > most and isinstance(value, Tensor) and value.dim():
                    most = count
    return most


@cache
def _fewest_holders() -> int:
    """Counts those of a tensor that nobody holds besides its state."""
    return _most_holders([SimpleNamespace(state={"": {"": torch.empty(1, device="cpu")}})])


def is_kept(parameter: nn.Parameter) -> bool:
    """Whether anyone but a parameter holds its gradient, or memory of that."""
    other = nn.Parameter(torch.empty(0, device="cpu"))
    other.grad = torch.empty(0, device="cpu")
    gradient, alone = parameter.grad, other.grad
    assert gradient is not None
    return getrefcount(gradient) > getrefcount(alone) or share_memory([gradient])


_IN_A_GRAPH = (
    "an update of the last optimizer.step() is still pending, which torch.compile(fullgraph=True) and control flow "
    "operators cannot wait for. Call model.synchronize() first."
)


@torch.compiler.disable(reason=_IN_A_GRAPH)  # type: ignore[untyped-decorator]  # a traced one would apply nothing
def _apply(parameter: Any) -> Any:
    """Applies what is pending; returns the parameter, which is an ordinary one then."""
    kind = type(parameter)
    if issubclass(kind, PendingParameter):  # no other thread has been asked before
        kind.updates.apply()
    return parameter


def apply_pending(*values: Any) -> None:
    """Applies the updates of parameters among values, and among lists, tuples and dicts of those."""
    for parameter in list(_pending_in(values)):
        _apply(parameter)


def _pending_in(value: Any) -> Iterator[PendingParameter]:
    if isinstance(value, PendingParameter):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _pending_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _pending_in(each)
