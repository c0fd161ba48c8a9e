"""The null back end: streams that run everything at once, on the host, and write down what CUDA would have been given.

Contract
    Values are right, because everything runs in the order in which it was enqueued. What is written down is a
    `StreamProgram`: each op of torch with the memory it reads and writes, under the stream that was current; each
    collective; each event, wait and read of the host; and the moment at which a tensor's memory is freed.
    `tests/support/streams/stream_order.py` then proves that the same calls are ordered on a device, where streams run
    beside each other.
    What would have made the host wait for the device (a size that depends on values, a value that is asked for) is
    written down too, in `host_waits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embrace_fx.runtime.launch.recorder import Clock, HostClock
from embrace_fx.vocabulary.operation_id import Lane
from tests.support.streams.stream_program import (
    Free,
    HostRead,
    Keep,
    Kernels,
    Launch,
    Record,
    Step,
    StreamProgram,
    WaitEvent,
)

_WAITS_FOR_DEVICE = frozenset(
    {
        *("aten::nonzero", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::masked_select"),
        *("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::repeat_interleave.Tensor"),
        *("aten::bincount",),
    }
)
"""Ops that read values of the device on the host, with whatever stands before them."""

_COLLECTIVES_WITH_INPUT = ("alltoall_base_", "_allgather_base_", "allgather_into_tensor_coalesced_")


class RecordedStreams(TorchDispatchMode):
    """Streams on paper. As a context, it writes down what runs within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step | str] = []
        self.host_waits: list[str] = []
        self.last: tuple[int, str] | None = None
        self._stream: Lane = "compute"
        self._what = ""
        self._events = self._pieces = 0
        self._names: dict[int, str] = {}  # of storages, by their address
        # Weak references keep a storage's address from being given to another one, not its memory. With the stream that
        # owns it; None: made before.
        self._alive: dict[int, tuple[StorageWeakRef, Lane | None]] = {}
        self._host: set[int] = set()  # storages on the host

    def program(self, title: str) -> StreamProgram:
        return StreamProgram(title, tuple(self.steps))

    # -- streams -------------------------------------------------------------------------------------------------------

    @contextmanager
    def on(self, lane: Lane, what: str) -> Iterator[None]:
        before, self._stream, self._what = (self._stream, self._what), lane, what
        try:
            yield
        finally:
            self._stream, self._what = before

    def record(self, name: str) -> str:
        self._events += 1
        event = f"{name} #{self._events}"
        self._append(Record(event, self._stream))
        return event

    def wait(self, event: str) -> None:
        self._append(WaitEvent(event, self._stream))

    def keep(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._append(Keep(self._name(tensor), self._stream))

    def from_host(self, values: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def to_host(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        self.expect_on_host([copy])
        return copy

    def read(self, event: str, copy: Tensor) -> list[Any]:
        self._append(HostRead(event, (self._name(copy),)))
        values: list[Any] = copy.tolist()
        return values

    def clock(self) -> Clock:
        return HostClock()

    def use_device(self) -> None:
        """Does nothing: there is none."""

    def expect_on_host(self, tensors: Iterable[Tensor]) -> None:
        """Takes tensors for such as would be on the host beside a device: to ask for their values makes nobody wait."""
        for tensor in tensors:
            self._name(tensor)
            self._host.add(tensor.untyped_storage()._cdata)

    # -- what runs -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # a graph is traced: nothing runs
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass, whose own ops come back here
        result = func(*args, **(kwargs or {}))
        self._observe(func, args, kwargs or {}, result)
        return result

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = _tensors((args, kwargs))
        read = {self._name(tensor) for tensor in given}
        if (func.name() in _WAITS_FOR_DEVICE and not self._are_on_host(given)) or _is_masked_index(func, args):
            self.host_waits.append(f"{func.name()} on stream {self._stream!r} {self._what}".rstrip())
        if func.namespace == "c10d":
            self._observe_collective(func, given)
            return
        written = {self._name(tensor) for tensor in _mutated(func, args, kwargs)}
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in self._names:
                written.add(self._name(tensor, self._stream))
                if self._are_on_host(given) and given:
                    self._host.add(tensor.untyped_storage()._cdata)
        if not written and _tensors(result):
            return  # a view
        op = f"{self._what}: {func.name()}" if self._what else func.name()
        self._append(Kernels(op, tuple(sorted(read - written)), tuple(sorted(written)), self._stream))

    def _observe_collective(self, func: Any, given: list[Tensor]) -> None:
        if all(tensor.untyped_storage()._cdata in self._host for tensor in given):
            return  # between the hosts
        names = [self._name(tensor) for tensor in given]
        reads, writes = (names[1:], names[:1]) if func._opname in _COLLECTIVES_WITH_INPUT else (names, names)
        self._append(Launch(self._stream, self._what or func._opname, tuple(reads), tuple(writes)))

    def _are_on_host(self, tensors: list[Tensor]) -> bool:
        return all(tensor.untyped_storage()._cdata in self._host for tensor in tensors)

    def _name(self, tensor: Tensor, owner: Lane | None = None) -> str:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._names:
            self._pieces += 1
            self._names[address] = f"memory {self._pieces}"
            self._alive[address] = (StorageWeakRef(storage), owner)
        return self._names[address]

    def _append(self, step: Step) -> None:
        self._collect()
        self.steps.append(step)

    def _collect(self) -> None:
        """Writes down what has been freed."""
        for address in [address for address, (storage, _) in self._alive.items() if storage.expired()]:
            _, owner = self._alive.pop(address)
            if owner is not None and address not in self._host:
                self.steps.append(Free(self._names[address], owner))
            self._host.discard(address)
            del self._names[address]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for k, argument in enumerate(func._schema.arguments):
        value = args[k] if k < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(value)
    return found


def _is_masked_index(func: Any, args: tuple[Any, ...]) -> bool:
    """An index by a mask, whose result is as long as the mask has true entries."""
    return func.name() in ("aten::index.Tensor", "aten::index_put_") and any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
