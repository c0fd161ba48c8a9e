"""Ops for one layer and direction of an RNN, LSTM or GRU, and for its backward, without unrolling over time.

Contract
    `embrace::rnn_layer` and `embrace::rnn_layer_backward` are pure: everything the backward needs is an argument. The
    cells compute what the documentation of `torch.nn.LSTM`, `GRU` and `RNN` defines, gates in torch's order.

Shape legend
    T steps; B sequences; R rows: T * B, or the sum of `batch_sizes` if sequences are packed; I width of the input;
    H hidden size; P width of the state h: H, or the projection's size of an LSTM with one; G gates of the cell.

Kernels, chosen at capture and visible in the graph
    "mkldnn": oneDNN's fused LSTM (CPU). "cudnn": cuDNN (CUDA). "loop": one matrix product for the input of all steps,
    then a loop over time (any device, cell and dtype).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import register_autograd

from embrace_fx.vocabulary.fake_results import empty_as, op, unknown_size

GATES: dict[str, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Cell -> its number of gates."""


class LayerWeights(NamedTuple):
    """The weights of one layer in one direction. G is the number of gates, I the size of the input, H the hidden size,
    and P the size of the output (H without a projection).

    Attributes:
        ih, hh: the weights of the input (G*H, I) and of the hidden state (G*H, P).
        bias_ih, bias_hh: biases (G*H,), or None.
        projection: the projection (P, H) of an LSTM's hidden state, or None.
    """

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    projection: Tensor | None

    @classmethod
    def from_list(cls, weights: Sequence[Tensor]) -> LayerWeights:
        """Returns the weights from a list in the order of `torch.nn.RNNBase`: the weights of the input and of the
        hidden state, then both biases, then the projection. The list has two to five entries, because biases and
        projection may be missing.
        """
        has_biases = len(weights) >= 4
        bias_ih, bias_hh = (weights[2], weights[3]) if has_biases else (None, None)
        projection = weights[-1] if len(weights) in (3, 5) else None
        return cls(weights[0], weights[1], bias_ih, bias_hh, projection)


def compute_dtype(input: Tensor) -> torch.dtype:
    """Returns the dtype in which the "loop" kernel computes for this input: at least float32, because the state is
    carried over many steps.
    """
    return torch.promote_types(input.dtype, torch.float32)


@op(
    "rnn_layer",
    "(Tensor input, Tensor h0, Tensor? c0, Tensor[] weights, Tensor? batch_sizes, str cell, bool reverse, str kernel,"
    " bool save) -> Tensor[]",
)
def rnn_layer(
    input: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    batch_sizes: Tensor | None,
    cell: str,
    reverse: bool,
    kernel: str,
    save: bool,
) -> list[Tensor]:
    """Runs one layer of an RNN, LSTM or GRU in one direction.

    T is the number of steps, and B of sequences. I, H and P are the sizes of input, cell and output. R is T * B or, for
    a packed input, the sum of `batch_sizes`.

    Args:
        input: (T, B, I), or (R, I) packed as `torch.nn.utils.rnn.PackedSequence` packs it.
        h0: the initial hidden state (B, P).
        c0: the initial cell state (B, H) of an LSTM, None for other cells.
        weights: as `LayerWeights.from_list` reads them.
        batch_sizes: (T,) int64 on the host if the input is packed, else None.
        cell: a key of `GATES`.
        reverse: whether to run from the last step to the first. The output stays in the input's order.
        kernel: "mkldnn", "cudnn" or "loop".
        save: whether to also return the values that the backward needs.

    Returns:
        A list of the output (T, B, P) or (R, P) and h_n (B, P), in the dtype of `h0`, and for an LSTM c_n (B, H). With
            `save`, the values for the backward follow. They depend on the kernel:

        "mkldnn": oneDNN's workspace (uint8).
        "cudnn": the reserve (uint8) and the packed weights.
        "loop", LSTM: the activated gates (R, 4 * H), the cell states (R, H) and, with a projection, the hidden states
            before it (R, H).
        "loop", GRU: the activated gates (R, 3 * H) and the recurrent half of the new gate (R, H).
    """
    w = LayerWeights.from_list(weights)
    hidden_size = w.hh.shape[0] // GATES[cell]
    results = [
        empty_as(h0, (*input.shape[:-1], h0.shape[1])),
        torch.empty_like(h0, memory_format=torch.contiguous_format),
    ]
    if c0 is not None:
        results.append(torch.empty_like(c0, memory_format=torch.contiguous_format))
    if not save:
        return results
    if kernel == "mkldnn":
        return [*results, empty_as(input, (unknown_size(),), dtype=torch.uint8)]
    if kernel == "cudnn":
        reserve = empty_as(input, (unknown_size(),), dtype=torch.uint8)
        return [*results, reserve, empty_as(input, (unknown_size(),))]
    rows = input.shape[0] if batch_sizes is not None else input.shape[0] * input.shape[1]
    widths = {
        "lstm": (4 * hidden_size, hidden_size) + (() if w.projection is None else (hidden_size,)),
        "gru": (3 * hidden_size, hidden_size),
    }.get(cell, ())
    return [*results, *(empty_as(input, (rows, width), dtype=compute_dtype(input)) for width in widths)]


