"""Makes the schedule of a single process: compute, offloads and reloads; nothing is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import fx

from embrace_fx import cost
from embrace_fx.cost.storage import RowMemory
from embrace_fx.passes.memory.line import memory_line
from embrace_fx.passes.node_cost import estimate
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.passes.scheduler.step_graph import Block, build_alone, cut_at_copies
from embrace_fx.passes.scheduler.storage import with_storage
from embrace_fx.passes.step_memory import step_memory
from embrace_fx.passes.verifier.storage import check_storage
from embrace_fx.runtime.launch import streams
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.memory.resident import bytes_in_use
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.operation_id import BETWEEN, WHOLE_BACKWARD, WHOLE_FORWARD
from embrace_fx.vocabulary.schedule import Schedule


@dataclass(frozen=True)
class SoloSchedule:
    """The estimated schedule of a single process, and the recorder that measures it.

    Attributes:
        schedule: backward, the time between two calls, and forward.
        recorder: measures these operations.
    """

    schedule: Schedule
    recorder: Recorder

    @classmethod
    def of(
        cls,
        graph: TrainingGraph,
        name: str,
        compute: cost.Compute,
        device: torch.device,
        memory: Mapping[str, RowMemory] = MappingProxyType({}),
    ) -> SoloSchedule:
        """Estimates the steps of a training graph on one process.

        Args:
            graph: a graph with phases.
            name: the schedule that was asked for.
            device: the model's device.
            memory: table beyond memory -> its rows in memory.
        """
        node_ms = estimate(compute, graph.expected)

        def ms(*phases: fx.GraphModule) -> float:
            return sum(node_ms(node) for phase in phases for node in phase.graph.nodes)

        phases = graph.phases
        steps = build_alone(
            [
                *cut_at_copies(phases["backward"], WHOLE_BACKWARD, node_ms),
                Block(BETWEEN),
                *cut_at_copies(phases["forward"], WHOLE_FORWARD, node_ms, ms(phases["unique"], phases["ids"])),
            ]
        )
        steps = with_storage(steps, memory)
        check_storage(steps, memory)
        on = streams.streams_of(device)
        found = schedule(steps, name)
        line = memory_line(found.predicted, step_memory(graph), node_ms)
        recorder = Recorder(on.clock() if on is not None else None, partial(bytes_in_use, device))
        return cls(replace(found, predicted=replace(found.predicted, memory=line)), recorder)
