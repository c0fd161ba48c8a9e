"""What a compiled model shows to its user: report, graphs, schedule, and recorded steps."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from embrace_fx.passes.scheduler.schedule_facts import compute_facts
from embrace_fx.passes.step_memory import StepMemory
from embrace_fx.runtime.launch.timeline import gather_timeline
from embrace_fx.runtime.tables.table import Member
from embrace_fx.session.eager_calls import EagerCalls
from embrace_fx.session.programs import Programs
from embrace_fx.setup.context import Context
from embrace_fx.viz.graphs import Graphs
from embrace_fx.viz.why import compare_to_prediction, explain_step
from embrace_fx.vocabulary.operation_id import LANES
from embrace_fx.vocabulary.picture_facts import PictureFacts
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.plan_summary import give_advice
from embrace_fx.vocabulary.plan_text import preformatted, render, terminal_width
from embrace_fx.vocabulary.schedule import Schedule, Timeline
from embrace_fx.vocabulary.step_parts import SHARES, Share


class Views:
    """Creates what a compiled model shows to its user: plan, graphs, schedule, timeline, report and metrics."""

    def __init__(self, context: Context, programs: Programs, eager: EagerCalls) -> None:
        self._context = context
        self._eager = eager
        self._programs = programs
        self._timeline: Timeline | None = None

    @property
    def plan(self) -> Plan:
        """The current plan, available after the first training call."""
        return self._programs.in_use.plan

    @property
    def graphs(self) -> Graphs:
        """The graphs of the last training step that was compiled."""
        return self._programs.in_use.graphs.set_eager_reason(self._eager.reason)

    def report(self) -> Report:
        """Returns a text with the plan and its reasons, the time of measured steps, the memory, and advice."""
        context, pipeline, plan = self._context, self._programs.in_use, self.plan
        shares_ms, schedule = context.optimizer_hooks.recorder.step_times.shares_ms(), pipeline.schedule
        parts = [render(plan, folded=True) + context.communicator.rounding_report()]
        if shares_ms is not None and (found := explain_step(shares_ms, "A step of this rank takes")) is not None:
            # Eager forwards have no predicted step time, and a prediction from assumed links would be useless.
            predicts = not self._eager.reason and plan.links_are != "assumed"
            unlike = (
                compare_to_prediction(shares_ms, pipeline.decided) if predicts and pipeline.decided is not None else ""
            )
            parts.append(textwrap.fill(f"{found} {unlike}".rstrip(), terminal_width()))
        text = "\n".join(filter(None, (*parts, give_advice(plan))))
        if reason := self._eager.reason:
            text += f"\n\nroute: eager; tables are whole, and updates do not overlap the next forward: {reason}"
        if tables := context.state.tables:
            step_ms = None if schedule is None else schedule.without_storage_ms
            if shares_ms is not None:
                step_ms = sum(shares_ms.values()) - shares_ms["storage"]
            first = {space.name: space.tables[0] for space in plan.spaces}
            beyond = {first.get(name, name): of.describe(step_ms) for name, of in pipeline.memory.items()}
            text += f"\n\n{tables_report(tables, context.communicator.world_size, beyond)}"
        if (held := pipeline.step_memory()) is not None:
            text += f"\n\n{memory_report(held, context.model, context.optimizer_hooks.known_optimizers.optimizers)}"
        return Report(text)

    def metrics(self) -> dict[str, float]:
        """Returns metrics by name: predicted bytes and, once measured, the times of the last complete step."""
        steps, plan = self._context.optimizer_hooks.recorder.step_times.steps, self.plan
        found = {
            "sent_bytes_predicted": float(plan.sent_bytes_per_step),
            "sent_bytes_ddp": float(sum(d.ddp_bytes_per_step for d in plan)),
            "tables_sharded": float(len(plan.divided)),
        }
        if steps:
            parts, sent_bytes = steps[-1]
            found |= {_METRICS[share]: parts.get(share, 0.0) * 1e3 for share in SHARES}
            found |= {"step_ms": sum(parts.values()) * 1e3, "sent_bytes": float(sent_bytes)}
        return found

    @property
    def schedule(self) -> Schedule:
        """The current schedule, available after the first training step."""
        if (found := self._programs.in_use.schedule) is None:
            raise RuntimeError(_NOT_SCHEDULED)
        return found

    def background(self) -> PictureFacts:
        """Returns the facts that a picture shows beside the schedule."""
        return compute_facts(self.plan, self.schedule)

    @property
    def timeline(self) -> Timeline:
        """The timeline of all ranks, measured by the last `record()`."""
        if self._timeline is None:
            raise RuntimeError("There is no timeline yet. Train a few steps inside `with model.record():`.")
        return self._timeline

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Records the training steps that run inside the context."""
        programs, recording = self._programs, None
        if programs.pipeline is not None and programs.pipeline.recorder is None:
            raise RuntimeError(_NOT_SCHEDULED)
        programs.records = True
        programs.start_recording()
        try:
            yield
        finally:
            programs.records = False
            recorder = None if programs.pipeline is None else programs.pipeline.recorder
            if recorder is not None and recorder.recording is not None:
                recording = recorder.stop()
        if recording is None:
            raise RuntimeError("No training step ran inside `with model.record():`. Train a few steps in it.")
        self._timeline = gather_timeline(self._context.communicator, recording, self.schedule.steps)


