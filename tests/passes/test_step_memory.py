"""The memory model of a step."""

from __future__ import annotations

import pytest
import torch

import embrace_fx.vocabulary.ops  # noqa: F401  (declares the ops)
from embrace_fx.passes.rnn_sizes import lstm_workspace_bytes


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
    assert found == pytest.approx(workspace.nbytes, rel=0.03)  # exact if pages and cache lines have the assumed sizes