@op(
    "rnn_layer_backward",
    "(Tensor? grad_output, Tensor? grad_h, Tensor? grad_c, Tensor input, Tensor h0, Tensor? c0, Tensor[] weights,"
    " Tensor? batch_sizes, Tensor[] results, str cell, bool reverse, str kernel, bool input_grad) -> Tensor[]",
)
def rnn_layer_backward(
    grad_output: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    input: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    batch_sizes: Tensor | None,
    results: Sequence[Tensor],
    cell: str,
    reverse: bool,
    kernel: str,
    input_grad: bool,
) -> list[Tensor]:
    """Computes the gradients of one layer of an RNN, LSTM or GRU. Returns the gradients of [input if `input_grad`, h0,
    c0 of an LSTM, each weight], in their shapes and dtypes.

    Args:
        grad_output, grad_h, grad_c: gradients of the layer's output, h_n and c_n. None stands for zero.
        results: all results of `rnn_layer` with `save`.
        input_grad: whether the input needs a gradient.

    The other arguments are those of `rnn_layer`.
    """
    sources = [*([input] if input_grad else []), h0, *([] if c0 is None else [c0]), *weights]
    return [torch.empty_like(source, memory_format=torch.contiguous_format) for source in sources]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Saves what the backward of the op `rnn_layer` reads in the autograd context `ctx`."""
    input, h0, c0, weights, batch_sizes, ctx.cell, ctx.reverse, ctx.kernel, save = inputs
    if not save:
        raise RuntimeError(
            "embrace::rnn_layer: a gradient was requested, but the layer ran with save=False and kept no values for "
            "the backward. Capture the model with gradients enabled."
        )
    ctx.num_weights, ctx.num_results = len(weights), 2 if c0 is None else 3
    ctx.mark_non_differentiable(*output[ctx.num_results :])
    # Keep missing gradients None, because zeros of the size of the saved gates would cost as much as the cell.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(input, h0, c0, batch_sizes, *weights, *output)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Returns the gradients of the arguments of the op `rnn_layer`, for autograd.

    Args:
        grads: the gradient of each result of the op, or None for a result that has no gradient.
    """
    input, h0, c0, batch_sizes, *rest = ctx.saved_tensors
    weights, results = rest[: ctx.num_weights], rest[ctx.num_weights :]
    grad_c = grads[2] if c0 is not None else None
    input_grad = ctx.needs_input_grad[0]
    of_call = (ctx.cell, ctx.reverse, ctx.kernel, input_grad)
    gradients = torch.ops.embrace.rnn_layer_backward(
        grads[0], grads[1], grad_c, input, h0, c0, weights, batch_sizes, results, *of_call
    )
    grad_input = gradients.pop(0) if input_grad else None
    grad_h0 = gradients.pop(0)
    grad_c0 = gradients.pop(0) if c0 is not None else None
    return grad_input, grad_h0, grad_c0, gradients, None, None, None, None, None


register_autograd("embrace::rnn_layer", _backward, setup_context=_setup_context)
