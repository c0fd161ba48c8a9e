"""The memory model of a step, on graphs made by hand."""

from __future__ import annotations

import cProfile
import operator
import pstats

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import embrace_fx.vocabulary.ops  # noqa: F401  (declares the ops)
from embrace_fx.passes.rnn_sizes import lstm_workspace_bytes
from embrace_fx.passes.step_memory import memory_of

embrace = torch.ops.embrace


def _bucket(count: int) -> list[fx.Node]:
    """The nodes of a bucket of so many gradients, packed and unpacked, each then taken out and returned."""
    graph = fx.Graph()
    gradient = graph.placeholder("gradient")
    packed = graph.call_function(embrace.pack_bucket.default, ([gradient] * count, 0.5))
    unpacked = graph.call_function(embrace.unpack_bucket.default, (packed, [gradient] * count))
    taken = [graph.call_function(operator.getitem, (unpacked, k)) for k in range(count)]
    graph.output(tuple(taken))
    with FakeTensorMode():
        gradient.meta["val"] = torch.empty(2, 4)
        packed.meta["val"] = embrace.pack_bucket([gradient.meta["val"]] * count, 0.5)
        unpacked.meta["val"] = embrace.unpack_bucket(packed.meta["val"], [gradient.meta["val"]] * count)
    for node, value in zip(taken, unpacked.meta["val"], strict=True):
        node.meta["val"] = value
    return [gradient, packed, unpacked, *taken]


def _calls(count: int) -> int:
    """Calls of Python functions for what a bucket of so many gradients holds."""
    gradient, *nodes = _bucket(count)
    profiler = cProfile.Profile()
    with profiler:
        assert memory_of([gradient, *nodes], 0, nodes[2:]).peak_bytes == (count + 1) * 32
    return pstats.Stats(profiler).total_calls  # type: ignore[attr-defined]


def test_what_a_bucket_holds_is_found_in_proportion_to_its_gradients() -> None:
    few, more, many = (_calls(count) for count in (16, 32, 64))
    assert (many - more) < 2.2 * (more - few)  # in proportion: 2; with the square: 4


@pytest.mark.parametrize(
    ("steps", "sequences", "width", "own"),
    [(64, 64, 64, 64), (2, 64, 112, 64), (20, 64, 128, 256), (40, 8, 100, 100), (7, 5, 33, 65), (12, 8, 64, 512)],
)
def test_what_an_lstm_saves_for_its_backward(steps: int, sequences: int, width: int, own: int) -> None:
    state = torch.zeros(1, sequences, own)
    weights = [torch.zeros(4 * own, *rest) for rest in ((width,), (own,), (), ())]
    input_TBI = torch.zeros(steps, sequences, width)
    *_, workspace = torch.ops.aten.mkldnn_rnn_layer(
        input_TBI, *weights, state, state, False, [], 2, own, 1, True, False, False, True
    )
    found = lstm_workspace_bytes(steps, sequences, width, own, 4)
    assert found == pytest.approx(workspace.nbytes, rel=0.03)  # to the byte where its pages and cache lines are ours
