"""Gradients put where optimizers find them, on one process: each once, none shared, none that the loss is not of."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.ranks.announcement import Announcements
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.delivery import Delivery
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.graph import Gradient, Parameter

NAMES = ("weight", "bias")


def no_flow() -> Flow:
    """A flow that leaves nothing to the next step."""
    return Flow.within_steps(Announcements(Communicator(None)))


class Case:
    """A layer, and what a backward found of it."""

    def __init__(self, *, synchronised: bool = True) -> None:
        self.layer = nn.Linear(2, 3)
        self.state = ModelState(self.layer)
        self.deliver = Delivery(self.state, no_flow(), synchronised, own=not synchronised)

    def __call__(
        self, weight: Tensor, bias: Tensor, absent: Collection[str] = (), tangents: Collection[Tensor] = ()
    ) -> None:
        roles = [Gradient(Parameter(name)) for name in NAMES]
        self.deliver(roles, [weight, bias], frozenset(absent), frozenset(absent), list(tangents))


def test_no_two_parameters_share_a_gradient() -> None:
    module = nn.Module()
    module.register_parameter("one", nn.Parameter(torch.zeros(3)))
    module.register_parameter("two", nn.Parameter(torch.zeros(3)))
    found = torch.rand(3)
    roles = [Gradient(Parameter("one")), Gradient(Parameter("two"))]

    Delivery(ModelState(module), no_flow(), True, False)(roles, [found, found], frozenset(), frozenset(), [])

    one, two = module.get_parameter("one").grad, module.get_parameter("two").grad
    assert one is not None
    assert two is not None
    assert torch.equal(one, two)
    assert one.data_ptr() != two.data_ptr()


def test_a_gradient_lies_in_memory_as_its_parameter_does() -> None:
    case = Case()

    case(torch.rand(2, 3).t(), torch.rand(3))

    assert case.layer.weight.grad is not None
    assert case.layer.weight.grad.stride() == case.layer.weight.stride()
