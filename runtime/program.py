"""Runs a partitioned graph: one call of the model, and its backward.

Contract
    The ids phase runs first, then the forward; autograd calls the backward when the user's `loss.backward()` reaches
    the results. Gradients are delivered at its very end, together: a step either leaves all of its gradients or none.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from embrace_fx.graph import (
    BatchInput,
    Buffer,
    Gradient,
    OutputRole,
    Parameter,
    Result,
    RowGradient,
    Saved,
    Shard,
    Tangent,
    TrainingGraph,
    inputs_of,
    outputs_of,
)
from embrace_fx.runtime.communicator import Communicator
from embrace_fx.runtime.lower import Phase, lower
from embrace_fx.runtime.tables import RowTable, local_tensor

Values = dict[str, Any]


class ModelState:
    """Where a program finds parameters, buffers and tables: always the ones the model holds right now.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(_owners(model, "_parameters"))
        self._buffers = dict(_owners(model, "_buffers"))
        self.tables: dict[str, RowTable] = {}
        self.unreduced: set[str] = set()
        """Parameters whose `.grad` holds this rank's own sum, from backwards under `no_sync`."""
        self._delivered: list[tuple[Tensor, int]] = []

    def parameter(self, name: str) -> nn.Parameter:
        owner, key = self._parameters[name]
        found: nn.Parameter = owner[key]
        return found

    def note_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Remembers the gradients that were just delivered, as they are."""
        self._delivered = [(p.grad, p.grad._version) for p in parameters if p.grad is not None]

    def check_gradients(self) -> None:
        """Raises where all dense gradients were written in place since they were delivered.

        That is what `torch.nn.utils.clip_grad_norm_` and `GradScaler.unscale_` do, and neither sees the gradients of
        sharded tables: the step would mix clipped and unclipped ones.
        """
        delivered, self._delivered = self._delivered, []
        if self.tables and delivered and all(gradient._version != version for gradient, version in delivered):
            raise RuntimeError(
                "expected gradients as the backward left them, in optimizer.step(), found that all dense ones were "
                "changed in "
                "place (clipped or unscaled?) while the sharded tables' were not. Clip with the compiled model's own "
                "clip_grad_norm_(), and let GradScaler.step() do the unscaling."
            )

    def with_unreduced(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient plus what backwards under `no_sync` left of it in `.grad`."""
        left = self.parameter(name).grad if name in self.unreduced else None
        return gradient if left is None else gradient + left

    def parameter_reader(self, name: str) -> Callable[[], Tensor]:
        owner, key = self._parameters[name]
        return lambda: owner[key]

    def shard_reader(self, name: str) -> Callable[[], Tensor]:
        owner, key = self._parameters[name]
        return lambda: local_tensor(owner[key].data)

    def reader(self, module: fx.GraphModule) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """A graph without collectives as a function of the flattened batch."""
        runnable = _runnable(module, self, {})
        return lambda leaves: runnable(leaves, {}, {})

    def buffer_reader(self, name: str) -> Callable[[], Tensor]:
        owner, key = self._buffers[name]
        return lambda: owner[key]


