"""Buckets of dense gradients whose reduction and update overlap the next step (EmbRace, ICPP 2022, section 4.1).

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
from embrace_fx.runtime.launch.launch_queue import Ticket
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.runtime.tables.local_storage import GONE, GradientFuture
from embrace_fx.runtime.tables.own_step import accepts_sparse, hyperparameters, step_groups
from embrace_fx.vocabulary.operation_id import OperationId, bucket_name, compute_id
from embrace_fx.vocabulary.proxies import READ_MEMORY, NoStorage, forward_methods, share_memory_on_assignment


class PendingGradient(Tensor):
    """The tensor in `.grad` while the gradient is still being reduced. Any use waits for the gradient first.

    Code that reads gradients between backward and step, such as clipping or logging, therefore works as with any model.
    After the first use, `.grad` is an ordinary tensor. The future `late` delivers the gradients of the whole bucket;
    this one is at the index `place`.
    """

    late: GradientFuture[Tensor]
    place: int
    is_sparse: bool = False  # replaces Tensor.is_sparse, which subclasses cannot override by dispatch

    @staticmethod
    def create_all(
        parameters: Sequence[Tensor], late: GradientFuture[Tensor], *, sparse: bool
    ) -> list[PendingGradient]:
        """Creates a pending gradient for each parameter whose gradient `late` delivers."""
        found = list[PendingGradient]()
        for place, like in enumerate(parameters):  # inlined, because it runs for every parameter in every step
            made: PendingGradient = Tensor._make_wrapper_subclass(
                PendingGradient,
                like.shape,
                strides=like.stride(),
                dtype=like.dtype,
                device=like.device,
                dispatch_layout=sparse,
            )
            made.late, made.place, made.is_sparse = late, place, sparse
            Tensor.untyped_storage(made).__class__ = NoStorage  # type: ignore[assignment]
            found.append(made)
        return found

    @property
    def landed(self) -> Tensor | None:
        """The gradient if it has arrived, otherwise None."""
        found = self.late.landed
        return None if found is None else found[self.place]

    def resolve(self) -> Tensor:
        """Waits for the gradient, and returns it."""
        return self.late.now()[self.place]

    @property
    def data(self) -> Tensor:
        """The `.data` of the reduced gradient. Waits for the reduction first."""
        return self.resolve().data

    @data.setter
    def data(self, value: Tensor) -> None:
        """Sets the `.data` of the reduced gradient. Waits for the reduction first."""
        self.resolve().data = value

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.layout.default:  # torch queries the layout only of sparse gradients
            return torch.sparse_coo
        args, kwargs = torch.utils._pytree.tree_map_only(
            PendingGradient, PendingGradient.resolve, (args, dict(kwargs or {}))
        )
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.resolve(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.resolve().__reduce_ex__(protocol)


forward_methods(PendingGradient, (*READ_MEMORY, "as_subclass"), lambda gradient, _: gradient.resolve())
share_memory_on_assignment(PendingGradient, lambda gradient, _: gradient.resolve())

BucketExchange = Callable[[Tensor, str], InFlight]
"""Starts the exchange of a flat tensor, in place; given the name of its launch."""

_Sent = tuple[Tensor, list[Ticket]]
"""A packed bucket, and its launches."""

_Update = tuple[Optimizer, dict[str, Any], nn.Parameter]
"""A step of one parameter: the optimizer, the options of its group at that step, and the parameter."""


class Bucket:
    """One bucket of dense gradients: its reduction in progress, and the optimizer steps that wait for it.

    Args:
        find: returns the parameters with the given names.

    Attributes:
        parameters: the parameters of the last backward.
        sent: the packed gradients and the launches of their reduction, or None if none is in progress.
        updates: optimizer steps that are left to the next forward.
        late: the future that delivers the pending gradients in `.grad`, or None.
    """

    def __init__(
        self, names: tuple[str, ...], find: Callable[[Collection[str]], list[nn.Parameter]], launcher: Launcher
    ) -> None:
        self._names, self._find, self._launcher = names, find, launcher
        self.parameters: list[nn.Parameter] = []
        self.sent: _Sent | None = None
        self.updates: list[_Update] = []
        self.late: GradientFuture[Tensor] | None = None

    @property
    def waiting(self) -> bool:
        """Whether the bucket's reduction was submitted and no optimizer step has used its gradients yet."""
        return self.sent is not None and not self.updates

    @property
    def has_arrived(self) -> bool:
        """Whether the bucket's reduction has ended and an optimizer step waits for it."""
        return bool(self.updates) and self.sent is not None and all(ticket.has_ended() for ticket in self.sent[1])

    def take_reduction(self, sent: _Sent) -> None:
        """Stores the bucket's reduction, which is still in progress, at the end of a backward."""
        if self.sent is not None:  # the last step's reduction is still pending, because no forward reads the parameters
            self._finish()
        self.parameters, self.sent = self._find(self._names), sent

    def deliver(self, without: Set[int]) -> None:
        """Sets `.grad` to tensors that wait for the reduction when they are used, except for the `id`s in `without`.
        Adds to gradients that are already there, for which it waits.
        """
        sent, itself = self.sent, ref(self)
        assert sent is not None

        def wait() -> Sequence[Tensor]:
            """Waits for the bucket's reduction, because one of its gradients is being read. Returns all of them."""
            if (bucket := itself()) is None:
                raise RuntimeError(GONE)
            # Rows of the next forward may come before this bucket in the launch order.
            with bucket._launcher.flushing(), torch._C.DisableTorchFunctionSubclass():
                return bucket._finish() if bucket.sent is sent else bucket._wait_for_gradients(sent)

        self.late = GradientFuture(wait)
        found = PendingGradient.create_all(self.parameters, self.late, sparse=sent[0].is_sparse)
        sums = list[tuple[Tensor, Tensor]]()
        for parameter, gradient in zip(self.parameters, found, strict=True):
            if id(parameter) not in without:
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    sums.append((parameter.grad, gradient))
        for total, own in sums:  # last, because the first sum waits for the bucket, and sets the others' `.grad`
            total.add_(own)

    def wait(self) -> None:
        """Waits for the reduction, unless an optimizer step is left to the next forward, which then waits."""
        if self.waiting:
            self._finish()

    def apply(self, others: Sequence[Bucket] = ()) -> None:
        """Applies the optimizer steps that wait for this bucket, together with those of `others`."""
        if self.updates:
            self._finish(others)

    def drop(self) -> None:
        """Drops a reduction that no optimizer step has used, and sets each `.grad` that still refers to it to None."""
        if self.waiting:
            for n, parameter in enumerate(self.parameters):
                found = parameter.grad
                if type(found) is PendingGradient and found.place == n and found.late is self.late:
                    parameter.grad = None
            self.sent = self.late = None

    def _finish(self, others: Sequence[Bucket] = ()) -> Sequence[Tensor]:
        """Waits for the reductions and applies the optimizer steps that wait for them. Returns its gradients."""
        buckets = (self, *others)
        landed = [bucket._wait_for_gradients(bucket.sent) for bucket in buckets]
        updates, given = list[_Update](), list[tuple[nn.Parameter, Tensor, Tensor | None]]()
        for bucket, found in zip(buckets, landed, strict=True):
            if bucket.late is not None:
                bucket.late.landed = found  # user code may still refer to the pending gradients
            updates += bucket.updates
            bucket.sent, bucket.late, bucket.updates = None, None, []
            for parameter, gradient in zip(bucket.parameters, found, strict=True):
                given.append((parameter, gradient, parameter.grad))
                parameter.grad = gradient
        _apply_updates(updates)
        for parameter, gradient, stood in given:
            # Replace only pending gradients. Keep None, as left by zero_grad(), and any tensor that the user assigned.
            parameter.grad = gradient if getattr(stood, "landed", None) is gradient else stood
        return landed[0]

    def _wait_for_gradients(self, sent: _Sent | None) -> list[Tensor]:
        """Waits for a reduction, and returns the gradient of each of the bucket's parameters."""
        assert sent is not None
        flat, tickets = sent
        for ticket in tickets:
            self._launcher.wait(ticket)
        return unpack_bucket(flat, self.parameters)


