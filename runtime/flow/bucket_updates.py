"""Dense gradients whose reduction and update run into the next step (EmbRace, ICPP 2022, section 4.1).

Contract
    After a backward the gradients of a bucket are on their way; `.grad` holds stand-ins that wait when they are used.
    `optimizer.step()` keeps the options of its moment and returns. The update of a bucket is applied when the next
    forward needs its parameters, by the optimizer's own class, with the same numbers as at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.cost import links as cost
from embrace_fx.runtime.kernels import unpack_bucket
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.runtime.tables.held import GONE, Late
from embrace_fx.runtime.tables.own_step import hyperparameters, step_groups, takes_sparse
from embrace_fx.vocabulary.forwarding import READ_MEMORY, NoStorage, forward, share_memory
from embrace_fx.vocabulary.operation_id import OperationId, bucket_name, compute_id


class PendingGradient(Tensor):
    """Stands in `.grad` for a gradient in flight: any use waits for the gradient, and then uses the real one.

    So code that looks at gradients between backward and step (clipping, logging) works as on any model; what it looked
    at is from then on an ordinary gradient.

    Attributes:
        late: the gradients among which it is.
        place: which of them it is.
        is_sparse: the gradient is (COO), and so it seems while it is in flight.
    """

    late: Late[Tensor]
    place: int
    is_sparse: bool = False  # torch's asks no subclass

    @staticmethod
    def __new__(cls, like: Tensor, late: Late[Tensor], place: int, *, sparse: bool = False) -> PendingGradient:
        made: PendingGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, dispatch_layout=sparse
        )
        made.late, made.place, made.is_sparse = late, place, sparse
        Tensor.untyped_storage(made).__class__ = NoStorage  # type: ignore[assignment]
        return made

    @property
    def landed(self) -> Tensor | None:
        """The real one; None: nobody has waited for it."""
        found = self.late.landed
        return None if found is None else found[self.place]

    def resolve(self) -> Tensor:
        return self.late.now()[self.place]

    @property
    def data(self) -> Tensor:
        return self.resolve().data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.resolve().data = value

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.layout.default:  # asked of sparse ones alone
            return torch.sparse_coo
        args, kwargs = torch.utils._pytree.tree_map_only(
            PendingGradient, PendingGradient.resolve, (args, dict(kwargs or {}))
        )
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.resolve(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.resolve().__reduce_ex__(protocol)


forward(PendingGradient, (*READ_MEMORY, "as_subclass"), lambda gradient, _: gradient.resolve())
share_memory(PendingGradient, lambda gradient, _: gradient.resolve())

BucketExchange = Callable[[Tensor, str], InFlight]
"""Starts the exchange of a flat tensor, in place; given the name of its launch."""


class _Bucket:
    """One bucket's gradients, from their submission to their update.

    Attributes:
        gradients: once they have landed.
    """

    def __init__(self, parameters: list[nn.Parameter], flat: Tensor, tickets: list[Ticket]) -> None:
        self.parameters = parameters
        self.flat = flat
        self.tickets = tickets
        self.updates: list[tuple[Optimizer, list[dict[str, Any]]]] = []
        self.stepped: dict[int, nn.Parameter] = {}
        """Parameters that `updates` covers, by identity: a tensor's hash is a call of Python."""
        self.gradients: Sequence[Tensor] = ()
        self.late: Callable[[], Late[Tensor] | None] = lambda: None
        """Finds what has been put into `.grad` of the parameters, as long as someone holds that."""

    def stands_in(self, n: int) -> bool:
        """Tells whether `.grad` of the n-th parameter is what was put there, and nobody has looked at it."""
        found = self.parameters[n].grad
        if type(found) is not PendingGradient or found.place != n or found.late.landed is not None:
            return False
        return found.late is self.late()

    def is_held(self) -> bool:
        """Tells whether someone holds what was put into `.grad`."""
        return self.late() is not None

    def arrived(self, gradients: Sequence[Tensor]) -> None:
        """Tells whoever still holds a stand-in."""
        self.gradients = gradients
        if (late := self.late()) is not None and late.landed is None:
            late.landed = gradients