def _owners(model: nn.Module, kind: str) -> list[tuple[str, tuple[dict[str, Any], str]]]:
    """(full name, (the dict that holds it, its key)) of every parameter or buffer, by every name it has."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        owner: dict[str, Any] = getattr(module, kind)
        found += [
            (f"{prefix}.{key}" if prefix else key, (owner, key)) for key, value in owner.items() if value is not None
        ]
    return found


_STATE, _BATCH, _SAVED, _TANGENT = range(4)


@dataclass(frozen=True)
class _Runnable:
    """A lowered phase, where each of its arguments comes from, and what its outputs mean."""

    run: Phase
    sources: tuple[tuple[int, Any], ...]
    roles: tuple[OutputRole, ...]

    def __call__(self, leaves: Sequence[Any], values: Values, tangents: Mapping[int, Tensor]) -> tuple[Any, ...]:
        arguments: list[Any] = []
        for kind, key in self.sources:
            if kind == _SAVED:
                arguments.append(values[key])
            elif kind == _STATE:
                arguments.append(key())
            elif kind == _BATCH:
                arguments.append(leaves[key])
            else:
                arguments.append(tangents[key])
        return self.run(arguments)


class Program:
    """The runnable form of one graph.

    Args:
        graph: partitioned.
        buckets: what the graph reduces, in launch order; None: its gradients are this rank's own (`no_sync`).
        result_constants: results that are not tensors, by their index among the flattened results.
        before_forward: called once every rank has announced this same program, before anything reads a buffer.
        check: says what is wrong with a flattened batch, which the step then announces to all ranks.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        state: ModelState,
        communicator: Communicator,
        buckets: tuple[tuple[str, ...], ...] | None,
        result_constants: Mapping[int, Any],
        before_forward: Callable[[], None] = lambda: None,
        check: Callable[[Sequence[Any]], str | None] = lambda leaves: None,
    ) -> None:
        self._state = state
        self._communicator = communicator
        launches = dict(communicator.launches())
        packs = iter(buckets or ())

        def with_own_bucket(node: fx.Node) -> Callable[..., Any] | None:
            if str(node.target) == "embrace.pack_bucket.default":
                return _Packer(state, next(packs))
            return None

        def with_table_names(node: fx.Node) -> Callable[..., Any] | None:
            if str(node.target) != "embrace.all_gather_ids.default":
                return None

            names: tuple[str, ...] = node.meta["tables"]

            def all_gather_ids(unique: Sequence[Tensor], num_rows: Sequence[int], group: str, group_size: int) -> Any:
                return communicator.all_gather_ids(unique, num_rows, group, group_size, names)

            return all_gather_ids

        self._ids = _runnable(graph.phases["ids"], state, launches, with_table_names)
        self._forward = _runnable(graph.phases["forward"], state, launches)
        self._backward = (
            _runnable(graph.phases["backward"], state, launches, with_own_bucket)
            if "backward" in graph.phases
            else None
        )
        self._announces = any(
            str(node.target) == "embrace.all_gather_ids.default" for node in graph.phases["ids"].graph.nodes
        )
        self._synchronised = buckets is not None
        self._constants = dict(result_constants)
        self._before_forward = before_forward
        self._check = check
        roles = [role for _, role in outputs_of(graph.phases["forward"])]
        self._results = [role.index for role in roles if isinstance(role, Result)]
        self._differentiable = frozenset(role.index for _, role in graph.inputs() if isinstance(role, Tangent))

    @property
    def result_count(self) -> int:
        return len(self._results) + len(self._constants)

    def call(self, leaves: Sequence[Any], *, train: bool) -> list[Any]:
        """Runs the model on a flattened batch; returns its flattened results.

        Args:
            train: whether a backward will follow, from results that require grad.
        """
        step = Step(self, leaves)
        with _autocast_is_in_the_graph():
            tensors = self._run(step, leaves, train)
        results: list[Any] = [None] * self.result_count
        for index, value in self._constants.items():
            results[index] = value
        for index, value in zip(self._results, tensors, strict=True):
            results[index] = value
        return results

    def _run(self, step: Step, leaves: Sequence[Any], train: bool) -> tuple[Tensor, ...]:
        if train and self._backward is not None:
            inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            anchor = torch.empty((), requires_grad=True)
            tensors: tuple[Tensor, ...] = _Run.apply(step, anchor, *inputs)  # type: ignore[no-untyped-call]
            return tensors
        with torch.no_grad():
            return tuple(step.forward())


