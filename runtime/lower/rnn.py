"""The kernels of `embrace::rnn_layer` and its backward: oneDNN, cuDNN, and the loop over time of `rnn_loop`.

Importing this file registers them. Shape legend: see `embrace_fx.vocabulary.rnn_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.library import impl

from embrace_fx.runtime.lower.rnn_loop import (
    Backward,
    Walk,
    gru_backward,
    gru_forward,
    lstm_backward,
    lstm_forward,
    rnn_backward,
    rnn_forward,
)
from embrace_fx.vocabulary.rnn_ops import LayerWeights, compute_dtype

# The numbers of the cells in oneDNN's and cuDNN's calls alike.
_CELL_NUMBERS = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


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
    """Computes one layer and direction of a recurrent network, as `embrace_fx.vocabulary.rnn_ops` describes."""
    walk = Walk.of(input, batch_sizes, reverse)
    if kernel == "loop":
        with _no_autocast(input):
            return _loop_forward(input, h0, c0, weights, cell, walk, save)
    if h0.shape[0] == 0:
        return _no_sequences(input, h0, c0, kernel, save)
    if kernel == "cudnn":
        return _cudnn_forward(input, h0, c0, weights, batch_sizes, cell, walk, save)
    assert c0 is not None  # oneDNN has LSTMs only
    return _mkldnn_forward(input, h0, c0, weights, reverse, save)


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
    """Computes the gradients of `rnn_layer`, as `embrace_fx.vocabulary.rnn_ops` describes."""
    sources = [*([input] if input_grad else []), h0, *([] if c0 is None else [c0]), *weights]
    grads = (grad_output, grad_h, grad_c)
    walk = Walk.of(input, batch_sizes, reverse)
    if kernel == "loop":
        with _no_autocast(input):
            found = _loop_backward(grads, input, h0, c0, weights, results, cell, walk, input_grad)
    elif h0.shape[0] == 0:
        return [torch.zeros_like(source, memory_format=torch.contiguous_format) for source in sources]
    elif kernel == "cudnn":
        found = _cudnn_backward(grads, input, h0, c0, weights, batch_sizes, results, cell, walk, input_grad)
    else:
        assert c0 is not None
        found = _mkldnn_backward(grads, input, h0, c0, weights, results, reverse)
    gradients = [*([found.input] if input_grad else []), found.h0, *([] if c0 is None else [found.c0]), *found.weights]
    # Kernels compute wider than some of their arguments; a gradient is as wide as what it belongs to.
    return [
        g.to(source.dtype).view(source.shape) for g, source in zip(gradients, sources, strict=True) if g is not None
    ]


def _no_autocast(input: Tensor) -> torch.autocast:
    """Autocast has had its say where the op was placed: what an op computes must not depend on who calls it."""
    return torch.autocast(input.device.type, enabled=False)


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _loop_forward(
    input: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor], cell: str, walk: Walk, save: bool
) -> list[Tensor]:
    wide = compute_dtype(input)
    x, h = input.reshape(-1, input.shape[-1]).to(wide), h0.to(wide)
    w = LayerWeights.of([weight.to(wide) for weight in weights])
    _, last = walk.ends(input.device)
    states = []
    if cell == "lstm":
        assert c0 is not None
        output, *saved = lstm_forward(x, h, c0.to(wide), w, walk)
        states = [saved[1][last].to(c0.dtype)]
    elif cell == "gru":
        output, *saved = gru_forward(x, h, w, walk)
    else:
        output, *saved = rnn_forward(x, h, w, walk, cell)
    output = output.to(h0.dtype)
    results = [output.view(*input.shape[:-1], h0.shape[1]), output[last], *states]
    return results + saved if save else results


def _loop_backward(
    grads: _Gradients,
    input: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    results: Sequence[Tensor],
    cell: str,
    walk: Walk,
    input_grad: bool,
) -> Backward:
    wide = compute_dtype(input)
    x, h = input.reshape(-1, input.shape[-1]).to(wide), h0.to(wide)
    w = LayerWeights.of([weight.to(wide) for weight in weights])
    output = results[0].reshape(-1, h0.shape[1]).to(wide)
    grad_output = _per_row(grads[0], grads[1], output, walk)
    if cell == "lstm":
        assert c0 is not None
        saved = results[3:]
        grad_cells = _per_row(None, grads[2], saved[1], walk)
        return lstm_backward(grad_output, grad_cells, x, h, c0.to(wide), w, [output, *saved], walk, input_grad)
    if cell == "gru":
        return gru_backward(grad_output, x, h, w, [output, *results[2:]], walk, input_grad)
    return rnn_backward(grad_output, x, h, w, output, walk, cell, input_grad)


def _per_row(grad_rows: Tensor | None, grad_final: Tensor | None, rows: Tensor, walk: Walk) -> Tensor:
    """A new (R, ...) gradient of `rows`: that of the rows themselves plus that of each sequence's final state."""
    total = torch.zeros_like(rows)
    if grad_rows is not None:
        total.copy_(grad_rows.reshape(rows.shape))
    if grad_final is not None:
        _, last = walk.ends(rows.device)
        total.index_add_(0, last, grad_final.to(rows.dtype))
    return total


def _no_sequences(input: Tensor, h0: Tensor, c0: Tensor | None, kernel: str, save: bool) -> list[Tensor]:
    """The results for an empty batch, which the fused kernels refuse."""
    results = [h0.new_empty((*input.shape[:-1], h0.shape[1])), h0.clone(), *([] if c0 is None else [c0.clone()])]
    if not save:
        return results
    workspace = input.new_empty(0, dtype=torch.uint8)
    return [*results, workspace] if kernel == "mkldnn" else [*results, workspace, input.new_empty(0)]


