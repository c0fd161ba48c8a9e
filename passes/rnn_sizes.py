"""Computes the memory of recurrent layers that the graph does not show: oneDNN's workspace, and temporaries of the loop
over time.

Legend as in `embrace_fx.vocabulary.rnn_ops`: R rows of all steps, B sequences, I width of the input, H hidden size, P
width of the state, G gates.
"""

from __future__ import annotations

from math import prod

from torch import Tensor, fx

from embrace_fx.vocabulary.ops import op_name
from embrace_fx.vocabulary.rnn_ops import GATES, LayerWeights, compute_dtype
from embrace_fx.vocabulary.sizes import ExpectedSizes

_LAYER, _BACKWARD = "embrace::rnn_layer", "embrace::rnn_layer_backward"
_PAGE_BYTES = 4096


def saved_workspace_bytes(node: fx.Node, expected: ExpectedSizes) -> int | None:
    """Returns the bytes of the workspace that oneDNN saves for the backward of an RNN layer. Returns None if `node` is
    not a layer that oneDNN computes for training.

    Args:
        expected: the values to assume for data-dependent sizes.
    """
    if op_name(node) != _LAYER or node.args[-2:] != ("mkldnn", True):
        return None
    input_TBI, output_TBH = node.all_input_nodes[0].meta["val"], node.meta["val"][0]
    steps, sequences, width, own = map(expected.number, (*input_TBI.shape, output_TBH.shape[-1]))
    return lstm_workspace_bytes(steps, sequences, width, own, output_TBH.element_size())


def lstm_workspace_bytes(steps: int, sequences: int, width: int, hidden_size: int, itemsize: int) -> int:
    """Returns the bytes of oneDNN's LSTM workspace, which it saves for the backward, for one layer and direction.

    The workspace has the gates, the hidden states, the cells and their gradients. Each of these arrays begins at a
    page. Each row of an array fills whole cache lines, with one more line if all rows would map to the same cache sets.
    This layout was found by experiment (torch 2.13, float32).

    Args:
        steps, sequences: the length and the number of the sequences.
        width: the number of input features.
        hidden_size: the number of features of the hidden state.
        itemsize: the bytes of an element.
    """

    def padded_row(values: int) -> int:
        """Returns the number of elements to which oneDNN pads a row of `values` elements."""
        line = 64 // itemsize
        filled = -(-values // line) * line
        return filled + line if filled % 256 == 0 else filled

    of_steps = [padded_row(4 * hidden_size), padded_row(hidden_size)]
    of_layers = [
        *[padded_row(max(width, hidden_size))] * 3,
        *[hidden_size] * 2,
    ]
    # `steps + 1` makes the sum an upper bound.
    values = [*(steps * each for each in of_steps), *(2 * (steps + 1) * each for each in of_layers)]
    return sum(-(-sequences * each * itemsize // _PAGE_BYTES) * _PAGE_BYTES for each in values)


def scratch_bytes(node: fx.Node, expected: ExpectedSizes) -> int:
    """Returns the bytes of temporaries of an RNN layer that a loop over time steps computes, or of the layer's
    backward. Returns 0 for other nodes.

    Args:
        expected: the values of data-dependent sizes.
    """
    name = op_name(node)
    if name not in (_LAYER, _BACKWARD):
        return 0
    *_, cell, _, kernel, last = node.args
    if kernel != "loop":
        return 0
    assert isinstance(cell, str)
    of_input, of_weights = (0, 3) if name == _LAYER else (3, 6)
    input, h0 = (_fake_tensor(node.args[of_input + k]) for k in (0, 1))
    w = LayerWeights.from_list([_fake_tensor(each) for each in node.args[of_weights]])  # type: ignore[union-attr]
    gates = GATES[cell]
    rows = prod(map(expected.number, input.shape[:-1]))
    sequences, own = map(expected.number, h0.shape)
    hidden, width = w.hh.shape[0] // gates, w.ih.shape[1]
    if name == _LAYER:
        elements = sequences * hidden if cell == "lstm" else 0
        if not last:  # values that a backward would read are temporary here
            kept = {"lstm": gates + 1 + (w.projection is not None), "gru": gates + 1}.get(cell, 0)
            elements += rows * kept * hidden
    else:
        results = sum(prod(map(expected.number, tuple(each.shape))) for each in node.meta["val"])
        # Bytes in use throughout the loop, and additional bytes in use only at its start or only at its end.
        through, begins, ends = {
            "lstm": (rows * (own + (gates + 2) * hidden), rows * hidden, rows * own + sequences * gates * hidden),
            "gru": (rows * 6 * hidden, rows * hidden, 2 * gates * hidden * width),
        }.get(cell, (rows * 2 * own, rows * own, rows * own))
        elements = through + max(begins - results, ends)
        if w.projection is not None:
            elements += sequences * hidden
    return elements * compute_dtype(input).itemsize


def _fake_tensor(argument: object) -> Tensor:
    """Returns the fake tensor of an argument, which must be a node."""
    assert isinstance(argument, fx.Node)
    value: Tensor = argument.meta["val"]
    return value
