"""The kernels of the op `embrace::rnn_layer` and its backward: oneDNN, cuDNN, and the loop over time of `rnn_loop`.

Importing this file registers them. Shape legend: see `embrace_fx.vocabulary.rnn_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import impl

from embrace_fx.runtime.lower.rnn_loop import (
    Backward,
    LayerRows,
    TimeOrder,
    gru_backward,
    gru_forward,
    lstm_backward,
    lstm_forward,
    rnn_backward,
    rnn_forward,
)
from embrace_fx.vocabulary.rnn_ops import LayerWeights, compute_dtype

# The numbers by which both oneDNN and cuDNN identify the kind of cell.
_CELL_NUMBERS = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


class _Layer(NamedTuple):
    """The arguments of the op `rnn_layer`: one layer of a recurrent network in one direction."""

    input: Tensor
    h0: Tensor
    c0: Tensor | None
    weights: Sequence[Tensor]
    batch_sizes: Tensor | None
    cell: str
    reverse: bool
    kernel: str
    save: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the layer's output."""
        return *self.input.shape[:-1], self.h0.shape[1]

    def rows(self, walk: TimeOrder) -> LayerRows:
        """Returns the arguments as the "loop" kernel takes them."""
        dtype = compute_dtype(self.input)
        x, c0 = self.input.reshape(-1, self.input.shape[-1]).to(dtype), None if self.c0 is None else self.c0.to(dtype)
        weights = LayerWeights.from_list([weight.to(dtype) for weight in self.weights])
        return x, self.h0.to(dtype), c0, weights, walk


def rnn_layer(*arguments: Any) -> list[Tensor]:
    """Runs one layer of a recurrent network in one direction. Returns [output, final hidden state, final cell state if
    the layer is an LSTM, tensors saved for the backward]. `embrace_fx.vocabulary.rnn_ops` lists the arguments.
    """
    layer = _Layer(*arguments)
    walk = TimeOrder.of_input(layer.input, layer.batch_sizes, layer.reverse)
    if layer.kernel == "loop":
        with torch.autocast(layer.input.device.type, enabled=False):  # because the graph contains the casts
            return _loop_forward(layer, walk)
    if layer.h0.shape[0] == 0:
        return _empty_results(layer)
    return _cudnn_forward(layer, walk) if layer.kernel == "cudnn" else _mkldnn_forward(layer)


def rnn_layer_backward(grad_output: Any, grad_h: Any, grad_c: Any, *arguments: Any) -> list[Tensor]:
    """Computes the gradients of `rnn_layer`. Returns [gradient of the input if requested, gradient of h0, gradient of
    c0 if the layer is an LSTM, gradient of each weight].

    Args:
        grad_output, grad_h, grad_c: the gradients of the output and of the final states, or None.
        arguments: as `embrace_fx.vocabulary.rnn_ops` lists them.
    """
    *inputs, results, cell, reverse, kernel, input_grad = arguments
    given: list[Any] = [*inputs, cell, reverse, kernel, True]
    layer, grads = _Layer(*given), (grad_output, grad_h, grad_c)
    of_cells = [] if layer.c0 is None else [layer.c0]
    sources = [*([layer.input] if input_grad else []), layer.h0, *of_cells, *layer.weights]
    walk = TimeOrder.of_input(layer.input, layer.batch_sizes, reverse)
    if kernel == "loop":
        with torch.autocast(layer.input.device.type, enabled=False):
            found = _loop_backward(grads, layer, results, walk, input_grad)
    elif layer.h0.shape[0] == 0:
        return [torch.zeros_like(source, memory_format=torch.contiguous_format) for source in sources]
    elif kernel == "cudnn":
        found = _cudnn_backward(grads, layer, results, walk, input_grad)
    else:
        found = _mkldnn_backward(grads, layer, results)
    gradients = [*([found.input] if input_grad else []), found.h0, *([found.c0] if of_cells else []), *found.weights]
    # Kernels may compute in a wider dtype than an argument's; a gradient gets its argument's dtype.
    return [
        g.to(source.dtype).view(source.shape) for g, source in zip(gradients, sources, strict=True) if g is not None
    ]


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of a layer's output, final hidden state and final cell state; None where there is none."""


