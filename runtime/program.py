"""Runs a partitioned graph: one call of the model, and its backward.

Contract
    The ids' phases run first, then the forward; autograd calls the backward when the user's `loss.backward()` reaches
    the results. Gradients are delivered at its very end, together: a step either leaves all of its gradients or none.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx, nn

from embrace_fx.cost import Cluster
from embrace_fx.graph import (
    BatchInput,
    Buffer,
    Gradient,
    Mutation,
    OutputRole,
    Parameter,
    PendingGradients,
    Result,
    RowGradient,
    Saved,
    Shard,
    Tangent,
    TrainingGraph,
    inputs_of,
    outputs_of,
)
from embrace_fx.runtime.communicator import Communicator, InFlight
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.in_place import ExchangeKind, exchange_gradient_
from embrace_fx.runtime.flow import Ahead, Flow, IdsProgram, TableRoute
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
        self.awaiting_backward: WeakSet[Step] = WeakSet()
        """Calls whose results the user still holds, and has not gone backward from."""

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
                "changed in place (clipped or unscaled?) while the sharded tables' were not. Clip with the compiled "
                "model's own clip_grad_norm_(), and let GradScaler.step() do the unscaling."
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
        flow: launches the exchanges, and keeps what a relaxed graph leaves to the next step; None: they are
            launched on the spot.
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
        flow: Flow | None = None,
    ) -> None:
        self._state = state
        self._communicator = communicator
        self.flow = flow
        launches = {
            **communicator.launches(),
            "embrace::exchange_gradient_": partial(_exchange_gradient_, communicator),
        }
        packs = iter(buckets or ())
        if flow is not None:
            launches |= _relaxed_ops(flow)
        through_launcher = _through_launcher(graph, flow) if flow is not None else {}

        def with_own_bucket(node: fx.Node) -> Callable[..., Any] | None:
            if str(node.target) == "embrace.pack_bucket.default":
                return _Packer(state, next(packs))
            return through_launcher.get(node.name)

        def with_table_names(node: fx.Node) -> Callable[..., Any] | None:
            if str(node.target) != "embrace.all_gather_ids.default":
                return None

            names: tuple[str, ...] = node.meta["tables"]

            def all_gather_ids(unique: Sequence[Tensor], num_rows: Sequence[int], group: str, group_size: int) -> Any:
                return communicator.all_gather_ids(unique, num_rows, group, group_size, names)

            return all_gather_ids

        self._unique = _runnable(graph.phases["unique"], state, launches)
        self._ids = _runnable(graph.phases["ids"], state, launches, with_table_names)
        self._forward = _runnable(graph.phases["forward"], state, launches, lambda n: through_launcher.get(n.name))
        self._backward = (
            _runnable(graph.phases["backward"], state, launches, with_own_bucket)
            if "backward" in graph.phases
            else None
        )
        self.ids = self._ids_program(graph, state) if flow is not None else None
        self._is_relaxed = any(
            str(node.target).startswith(("embrace.await_", "embrace.submit_"))
            for module in graph.phases.values()
            for node in module.graph.nodes
        )
        self._ids_are_pure = _is_pure(graph.phases["unique"], graph.phases["forward"])
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

    def _ids_program(self, graph: TrainingGraph, state: ModelState) -> IdsProgram:
        """The ids' phases as functions that can run ahead of their batch."""
        given: list[InFlight] = []

        def what_was_gathered(node: fx.Node) -> Callable[..., Any] | None:
            return (lambda *_: given.pop()) if str(node.target) == "embrace.all_gather_ids.default" else None

        launches = {"_c10d_functional::wait_tensor": self._communicator.wait}
        route = _runnable(graph.phases["ids"], state, launches, what_was_gathered)

        def routing(values: Values, gathered: InFlight) -> None:
            given.append(gathered)
            _keep(route.roles, route((), values, {}), values)

        def unique(leaves: Sequence[Any]) -> Values:
            values: Values = {}
            _keep(self._unique.roles, self._unique(leaves, values, {}), values)
            return values

        gathers = [n for n in graph.phases["ids"].graph.nodes if str(n.target) == "embrace.all_gather_ids.default"]
        sent = [node.meta["role"].name for gather in gathers for node in gather.args[0]]
        return IdsProgram(
            unique,
            lambda values: [values[name] for name in sent],
            routing,
            tuple(table for gather in gathers for table in gather.meta["tables"]),
            tuple(size for gather in gathers for size in gather.args[1]),
            tuple(
                TableRoute(node.args[3], node.args[1].meta["role"].name, node.args[2].meta["role"].name, node.args[4])
                for node in graph.phases["forward"].graph.nodes
                if str(node.target) == "embrace.await_rows.default"
            ),
        )

    def ahead(self, leaves: Sequence[Any]) -> Ahead | None:
        """A batch to come, with the rows it reads; None where that cannot be known before its turn."""
        if self.ids is None or not self._is_relaxed or not self._ids_are_pure:
            return None
        with torch.no_grad(), _autocast_is_in_the_graph():
            return Ahead.of(self.ids, leaves)

    @property
    def result_count(self) -> int:
        return len(self._results) + len(self._constants)

    def call(self, leaves: Sequence[Any], *, train: bool, following: Ahead | None = None) -> list[Any]:
        """Runs the model on a flattened batch; returns its flattened results.

        Args:
            train: whether a backward will follow, from results that require grad.
            following: the next batch, where it is known and the program has a flow.
        """
        step = Step(self, leaves, following)
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

    def __init__(self, program: Program, leaves: Sequence[Any], following: Ahead | None) -> None:
        self.program = program
        self._leaves = leaves
        self._following = following
        self._values: Values | None = None
        self._results: list[Any] = []  # tensors, and sizes the model returns

    def forward(self) -> list[Any]:
        program = self.program
        program._communicator.failure = program._check(self._leaves)
        values = self._begin_forward()
        program._before_forward()
        forward = program._forward
        outputs = forward(self._leaves, values, {})
        results = [value for role, value in zip(forward.roles, outputs, strict=True) if isinstance(role, Result)]
        _keep(forward.roles, outputs, values)
        if program.flow is not None:
            program.flow.end_forward()
        self._values = values
        self._results = [r.detach() if isinstance(r, Tensor) else r for r in results]
        return results

    def _begin_forward(self) -> Values:
        """The values of the ids' phases."""
        program = self.program
        if program.flow is not None and program._is_relaxed:
            assert program.ids is not None
            following, self._following = self._following, None
            return program.flow.begin_forward(program.ids, self._leaves, following)
        if not program._announces:
            program._communicator.announce(())
        values: Values = {}
        for phase in (program._unique, program._ids):
            _keep(phase.roles, phase(self._leaves, values, {}), values)
        if program.flow is not None:
            program.flow.begin_plain_forward()
        return values

    def backward(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the backward, delivers the parameters' gradients, and returns the batch tensors' ones."""
        program = self.program
        if self._values is None:
            raise RuntimeError(
                "expected one backward for each call of the compiled model, in backward(), found a second one for the "
                "same results; what it needs has been freed and its gradients have been reduced. Call the model again, "
                "or add the losses and call backward once."
            )
        program._state.awaiting_backward.discard(self)
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
        if program.flow is not None:
            assert program.ids is not None
            program.flow.begin_backward(program.ids, values)
        outputs = backward(self._leaves, values, dense)
        if program.flow is not None:
            program.flow.end_backward()
        try:
            self._finish_finite_check(flag)
        except FloatingPointError:
            if program.flow is not None:
                program.flow.discard()
            raise
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
                f"{', '.join(map(str, bad))}. No gradient of this step was kept, on any rank: skip the batch, or lower "
                "the learning rate."
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
        pending = [role for role in roles if isinstance(role, PendingGradients)]
        for role in pending:
            for name in state.unreduced.intersection(role.parameters):
                state.parameter(name).grad = None  # the bucket took the accumulated part along
                state.unreduced.discard(name)
        if pending:
            assert self.program.flow is not None
            self.program.flow.buckets.deliver([role.bucket for role in pending])
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


def _is_pure(unique: fx.GraphModule, forward: fx.GraphModule) -> bool:
    """Whether a batch's ids are the same a step earlier: no random numbers, nothing that the forward writes."""
    draws = any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in unique.graph.nodes)
    written = {role.of for _, role in outputs_of(forward) if isinstance(role, Mutation)}
    return not draws and written.isdisjoint(role for _, role in inputs_of(unique))


