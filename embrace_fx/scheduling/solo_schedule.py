"""One process's schedule and timeline: compute alone, for nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from embrace_fx import cost
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.passes.scheduler.node_cost import estimate
from embrace_fx.runtime.launch import streams
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.operation_id import BETWEEN, WHOLE_BACKWARD, WHOLE_FORWARD
from embrace_fx.vocabulary.schedule import Operation, Schedule, StepGraph


@dataclass(frozen=True)
class SoloSchedule:
    """What one process shows of its steps.

    Attributes:
        schedule: backward, what comes between two calls, and forward, as estimated.
        recorder: measures them.
    """

    schedule: Schedule
    recorder: Recorder

    @classmethod
    def of(cls, graph: TrainingGraph, name: str, compute: cost.Compute, device: torch.device) -> SoloSchedule:
        """What a process shows of a training graph.

        Args:
            graph: in phases.
            name: of the schedule that was asked for.
            device: of the model.
        """
        node_ms = estimate(compute)

        def ms(*phases: fx.GraphModule) -> float:
            return sum(node_ms(node) for phase in phases for node in phase.graph.nodes)

        phases = graph.phases
        operations = (
            Operation.of(WHOLE_BACKWARD, ms(phases["backward"])),
            Operation.of(BETWEEN, 0.0),
            Operation.of(WHOLE_FORWARD, ms(phases["unique"], phases["ids"], phases["forward"])),
        )
        steps = StepGraph(operations, (), tuple(operation.name for operation in operations))
        on = streams.streams_of(device)
        return cls(schedule(steps, name), Recorder(on.clock() if on is not None else None))
