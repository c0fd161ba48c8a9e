"""Dense gradients whose reduction and update run into the next step (EmbRace, ICPP 2022, section 4.1).

Contract
    After a backward the gradients of a bucket are on their way; `.grad` holds stand-ins that wait when they are used.
    `optimizer.step()` keeps the options of its moment and returns. The update of a bucket is applied when the next
    forward needs its parameters, by the optimizer's own class, with the same numbers as at once.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from embrace_fx import cost
from embrace_fx.runtime.kernels import unpack_bucket
from embrace_fx.runtime.launch.launcher import Launcher, Ticket
from embrace_fx.runtime.optimizer.row_optimizers import hyperparameters
from embrace_fx.runtime.ranks.communicator import LANE_GROUP, Communicator, InFlight
from embrace_fx.vocabulary.schedule import OperationId, bucket_name

BY_PARAMETER: frozenset[type[Optimizer]] = frozenset(
    {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop}
)
"""Optimizer classes whose update of a parameter depends on that parameter alone, so that it can be applied apart."""


WRITTEN = (
    "expected parameters to be written only through the compiled model, between optimizer.step() and the next call, "
    "found {} that was written before its pending update. Take it from model.parameters() or model.named_parameters() "
    "at that moment, or call model.synchronize() before."
)


class PendingGradient(Tensor):
    """What `.grad` holds while a gradient is on its way: any use waits for it, and then uses the real one.

    So code that looks at gradients between backward and step (clipping, logging) works as on any model; what it looked
    at is from then on an ordinary gradient.

    Attributes:
        land: waits for the gradient, and sets `landed`.
        landed: the real one.
    """

    land: Callable[[], None]
    landed: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, land: Callable[[], None]) -> PendingGradient:
        made: PendingGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.land, made.landed = land, None
        return made

    def resolve(self) -> Tensor:
        if self.landed is None:
            self.land()
        assert self.landed is not None
        return self.landed

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(
            PendingGradient, PendingGradient.resolve, (args, dict(kwargs or {}))
        )
        return func(*args, **kwargs)

    # What reads memory without the dispatcher.

    def numpy(self, *, force: bool = False) -> Any:
        return self.resolve().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.resolve().__array__(dtype)

    def tolist(self) -> Any:
        return self.resolve().tolist()

    def data_ptr(self) -> int:
        return self.resolve().data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.resolve(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.resolve().__reduce_ex__(protocol)


_OWN_REFERENCES = 3
"""References to a stand-in that are not the user's: the table of stand-ins, a local variable, `getrefcount`'s own."""


class _Bucket:
    """One bucket's gradients, from their submission to their update."""

    def __init__(self, parameters: list[nn.Parameter], flat: Tensor, tickets: list[Ticket]) -> None:
        self.parameters = parameters
        self.flat = flat
        self.tickets = tickets
        self.updates: list[tuple[Optimizer, type[Optimizer], list[dict[str, Any]]]] = []
        self.stepped: dict[nn.Parameter, int] = {}
        """Parameters that `updates` covers, and their versions at the step."""


