"""Gradients that are to be differentiated again (`create_graph=True`): those of parameters raise where they are.

A mean over ranks is no function that autograd knows. Under DDP, too, what is made of it again is wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.step.program import Program

TWICE = (
    "expected a backward of the compiled model without create_graph=True, in backward(), found one with it: its "
    "gradients cannot be differentiated again. Pass route='eager' to compile(): the batch's gradients can be then."
)


class _Final(torch.autograd.Function):
    """A gradient as it is."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RuntimeError(TWICE)


def make_final(program: Program) -> None:
    """Has gradients require grad, as after `backward(create_graph=True)`, and raise where they are differentiated."""
    if program.flow is not None:
        program.flow.materialise()
    with torch.enable_grad():
        for parameter in program.state.parameters():
            if parameter.grad is not None:
                parameter.grad = _Final.apply(parameter.grad.detach().requires_grad_())  # type: ignore[no-untyped-call]