class BucketUpdates:
    """All buckets of a model.

    Args:
        buckets: parameter names by bucket.
        parameters: finds parameters by their names.
        exchanges: by bucket, those that are not AllReduced.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[str, ...]],
        parameters: Callable[[Collection[str]], list[nn.Parameter]],
        communicator: Communicator,
        launcher: Launcher,
        exchanges: Mapping[int, BucketExchange],
    ) -> None:
        self._exchanges = exchanges
        self._names = tuple(buckets)
        self._bucket_of = {bucket_name(k): k for k in range(len(buckets))}
        self._parameters = parameters
        self._communicator = communicator
        self._launcher, self._recorder = launcher, launcher.recorder
        self._waiting: dict[int, _Bucket] = {}
        self._dropped: list[_Bucket] = []  # before they were waited for, and of which someone may hold a gradient
        self._submitted: dict[OperationId, Ticket] = {}  # of this window, and of no bucket yet
        self._stood_in = False  # some `.grad` has been a stand-in
        self._any_sparse = False  # some gradient was sparse

    # -- backward ------------------------------------------------------------------------------------------------------

    def launch_bucket(self, launch: OperationId, flat: Tensor, *_: object) -> Ticket:
        """Launches a bucket that is waited for in the same backward: `all_reduce_` or `exchange_gradient_`."""
        self._recorder.mark(compute_id("backward", launch.what))
        return self._launch(launch, flat, 0, flat.numel())

    def _launch(self, launch: OperationId, flat: Tensor, start: int, length: int) -> Ticket:
        """Submits the AllReduce of a part of a packed bucket, in place, or the exchange of a whole one."""
        exchange = self._exchanges.get(self._bucket_of[launch.what])
        part = flat if flat.is_sparse or length == flat.numel() else flat[start : start + length]
        if exchange is not None:
            return self._launcher.submit(launch, lambda: exchange(part, str(launch)), 0)
        return self._launcher.submit(
            launch,
            lambda: self._communicator.all_reduce_(part, "sum", LANE_GROUP[launch.lane]),
            cost.all_reduce(part.numel() * part.element_size(), self._communicator.world_size).sent_bytes,
        )

    def submit_chunk(self, launch: OperationId, flat: Tensor, start: int, length: int, name: str) -> Tensor:
        """Submits a chunk, to be waited for by its id, or taken over with its bucket."""
        self._recorder.mark(compute_id("backward", launch.what))
        self._submitted[launch] = self._launch(launch, flat, start, length)
        return flat

    def await_chunk(self, launch: OperationId, value: Any, name: str) -> Any:
        """Waits for a chunk, if it is on its way: its gradient may have been used, or dropped, before."""
        self._recorder.stand()
        ticket = self._submitted.pop(launch, None)
        if ticket is None and (bucket := self._waiting.get(self._bucket_of[launch.what])) is not None:
            ticket = next((each for each in bucket.tickets if each.id == launch), None)
        if ticket is not None:
            self._launcher.wait(ticket)
        return value

    @property
    def waiting(self) -> bool:
        """Tells whether there are gradients that no optimizer has taken over."""
        return any(not bucket.updates for bucket in self._waiting.values())

    @property
    def stepped(self) -> list[nn.Parameter]:
        """Parameters whose update is still to be applied."""
        found: list[nn.Parameter] = []
        for bucket in self._waiting.values():
            found += bucket.stepped.values()
        return found

    @property
    def optimizers(self) -> list[Optimizer]:
        """Lists the optimizers with an update of a bucket still to be applied."""
        return [optimizer for bucket in self._waiting.values() for optimizer, _ in bucket.updates]

    def forget_submitted(self) -> None:
        """Forgets chunks that a backward has submitted, which has been given up: they are no bucket's."""
        self._submitted.clear()

    def hand_over(self, flat: Tensor, k: int) -> None:
        """Takes a packed bucket over, all of whose chunks have been submitted; an optimizer will have it in flight."""
        self.await_update(k)  # of the step before, if no forward has read the parameters since
        mine = [launch for launch in self._submitted if self._bucket_of[launch.what] == k]
        tickets = [self._submitted.pop(launch) for launch in mine]
        self._any_sparse |= flat.is_sparse
        self._waiting[k] = _Bucket(self._parameters(self._names[k]), flat, tickets)

    def deliver(self, buckets: Sequence[int], absent: Collection[nn.Parameter] = ()) -> None:
        """Puts stand-ins into `.grad` of parameters that have none; sums up where there is a gradient already.

        Args:
            absent: parameters that this backward gives no gradient.
        """
        without = {id(parameter) for parameter in absent}
        summed = False
        for k in buckets:
            bucket = self._waiting[k]
            for parameter in bucket.parameters:
                summed |= parameter.grad is not None and id(parameter) not in without
        if summed:
            with self._launcher.hurrying():  # rows of a forward to come may stand before the buckets
                landed = {k: self._land(self._waiting[k]) for k in buckets}
            for k, gradients in landed.items():
                for parameter, gradient in zip(self._waiting.pop(k).parameters, gradients, strict=True):
                    if id(parameter) not in without:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            return
        self._stood_in |= bool(buckets)
        for k in buckets:
            bucket, late = self._waiting[k], self._late(k)
            for n, parameter in enumerate(bucket.parameters):
                if id(parameter) not in without:
                    parameter.grad = PendingGradient(parameter, late, n, sparse=bucket.flat.is_sparse)

    def _late(self, k: int) -> Late[Tensor]:
        """Returns the gradients of a bucket, which refer to the model weakly."""
        bucket = self._waiting[k]
        itself, of_bucket = ref(self), ref(bucket)
        late = Late(lambda: _landed(itself(), k, of_bucket()))
        bucket.late = ref(late)
        return late

    def wanted(self, k: int, bucket: _Bucket) -> Sequence[Tensor]:
        """Lands the gradients of a bucket, of which someone uses one."""
        # Rows of a forward to come may stand before it; parameters of other buckets may have to wait still.
        with self._launcher.hurrying(), torch._C.DisableTorchFunctionSubclass():
            if self._waiting.get(k) is not bucket:  # dropped since
                bucket.arrived(self._land(bucket))
            elif bucket.updates:
                self.await_update(k)
            else:
                self.materialise()
        return bucket.gradients

    # -- updates -------------------------------------------------------------------------------------------------------

    def hide_late(self, optimizer: Optimizer, tables: Set[int]) -> list[tuple[nn.Parameter, Tensor]]:
        """Hides late gradients from an optimizer that is about to step, if every gradient it would read is late.

        Args:
            tables: ids of sharded ones, which others look after.

        Returns: what `.grad` was, to be put back after the step, which then skips those parameters. Nothing where the
        optimizer has to step them by itself, at once; their gradients are ordinary ones then.
        """
        if not self._stood_in and not self._waiting:
            return []
        place_of: dict[int, tuple[_Bucket, Late[Tensor] | None, int]] = {}
        for bucket in self._waiting.values():
            late = bucket.late()
            for n, parameter in enumerate(bucket.parameters):
                place_of[id(parameter)] = bucket, late, n
        hidden, may_step = [], True
        takes_any = not self._any_sparse or takes_sparse(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = None if id(parameter) in tables else parameter.grad
                if gradient is None:
                    continue
                is_late = False
                if type(gradient) is PendingGradient:  # of every parameter: without calls
                    late, n = gradient.late, gradient.place
                    if late.landed is not None:
                        parameter.grad = late.landed[n]  # put back by an assignment such as `p.grad *= 2`
                    elif (found := place_of.get(id(parameter))) is not None:
                        is_late = found[1] is late and found[2] == n and id(parameter) not in found[0].stepped
                may_step = may_step and is_late and (takes_any or not gradient.is_sparse)
                hidden.append((parameter, gradient))
        if not may_step:
            self.release(optimizer)
            return []
        for parameter, _ in hidden:
            parameter.grad = None
        return hidden

    def step(self, optimizer: Optimizer, hidden: Set[int]) -> None:
        """Leaves the step of hidden gradients, of parameters by their ids, to the next forward, under the options of
        this moment: the optimizer has stepped."""
        bucket_of = {id(parameter): k for k, bucket in self._waiting.items() for parameter in bucket.parameters}
        groups: dict[int, list[dict[str, Any]]] = {}
        for group in optimizer.param_groups:
            kept, by_bucket = hyperparameters(group), dict[int, list[nn.Parameter]]()
            for parameter in group["params"]:
                if id(parameter) in hidden:
                    by_bucket.setdefault(bucket_of[id(parameter)], []).append(parameter)
            for k, parameters in by_bucket.items():
                groups.setdefault(k, []).append({**kept, "params": parameters})
        for k, of_bucket in groups.items():
            bucket = self._waiting[k]
            bucket.updates.append((optimizer, of_bucket))
            bucket.stepped |= {id(parameter): parameter for group in of_bucket for parameter in group["params"]}

    def release(self, optimizer: Optimizer) -> None:
        """Makes the gradients of an optimizer's parameters ordinary ones."""
        if not self._waiting:
            return
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        with self._launcher.hurrying():
            for k in [k for k, bucket in self._waiting.items() if not mine.isdisjoint(map(id, bucket.parameters))]:
                self.await_update(k)

    def update_bucket(self, parameters: Any, k: int) -> Any:
        """Calls `await_update` in a forward, which goes on with the parameters."""
        self.await_update(k)
        self._recorder.mark(compute_id("update", bucket_name(k)))
        self._recorder.begin_segment(compute_id("forward", bucket_name(k)))
        return parameters

    def await_update(self, k: int) -> None:
        """Applies what an optimizer has taken over of a bucket; other gradients of it become ordinary ones."""
        bucket = self._waiting.pop(k, None)
        if bucket is None:
            return
        gradients = self._land(bucket)
        bucket.arrived(gradients)
        before = [parameter.grad for parameter in bucket.parameters]
        for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer, groups in bucket.updates:
            step_groups(optimizer, groups)
        for parameter, gradient, stood in zip(bucket.parameters, gradients, before, strict=True):
            # None after zero_grad, or without a gradient; or the user's own; else what was waited for
            parameter.grad = gradient if getattr(stood, "landed", None) is gradient else stood

    def apply_pending(self) -> None:
        """Applies every update that an optimizer has taken over."""
        for k in [k for k, bucket in self._waiting.items() if bucket.updates]:
            self.await_update(k)

    def materialise(self) -> None:
        """Makes gradients that no optimizer has taken over ordinary ones."""
        for k in [k for k, bucket in self._waiting.items() if not bucket.updates]:
            self.await_update(k)

    def discard(self) -> None:
        """Forgets gradients that no optimizer has taken over."""
        for k in [k for k, bucket in self._waiting.items() if not bucket.updates]:
            bucket = self._waiting.pop(k)
            for n, parameter in enumerate(bucket.parameters):
                if bucket.stands_in(n):
                    parameter.grad = None
            self._dropped = [each for each in (*self._dropped, bucket) if each.is_held()]

    def _land(self, bucket: _Bucket) -> list[Tensor]:
        for ticket in bucket.tickets:
            self._launcher.wait(ticket)
        return unpack_bucket(bucket.flat, bucket.parameters)


def _landed(updates: BucketUpdates | None, k: int, bucket: _Bucket | None) -> Sequence[Tensor]:
    """Has gradients of which someone uses one land.

    Raises:
        RuntimeError: the compiled model is gone, and with it what would have brought the gradient.
    """
    if updates is None or bucket is None:
        raise RuntimeError(GONE)
    return updates.wanted(k, bucket)