class BucketUpdates:
    """All buckets of a model.

    Args:
        buckets: parameter names by bucket.
        parameter: finds a parameter by name.
        wait: waits for a ticket (and takes the time of it).
        exchanges: by bucket, those that are not AllReduced: what starts the exchange of a flat tensor, in place.
        delivered: told of parameters whose gradients have become ordinary ones.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[str, ...]],
        parameter: Callable[[str], nn.Parameter],
        communicator: Communicator,
        launcher: Launcher,
        wait: Callable[[Ticket], Tensor],
        delivered: Callable[[Sequence[nn.Parameter]], None],
        exchanges: Mapping[int, Callable[[Tensor], InFlight]],
    ) -> None:
        self._exchanges = exchanges
        self._names = tuple(buckets)
        self._bucket_of = {bucket_name(k): k for k in range(len(buckets))}
        self._parameter = parameter
        self._communicator = communicator
        self._launcher = launcher
        self._wait = wait
        self._delivered = delivered
        self._waiting: dict[int, _Bucket] = {}
        self._submitted: dict[OperationId, Ticket] = {}  # of this window, and of no bucket yet
        self._stand_ins: dict[nn.Parameter, PendingGradient] = {}

    # -- backward ------------------------------------------------------------------------------------------------------

    def launch(self, launch: OperationId, flat: Tensor, start: int, length: int) -> Ticket:
        """Submits the AllReduce of a part of a packed bucket, in place, or the exchange of a whole one."""
        exchange = self._exchanges.get(self._bucket_of[launch.what])
        if exchange is not None:
            return self._launcher.submit(launch, lambda: exchange(flat), 0)
        part = flat[start : start + length]
        return self._launcher.submit(
            launch,
            lambda: self._communicator.all_reduce_(part, "sum", LANE_GROUP[launch.lane]),
            cost.all_reduce(part.numel() * part.element_size(), self._communicator.world_size).sent_bytes,
        )

    def submit_chunk(self, launch: OperationId, flat: Tensor, start: int, length: int) -> None:
        """The same, to be waited for by its id, or taken over with its bucket."""
        self._submitted[launch] = self.launch(launch, flat, start, length)

    def await_chunk(self, launch: OperationId) -> None:
        """Waits for a chunk, if it is on its way: its gradient may have been used, or dropped, before."""
        ticket = self._submitted.pop(launch, None)
        if ticket is None and (bucket := self._waiting.get(self._bucket_of[launch.what])) is not None:
            ticket = next((each for each in bucket.tickets if each.id == launch), None)
        if ticket is not None:
            self._wait(ticket)

    def take(self, k: int, flat: Tensor) -> None:
        """Takes a packed bucket over, all of whose chunks have been submitted."""
        self.await_update(k)  # of the step before, if no forward has read the parameters since
        mine = [launch for launch in self._submitted if self._bucket_of[launch.what] == k]
        tickets = [self._submitted.pop(launch) for launch in mine]
        self._waiting[k] = _Bucket([self._parameter(name) for name in self._names[k]], flat, tickets)

    def deliver(self, buckets: Sequence[int], absent: Collection[nn.Parameter] = ()) -> None:
        """Puts stand-ins into `.grad` of parameters that have none; sums up where there is a gradient already.

        Args:
            absent: parameters that this backward gives no gradient.
        """
        without = set(absent)
        summed = False
        for k in buckets:
            bucket = self._waiting[k]
            for parameter in bucket.parameters:
                summed |= parameter.grad is not None and parameter not in without
        if summed:
            with self._launcher.hurrying():  # rows of a forward to come may stand before the buckets
                landed = {k: self._land(self._waiting[k]) for k in buckets}
            for k, gradients in landed.items():
                for parameter, gradient in zip(self._waiting.pop(k).parameters, gradients, strict=True):
                    if parameter not in without:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            self._delivered([parameter for names in self._names for parameter in map(self._parameter, names)])
            return
        for k in buckets:
            for parameter in self._waiting[k].parameters:
                if parameter not in without:
                    parameter.grad = self._stand_in(parameter, k)

    def _stand_in(self, parameter: nn.Parameter, k: int) -> PendingGradient:
        found = self._stand_ins.get(parameter)
        if found is None or sys.getrefcount(found) > _OWN_REFERENCES:  # someone kept the last one, for what it was
            found = self._stand_ins[parameter] = PendingGradient(parameter, lambda: self._wanted(k))
        found.landed = None
        return found

    def _wanted(self, k: int) -> None:
        """Someone uses a gradient of a bucket."""
        with self._launcher.hurrying():  # rows of a forward to come may stand before it
            if self._waiting[k].updates:
                self.await_update(k)
            else:
                self.materialise()

    # -- updates -------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, kind: type[Optimizer]) -> bool:
        """Takes an optimizer's step over, if all that it would read is on its way.

        Returns: false where it has to step by itself, at once; its gradients are ordinary ones then.
        """
        hooks = (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        mine = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        for parameter in mine:
            if isinstance(parameter.grad, PendingGradient) and parameter.grad.landed is not None:
                parameter.grad = parameter.grad.landed  # put back by an assignment such as `p.grad *= 2`
        ready = all(p.grad is self._stand_ins.get(p) for p in mine)
        if not self._waiting or not ready or kind not in BY_PARAMETER or any(hooks):
            self.release(optimizer)
            return False
        options = [hyperparameters(group) for group in optimizer.param_groups]
        bucket_of = {parameter: k for k, bucket in self._waiting.items() for parameter in bucket.parameters}
        taken: dict[int, list[dict[str, Any]]] = {}
        for kept, group in zip(options, optimizer.param_groups, strict=True):
            by_bucket: dict[int, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter in mine and (k := bucket_of.get(parameter)) is not None:
                    by_bucket.setdefault(k, []).append(parameter)
            for k, parameters in by_bucket.items():
                taken.setdefault(k, []).append({**kept, "params": parameters})
        for k, groups in taken.items():
            bucket = self._waiting[k]
            bucket.updates.append((optimizer, kind, groups))
            bucket.stepped |= {p: p._version for group in groups for p in group["params"]}
        return True

    def release(self, optimizer: Optimizer) -> None:
        """Makes the gradients of an optimizer's parameters ordinary ones."""
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        with self._launcher.hurrying():
            for k in [k for k, bucket in self._waiting.items() if not mine.isdisjoint(bucket.parameters)]:
                self.await_update(k)

    def await_update(self, k: int) -> None:
        """Applies what an optimizer has taken over of a bucket; other gradients of it become ordinary ones."""
        bucket = self._waiting.pop(k, None)
        if bucket is None:
            return
        gradients = self._land(bucket)
        before = [parameter.grad for parameter in bucket.parameters]
        for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._check_unwritten(bucket)
        for optimizer, kind, groups in bucket.updates:
            part = kind.__new__(kind)
            part.__dict__.update(optimizer.__dict__)
            part.param_groups = groups
            part._optimizer_step_pre_hooks = OrderedDict()  # those of after the step it stands for are not meant
            part._optimizer_step_post_hooks = OrderedDict()
            kind.step(part)
        for parameter, gradient, stood in zip(bucket.parameters, gradients, before, strict=True):
            stand_in = self._stand_ins.get(parameter)
            if stand_in is None or stood is not stand_in:
                parameter.grad = stood  # None after zero_grad, or without a gradient; or the user's own
            if stand_in is not None and (stood is stand_in or sys.getrefcount(stand_in) > _OWN_REFERENCES):
                stand_in.landed = gradient  # for whoever still looks at it

    def _check_unwritten(self, bucket: _Bucket) -> None:
        """Raises where a parameter was written between an optimizer's step and the update that the step stands for."""
        for parameter, version in bucket.stepped.items():
            if parameter._version != version:
                raise RuntimeError(WRITTEN.format(f"one of shape {tuple(parameter.shape)}"))

    def apply(self) -> None:
        """Applies every update that an optimizer has taken over."""
        for k in [k for k, bucket in self._waiting.items() if bucket.updates]:
            self.await_update(k)

    def materialise(self) -> None:
        """Makes gradients that no optimizer has taken over ordinary ones."""
        landed = []
        for k in [k for k, bucket in self._waiting.items() if not bucket.updates]:
            landed += self._waiting[k].parameters
            self.await_update(k)
        if landed:
            self._delivered(landed)

    def discard(self) -> None:
        """Forgets gradients that no optimizer has taken over."""
        for k in [k for k, bucket in self._waiting.items() if not bucket.updates]:
            bucket = self._waiting.pop(k)
            for parameter in bucket.parameters:
                if parameter.grad is not None and parameter.grad is self._stand_ins.get(parameter):
                    parameter.grad = None

    def _land(self, bucket: _Bucket) -> list[Tensor]:
        for ticket in bucket.tickets:
            self._wait(ticket)
        return unpack_bucket(bucket.flat, bucket.parameters)