def _apply_updates(updates: Sequence[_Update]) -> None:
    """Applies optimizer steps. Parameters of one param group and step are updated together."""
    merged: dict[int, tuple[Optimizer, dict[str, Any], list[nn.Parameter]]] = {}
    for optimizer, options, parameter in updates:
        merged.setdefault(id(options), (optimizer, options, []))[2].append(parameter)
    groups: dict[int, tuple[Optimizer, list[dict[str, Any]]]] = {}
    for optimizer, options, parameters in merged.values():
        groups.setdefault(id(optimizer), (optimizer, []))[1].append({**options, "params": parameters})
    for optimizer, of_optimizer in groups.values():
        step_groups(optimizer, of_optimizer)


class Buckets:
    """All buckets of dense gradients in a model's plan, with their exchanges.

    Args:
        buckets: the parameter names of each bucket.
        parameters: function that returns the parameters with the given names.
        exchanges: index of a bucket -> the function that starts its sparse exchange. Other buckets are AllReduced.
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
        self._number = {bucket_name(k): k for k in range(len(buckets))}
        self._communicator = communicator
        self._launcher, self._recorder = launcher, launcher.recorder
        self.all = [Bucket(names, parameters, launcher) for names in buckets]
        self._submitted: dict[OperationId, Ticket] = {}  # submitted chunks of this window that no bucket has taken over
        self._stood_in = False  # whether any `.grad` has been a pending gradient

    # -- backward ------------------------------------------------------------------------------------------------------

    def launch_bucket(self, launch: OperationId, flat: Tensor, *_: object) -> Ticket:
        """Submits the reduction of a bucket. Returns the ticket, for which the same backward waits."""
        self._recorder.mark(compute_id("backward", launch.what))
        return self._launch(launch, flat, 0, flat.numel())

    def _launch(self, launch: OperationId, flat: Tensor, start: int, length: int) -> Ticket:
        """Submits the in-place AllReduce of `length` elements of a packed bucket, or the bucket's sparse exchange."""
        exchange = self._exchanges.get(self._number[launch.what])
        part = flat if flat.is_sparse else flat.narrow(0, start, length)
        if exchange is not None:
            return self._launcher.submit(launch, lambda: exchange(part, str(launch)), 0)
        return self._launcher.submit(
            launch,
            lambda: self._communicator.all_reduce_(part, "sum", LANE_GROUP[launch.lane]),
            cost.all_reduce(part.nbytes, self._communicator.world_size).sent_bytes,
        )

    def submit_chunk(self, launch: OperationId, flat: Tensor, start: int, length: int, name: str) -> Tensor:
        """Submits the reduction of `length` elements of a packed bucket, from `start`. Returns `flat` without waiting:
        `await_chunk` waits for the reduction, or `defer_bucket` leaves it to the next forward.
        """
        self._recorder.mark(compute_id("backward", launch.what))
        self._submitted[launch] = self._launch(launch, flat, start, length)
        return flat

    def await_chunk(self, launch: OperationId, value: Any, name: str) -> Any:
        """Waits for the reduction of a chunk, unless its gradients have been used or dropped. Returns `value`."""
        self._recorder.pause_segment()
        if (submitted := self._submitted.pop(launch, None)) is not None:
            self._launcher.wait(submitted)
        elif (sent := self.all[self._number[launch.what]].sent) is not None:
            for ticket in sent[1]:
                if ticket.id == launch:
                    self._launcher.wait(ticket)
        return value

    def drop_submitted(self) -> None:
        """Forgets the submitted chunks of a failed backward."""
        self._submitted.clear()

    def defer_bucket(self, flat: Tensor, k: int) -> None:
        """Ends a backward's work on bucket `k`, whose chunks are left in flight for the next forward."""
        mine = [launch for launch in self._submitted if self._number[launch.what] == k]
        self.all[k].take_reduction((flat, [self._submitted.pop(launch) for launch in mine]))

    def deliver(self, numbers: Sequence[int], absent: Collection[nn.Parameter] = ()) -> None:
        """Sets the `.grad` of the parameters of some buckets, except the `absent` ones, or adds to it."""
        without = {id(parameter) for parameter in absent}
        self._stood_in |= bool(numbers)
        for k in numbers:
            self.all[k].deliver(without)

    # -- updates -------------------------------------------------------------------------------------------------------

    @property
    def pending_parameters(self) -> list[nn.Parameter]:
        """The parameters whose update has not been applied yet."""
        return [parameter for bucket in self.all for *_, parameter in bucket.updates]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that have an update of a bucket which has not been applied yet."""
        return [optimizer for bucket in self.all for optimizer, *_ in bucket.updates]

    def hide_late(self, optimizer: Optimizer, tables: Set[int]) -> dict[int, tuple[nn.Parameter, Tensor, Bucket]]:
        """Hides gradients from an optimizer's step, so that the step can be left to the next forward. This is possible
        only if all gradients that the step would read are in flight. Ignores the parameters with an `id` in `tables`.

        Returns:
            A map from the `id` of each hidden parameter to (parameter, its hidden `.grad`, its bucket). The step skips
            these parameters, and the caller restores their `.grad` after the step. Empty if the optimizer must step all
            parameters now; this call then waits for their gradients.
        """
        if not self._stood_in:
            return {}
        bucket_of = {id(bucket.late): bucket for bucket in self.all if bucket.late is not None}
        hidden: dict[int, tuple[nn.Parameter, Tensor, Bucket]] = {}
        may_step, takes_any = True, accepts_sparse(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = None if id(parameter) in tables else parameter.grad
                if gradient is None:
                    continue
                bucket: Bucket | None = None
                if type(gradient) is PendingGradient:  # inlined, because it runs for every parameter in every step
                    late, n = gradient.late, gradient.place
                    if late.landed is not None:
                        # An assignment such as `p.grad *= 2` has put the pending gradient back.
                        parameter.grad = late.landed[n]
                    elif (found := bucket_of.get(id(late))) is not None and found.parameters[n] is parameter:
                        deferred = found.updates and any(parameter is each for *_, each in found.updates)
                        bucket = None if deferred else found
                if bucket is not None and (takes_any or not gradient.is_sparse):
                    hidden[id(parameter)] = parameter, gradient, bucket
                else:
                    may_step = False
        if not may_step:
            self.release(optimizer)
            return {}
        for parameter, _, _ in hidden.values():
            parameter.grad = None
        return hidden

    def step(self, optimizer: Optimizer, bucket_of: Mapping[int, Bucket]) -> None:
        """Leaves the step of the parameters that `hide_late` has found to the next forward, with the options of now.
        Called after the optimizer has stepped all others. `bucket_of` maps the `id` of a parameter to its bucket.
        """
        for group in optimizer.param_groups:
            options = hyperparameters(group)
            for parameter in group["params"]:
                if (bucket := bucket_of.get(id(parameter))) is not None:
                    bucket.updates.append((optimizer, options, parameter))

    def _arrived_after(self, k: int) -> list[Bucket]:
        """Returns the buckets that the forward reads after bucket `k`, up to the first that has not arrived."""
        found = list[Bucket]()
        for bucket in reversed(self.all[:k]):
            if not bucket.has_arrived:
                break
            found.append(bucket)
        return found

    def release(self, optimizer: Optimizer) -> None:
        """Waits for the gradients of an optimizer's parameters, so that `.grad` has ordinary tensors."""
        sent = [bucket for bucket in self.all if bucket.sent is not None]
        if not sent:
            return
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        with self._launcher.flushing():
            for bucket in sent:
                if not mine.isdisjoint(map(id, bucket.parameters)):
                    bucket.apply()
                    bucket.wait()

    def update_bucket(self, parameters: Any, k: int) -> Any:
        """Applies the pending update of bucket `k` in a forward, and returns the parameters. Also applies the updates
        of the buckets that the forward reads next, if their gradients have arrived, because one step of many parameters
        is faster.
        """
        if self.all[k].updates:
            self.all[k].apply(self._arrived_after(k))
        self.all[k].wait()
        self._recorder.mark(compute_id("update", bucket_name(k)))
        self._recorder.begin_segment(compute_id("forward", bucket_name(k)))
        return parameters