def _loop_forward(layer: _Layer, walk: TimeOrder) -> list[Tensor]:
    """Runs a layer's forward by a Python loop over time steps. Returns the results of `rnn_layer`."""
    rows, (_, last), states = layer.rows(walk), walk.ends(layer.input.device), list[Tensor]()
    if layer.c0 is not None:
        output, *saved = lstm_forward(rows)
        states = [saved[1][last].to(layer.c0.dtype)]
    else:
        output, *saved = gru_forward(rows) if layer.cell == "gru" else rnn_forward(rows, layer.cell)
    output = output.to(layer.h0.dtype)
    results = [output.view(layer.shape), output[last], *states]
    return results + saved if layer.save else results


def _loop_backward(
    grads: _Gradients, layer: _Layer, results: Sequence[Tensor], walk: TimeOrder, input_grad: bool
) -> Backward:
    """Computes a layer's gradients by a Python loop over time steps. `results` are those of `_loop_forward`."""
    rows = layer.rows(walk)
    output = results[0].reshape(-1, layer.h0.shape[1]).to(rows[0].dtype)
    grad_output = _row_gradients(grads[0], grads[1], output, walk)
    if layer.c0 is not None:
        grad_cells = _row_gradients(None, grads[2], results[4], walk)
        return lstm_backward(rows, [output, *results[3:]], grad_output, grad_cells, input_grad)
    if layer.cell == "gru":
        return gru_backward(rows, [output, *results[2:]], grad_output, input_grad)
    return rnn_backward(rows, output, grad_output, layer.cell, input_grad)


def _row_gradients(grad_rows: Tensor | None, grad_final: Tensor | None, rows: Tensor, walk: TimeOrder) -> Tensor:
    """Returns the gradient of rows (R, ...): the sum of that of all rows, and of that of each sequence's final state
    (B, ...), which is the row processed last. Either may be None.
    """
    total = torch.zeros_like(rows)
    if grad_rows is not None:
        total.copy_(grad_rows.reshape(rows.shape))
    if grad_final is not None:
        _, last = walk.ends(rows.device)
        total.index_add_(0, last, grad_final.to(rows.dtype))
    return total


def _empty_results(layer: _Layer) -> list[Tensor]:
    """Returns the results for an empty batch, which fused kernels do not support."""
    input, h0, c0 = layer.input, layer.h0, layer.c0
    results = [h0.new_empty(layer.shape), h0.clone(), *([] if c0 is None else [c0.clone()])]
    if not layer.save:
        return results
    workspace = input.new_empty(0, dtype=torch.uint8)
    return [*results, workspace] if layer.kernel == "mkldnn" else [*results, workspace, input.new_empty(0)]


def _mkldnn_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns the four weights that oneDNN's calls take."""
    # Without biases, pass the weights again: the call has arguments for biases, but does not read them.
    return [weight.contiguous() for weight in (weights if len(weights) == 4 else [*weights, *weights])]


def _mkldnn_forward(layer: _Layer) -> list[Tensor]:
    """Runs a layer's forward with oneDNN. Returns the results of `rnn_layer`."""
    # oneDNN returns its workspace only if gradients are enabled. Detach the parameters for this call: kernels run
    # without the dispatcher, and an autograd graph would keep the workspace in memory as long as the output.
    weights, save, c0 = [weight.detach() for weight in layer.weights], layer.save, layer.c0
    assert c0 is not None  # oneDNN supports only LSTMs here
    with torch.set_grad_enabled(save):
        results = torch.ops.aten.mkldnn_rnn_layer(
            layer.input.detach().contiguous(), *_mkldnn_weights(weights), layer.h0.detach().contiguous(),
            c0.detach().contiguous(), layer.reverse, [],
            _CELL_NUMBERS["lstm"], c0.shape[1], 1, len(weights) == 4, False, False, save,
        )  # fmt: skip
    return list(results) if save else list(results[:3])


def _mkldnn_backward(grads: _Gradients, layer: _Layer, results: Sequence[Tensor]) -> Backward:
    """Computes a layer's gradients with oneDNN. `results` are those of `_mkldnn_forward`."""
    output, h_n, c_n, workspace = results
    weights, c0 = layer.weights, layer.c0
    assert c0 is not None
    # The call uses parts of the workspace as scratch memory. A second backward still computes the same gradients.
    grad_input, *grad_weights, grad_h0, grad_c0 = torch.ops.aten.mkldnn_rnn_layer_backward(
        layer.input.contiguous(), *_mkldnn_weights(weights), layer.h0.contiguous(), c0.contiguous(), output, h_n, c_n,
        *grads, layer.reverse, _CELL_NUMBERS["lstm"], c0.shape[1], 1, len(weights) == 4, True, False, [], False,
        workspace,
    )  # fmt: skip
    return Backward(grad_input, grad_h0, grad_c0, grad_weights[: len(weights)])


