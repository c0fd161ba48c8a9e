"""What costs next to nothing is computed again: fewer bytes saved, the same bits, no more time than is allowed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import embrace_fx
from embrace_fx.cost.links import CORE, Compute
from embrace_fx.passes.dropout import EagerDropout
from embrace_fx.passes.memory import recompute_cheap
from embrace_fx.passes.memory.recompute_cheap import AT_MOST, RecomputeCheap
from embrace_fx.passes.node_cost import node_time_estimator
from embrace_fx.passes.pipeline import run_passes
from embrace_fx.passes.step_memory import step_memory
from tests.support.checkpointed import FORMS, IDS, Block, Model, assert_equal_gradients, gradients
from tests.support.graphs import analysed

SLOW = Compute(1e4, 1e10)
"""Matrix products take so long that everything else is cheap."""


class FeedForward(nn.Module):
    """A table, and layers whose inputs autograd saves twice: before and behind an activation, a norm, a mask."""

    def __init__(self, activation: Callable[[Tensor], Tensor], width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(100, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.activation = activation

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.dropout(self.activation(up(norm(x))), 0.1))
        return x.square().mean()


WORDS = torch.randint(100, (16, 64), generator=torch.Generator().manual_seed(0))


def masked(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * 2.0, -x)


ACTIVATIONS = [F.gelu, *(pytest.param(each, marks=pytest.mark.long) for each in (F.relu, F.silu))]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_same_bits_and_less_saved(activation: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = FeedForward(activation)
    plain = run_passes(analysed(model, WORDS), (EagerDropout(),)).graph
    compiled = embrace_fx.compile(FeedForward(activation))
    compiled.module.load_state_dict(model.state_dict())
    for _ in range(2):
        assert_equal_gradients(gradients(compiled.module, compiled, WORDS), gradients(model, model, WORDS))
    assert "_again" in str(compiled.graphs["backward"].graph)
    assert step_memory(RecomputeCheap(CORE)(plain)).saved_bytes < step_memory(plain).saved_bytes
    assert step_memory(RecomputeCheap(SLOW)(plain)).saved_bytes <= 0.85 * step_memory(plain).saved_bytes
    assert step_memory(RecomputeCheap(CORE)(plain)).peak_bytes <= step_memory(plain).peak_bytes


def test_what_would_hold_more_at_a_time_is_left_as_it_is() -> None:
    """All that a mask is made of comes again at once, where the backward holds the most already."""
    plain = run_passes(analysed(FeedForward(masked), WORDS), (EagerDropout(),)).graph
    assert step_memory(RecomputeCheap(CORE)(plain)).peak_bytes <= step_memory(plain).peak_bytes


def test_nothing_is_read_in_the_backward_that_may_have_been_written_meanwhile() -> None:
    """A batch that is used once the loss is there, as in eager mode, which has saved what it needs of it."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 64)
            self.up, self.down = nn.Linear(64, 2048), nn.Linear(2048, 1)  # slow, so that `relu` is cheap by comparison

        def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
            return self.down(self.up(self.table(ids) * torch.relu(scale))).square().mean()

    plain = Scaled()
    compiled = embrace_fx.compile(copy.deepcopy(plain))
    found: list[list[Tensor | None]] = []
    for model in (plain, compiled):
        scale = torch.ones(16, 64, 64)
        loss = model(WORDS, scale)
        scale.zero_()
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])

    torch.testing.assert_close(found[1], found[0])


def test_no_more_time_than_allowed() -> None:
    plain = run_passes(analysed(FeedForward(F.gelu), WORDS), (EagerDropout(),)).graph
    node_ms = node_time_estimator(CORE)
    lean = RecomputeCheap(CORE)(plain)
    step_ms, lean_ms = (sum(map(node_ms, step_memory(each).nodes)) for each in (plain, lean))
    assert lean_ms <= (1 + AT_MOST) * step_ms


def test_models_that_checkpoint_have_decided_already() -> None:
    graph = run_passes(analysed(Model(FORMS["not reentrant"], Block), IDS), (EagerDropout(),)).graph
    from embrace_fx.passes.memory.regions import RecomputeRegions  # noqa: PLC0415

    graph = RecomputeRegions()(graph)
    assert RecomputeCheap(SLOW)(graph) is graph


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.booleans(), st.lists(st.integers(0, 5), max_size=2)), min_size=2, max_size=6
    ),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_no_other_choice_saves_fewer_bytes(made: list[tuple[int, bool, list[int]]], read: list[bool]) -> None:
    """Of storages, each made of earlier ones, cheaply or not, and some read in the backward."""
    sizes = [size for size, _, _ in made]
    sources = {k: sorted({s % k for s in of}) for k, (_, is_cheap, of) in enumerate(made) if is_cheap and k and of}
    needed = [k for k in range(len(made)) if read[k]]
    saved = recompute_cheap.cheapest_to_save(sizes, sources, needed)
    assert _can_be_had(needed, saved, sources)
    choices = (set(c) for n in range(len(made) + 1) for c in itertools.combinations(range(len(made)), n))
    least = min(sum(sizes[k] for k in c) for c in choices if _can_be_had(needed, c, sources))
    assert sum(sizes[k] for k in saved) == least


def _can_be_had(needed: list[int], saved: set[int], sources: dict[int, list[int]]) -> bool:
    waiting = list(needed)
    while waiting:
        key = waiting.pop()
        if key not in saved:
            if key not in sources:
                return False
            waiting += sources[key]
    return True