def _keep(roles: Sequence[OutputRole], outputs: Sequence[Any], values: Values) -> None:
    """Adds what a phase saves to `values`."""
    for role, value in zip(roles, outputs, strict=True):
        if isinstance(role, Saved):
            values[role.name] = value


def _relaxed_ops(flow: Flow) -> dict[str, Callable[..., Any]]:
    """Op name -> what a relaxed program calls."""

    def await_update(parameters: list[Tensor], bucket: int) -> list[Tensor]:
        flow.await_update(bucket)
        return parameters

    def submit_bucket(flat: Tensor, bucket: int) -> None:
        flow.recorder.mark(f"backward bucket {bucket}")
        flow.buckets.submit(bucket, flat)

    def submit_rows(rows: Tensor, ids: Tensor, counts: Tensor, table: str, padding_idx: int, scale: float) -> None:
        flow.recorder.mark(f"backward {table}")
        flow.exchanges[table].submit_gradient(rows, ids, counts, padding_idx, scale)

    def await_rows(shard: Tensor, ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype) -> Tensor:
        return flow.await_rows(table)

    return {
        "embrace::await_update": await_update,
        "embrace::submit_bucket": submit_bucket,
        "embrace::submit_rows": submit_rows,
        "embrace::await_rows": await_rows,
        "_c10d_functional::wait_tensor": flow.wait_all,
    }


