"""A program: the phases of a partitioned graph as functions, and what is needed to run them. `step.py` runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, fx

from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.flow.comm_pipeline import CommPipeline
from embrace_fx.runtime.memory.copies import Copies
from embrace_fx.runtime.ranks.step_handshake import HandshakeMessage
from embrace_fx.runtime.step.bindings import Bindings
from embrace_fx.runtime.step.delivery import Delivery, delivered
from embrace_fx.runtime.step.ids_program import make_ids_program
from embrace_fx.runtime.step.missing_launches import MissingLaunches
from embrace_fx.runtime.step.runnable_phase import Runnable, make_runnable
from embrace_fx.runtime.step.streaming_backward import StreamingBackward
from embrace_fx.runtime.step.used_parameters import UsedParameters
from embrace_fx.runtime.step.writable_results import storage_id
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.graph import (
    BatchInput,
    Parameter,
    Result,
    Saved,
    Shard,
    Tangent,
    TrainingGraph,
    Values,
    inputs_of,
    outputs_of,
)
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.ops import op_name
from embrace_fx.vocabulary.step_variant import ForwardVariant, StepVariant
from embrace_fx.vocabulary.submissions import overlaps_steps, submitted
from embrace_fx.vocabulary.version_snapshot import VersionSnapshot

if TYPE_CHECKING:  # importing Inductor takes seconds, so only its users import it
    from embrace_fx.runtime.lower.inductor import RegionCompiler


@dataclass(frozen=True)
class LoweredPhase:
    """A forward or backward phase as a function."""

    run: Runnable | StreamingBackward
    missing: MissingLaunches  # makes the launches for which other ranks wait, if the phase fails
    absent: tuple[OperationId, ...]  # launches that this variant does not make, so that the launcher skips them


@dataclass(eq=False)
class Program:
    """A graph in the form in which it runs: its phases as functions, and what is needed to run them.

    Attributes:
        unique, ids: the phases that run before the forward.
        ids_program: finds the rows that a batch reads. It can run before the batch's step.
        overlaps_steps: whether the forward waits for communication that the previous step has started.
        announces: whether the exchange of ids also announces the step.
        results: indices of the flattened results that the forward computes.
        differentiable: the subset of `results` that has gradients.
        differentiable_places: the positions in `results` of the indices in `differentiable`.
        promised: index of a result -> its deferred logits. The forward returns hidden states there, and the user gets
            logits whose values are computed when they are read.
    """

    graph: InitVar[TrainingGraph]  # partitioned
    state: ModelState
    flow: CommPipeline
    # The parameters of each bucket that the graph reduces, in launch order. None under `no_sync`: nothing is reduced.
    buckets: tuple[tuple[str, ...], ...] | None
    constants: dict[int, Any]  # index of a flattened result -> its value, for results that are not tensors
    head: Callable[[Sequence[Any]], HandshakeMessage]  # builds the announcement of a step from a flattened batch
    scores_nothing: Callable[[Sequence[Any]], bool]  # whether a loss averages over labels but a batch has none
    share_buffers: Callable[[], None] | None  # called once all ranks have announced, before anything reads a buffer
    links: Cluster  # from which message sizes are chosen
    regions: RegionCompiler | None  # compiles the compute between two communications; None to call each op separately
    variants: Callable[[StepVariant], TrainingGraph] | None  # None if the graph serves all variants of a step
    copies: Copies | None  # offloads saved values to the host and reloads them
    of_gradients: bool  # whether the backward gets gradients one by one, as on the eager route

    def __post_init__(self, graph: TrainingGraph) -> None:
        self.announcements, self.communicator = self.flow.announcements, self.flow.communicator
        alone, reduces = self.communicator.world_size == 1, self.buckets is not None
        # In a single process, a gradient is both the mean over all ranks and this rank's own gradient.
        self.deliver = Delivery(self.state, self.flow, reduces or alone, not reduces or alone)
        self._lower(graph)
        self.overlaps_steps = overlaps_steps(graph)
        self.announces = any(op_name(node) == "embrace::all_gather_ids" for node in graph.phases["ids"].graph.nodes)
        self._record_results(graph)
        self._record_backward_reads(graph)
        self.promised = graph.promised

    def _lower(self, graph: TrainingGraph) -> None:
        """Makes functions of all phases of a graph."""
        phases, state, bound = graph.phases, self.state, self._bind(graph)
        self.unique = make_runnable(phases["unique"], state, bound.call, self.regions)
        self.ids = make_runnable(phases["ids"], state, bound.call)
        self.has_backward = "backward" in phases
        self._lowered: dict[StepVariant | str, LoweredPhase] = {}
        self._lowered["forward"] = self._lower_phase("forward", graph, bound)
        if self.has_backward:
            self._lowered["backward"] = self._lower_phase("backward", graph, bound)
        self.ids_program = make_ids_program(graph, state, self.unique)

    def _bind(self, graph: TrainingGraph) -> Bindings:
        """Returns the runtime functions for the nodes of a graph."""
        keeps, buckets = self.of_gradients, self.buckets or ()
        return Bindings(graph, self.state, self.flow, buckets, self.links, self.copies, keeps_buckets=keeps)

    def _lower_phase(self, phase: str, graph: TrainingGraph, bound: Bindings) -> LoweredPhase:
        """Makes a function of a phase. Registers its launches, because they must be made even if the phase fails."""
        module, is_last = graph.phases[phase], phase == "backward"
        missing = MissingLaunches(self.flow)

        def call(node: fx.Node) -> Callable[..., Any] | None:
            found = bound.call(node)
            return found and missing.add(node, found)

        def lower_part(part: fx.GraphModule) -> Runnable:
            return make_runnable(part, self.state, call, self.regions, last=is_last)

        launcher = self.flow.launcher
        in_pieces = is_last and self.of_gradients and not self.flow.is_within_steps
        run = StreamingBackward(module, lower_part) if in_pieces else lower_part(module)
        return LoweredPhase(run, missing, launcher.missing_from({*submitted(module)}, forward=not is_last))

    def phase(self, variant: StepVariant) -> LoweredPhase:
        """Returns the phase for a variant of a step. The first call makes the phase's function."""
        key = variant.phase if variant.is_steady or self.variants is None else variant
        if key not in self._lowered:
            assert self.variants is not None
            graph = self.variants(variant)
            self._lowered[key] = self._lower_phase(variant.phase, graph, self._bind(graph))
        return self._lowered[key]

    @property
    def sources(self) -> dict[str, Callable[[], str]]:
        """Maps the name of each phase or variant to a function that returns its source code."""
        runs = {"unique": self.unique, "ids": self.ids, **{str(key): each.run for key, each in self._lowered.items()}}
        return {name: run.source for name, run in runs.items()}

    def compute_as(self, graph: TrainingGraph) -> None:
        """Replaces the backward, from the next one on, by that of `graph`: the same values in another order."""
        of_forward = {key for key in self._lowered if key == "forward" or isinstance(key, ForwardVariant)}
        self._lowered = {key: each for key, each in self._lowered.items() if key in of_forward}
        self._lowered["backward"] = self._lower_phase("backward", graph, self._bind(graph))
        self._record_backward_reads(graph)

    def _record_results(self, graph: TrainingGraph) -> None:
        """Stores which results the forward computes, and which have a gradient and depend on which parameters."""
        self.results = [r.index for _, r in outputs_of(graph.phases["forward"]) if isinstance(r, Result)]
        self.differentiable = frozenset(role.index for _, role in graph.inputs() if isinstance(role, Tangent))
        found = enumerate(self.results)
        self.differentiable_places = tuple(place for place, index in found if index in self.differentiable)
        roles = self._lowered["backward"].run.roles if self.has_backward else ()
        state, size = self.state, self.communicator.world_size
        self.used = UsedParameters(state.names, graph.results_behind, delivered(roles), size, state.ignored)

    def _record_backward_reads(self, graph: TrainingGraph) -> None:
        """Stores which tensors the backward reads. Writing one of them before the backward is an error."""
        found = [*inputs_of(graph.phases["backward"])] if self.has_backward else []
        self._leaves_read = [role.index for _, role in found if isinstance(role, BatchInput)]
        self._parameters_read = [role.name for _, role in found if isinstance(role, Parameter)]
        self._shards_read = [role.table for node, role in found if isinstance(role, Shard) and _is_computed_with(node)]
        self._saved_read = sorted(role.name for _, role in found if isinstance(role, Saved))
        of_forward = (role.name for _, role in inputs_of(graph.phases["forward"]) if isinstance(role, Saved))
        self._read_after = {"ids": {*self._saved_read, *of_forward}, "forward": {*self._saved_read}}

    def read_after(self, phase: Literal["ids", "forward"], values: Values) -> Values:
        """Returns the saved values that a phase after `phase` reads, or all of them if steps overlap."""
        if self.overlaps_steps:
            return values
        read = self._read_after[phase]
        return {name: value for name, value in values.items() if name in read}

    def snapshot_reads(self, leaves: Sequence[Any], values: Values) -> VersionSnapshot:
        """Returns a snapshot of the tensors that the backward reads, to detect writes."""
        found = [*map(leaves.__getitem__, self._leaves_read), *map(values.__getitem__, self._saved_read)]
        found += self.state.parameters(self._parameters_read)
        found += [self.state.table(name).local for name in self._shards_read]
        return VersionSnapshot.of_tensors_in(found)

    def name_written(self, written: Sequence[Tensor], leaves: Sequence[Any]) -> str:
        """Returns the names of the tensors in `written`, for an error message."""
        names = {storage_id(leaf): "a tensor of the batch" for leaf in leaves if isinstance(leaf, Tensor)}
        names |= {storage_id(self.state.parameter(name)): name for name in self.state.names}
        return ", ".join(dict.fromkeys(names.get(storage_id(tensor), "a result") for tensor in written))


def _is_computed_with(node: fx.Node) -> bool:
    """Returns whether any op except this package's communication ops reads the value of a graph node."""
    return any(not op_name(user).startswith("embrace::") for user in node.users)