def _mkldnn_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    # Without biases the call still has their places; what stands there is not read.
    return [weight.contiguous() for weight in (weights if len(weights) == 4 else [*weights, *weights])]


def _mkldnn_forward(
    input: Tensor, h0: Tensor, c0: Tensor, weights: Sequence[Tensor], reverse: bool, save: bool
) -> list[Tensor]:
    # oneDNN hands out its workspace only where gradients are enabled. Autograd must not see parameters then: kernels
    # are called without the dispatcher, and what autograd noted would hold the workspace as long as the output lives.
    weights = [weight.detach() for weight in weights]
    with torch.set_grad_enabled(save):
        results = torch.ops.aten.mkldnn_rnn_layer(
            input.detach().contiguous(), *_mkldnn_weights(weights), h0.detach().contiguous(),
            c0.detach().contiguous(), reverse, [],
            _CELL_NUMBERS["lstm"], c0.shape[1], 1, len(weights) == 4, False, False, save,
        )  # fmt: skip
    return list(results) if save else list(results[:3])


def _mkldnn_backward(
    grads: _Gradients,
    input: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: Sequence[Tensor],
    results: Sequence[Tensor],
    reverse: bool,
) -> Backward:
    output, h_n, c_n, workspace = results
    # The call uses the workspace as scratch memory as well; a second backward reads only what the forward wrote.
    grad_input, *grad_weights, grad_h0, grad_c0 = torch.ops.aten.mkldnn_rnn_layer_backward(
        input.contiguous(), *_mkldnn_weights(weights), h0.contiguous(), c0.contiguous(), output, h_n, c_n, *grads,
        reverse, _CELL_NUMBERS["lstm"], c0.shape[1], 1, len(weights) == 4, True, False, [], False, workspace,
    )  # fmt: skip
    return Backward(grad_input, grad_h0, grad_c0, grad_weights[: len(weights)])


def _turned(rows: Tensor, shape: Sequence[int], walk: Walk) -> Tensor:
    """Contiguous rows in the order of the walk: cuDNN itself walks one direction only. Turning twice restores."""
    if not walk.reverse:
        return rows.contiguous()
    return rows.reshape(-1, rows.shape[-1])[walk.mirror(rows.device)].view(shape)


def _cudnn_forward(
    input: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    batch_sizes: Tensor | None,
    cell: str,
    walk: Walk,
    save: bool,
) -> list[Tensor]:
    output, h_n, c_n, reserve, packed_weights = torch.ops.aten._cudnn_rnn(
        _turned(input, input.shape, walk), list(weights), len(weights), None, h0.unsqueeze(0).contiguous(),
        None if c0 is None else c0.unsqueeze(0).contiguous(), *_cudnn_sizes(cell, weights), 1, False, 0.0, save, False,
        [] if batch_sizes is None else walk.sizes, None,
    )  # fmt: skip
    results = [_turned(output, output.shape, walk), h_n.squeeze(0), *([] if c0 is None else [c_n.squeeze(0)])]
    return [*results, reserve, packed_weights] if save else results


def _cudnn_backward(
    grads: _Gradients,
    input: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor],
    batch_sizes: Tensor | None,
    results: Sequence[Tensor],
    cell: str,
    walk: Walk,
    input_grad: bool,
) -> Backward:
    output, *_, reserve, packed_weights = results
    grad_output, grad_h, grad_c = grads
    # cuDNN writes into the reserve while it computes the gradients; an op that changes its arguments is not pure.
    grad_input, grad_h0, grad_c0, grad_weights = torch.ops.aten._cudnn_rnn_backward(
        _turned(input, input.shape, walk), list(weights), len(weights), packed_weights, h0.unsqueeze(0).contiguous(),
        None if c0 is None else c0.unsqueeze(0).contiguous(), _turned(output, output.shape, walk),
        None if grad_output is None else _turned(grad_output, output.shape, walk),
        None if grad_h is None else grad_h.unsqueeze(0).contiguous(),
        None if grad_c is None else grad_c.unsqueeze(0).contiguous(),
        *_cudnn_sizes(cell, weights), 1, False, 0.0, True, False, [] if batch_sizes is None else walk.sizes, None,
        reserve.clone(), [input_grad, True, c0 is not None, True],
    )  # fmt: skip
    return Backward(
        _turned(grad_input, input.shape, walk) if input_grad else None,
        grad_h0,
        None if c0 is None else grad_c0,
        list(grad_weights),
    )


def _cudnn_sizes(cell: str, weights: Sequence[Tensor]) -> tuple[int, int, int]:
    """The cell's number, its hidden size, and its projection's size or 0."""
    w = LayerWeights.of(weights)
    state_size = w.hh.shape[1]
    if w.projection is None:
        return _CELL_NUMBERS[cell], state_size, 0
    return _CELL_NUMBERS[cell], w.projection.shape[1], state_size


KERNELS: dict[str, Callable[..., list[Tensor]]] = {
    "embrace::rnn_layer": rnn_layer,
    "embrace::rnn_layer_backward": rnn_layer_backward,
}
"""Op name -> kernel: what a lowered program calls, without the dispatcher in between."""

for _name, _kernel in KERNELS.items():
    impl(_name, ("cpu", "cuda"))(_kernel)