class Report(str):
    """A report as text. A notebook shows it with its line breaks."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Returns the report as HTML, for notebooks."""
        return preformatted(self)


def memory_report(step_memory: StepMemory, model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Returns a text about this rank's memory: the measured memory of parameters and optimizer state, and the memory
    that a step is predicted to use over time.
    """
    again = sum("again" in node.meta for node in step_memory.nodes)
    state = [value for each in optimizers for value in pytree.tree_leaves(dict(each.state))]
    lines = [
        "memory of this rank (steps predicted, the rest measured)",
        f"  parameters and buffers  {_mib(_nbytes([*model.parameters(), *model.buffers()]))}",
        f"  optimizer state         {_mib(_nbytes(state))}",
        f"  saved for the backward  {_mib(step_memory.saved_bytes)} in {len(step_memory.saved)} storages"
        + (f"; {again} nodes run again" if again else ""),
        f"  most at a time          {_mib(step_memory.peak_bytes)} in forward and backward",
        f"  |{step_memory.as_line()}|  forward to backward",
    ]
    return "\n".join(lines)


def tables_report(tables: Mapping[str, Member], ranks: int, beyond: Mapping[str, str]) -> str:
    """Returns a text with the memory of each sharded table: predicted for the rank with the most, and measured on this
    rank.

    Args:
        ranks: the number of ranks.
        beyond: texts about the predicted storage reads of tables larger than memory, by name of the table.
    """
    rows = [
        ("", *("parameters", "gradient", "state") * 2),
        *((name, *map(_mib, (*of.predicted_bytes(ranks), *of.held_bytes()))) for name, of in tables.items()),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    remarks = ((of.store.remark, beyond.get(name) and f"  {beyond[name]}") for name, of in tables.items())
    aligned += filter(None, chain.from_iterable(remarks))
    return "\n".join(["tables of this rank: predicted, then measured", *(f"  {each}" for each in aligned)])


def _nbytes(values: Iterable[Any]) -> int:
    """Returns the bytes of the tensors among values."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def _mib(nbytes: int | None) -> str:
    """Returns a number of bytes as text in MiB, or "not known yet" for None."""
    return "not known yet" if nbytes is None else f"{nbytes / 2**20:,.2f} MiB"


_METRICS: Mapping[Share, str] = {
    share: f"{'wait_' if share in LANES else ''}{share.replace(' ', '_')}_ms" for share in SHARES
}
"""Maps each part of a step to its name among the metrics, such as "loader_ms" or "wait_dense_ms"."""

_NOT_SCHEDULED = (
    "The model is on several devices, but only a model on the CPU or on one GPU has a schedule. To see the schedule "
    "that the model would have on one device, use embrace_fx.plan(model, batch, world_size=...).schedule."
)
