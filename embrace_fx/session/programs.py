"""Programs for captured graphs under one plan: passes, the agreement on what they launch, the flow between steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import fx

from embrace_fx.capture.structured_trace import log_graph
from embrace_fx.passes.collectives import sequence_hash
from embrace_fx.passes.memory.budget import Memory
from embrace_fx.passes.memory.held import Held, held
from embrace_fx.passes.relax.order import OrderCompute
from embrace_fx.planning.replanning import TrainingCalls
from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.step.program import Program
from embrace_fx.scheduling.scheduling import Scheduling, cuts
from embrace_fx.session.batch_check import batch_check
from embrace_fx.session.buffer_sharing import BufferSharing
from embrace_fx.session.calls import Variant
from embrace_fx.session.pipeline import Compiled, relaxing_passes, run_passes, training_passes
from embrace_fx.setup.agreement import agree_on_sequence, give_up
from embrace_fx.setup.setting import Setting
from embrace_fx.vocabulary.graph import Gradient, Parameter, TrainingGraph
from embrace_fx.vocabulary.plan import Plan

if TYPE_CHECKING:
    from embrace_fx.runtime.lower.inductor import RegionCompiler


class ProgramBuilder:
    """Builds one model's programs while a plan is in use.

    Args:
        on_other_batch: called when the batch that was looked ahead to does not come.

    Attributes:
        flow: what runs from one step into the next; None before the first training program, and on one rank.
        scheduling: the schedule that the flow follows.
        graphs: of the last training program, after each pass.
    """

    def __init__(
        self,
        setting: Setting,
        plan: Plan,
        calls: TrainingCalls,
        buffers: BufferSharing,
        on_other_batch: Callable[[], None],
    ) -> None:
        self.flow: Flow | None = None
        self.scheduling: Scheduling | None = None
        self.graphs: Mapping[str, fx.GraphModule] = {}
        self._setting = setting
        self._plan = plan
        self._calls = calls
        self._buffers = buffers
        self._on_other_batch = on_other_batch
        self._communicator = setting.communicator
        self._announcements = setting.announcements
        self._joint: TrainingGraph | None = None  # of the last training program
        self._units: tuple[str, ...] = ()  # of backwards, in the order in which they are computed; none: as they stand
        self._relaxed: WeakKeyDictionary[Program, tuple[Compiled, TrainingGraph]] = WeakKeyDictionary()
        self._sequence: str | None = None  # hash of what every training program launches

    def build(self, variant: Variant) -> None:
        """Makes a variant's program. The first training program's is collective.

        Raises:
            PeerFailure: a rank could not build its own; on every rank.
            RuntimeError: the ranks' programs launch different collectives; on every rank.
        """
        compiled, failure = None, None
        try:
            compiled = self._compile(variant.analysed, reduce=variant.train)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        if variant.train and self._sequence is None:
            graph = None if compiled is None else compiled.graph
            self._sequence = agree_on_sequence(self._communicator, graph, failure)
        elif failure is not None:
            give_up(self._announcements, failure)
        assert compiled is not None
        if variant.train:
            self._check_gradients(variant.analysed)
            self._check_sequence(compiled)
            compiled = self._relax(compiled, variant.analysed)
            self.graphs = compiled.graphs
            self._joint = compiled.graph
            for name, module in compiled.graphs.items():
                log_graph(name, module)
        variant.program = self._program(compiled, variant, reduce=variant.train)
        if self.flow is not None and variant.train:
            self._relaxed[variant.program] = compiled, variant.analysed
        self._narrow(variant)

    def held(self) -> Held | None:
        """What a step of the last training program holds, as predicted; None before the first."""
        return None if self._joint is None else held(self._joint)

    def build_accumulating(self, variant: Variant) -> None:
        """Makes the program of the same graph with its dense gradients left as they are."""
        compiled = self._compile(variant.analysed, reduce=False)
        variant.accumulating = self._program(compiled, variant, reduce=False)
        self._narrow(variant)

    def _narrow(self, variant: Variant) -> None:
        """What compiling regions has found out about the batches that they are valid for holds for the variant."""
        if self._setting.options.backend == "inductor":
            variant.captured = variant.captured.guarded_again()

    def _compile(self, analysed: TrainingGraph, *, reduce: bool) -> Compiled:
        present = {table.parameter for table in analysed.tables}
        budget = self._setting.options.memory_budget
        memory = Memory(budget, self._plan.links.compute) if budget is not None else None
        rank = self._communicator.rank
        return run_passes(analysed, training_passes(self._plan, present, rank, reduce=reduce, memory=memory))

    def _check_gradients(self, analysed: TrainingGraph) -> None:
        """A gradient that the plan does not know of would stay this rank's own."""
        trained = {r.of.name for _, r in analysed.outputs() if isinstance(r, Gradient) and isinstance(r.of, Parameter)}
        late = [d.parameter for d in self._plan if d.strategy == "unused" and d.parameter in trained]
        if late and self._communicator.world_size > 1:
            give_up(
                self._announcements,
                RuntimeError(
                    "expected a batch to train only parameters that the first batch trained on some rank, in "
                    f"backward(), found gradients of {', '.join(late)} too. Begin with a batch that uses every "
                    "parameter."
                ),
            )

    def _check_sequence(self, compiled: Compiled) -> None:
        """A batch of other shapes launches what the first one did."""
        if self._communicator.world_size > 1 and sequence_hash(compiled.graph) != self._sequence:
            give_up(
                self._announcements,
                RuntimeError(
                    "expected a batch of other shapes to launch the same collectives as the first, after the last "
                    "pass, found others: the forward took another path. Make it read the same tables and parameters "
                    "for every batch"
                ),
            )

    def _relax(self, compiled: Compiled, analysed: TrainingGraph) -> Compiled:
        """Lets communication run into the next step, as the schedule says. Collective the first time."""
        if self._communicator.world_size == 1:
            return compiled
        schedule = self._setting.options.schedule
        devices = {parameter.device for parameter in self._setting.model.parameters()}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            warnings.warn(
                f"expected a model on the CPU or on one GPU for schedule={schedule!r}, found one on "
                f"{', '.join(sorted(map(str, devices)))}: its communication is launched and waited for within each "
                "step. Pass schedule='none' to say so.",
                stacklevel=2,
            )
            return compiled
        found = cuts(self._setting, self._plan) if self.scheduling is None else self.scheduling.cuts
        passes = relaxing_passes(self._plan, schedule, self._communicator.rank, found)
        relaxed = run_passes(analysed, (*passes, *self._ordering()), compiled)
        if self.flow is None:
            self.scheduling = Scheduling(self._setting, self._plan, relaxed.graph, found, self._compute_in_order)
            self.flow = self.scheduling.start(self._on_other_batch)
            self._setting.stepping.flow = self.flow
        return relaxed

    def _ordering(self) -> tuple[OrderCompute, ...]:
        return (OrderCompute(self._units),) if self._units else ()

    def _compute_in_order(self, units: tuple[str, ...]) -> TrainingGraph:
        """Has all training programs compute their backward's units in an order, from the next backward on.

        Returns:
            The graph of the program that was built last.
        """
        self._units = units
        for program, (compiled, analysed) in self._relaxed.items():
            ordered = run_passes(analysed, self._ordering(), compiled)
            program.compute_as(ordered.graph)
            self._relaxed[program] = ordered, analysed
            self.graphs = ordered.graphs
            self._joint = ordered.graph
        assert self._joint is not None
        log_graph("order_compute", self._joint.phases["backward"])
        return self._joint

    def _program(self, compiled: Compiled, variant: Variant, *, reduce: bool) -> Program:
        analysed, train = variant.analysed, variant.train
        return Program(
            compiled.graph,
            self._setting.state,
            self._announcements,
            self._plan.buckets if reduce else None,
            variant.captured.result_constants,
            self._buffers.before_forward(analysed, self._assigned(variant), train=train),
            batch_check(self._setting, self._plan, analysed, self._calls, train=train),
            self.flow if train and reduce else None,
            links=self._plan.links,
            regions=self._region_compiler(),
        )

    def _assigned(self, variant: Variant) -> frozenset[str]:
        """The buffers that the forward assigns, beside those that its graph writes."""
        replay, state = variant.captured.replay, self._setting.state
        return frozenset() if replay is None else frozenset(state.buffers_in(replay.writes))

    def _region_compiler(self) -> RegionCompiler | None:
        if self._setting.options.backend == "eager":
            return None
        from embrace_fx.runtime.lower.inductor import RegionCompiler  # noqa: PLC0415  (takes seconds to import)

        return RegionCompiler()
