"""Reduces buckets with a communication hook of the user, as DDP does: `hook(state, bucket) -> Future[Tensor]`.

Contract
    A hook gets this rank's own sum of gradients, divided by nothing, in the order of the buckets, on the thread that
    runs the backward, and may begin collectives of its own. What its future yields takes the bucket's place at the end
    of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embrace_fx.runtime.ranks.communicator import InFlight


@dataclass(frozen=True)
class CommHook:
    """A communication hook of the user, with the state that the user registered for it."""

    state: object
    hook: Callable[[Any, Any], Any]

    @property
    def name(self) -> str:
        """The hook's name, which ranks compare to check that all of them have registered the same hook."""
        return str(getattr(self.hook, "__qualname__", type(self.hook).__qualname__))


class HookedBucket:
    """The bucket that a communication hook gets, with the methods of torch's `GradBucket`. `flat` has all gradients."""

    def __init__(self, flat: Tensor, parameters: Sequence[nn.Parameter], index: int, *, is_last: bool) -> None:
        self._flat, self._parameters = flat, list(parameters)
        self._index, self._is_last = index, is_last

    def index(self) -> int:
        """Returns the bucket's index, which is the same in every step of a plan."""
        return self._index

    def is_last(self) -> bool:
        """Returns whether the bucket is the last one of the backward."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Returns the flat tensor of all gradients."""
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        """Replaces the flat tensor of gradients."""
        self._flat = flat

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the bucket."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Returns the gradient of each parameter, as views of the flat tensor."""
        parts = self._flat.split([parameter.numel() for parameter in self._parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]


def run_comm_hook(comm_hook: CommHook, flat: Tensor, bucket: HookedBucket) -> InFlight:
    """Begins a bucket's reduction into `flat` by a communication hook. Raises `TypeError` if it returns no future."""
    future = comm_hook.hook(comm_hook.state, bucket)
    if not isinstance(future, torch._C.Future):  # collectives return futures of the base class
        raise TypeError(
            f"the communication hook {comm_hook.name} must return a torch.futures.Future of the reduced bucket, but "
            f"returned a {type(future).__name__}. For example, return dist.all_reduce(bucket.buffer(), "
            "async_op=True).get_future()."
        )
    return InFlight(flat, _HookReduction(future, flat, comm_hook.name))


@dataclass(frozen=True)
class _HookReduction:
    """The reduction of a bucket by the communication hook with this name, in progress."""

    _future: torch._C.Future[Any]
    _flat: Tensor
    _name: str

    def wait(self) -> None:
        """Waits for the reduction, and copies it to the flat tensor. Raises `TypeError` if it has another size."""
        found = self._future.wait()
        reduced = found[0] if isinstance(found, list | tuple) and found else found
        if not isinstance(reduced, Tensor) or reduced.numel() != self._flat.numel():
            kind = type(reduced).__name__
            what = f"a tensor of shape {tuple(reduced.shape)}" if isinstance(reduced, Tensor) else f"a {kind}"
            raise TypeError(
                f"the future of the communication hook {self._name} holds {what}, but must hold the reduced bucket: a "
                f"tensor of {self._flat.numel()} elements."
            )
        if reduced is not self._flat:
            self._flat.copy_(reduced.reshape(self._flat.shape))