def _reorder_for_cudnn(rows: Tensor, shape: Sequence[int], walk: TimeOrder) -> Tensor:
    """Reverses every sequence in time if the layer runs backward in time, because cuDNN is called only for layers that
    run forward. A second call restores the order.
    """
    if not walk.reverse:
        return rows.contiguous()
    return rows.reshape(-1, rows.shape[-1])[walk.reversal(rows.device)].view(shape)


def _cudnn_forward(layer: _Layer, walk: TimeOrder) -> list[Tensor]:
    """Runs a layer's forward with cuDNN. Returns the results of `rnn_layer`."""
    c0 = layer.c0
    output, h_n, c_n, reserve, packed_weights = torch.ops.aten._cudnn_rnn(
        *_cudnn_inputs(layer, walk, None), *_cudnn_sizes(layer), 1, False, 0.0, layer.save, False,
        [] if layer.batch_sizes is None else walk.sizes, None,
    )  # fmt: skip
    results = [
        _reorder_for_cudnn(output, output.shape, walk),
        h_n.squeeze(0),
        *([] if c0 is None else [c_n.squeeze(0)]),
    ]
    return [*results, reserve, packed_weights] if layer.save else results


def _cudnn_inputs(layer: _Layer, walk: TimeOrder, packed_weights: Tensor | None) -> tuple[Any, ...]:
    """Returns the first arguments of cuDNN's calls: (input, weights, number of weights, packed weights, h0, c0)."""
    weights, h0, c0 = list(layer.weights), layer.h0, layer.c0
    states = h0.unsqueeze(0).contiguous(), None if c0 is None else c0.unsqueeze(0).contiguous()
    return _reorder_for_cudnn(layer.input, layer.input.shape, walk), weights, len(weights), packed_weights, *states


def _cudnn_backward(
    grads: _Gradients, layer: _Layer, results: Sequence[Tensor], walk: TimeOrder, input_grad: bool
) -> Backward:
    """Computes a layer's gradients with cuDNN. `results` are those of `_cudnn_forward`."""
    output, *_, reserve, packed_weights = results
    grad_output, *grad_states = grads
    # Pass a copy of the reserve, because cuDNN writes into it, and this op must not change its arguments.
    grad_input, grad_h0, grad_c0, grad_weights = torch.ops.aten._cudnn_rnn_backward(
        *_cudnn_inputs(layer, walk, packed_weights), _reorder_for_cudnn(output, output.shape, walk),
        None if grad_output is None else _reorder_for_cudnn(grad_output, output.shape, walk),
        *(None if grad is None else grad.unsqueeze(0).contiguous() for grad in grad_states),
        *_cudnn_sizes(layer), 1, False, 0.0, True, False, [] if layer.batch_sizes is None else walk.sizes, None,
        reserve.clone(), [input_grad, True, layer.c0 is not None, True],
    )  # fmt: skip
    return Backward(
        _reorder_for_cudnn(grad_input, layer.input.shape, walk) if input_grad else None,
        grad_h0,
        None if layer.c0 is None else grad_c0,
        list(grad_weights),
    )


def _cudnn_sizes(layer: _Layer) -> tuple[int, int, int]:
    """Returns (cuDNN's number for the kind of cell, the hidden size, the projection's size or 0 without one)."""
    w, cell = LayerWeights.from_list(layer.weights), layer.cell
    state_size = w.hh.shape[1]
    if w.projection is None:
        return _CELL_NUMBERS[cell], state_size, 0
    return _CELL_NUMBERS[cell], w.projection.shape[1], state_size


KERNELS: dict[str, Callable[..., list[Tensor]]] = {
    "embrace::rnn_layer": rnn_layer,
    "embrace::rnn_layer_backward": rnn_layer_backward,
}
"""Op name -> the kernel that a lowered program calls directly, without the dispatcher."""

for _name, _kernel in KERNELS.items():
    impl(_name, ("cpu", "cuda"))(_kernel)