class Step:
    """One call of the model: what its backward needs."""

    def __init__(self, program: Program, leaves: Sequence[Any]) -> None:
        self.program = program
        self._leaves = leaves
        self._values: Values | None = None
        self._results: list[Any] = []  # tensors, and sizes the model returns

    def forward(self) -> list[Any]:
        program = self.program
        program._communicator.failure = program._check(self._leaves)
        if not program._announces:
            program._communicator.announce(())
        values: Values = {}
        results: list[Any] = []
        for phase in (program._ids, program._forward):
            if phase is program._forward:
                program._before_forward()
            for role, value in zip(phase.roles, phase(self._leaves, values, {}), strict=True):
                if isinstance(role, Result):
                    results.append(value)
                elif isinstance(role, Saved):
                    values[role.name] = value
        self._values = values
        self._results = [r.detach() if isinstance(r, Tensor) else r for r in results]
        return results

    def backward(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the backward, delivers the parameters' gradients, and returns the batch tensors' ones."""
        program = self.program
        if self._values is None:
            raise RuntimeError(
                "expected one backward for each call of the compiled model, in backward(), found a second one for the "
                "same "
                "results; what it needs has been freed and its gradients have been reduced. Call the model again, or "
                "add "
                "the losses and call backward once."
            )
        values, self._values = self._values, None
        backward = program._backward
        assert backward is not None
        flag = self._launch_finite_check()
        dense = {
            # The graph was traced for contiguous gradients, and autograd leaves out those of unused results.
            index: tangent.contiguous() if tangent is not None else torch.zeros_like(result)
            for index, tangent, result in zip(program._results, tangents, self._results, strict=True)
            if index in program._differentiable
        }
        outputs = backward(self._leaves, values, dense)
        self._finish_finite_check(flag)
        return self._deliver(backward.roles, outputs)

    def _launch_finite_check(self) -> Any:
        """Whether every scalar result, on every rank, is a number: one tiny AllReduce under the backward."""
        scalars = [r for r in self._results if isinstance(r, Tensor) and r.dim() == 0 and r.is_floating_point()]
        bad = sum(not math.isfinite(r.item()) for r in scalars)
        flags = torch.zeros(self.program._communicator.world_size, dtype=torch.int64)
        flags[self.program._communicator.rank] = bad
        if self.program._communicator.world_size == 1:
            return flags
        return self.program._communicator.all_reduce_(flags, "sum", "ids")

    def _finish_finite_check(self, flag: Any) -> None:
        communicator = self.program._communicator
        flags = flag if isinstance(flag, Tensor) else communicator.wait(flag)
        bad = [rank for rank, count in enumerate(flags.tolist()) if count]
        if bad:
            raise FloatingPointError(
                "expected a finite loss on every rank, in backward(), found nan or inf on rank(s) "
                f"{', '.join(map(str, bad))}. "
                "No gradient of this step was kept, on any rank: skip the batch, or lower the learning rate."
            )

    def _deliver(self, roles: Sequence[OutputRole], outputs: Sequence[Any]) -> list[Tensor | None]:
        state = self.program._state
        batch: dict[int, Tensor] = {}
        rows: dict[str, dict[str, Tensor]] = {}
        delivered: set[int] = set()
        for role, value in zip(roles, outputs, strict=True):
            match role:
                case Gradient(Parameter(name)):
                    # Two parameters may get the same tensor (the biases of an LSTM), but no two may share a `.grad`.
                    _deliver_dense(
                        state, name, value.clone() if id(value) in delivered else value, self.program._synchronised
                    )
                    delivered.add(id(value))
                case Gradient(BatchInput(index)):
                    batch[index] = value
                case RowGradient(table, part):
                    rows.setdefault(table, {})[part] = value
        state.note_gradients(
            [state.parameter(r.of.name) for r in roles if isinstance(r, Gradient) and isinstance(r.of, Parameter)]
        )
        for table, parts in rows.items():
            state.tables[table].add_gradient(parts["ids"], parts["rows"])
        return [
            batch.get(index)
            for index, leaf in enumerate(self._leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]


def _deliver_dense(state: ModelState, name: str, gradient: Tensor, synchronised: bool) -> None:
    parameter = state.parameter(name)
    if gradient.stride() != parameter.stride():
        gradient = gradient.contiguous() if parameter.is_contiguous() else gradient.clone()
    if synchronised and name in state.unreduced:
        state.unreduced.discard(name)
        parameter.grad = gradient  # the bucket took the accumulated part along
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    if not synchronised:
        state.unreduced.add(name)


class _Packer:
    """Packs one bucket; what backwards under `no_sync` left in `.grad` is reduced along with it."""

    def __init__(self, state: ModelState, names: tuple[str, ...]) -> None:
        self._state = state
        self._names = names
        self.__name__ = "pack_bucket"

    def __call__(self, gradients: Sequence[Tensor], scale: float) -> Tensor:
        parts = [
            self._state.with_unreduced(name, gradient) for name, gradient in zip(self._names, gradients, strict=True)
        ]
        flat = torch.cat([part.reshape(-1) for part in parts])
        return flat.mul_(scale) if scale != 1.0 else flat


class _Run(torch.autograd.Function):
    """One call of the model as one node of the user's autograd graph."""

    @staticmethod
    def forward(ctx: Any, step: Step, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        results = step.forward()
        program = step.program
        fixed = [r for i, r in zip(program._results, results, strict=True) if i not in program._differentiable]
        ctx.mark_non_differentiable(*(r for r in fixed if isinstance(r, Tensor)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), _autocast_is_in_the_graph():
            return (None, None, *ctx.step.backward(tangents))


@contextlib.contextmanager
def _autocast_is_in_the_graph() -> Iterator[None]:
    """The capture made the casts of an autocast region nodes: running them under autocast would cast twice."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _runnable(
    module: fx.GraphModule,
    state: ModelState,
    launches: Mapping[str, Callable[..., Any]],
    special: Callable[[fx.Node], Callable[..., Any] | None] = lambda node: None,
) -> _Runnable:
    sources: list[tuple[int, Any]] = []
    for _, role in inputs_of(module):
        match role:
            case Parameter(name):
                sources.append((_STATE, state.parameter_reader(name)))
            case Shard(name):
                sources.append((_STATE, state.shard_reader(name)))
            case Buffer(name):
                sources.append((_STATE, state.buffer_reader(name)))
            case BatchInput(index):
                sources.append((_BATCH, index))
            case Tangent(index):
                sources.append((_TANGENT, index))
            case Saved(name):
                sources.append((_SAVED, name))
    run = lower(module, launches, special)
    return _Runnable(run, tuple(sources), tuple(role for _, role in outputs_of(module)))
