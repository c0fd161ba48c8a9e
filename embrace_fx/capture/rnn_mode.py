"""Keeps recurrent layers as single ops while a model is traced. Torch would unroll them over time steps.

Under `KeepRnnWhole()` a call of `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` (what `torch.nn.LSTM`, `GRU` and `RNN`
call, in plain Python and in a Dynamo graph) becomes one `embrace::rnn_layer` per layer and direction, with torch's own
dropout between the layers.

rewrite: out, h, c = lstm(x, (h0, c0), weights of two layers, ..., batch_first=True)
     ->  x_TBI = x.transpose(0, 1)
         y, h1, c1, workspace1 = rnn_layer(x_TBI, h0[0], c0[0], weights[:4], None, "lstm", False, "mkldnn", True)
         z, h2, c2, workspace2 = rnn_layer(dropout(y), h0[1], c0[1], weights[4:], None, "lstm", False, "mkldnn", True)
         out, h, c = z.transpose(0, 1), stack([h1, h2]), stack([c1, c2])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import embrace_fx.vocabulary.rnn_ops  # noqa: F401  (declares the ops)

CELLS: dict[Callable[..., Any], str] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "rnn_tanh",
    torch.rnn_relu: "rnn_relu",
}


class KeepRnnWhole(TorchFunctionMode):
    """A torch function mode that turns every recurrent network into one op per layer and direction.

    Args:
        kernel: the kernel of every layer ("cudnn", "mkldnn" or "loop"), or None for the fastest that supports it.
            "loop" supports any layer. Use "loop" if only shapes are needed: Dynamo runs each call on fake tensors, and
            cannot handle the workspace of a fused kernel, whose size is unknown.
    """

    def __init__(self, kernel: str | None = None) -> None:
        super().__init__()
        self._kernel = kernel

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        cell = CELLS.get(func)
        return func(*args, **kwargs) if cell is None else rnn_as_ops(cell, *args, kernel=self._kernel, **kwargs)


def rnn_as_ops(kind: str, *args: Any, kernel: str | None = None, **kwargs: Any) -> Any:
    """Computes `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu` with one op per layer and direction.

    A graph calls this instead of torch's functions, so that tracing the graph needs no mode, which would intercept
    every function and every tensor access.

    Args:
        kind: the function to compute: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        args, kwargs: the arguments of torch's function.
        kernel: the kernel of every layer ("cudnn", "mkldnn" or "loop"), or None for the fastest that supports it.
    """
    # For packed sequences, the second argument is `batch_sizes`, and there is no `batch_first`.
    if len(args) > 3 and isinstance(args[3], list | tuple):
        args, kwargs = (args[0], *args[2:]), {**kwargs, "batch_sizes": args[1]}
    if "data" in kwargs:
        kwargs["input"] = kwargs.pop("data")
    return _run_network(kind, kernel, *args, **kwargs)


@dataclass(frozen=True)
class _RnnOptions:
    """The options that all layers of a recurrent network share.

    Attributes:
        cell: the kind of network: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        kernel: the kernel of every layer ("cudnn", "mkldnn" or "loop"), or None for the fastest that supports it.
        num_layers: the number of layers.
        num_directions: 1, or 2 for bidirectional layers.
        dropout: the probability of dropout between the layers; 0 in evaluation mode.
        batch_sizes: the batch sizes of a packed input, or None.
    """

    cell: str
    kernel: str | None
    num_layers: int
    num_directions: int
    dropout: float
    batch_sizes: Tensor | None


def _run_network(
    cell: str,
    kernel: str | None,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Runs a recurrent network as one op for each layer and direction. Returns the output, h_n and, for an LSTM, c_n.

    All arguments after `kernel` are those of `torch.lstm`; `batch_sizes` is None unless the input is packed.

    Args:
        cell: the kind of network: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        kernel: the kernel of every layer, or None for the fastest that supports it.
    """
    stack = _RnnOptions(cell, kernel, num_layers, 1 + bidirectional, dropout if train else 0.0, batch_sizes)
    # Kernels need contiguous memory with time first. Copy here, so that the backward can read the same copy.
    input_TBI = input.transpose(0, 1).contiguous() if batch_first else input
    output, *states = _run_layers(stack, input_TBI, hx, params)
    return (output.transpose(0, 1) if batch_first else output, *states)


