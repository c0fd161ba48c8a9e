"""Makes one call of the model a single node of the user's autograd graph.

Gradients of parameters that are to be differentiated again (`create_graph=True`) raise where they are: a mean over
ranks is no function that autograd knows. Under DDP, too, what is made of it again is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embrace_fx.runtime.launch.spans import spanned
from embrace_fx.runtime.step.program import Program
from embrace_fx.runtime.step.runnable_phase import call_without_autograd

if TYPE_CHECKING:
    from embrace_fx.runtime.step.step import Step

TWICE = (
    "backward(create_graph=True): gradients of a compiled model cannot be differentiated again. For gradients of "
    "gradients with respect to the batch, such as a gradient penalty, pass route='eager' to compile()."
)


class CallNode(torch.autograd.Function):
    """The autograd function of one call of the model."""

    @staticmethod
    def forward(ctx: Any, step: Step, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Runs the step's forward, and returns its results.

        Args:
            anchor: requires grad, so that the results have a backward even if no input requires grad.
            inputs: the tensors of the batch that require grad.
        """
        ctx.step = step
        ctx.set_materialize_grads(False)
        results = call_without_autograd(spanned, "forward", step.forward)
        program = step.program
        program.state.awaiting_backward.add(step)
        of_results = zip(program.results, results, strict=True)
        fixed = [r for i, r in of_results if i not in program.differentiable and isinstance(r, Tensor)]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Runs the step's backward, and returns the gradients of the inputs. A tangent is None if its result has no
        gradient.
        """
        program, twice = ctx.step.program, torch.is_grad_enabled()
        program.state.graph_task = torch._C._current_graph_task_id()
        anchor, _ = ctx.next_functions[0]
        # `torch.autograd.grad` and `backward(inputs=...)` stop at their inputs, so they do not run the anchor's node.
        wanted = torch._C._will_engine_execute_node(anchor)
        # Only the anchor has a next function, so no tensor of the batch gets a gradient.
        final = twice and wanted and not program.state.tables and len(ctx.next_functions) == 1
        keeps = not wanted and torch._C._autograd._get_current_graph_task_keep_graph()
        run, options = ctx.step.backward, {"for_parameters": wanted, "twice": twice and not final, "keeps": keeps}
        with program.state.pending.closed(grows=program.overlaps_steps):
            gradients = call_without_autograd(spanned, "backward", run, tangents, **options)
        if final:
            refuse_second_derivatives(program)
        return (None, None, *gradients)


class _NotDifferentiable(torch.autograd.Function):
    """Returns a gradient unchanged, and raises an error if that gradient is differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RuntimeError(TWICE)


def refuse_second_derivatives(program: Program) -> None:
    """Makes the gradients of a backward with `create_graph=True` raise if they are differentiated."""
    program.flow.wait()
    with torch.enable_grad():
        for parameter in program.state.parameters():
            if parameter.grad is not None:
                parameter.grad = _NotDifferentiable.apply(parameter.grad.detach().requires_grad_())  # type: ignore[no-untyped-call]
