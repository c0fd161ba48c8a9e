"""Runs a partitioned graph: one call of the model, and its backward.

Contract
    The ids' phases run first, then the forward; autograd calls the backward when the user's `loss.backward()` reaches
    the results. Gradients are delivered at its very end, together: a step either leaves all of its gradients or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
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
    PendingRows,
    Result,
    RowGradient,
    Saved,
    Shard,
    Tangent,
    TrainingGraph,
    inputs_of,
    outputs_of,
)
from embrace_fx.runtime import solo, split_ahead, streams
from embrace_fx.runtime.ahead import Ahead, IdsProgram, TableRoute
from embrace_fx.runtime.backward_flags import Finish, launch_flags
from embrace_fx.runtime.communicator import Communicator, InFlight
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.in_place import ExchangeKind, exchange_gradient_
from embrace_fx.runtime.flow import Flow
from embrace_fx.runtime.lower import Phase, lower
from embrace_fx.runtime.streams import Streams
from embrace_fx.runtime.tables import RowTable, local_tensor

if TYPE_CHECKING:  # importing Inductor takes seconds, which only those who use it are to pay
    from embrace_fx.runtime.inductor import RegionCompiler

Values = dict[str, Any]


class ModelState:
    """Where a program finds parameters, buffers and tables: always the ones the model holds right now.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(_owners(model, "_parameters"))
        self._buffers = dict(_owners(model, "_buffers"))
        self.names = tuple(self._parameters)
        self.tables: dict[str, RowTable] = {}
        self.unreduced: set[str] = set()
        """Parameters whose `.grad` holds this rank's own sum, from backwards under `no_sync`."""
        self._delivered: list[tuple[nn.Parameter, Tensor, int]] = []
        self.awaiting_backward: WeakSet[Step] = WeakSet()
        """Calls whose results the user still holds, and has not gone backward from."""

    def parameter(self, name: str) -> nn.Parameter:
        owner, key = self._parameters[name]
        found: nn.Parameter = owner[key]
        return found

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them, as the model holds them now, without a walk through its modules."""
        return (owner[key] for owner, key in self._parameters.values())

    def any_parameter(self) -> nn.Parameter | None:
        """One of them, where there is any: they are on one device."""
        return next(self.parameters(), None)

    def note_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Remembers the gradients that were just delivered, as they are."""
        self._delivered = [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]

    def check_gradients(self) -> None:
        """Raises where all dense gradients were written in place, or replaced, since they were delivered.

        That is what `torch.nn.utils.clip_grad_norm_` and `GradScaler.unscale_` do, and neither sees the gradients of
        sharded tables: the step would mix clipped and unclipped ones.
        """
        delivered, self._delivered = self._delivered, []
        left = [each for each in delivered if each[0].grad is not None]
        if self.tables and left and all(p.grad is not given or given._version != v for p, given, v in left):
            raise RuntimeError(
                "expected gradients as the backward left them, in optimizer.step(), found that all dense ones were "
                "changed in place (clipped or unscaled?) or replaced while the sharded tables' were not. Clip with the "
                "compiled model's own clip_grad_norm_(), scale the loss and not its gradients, and let "
                "GradScaler.step() do the unscaling."
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
        regions: what compiles the compute between communications; None: every op is called by itself.
    """

    def __init__(  # noqa: PLR0913
        self,
        graph: TrainingGraph,
        state: ModelState,
        communicator: Communicator,
        buckets: tuple[tuple[str, ...], ...] | None,
        result_constants: Mapping[int, Any],
        before_forward: Callable[[], None] = lambda: None,
        check: Callable[[Sequence[Any]], str | None] = lambda leaves: None,
        flow: Flow | None = None,
        *,
        regions: RegionCompiler | None = None,
    ) -> None:
        self._state = state
        self._results_behind = graph.results_behind
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
            return through_launcher.get(node.name) or own_rows(node)

        def with_table_names(node: fx.Node) -> Callable[..., Any] | None:
            if str(node.target) != "embrace.all_gather_ids.default":
                return None

            names: tuple[str, ...] = node.meta["tables"]

            def all_gather_ids(unique: Sequence[Tensor], num_rows: Sequence[int], group: str, group_size: int) -> Any:
                return communicator.all_gather_ids(unique, num_rows, group, group_size, names)

            return all_gather_ids

        alone = solo.SoloRows(on) if (on := self._streams_alone()) is not None and solo.fits(graph) else None
        own_rows = alone.kernel if alone is not None else lambda node: None
        self._unique = _runnable(graph.phases["unique"], state, launches, own_rows, regions)
        self._ids = _runnable(graph.phases["ids"], state, launches, with_table_names if alone is None else alone.kernel)
        self._forward = _runnable(
            graph.phases["forward"], state, launches, lambda n: through_launcher.get(n.name), regions
        )
        self._backward = (
            _runnable(graph.phases["backward"], state, launches, with_own_bucket, regions)
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
        self._regions = regions
        self._constants = dict(result_constants)
        self._before_forward = before_forward
        self._check = check
        roles = [role for _, role in outputs_of(graph.phases["forward"])]
        self._results = [role.index for role in roles if isinstance(role, Result)]
        self._differentiable = frozenset(role.index for _, role in graph.inputs() if isinstance(role, Tangent))
        roles_read = [r for _, r in inputs_of(graph.phases["backward"])] if self._backward is not None else []
        self._leaves_read = [role.index for role in roles_read if isinstance(role, BatchInput)]
        self._parameters_read = [role.name for role in roles_read if isinstance(role, Parameter)]
        self._saved_read = [role.name for role in roles_read if isinstance(role, Saved)]

    def read_again(self, leaves: Sequence[Any], values: Values) -> list[tuple[Tensor, int]]:
        """The tensors that the backward reads, and their versions: views of parameters and results among them."""
        found = [leaves[index] for index in self._leaves_read]
        found += map(self._state.parameter, self._parameters_read)
        found += [values[name] for name in self._saved_read]
        return [(t, t._version) for t in found if isinstance(t, Tensor) and not t.is_inference()]

    def name_written(self, written: Sequence[Tensor], leaves: Sequence[Any]) -> str:
        """What shares memory with tensors that were written, in words; nothing where none was."""
        if not written:
            return ""
        names = {_memory(leaf): "a tensor of the batch" for leaf in leaves if isinstance(leaf, Tensor)}
        names |= {_memory(local_tensor(self._state.parameter(name))): name for name in self._state.names}
        return ", ".join(dict.fromkeys(names.get(_memory(tensor), "a result") for tensor in written))

    def without_gradient(self, starts_from: Callable[[int], bool]) -> frozenset[str]:
        """Parameters whose gradients come from none of the results that a backward starts from."""
        behind = self._results_behind.items()
        absent = frozenset(name for name, sources in behind if not any(map(starts_from, sources)))
        return absent - self._state.unreduced

    def _streams_alone(self) -> Streams | None:
        """The streams of the device on which a single process trains."""
        parameter = self._state.any_parameter()
        if self._communicator.world_size > 1 or parameter is None:
            return None
        return streams.streams_of(parameter.device)

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
        paddings = {
            node.args[3]: node.args[4]
            for node in (graph.phases["backward"].graph.nodes if "backward" in graph.phases else ())
            if str(node.target) == "embrace.submit_rows.default"
        }
        unique_ahead, routing_ahead = ids_ahead(graph, partial(_runnable, state=state), sent)
        return IdsProgram(
            unique,
            unique_ahead,
            lambda values: [values[name] for name in sent],
            routing,
            routing_ahead,
            tuple(table for gather in gathers for table in gather.meta["tables"]),
            tuple(size for gather in gathers for size in gather.args[1]),
            tuple(
                TableRoute(
                    node.args[3],
                    node.args[1].meta["role"].name,
                    node.args[2].meta["role"].name,
                    node.args[4],
                    paddings.get(node.args[3], -1),
                )
                for node in graph.phases["forward"].graph.nodes
                if str(node.target) == "embrace.await_rows.default"
            ),
        )

    def ahead(self, leaves: Sequence[Any]) -> Ahead | None:
        """A batch to come, with the rows it reads; None where that cannot be known before its turn."""
        if self.ids is None or not self._is_relaxed or not self._ids_are_pure:
            return None
        with torch.no_grad(), _autocast_is_in_the_graph():
            assert self.flow is not None
            return self.flow.look_at(self.ids, leaves)

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
        self._read_again: list[tuple[Tensor, int]] = []

    def forward(self) -> list[Any]:
        program = self.program
        program._communicator.failure = program._check(self._leaves)
        values = self._begin_forward()
        program._before_forward()
        if program._regions is not None:
            program._regions.begin_step()
        forward = program._forward
        outputs = forward(self._leaves, values, {})
        results = [value for role, value in zip(forward.roles, outputs, strict=True) if isinstance(role, Result)]
        _keep(forward.roles, outputs, values)
        if program.flow is not None:
            program.flow.end_forward()
        self._values = values
        self._results = [r.detach() if isinstance(r, Tensor) else r for r in results]
        self._read_again = program.read_again(self._leaves, values)
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

    def backward(self, tangents: Sequence[Tensor | None], *, for_parameters: bool) -> list[Tensor | None]:
        """Runs the backward, delivers the parameters' gradients, and returns the batch tensors' ones.

        Args:
            for_parameters: whether parameters are to get gradients; `torch.autograd.grad` of inputs wants none.
        """
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
        if program.flow is not None:
            assert program.ids is not None
            program.flow.begin_backward(program.ids, values)
        given = [index for index, t in zip(program._results, tangents, strict=True) if t is not None]
        written = [tensor for tensor, version in self._read_again if tensor._version != version]
        self._read_again = []  # values die with their last use
        names = program.name_written(written, self._leaves)
        finish = self._launch_flags(given, len(written))
        dense = {
            # The graph was traced for contiguous gradients, and autograd leaves out those of unused results.
            index: tangent.contiguous() if tangent is not None else torch.zeros_like(result)
            for index, tangent, result in zip(program._results, tangents, self._results, strict=True)
            if index in program._differentiable
        }
        outputs = backward(self._leaves, values, dense)
        if program.flow is not None:
            program.flow.end_backward()
        try:
            starts_from = finish(names)
        except (FloatingPointError, RuntimeError):
            if program.flow is not None:
                program.flow.discard()
            raise
        if not for_parameters:
            if program.flow is not None:
                program.flow.discard()
            return self._of_batch(backward.roles, outputs)
        return self._deliver(backward.roles, outputs, program.without_gradient(starts_from))

    def _launch_flags(self, given: Sequence[int], written: int) -> Finish:
        """Tells the ranks of this backward; the result tells of theirs."""
        scalars = [r for r in self._results if isinstance(r, Tensor) and r.dim() == 0 and r.is_floating_point()]
        flow = self.program.flow
        on = flow.streams if flow is not None else streams.streams_of(scalars[0].device) if scalars else None
        return launch_flags(scalars, given, written, self.program._communicator, on)

    def _of_batch(self, roles: Sequence[OutputRole], outputs: Sequence[Any]) -> list[Tensor | None]:
        """The gradients of the batch's tensors that require one."""
        found = {
            role.of.index: value
            for role, value in zip(roles, outputs, strict=True)
            if isinstance(role, Gradient) and isinstance(role.of, BatchInput)
        }
        return [found.get(k) for k, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def _deliver(
        self, roles: Sequence[OutputRole], outputs: Sequence[Any], absent: Collection[str]
    ) -> list[Tensor | None]:
        """Puts gradients where optimizers find them, all but the absent ones of parameters that the loss is not of."""
        state, flow = self.program._state, self.program.flow
        rows: dict[str, dict[str, Tensor]] = {}
        delivered: set[int] = set()
        for role, value in zip(roles, outputs, strict=True):
            match role:
                case Gradient(Parameter(name)) if name not in absent:
                    # Two parameters may get the same tensor (the biases of an LSTM), but no two may share a `.grad`.
                    _deliver_dense(
                        state, name, value.clone() if id(value) in delivered else value, self.program._synchronised
                    )
                    delivered.add(id(value))
                case RowGradient(table, part) if table not in absent:
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
            assert flow is not None
            flow.buckets.deliver([role.bucket for role in pending], [state.parameter(name) for name in absent])
        for role in roles:
            if isinstance(role, PendingRows) and role.table in absent:
                assert flow is not None
                flow.exchanges[role.table].discard()
        return self._of_batch(roles, outputs)


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


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def ids_ahead(
    graph: TrainingGraph, runnable: Callable[..., _Runnable], sent: Sequence[str]
) -> tuple[Callable[[Sequence[Any]], tuple[Values, list[Tensor]]], Callable[[Values, list[Tensor]], None]]:
    """`IdsProgram.unique_ahead` and `.routing_ahead`.

    Args:
        sent: names of the unique rows, by table.
    """
    counts: dict[str, Tensor] = {}
    unpacked: list[list[Tensor]] = []

    def unique_of(node: fx.Node) -> Callable[..., Any] | None:
        if str(node.target) != "embrace.unique_ids.default":
            return None
        name = next(user.name for user in node.users if user.args[1] == 0)

        def unique_ids_ahead(ids: Sequence[Tensor], num_rows: int, padding_idx: int) -> list[Tensor]:
            rows, counts[name], where = split_ahead.unique_ids(ids, num_rows, padding_idx)
            return [rows, *where]

        return unique_ids_ahead

    def given(node: fx.Node) -> Callable[..., Any] | None:
        if str(node.target) == "embrace.unpack_ids.default":
            return lambda *_: unpacked.pop()
        launches = ("embrace.all_gather_ids.default", "_c10d_functional.wait_tensor.default")
        return (lambda *_: None) if str(node.target) in launches else None

    unique = runnable(graph.phases["unique"], launches={}, special=unique_of)
    route = runnable(graph.phases["ids"], launches={}, special=given)

    def unique_ahead(leaves: Sequence[Any]) -> tuple[Values, list[Tensor]]:
        values: Values = {}
        _keep(unique.roles, unique(leaves, values, {}), values)
        found = [counts[name] for name in sent]
        counts.clear()
        return values, found

    def routing_ahead(values: Values, of_tables: list[Tensor]) -> None:
        unpacked.append(of_tables)
        _keep(route.roles, route((), values, {}), values)

    return unique_ahead, routing_ahead


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
            counts = node.args[1].meta.get("role")  # on a grid they are made here, and saved under their name
            table = tables[counts.name if counts is not None else node.args[1].name] = shards[columns.name]
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
        if torch.is_grad_enabled():
            raise RuntimeError(
                "expected a backward of the compiled model without create_graph=True, in backward(), found one with "
                "it: its gradients cannot be differentiated again. Train such a loss with the plain model."
            )
        anchor, _ = ctx.next_functions[0]  # not reached by `torch.autograd.grad` or `backward(inputs=...)`
        with torch.no_grad(), _autocast_is_in_the_graph():
            wanted = torch._C._will_engine_execute_node(anchor)
            return (None, None, *ctx.step.backward(tangents, for_parameters=wanted))


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
    regions: RegionCompiler | None = None,
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
    run = lower(module, launches, special, regions)
    return _Runnable(run, tuple(sources), tuple(role for _, role in outputs_of(module)))
