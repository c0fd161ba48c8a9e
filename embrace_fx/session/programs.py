"""Builds programs for captured graphs under one plan: runs passes, agrees on launches, starts the flow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import fx

from embrace_fx.capture.structured_trace import log_graph, log_text
from embrace_fx.passes.collectives import sequence_hash
from embrace_fx.passes.join_exchanges import ExchangedParameter, JoinExchanges
from embrace_fx.passes.memory.budget import Memory
from embrace_fx.passes.overlap.buckets import ChunkBuckets
from embrace_fx.passes.overlap.order import OrderCompute
from embrace_fx.passes.step_memory import StepMemory, step_memory
from embrace_fx.planning.replanning import Calls
from embrace_fx.planning.scheduling import Scheduling, cuts
from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.ranks.announcement import Announcement, activity_of
from embrace_fx.runtime.ranks.checksums import checksum_of_text
from embrace_fx.runtime.step.program import Program
from embrace_fx.session.batch_check import batch_check
from embrace_fx.session.buffer_sharing import BufferSharing
from embrace_fx.session.calls import Variant
from embrace_fx.session.gradient_graph import ROUTE as EAGER
from embrace_fx.session.offloading import offloading
from embrace_fx.session.pipeline import Compiled, overlap_passes, run_passes, training_passes
from embrace_fx.session.step_graphs import StepGraphs
from embrace_fx.setup.agreement import give_up
from embrace_fx.setup.setting import Setting
from embrace_fx.setup.telling import tell
from embrace_fx.viz.graphs import Graphs
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.plan_text import readable_bytes
from embrace_fx.vocabulary.schedule import Cuts, Schedule

if TYPE_CHECKING:
    from embrace_fx.runtime.lower.inductor import RegionCompiler


class ProgramBuilder:
    """Builds one model's programs while a plan is in use.

    Args:
        on_other_batch: called when another batch comes than the expected one.

    Attributes:
        flow: the communication between steps; None before the first training program, on one rank, and at the end.
        scheduling: the schedule of the steps; None before the first training program, and if nothing is scheduled.
        graphs: the graphs of the last training program, after each pass.
        built: a training program is built.
    """

    def __init__(
        self,
        setting: Setting,
        plan: Plan,
        calls: Calls,
        buffers: BufferSharing,
        on_other_batch: Callable[[], None],
    ) -> None:
        self.flow: Flow | None = None
        self.scheduling: Scheduling | None = None
        self.graphs = Graphs()
        self.built = False
        self._setting = setting
        self._plan = plan
        self._calls = calls
        self._buffers = buffers
        self._on_other_batch = on_other_batch
        self._copies, self._copy_rate = offloading(setting, plan.links.compute)
        self._communicator = setting.communicator
        self._announcements = setting.announcements
        self._shown: Compiled | None = None  # the last training program's graphs
        self._of_steps: StepGraphs | None = None  # the graphs of its steps, if they vary
        self._besides: dict[str, Callable[[], fx.GraphModule]] = {}  # name -> phase of an evaluation or accumulation
        self._told_least = False  # a budget that is not kept was reported
        self._units: tuple[str, ...] = ()  # the order of the backward's units; empty: autograd's order
        self._overlapped: WeakKeyDictionary[Program, StepGraphs] = WeakKeyDictionary()

    def build(self, variant: Variant, *, accumulates: bool) -> None:
        """Makes a program of a variant. The first training program's is collective.

        Args:
            accumulates: whether dense gradients are not reduced.

        Raises:
            PeerFailure: a rank could not build its own; on every rank.
        """
        train, reduce = variant.train, variant.train and not accumulates
        first = reduce and not self.built
        joint, compiled, failure = None, None, None
        try:
            joint = self._compile(variant.analysed, train=train, reduce=reduce)
            compiled = self._overlap(joint, variant) if reduce else joint
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        if first:
            self._communicator.check_none_failed(failure)
            self.built = True
        elif failure is not None:
            give_up(self._announcements, failure)
        assert joint is not None
        assert compiled is not None
        if reduce:
            self._start(compiled, gradients_alone=variant.captured.route == EAGER)
            self._show(compiled)
            log_text("pass_times", compiled.times)
            for name, module in compiled.graphs.items():
                log_graph(name, module)
        else:
            self._show_besides(compiled, "accumulating" if train else "evaluation")
        of_steps = StepGraphs(compiled, variant.analysed) if reduce and self.flow is not None else None
        program = variant.programs[accumulates] = self._program(joint, compiled, variant, of_steps, reduce=reduce)
        if of_steps is not None:
            self._overlapped[program] = of_steps
            self._show(compiled, of_steps)
        if self._setting.options.backend == "inductor":  # compiled regions have added guards
            variant.captured = variant.captured.guarded_again()

    @property
    def schedule(self) -> Schedule | None:
        """The predicted schedule; None before the first training program, and if nothing is scheduled."""
        return None if self.scheduling is None else self.scheduling.schedule

    def _show(self, compiled: Compiled, of_steps: StepGraphs | None = None) -> None:
        """Shows the user the graphs of a training program, and the phases of its other step variants."""
        self._shown, self._of_steps = compiled, of_steps
        variants = of_steps.modules() if of_steps is not None else {}
        self.graphs = Graphs(compiled.graphs, compiled.phases, {**variants, **self._besides})

    def _show_besides(self, compiled: Compiled, when: str) -> None:
        """Shows the user the phases that run in an evaluation, or while gradients are accumulated."""
        shown = (phase for phase in ("forward", "backward") if phase in compiled.graph.phases)
        self._besides |= {f"{phase}, {when}": partial(compiled.graph.phases.__getitem__, phase) for phase in shown}
        if self._shown is not None:
            self._show(self._shown, self._of_steps)

    def step_memory(self) -> StepMemory | None:
        """Predicts the memory that a step of the last training program holds; None before the first."""
        return None if self._shown is None else step_memory(self._shown.graph)

    def _compile(self, analysed: TrainingGraph, *, train: bool, reduce: bool) -> Compiled:
        present = {table.parameter for table in analysed.tables}
        budget = self._setting.options.memory_budget
        rates = self._plan.links.compute, self._copy_rate
        memory = None if budget is None else Memory(budget, *rates, self._tell_least)
        rank = self._communicator.rank
        join = JoinExchanges(self._exchanged(), self._plan.renormed) if train else None
        passes = training_passes(self._plan, present, rank, reduce=reduce, join=join, memory=memory)
        return run_passes(analysed, passes)

    def _tell_least(self, asked: int, least: int) -> None:
        """Reports once that a step holds the least possible bytes where the budget's fraction asks for less."""
        if not self._told_least and self._communicator.rank == 0:
            tell(
                "a step of this batch holds at least %s, where memory_budget=%g asks for %s: it keeps to that",
                readable_bytes(least),
                self._setting.options.memory_budget,
                readable_bytes(asked),
            )
        self._told_least = True

    def _exchanged(self) -> dict[str, ExchangedParameter]:
        """Finds the parameters whose rows or gradients a step exchanges; on a single process, none."""
        if self._communicator.world_size == 1:
            return {}
        bucketed, sharded = {name for bucket in self._plan.buckets for name in bucket}, set(self._plan.sharded)
        found = {}
        for decision in self._plan:
            name = decision.parameter
            if name in bucketed or name in sharded:
                parameter = self._setting.state.parameter(name)
                padding = decision.padding_idx if name in sharded else None
                found[name] = ExchangedParameter(decision.shape, parameter.dtype, parameter.device, padding)
        return found

    def _overlap(self, compiled: Compiled, variant: Variant) -> Compiled:
        """Overlaps communication with the next step, as the schedule says; not with a forward on the eager route, which
        could read any parameter anywhere."""
        if not self._launches():
            return compiled
        analysed = variant.analysed
        if variant.captured.route == EAGER:
            whole = tuple((sum(chunks),) for chunks in self._cuts.chunks)
            return run_passes(analysed, (ChunkBuckets(whole),), compiled)
        passes = overlap_passes(self._plan, self._plan.schedule_name, self._communicator.rank, self._cuts)
        return run_passes(analysed, (*passes, *self._ordering()), compiled)

    @cached_property
    def _cuts(self) -> Cuts:
        """The pieces in which the plan's communication travels."""
        return cuts(self._setting, self._plan)

    def _launches(self) -> bool:
        """Tells whether a launcher sends the steps' exchanges; a user's communication hook sends its own in a step."""
        devices = {parameter.device for parameter in self._setting.model.parameters()}
        one_device = len(devices) == 1 and next(iter(devices)).type in ("cpu", "cuda")
        return self._communicator.world_size > 1 and one_device and self._communicator.comm_hook is None

    def _start(self, compiled: Compiled, *, gradients_alone: bool) -> None:
        """Makes the flow at the first training program. Collective then.

        Args:
            gradients_alone: as in `Scheduling`.
        """
        name, devices = self._plan.schedule_name, {p.device for p in self._setting.model.parameters()}
        several = self._communicator.world_size > 1
        if self.scheduling is not None or (several and self._communicator.comm_hook is not None):
            return
        if several and not self._launches():
            warnings.warn(
                f"expected a model on the CPU or on one GPU for schedule={name!r}, found one on "
                f"{', '.join(sorted(map(str, devices)))}: its communication is launched and waited for within each "
                "step. Pass schedule='none' to say so.",
                stacklevel=2,
            )
            return
        graph, in_order = compiled.graph, self._compute_in_order
        self.scheduling = Scheduling(
            self._setting,
            self._plan,
            graph,
            self._cuts,
            in_order,
            gradients_alone=gradients_alone,
            ahead=self._calls.ahead,
        )
        self.flow = self.scheduling.start(self._on_other_batch)
        self._setting.stepping.follow(self.flow, self.scheduling.recorder)

    def end_flow(self) -> None:
        """Applies updates pending between steps, and ends the flow."""
        flow, self.flow = self.flow, None
        if flow is not None:
            self._setting.stepping.follow(None, flow.recorder)
            flow.close()

    def _ordering(self) -> tuple[OrderCompute, ...]:
        return (OrderCompute(self._units),) if self._units else ()

    def _compute_in_order(self, units: tuple[str, ...]) -> TrainingGraph:
        """Reorders the backward's units of all training programs, from the next backward on.

        Returns:
            The graph of the program that was built last.
        """
        self._units = units
        for program, of_steps in self._overlapped.items():
            of_steps.order(self._ordering())
            program.compute_as(of_steps.steady.graph)
            self._show(of_steps.steady, of_steps)
        assert self._shown is not None
        log_graph("order_compute", self._shown.graph.phases["backward"])
        return self._shown.graph

    def _launched(self, joint: Compiled, flow: Flow | None) -> int:
        """Hashes a program's launches into a number that ranks can compare; 0 on a single rank."""
        if self._communicator.world_size == 1:
            return 0
        launched = sequence_hash(joint.graph, ordered=flow is None)
        return checksum_of_text(f"{launched} {self._communicator.gradient_dtype}")

    def _program(
        self, joint: Compiled, compiled: Compiled, variant: Variant, of_steps: StepGraphs | None = None, *, reduce: bool
    ) -> Program:
        """Makes a variant's program.

        Args:
            joint: its graph, before communication overlaps the next step.
            of_steps: the graphs of the steps, if it does.
        """
        analysed, train = variant.analysed, variant.train
        flow = self.flow if train and reduce else None
        told, share = self._buffers.of_forward(analysed, self._assigned(variant), train=train, reduce=reduce)
        check = batch_check(self._setting, self._plan, analysed, self._calls, train=train)
        launched, activity = self._launched(joint, flow), activity_of(train=train, reduces=reduce)

        def head(leaves: Sequence[Any]) -> Announcement:
            return self._calls.announcement(
                Announcement(activity=activity, failure=check(leaves), program=launched, buffers=told()),
                self._communicator.progress.optimizer_steps,
            )

        return Program(
            compiled.graph,
            self._setting.state,
            self._announcements,
            self._plan.buckets if reduce else None,
            variant.captured.result_constants,
            head,
            flow,
            share_buffers=share,
            recorder=self.scheduling.recorder if self.scheduling is not None and self.flow is None and train else None,
            links=self._plan.links,
            regions=self._region_compiler(),
            variants=of_steps.graph if of_steps is not None and of_steps.vary else None,
            copies=self._copies,
            of_gradients=variant.captured.route == EAGER,
        )

    def _assigned(self, variant: Variant) -> frozenset[str]:
        """Names the buffers that the forward assigns, besides those that its graph writes."""
        replay, state = variant.captured.replay, self._setting.state
        if variant.captured.route == EAGER:  # the forward may write any buffer
            return frozenset(state.buffer_names())
        return frozenset() if replay is None else frozenset(state.buffers_in(replay.writes))

    def _region_compiler(self) -> RegionCompiler | None:
        if self._setting.options.backend == "eager":
            return None
        from embrace_fx.runtime.lower.inductor import RegionCompiler  # noqa: PLC0415  (takes seconds to import)

        return RegionCompiler()
