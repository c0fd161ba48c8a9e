"""One call of the model as one node of the user's autograd graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embrace_fx.runtime.launch.spans import span
from embrace_fx.runtime.step.phases import autocast_is_in_the_graph
from embrace_fx.runtime.step.twice import make_final

if TYPE_CHECKING:
    from embrace_fx.runtime.step.step import Step


class CallNode(torch.autograd.Function):
    """One call of the model as one node of the user's autograd graph."""

    @staticmethod
    def forward(ctx: Any, step: Step, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        with span("forward"):
            results = step.forward()
        program = step.program
        program.state.awaiting_backward.add(step)
        fixed = [r for i, r in zip(program.results, results, strict=True) if i not in program.differentiable]
        ctx.mark_non_differentiable(*(r for r in fixed if isinstance(r, Tensor)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        program, twice = ctx.step.program, torch.is_grad_enabled()
        program.state.graph_task = torch._C._current_graph_task_id()
        anchor, _ = ctx.next_functions[0]  # not reached by `torch.autograd.grad` or `backward(inputs=...)`
        with torch.no_grad(), autocast_is_in_the_graph():
            wanted = torch._C._will_engine_execute_node(anchor)
            final = twice and wanted and not program.state.tables and len(ctx.next_functions) == 1  # of no batch
            with span("backward"), program.state.pending.closed():
                gradients = ctx.step.backward(tangents, for_parameters=wanted, twice=twice and not final)
        if final:
            make_final(program)
        return (None, None, *gradients)