def _exchange_gradient_(
    communicator: Communicator, flat: Tensor, rows: int, strategy: str, scheme: str, group: str, group_size: int
) -> InFlight:
    """The op of that name where no launcher takes it: it has ended when this returns."""
    channel = Channel(communicator.process_group(group))
    with communicator.watching():
        exchange_gradient_(flat, ExchangeKind(rows, strategy, scheme), channel, Cluster())
    return InFlight(flat, None)


def _reduces_bucket(node: fx.Node) -> bool:
    """An AllReduce of gradients, or their exchange; other passes reduce counts."""
    reduces = str(node.target) in ("_c10d_functional.all_reduce_.default", "embrace.exchange_gradient_.default")
    return reduces and str(node.all_input_nodes[0].target) == "embrace.pack_bucket.default"


def _through_launcher(graph: TrainingGraph, flow: Flow) -> dict[str, Callable[..., Any]]:
    """Node name -> how the launcher launches it: exchanges that are waited for in the phase that launches them."""
    found: dict[str, Callable[..., Any]] = {}
    tables: dict[str, str] = {}  # name of a table's counts -> the table
    shards = {node.name: role.table for node, role in inputs_of(graph.phases["forward"]) if isinstance(role, Shard)}
    for node in graph.phases["forward"].graph.nodes:
        if str(node.target) == "embrace.all_to_all_rows.default":
            columns = node.args[0]
            while columns.op != "placeholder":
                columns = columns.all_input_nodes[0]
            table = tables[node.args[1].meta["role"].name] = shards[columns.name]
            found[node.name] = partial(flow.launch_rows, table)
    buckets = 0
    for node in graph.phases["backward"].graph.nodes if "backward" in graph.phases else ():
        if str(node.target) == "embrace.all_to_all_gradients.default":
            found[node.name] = partial(flow.launch_gradients, tables[node.args[1].meta["role"].name])
        elif _reduces_bucket(node):
            found[node.name] = partial(flow.launch_bucket, buckets)
            buckets += 1
    for node_name, launch in found.items():
        launch.__name__ = node_name.replace(".", "_")
    return found


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
        program._state.awaiting_backward.add(step)
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
