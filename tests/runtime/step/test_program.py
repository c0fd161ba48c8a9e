"""A program on one process: what it runs, what it makes once, and what it says of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embrace_fx.capture import capture
from embrace_fx.cost.links import Cluster
from embrace_fx.passes.pipeline import analyse, run_passes, training_passes
from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.ranks.announcement import Announcement, Announcements
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.runtime.step.program import Program
from embrace_fx.runtime.step.step import run_step
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.step_variant import BackwardVariant, ForwardVariant, StepVariant


class Words(nn.Module):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 2)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        found: Tensor = (self.layer(self.table(ids)) * scale).square().mean()
        return found


BATCH = (torch.tensor([1, 2, 2]), torch.tensor([2.0, 3.0]))


@cache
def partitioned() -> TrainingGraph:
    """What a single process runs of it, with every gradient dense."""
    graph = analyse(capture(Words(), BATCH, {}, train=True).graph)
    return run_passes(graph, training_passes(Plan(1, (), ()), (), 0)).graph


@dataclass
class Case:
    model: Words
    program: Program
    made: list[StepVariant]


@pytest.fixture
def case() -> Case:
    return make()


def make(check: Callable[[Any], str | None] = lambda leaves: None) -> Case:
    torch.manual_seed(0)
    model, made = Words(), list[StepVariant]()

    def variant_graph(variant: StepVariant) -> TrainingGraph:
        made.append(variant)
        return partitioned()

    state, announcements = ModelState(model), Announcements(Communicator(None))
    program = Program(
        partitioned(),
        state,
        announcements,
        None,
        {},
        Flow.within_steps(announcements),
        lambda leaves: Announcement(failure=check(leaves)),
        links=Cluster(),
        variants=variant_graph,
    )
    return Case(model, program, made)


def step(case: Case, *leaves: Tensor) -> Tensor:
    (loss,) = run_step(case.program, leaves or BATCH, train=True)
    assert isinstance(loss, Tensor)
    return loss


def test_it_computes_what_the_model_does(case: Case) -> None:
    loss = step(case)
    loss.backward()
    found = {name: p.grad for name, p in case.model.named_parameters()}
    case.model.zero_grad()
    expected = case.model(*BATCH)
    expected.backward()

    torch.testing.assert_close(loss, expected)
    for name, parameter in case.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_a_second_backward_of_a_step_is_refused(case: Case) -> None:
    loss = step(case)
    loss.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="a second one for the results"):
        loss.backward()


def test_a_tensor_of_the_batch_gets_its_gradient(case: Case) -> None:
    scale = torch.tensor([2.0, 3.0], requires_grad=True)
    other = scale.detach().clone().requires_grad_()
    graph = analyse(capture(Words(), (BATCH[0], scale), {}, train=True).graph)
    graph = run_passes(graph, training_passes(Plan(1, (), ()), (), 0)).graph
    announcements = Announcements(Communicator(None))
    flow = Flow.within_steps(announcements)
    case.program = Program(graph, ModelState(case.model), announcements, None, {}, flow, links=Cluster())

    step(case, BATCH[0], scale).backward()
    case.model(BATCH[0], other).backward()

    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, other.grad)


def test_without_training_there_is_nothing_to_go_back_through(case: Case) -> None:
    (loss,) = run_step(case.program, BATCH, train=False)

    assert not loss.requires_grad


def test_a_phase_is_made_once_and_the_steady_one_is_there(case: Case) -> None:
    first, second = ForwardVariant("whole"), BackwardVariant(left=False)

    steady = case.program.phase(ForwardVariant()), case.program.phase(BackwardVariant())
    assert case.made == []
    for _ in range(2):
        assert case.program.phase(first) is case.program.phase(first)
        case.program.phase(second)
    assert case.made == [first, second]
    assert steady == (case.program.phase(ForwardVariant()), case.program.phase(BackwardVariant()))


def test_another_order_of_the_backward_makes_backwards_anew_and_no_forward(case: Case) -> None:
    forward, backward = ForwardVariant("whole"), BackwardVariant(left=False)
    before = case.program.phase(forward), case.program.phase(BackwardVariant())
    case.program.phase(backward)

    case.program.compute_as(partitioned())

    assert case.program.phase(forward) is before[0]
    assert case.program.phase(BackwardVariant()) is not before[1]
    case.program.phase(backward)
    assert case.made == [forward, backward, backward]


def test_what_is_wrong_with_a_batch_is_an_error_before_anything_runs() -> None:
    case = make(lambda leaves: f"found {len(leaves)} tensors")

    with pytest.raises(PeerFailure, match="found 2 tensors"):
        step(case)


def test_what_is_written_between_forward_and_backward_is_named(case: Case) -> None:
    ids, scale = BATCH[0].clone(), BATCH[1].clone()
    program, leaves = case.program, [ids, scale]

    assert program.name_written([], leaves) == ""
    assert program.name_written([scale], leaves) == "a tensor of the batch"
    assert program.name_written([case.model.layer.weight.detach()], leaves) == "layer.weight"
    assert program.name_written([torch.ones(1)], leaves) == "a result"


def test_a_write_between_forward_and_backward_is_refused(case: Case) -> None:
    leaves = BATCH[0].clone(), BATCH[1].clone()
    loss = step(case, *leaves)
    leaves[1].add_(1)

    with pytest.raises(RuntimeError, match="a tensor of the batch"):
        loss.backward()
    assert case.model.layer.weight.grad is None