def _run_layers(
    stack: _RnnOptions, input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Runs all layers of a recurrent network. Returns the output, h_n and, for an LSTM, c_n.

    Args:
        stack: the options of all layers.
        input: shape (T, B, I) for T time steps, B sequences and I features, or (R, I) for a packed input with R rows.
        hx, params: the initial states and flat weights, as `torch.lstm` takes them.
    """
    is_lstm = stack.cell == "lstm"
    h0 = (hx[0] if is_lstm else hx).unbind(0)  # type: ignore[union-attr]
    c0 = hx[1].unbind(0) if is_lstm else [None] * len(h0)
    per_layer = len(params) // len(h0)
    states: list[list[Tensor]] = []
    for layer in range(stack.num_layers):
        outputs = []
        for direction in range(stack.num_directions):
            index = layer * stack.num_directions + direction
            weights = list(params[index * per_layer : (index + 1) * per_layer])
            output, *state = _run_layer(stack, input, h0[index], c0[index], weights, reverse=direction == 1)
            outputs.append(output)
            states.append(state)
        input = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if stack.dropout > 0 and layer < stack.num_layers - 1:
            input = torch.dropout(input, stack.dropout, True)
    return (input, *(torch.stack(state) for state in zip(*states, strict=True)))


def _run_layer(
    stack: _RnnOptions, input: Tensor, h0: Tensor, c0: Tensor | None, weights: list[Tensor], reverse: bool
) -> list[Tensor]:
    """Runs one layer in one direction. Returns its output, h_n and, for an LSTM, c_n.

    Args:
        stack: the options of all layers.
        input: shape (T, B, I) for T time steps, B sequences and I features, or (R, I) for a packed input with R rows.
        h0: the initial hidden state.
        c0: the initial cell state of an LSTM, else None.
        weights: the layer's weights, and biases if it has any, in the order of `torch.lstm`.
        reverse: whether the layer runs backward in time.
    """
    projected = len(weights) in (3, 5)
    kernel = stack.kernel or choose_kernel(
        stack.cell, _cast_for_autocast(input), projected, stack.batch_sizes is not None
    )
    input, weights = _cast_for_autocast(input), [_cast_for_autocast(weight) for weight in weights]
    # Eager autocast narrows the inputs of matrix products and fused kernels. State that element-wise code carries from
    # step to step keeps its dtype: the cell of an LSTM, the hidden state of a GRU.
    if kernel != "loop" or projected or stack.cell.startswith("rnn_"):
        h0 = _cast_for_autocast(h0)
    if c0 is not None and kernel != "loop":
        c0 = _cast_for_autocast(c0)
    save = torch.is_grad_enabled() and any(t.requires_grad for t in (input, h0, c0, *weights) if t is not None)
    results: list[Tensor] = torch.ops.embrace.rnn_layer(
        input, h0, c0, weights, stack.batch_sizes, stack.cell, reverse, kernel, save
    )
    return results[: 2 if c0 is None else 3]


def choose_kernel(cell: str, input: Tensor, projected: bool, packed: bool) -> str:
    """Returns the fastest kernel that supports a layer: "cudnn", "mkldnn" or "loop". The choice does not depend on the
    batch, so that a captured graph keeps its kernel.

    Args:
        cell: the layer's cell, such as "lstm".
        input: the layer's input, for its device and dtype.
        projected: whether the layer has a projection.
        packed: whether sequences are packed.
    """
    if input.is_cuda:
        return "cudnn" if torch.backends.cudnn.enabled and torch.backends.cudnn.is_available() else "loop"
    mkldnn = bool(torch.backends.mkldnn.enabled) and torch.backends.mkldnn.is_available()
    if not mkldnn or not input.is_cpu or cell != "lstm" or projected or packed:
        return "loop"
    bfloat16 = input.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "mkldnn" if input.dtype == torch.float32 or bfloat16 else "loop"


def _cast_for_autocast(tensor: Tensor) -> Tensor:
    """Casts a tensor to the active autocast dtype, as autocast does for the inputs of matrix products. Returns float64
    tensors and integer tensors unchanged, and all tensors if autocast is disabled.
    """
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
