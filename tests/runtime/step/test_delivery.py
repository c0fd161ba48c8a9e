"""Gradients put where optimizers find them, on one process: each once, none shared, none that the loss is not of."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import Tensor, nn

from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.ranks.announcement import Announcements
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.delivery import Delivery, delivered
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.graph import Gradient, OutputRole, Parameter, PendingGradients, PendingRows

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


def test_gradients_are_set_and_then_summed_up() -> None:
    case = Case()
    weight, bias = torch.rand(3, 2), torch.rand(3)

    case(weight.clone(), bias.clone())
    case(weight.clone(), bias.clone())

    assert torch.equal(case.layer.weight.grad, 2 * weight)  # type: ignore[arg-type]
    assert torch.equal(case.layer.bias.grad, 2 * bias)  # type: ignore[arg-type]


def test_a_parameter_that_the_loss_is_not_of_gets_none() -> None:
    case = Case()

    case(torch.rand(3, 2), torch.rand(3), absent=["bias"])

    assert case.layer.weight.grad is not None
    assert case.layer.bias.grad is None


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


def test_a_tensor_that_the_backward_was_given_stays_the_users() -> None:
    case, tangent = Case(), torch.rand(3)

    case(torch.rand(3, 2), tangent, tangents=[tangent])

    assert case.layer.bias.grad is not None
    assert case.layer.bias.grad.data_ptr() != tangent.data_ptr()


def test_a_gradient_lies_in_memory_as_its_parameter_does() -> None:
    case = Case()

    case(torch.rand(2, 3).t(), torch.rand(3))

    assert case.layer.weight.grad is not None
    assert case.layer.weight.grad.stride() == case.layer.weight.stride()


@pytest.mark.parametrize("synchronised", [True, False])
def test_what_is_not_reduced_is_remembered_until_it_is(synchronised: bool) -> None:
    case = Case(synchronised=synchronised)
    case.state.unreduced.update(["weight"] if synchronised else [])
    case.layer.weight.grad = torch.ones(3, 2)
    found = torch.rand(3, 2)

    case(found.clone(), torch.rand(3))

    # A reduced bucket took along what had been summed up; this rank's own sum goes on.
    assert torch.equal(case.layer.weight.grad, found if synchronised else found + 1)
    assert case.state.unreduced == (set() if synchronised else set(NAMES))


def test_hooks_of_an_own_gradient_run_once_and_change_it() -> None:
    case = Case(synchronised=False)
    case.state.hooked = frozenset(["weight"])
    seen: list[Tensor] = []

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * 2

    case.layer.weight.register_hook(double)
    found = torch.rand(3, 2)

    case(found.clone(), torch.rand(3))

    assert [torch.equal(each, found) for each in seen] == [True]
    assert torch.equal(case.layer.weight.grad, 2 * found)  # type: ignore[arg-type]


def test_what_a_backward_delivers_is_told_once_each_in_its_order() -> None:
    roles: list[OutputRole] = [Gradient(Parameter("b")), PendingGradients(0, ("c", "a")), Gradient(Parameter("b"))]

    assert delivered([*roles, PendingRows("t and 1 more", ("t", "u"))]) == ["b", "c", "a", "t", "u"]
