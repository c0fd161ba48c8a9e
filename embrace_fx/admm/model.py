"""The unrolled RNN as tensors: its weights and data, and conversions from and to the user's modules.

    a_n = U x_n + W s_{n-1} + b     s_n = tanh(a_n)     o_m = V s_m + c

Legend, here and in all of `embrace_fx.admm`
    N   time steps, n = 0 .. N-1          I   inputs of a step
    B   sequences                         H   hidden units
    M   steps the head reads: the last one (M = 1: classification of sequences), or all (M = N: language model)
    C   classes                           F, G   inputs of cell and head: I + H + 1, H + 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


def require(condition: bool, message: str) -> None:
    """Raises `ValueError` with this message if the condition is false."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Weights:
    """All weights of an RNN with I inputs and H hidden units, and of its head with C classes.

    Attributes:
        cell_HF: the RNN's weights [U W b], (H, I + H + 1), which multiply its input, previous state and 1.
        head_CG: the head's weights [V c], (C, H + 1), which multiply the RNN's state and 1.
    """

    cell_HF: Tensor
    head_CG: Tensor

    @property
    def W_HH(self) -> Tensor:
        """The RNN's recurrent weights W, (H, H) for H hidden units."""
        return self.cell_HF[:, -1 - self.cell_HF.shape[0] : -1]

    @property
    def V_CH(self) -> Tensor:
        """The head's weights V without the bias, (C, H) for C classes and H hidden units."""
        return self.head_CG[:, :-1]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Returns both weight matrices: the RNN cell's and the head's."""
        return self.cell_HF, self.head_CG

    def flat(self) -> Tensor:
        """Returns all weights as one vector, for sending to other ranks."""
        return torch.cat([tensor.flatten() for tensor in self.tensors()])

    def from_flat(self, vector: Tensor) -> Weights:
        """Returns new weights of the same shapes, with the values of a vector that `flat` has returned."""
        pieces = vector.split([tensor.numel() for tensor in self.tensors()])
        return Weights(*(p.view(t.shape).clone() for p, t in zip(pieces, self.tensors(), strict=True)))


@dataclass(frozen=True)
class PerConstraint:
    """One tensor for each of the three kinds of constraints of ADMM, such as the constraints' residuals or multipliers.

    The dimensions are N time steps or M steps that the head reads, B sequences, and H hidden units or C classes.

    Attributes:
        a_NBH: values for the constraints on preactivations, a_n = U x_n + W s_{n-1} + b.
        s_NBH: values for the constraints on states, s_n = tanh(a_n).
        o_MBC: values for the constraints on outputs, o_m = V s_m + c.
    """

    a_NBH: Tensor
    s_NBH: Tensor
    o_MBC: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tensors for preactivations, states and outputs."""
        return self.a_NBH, self.s_NBH, self.o_MBC

    def __add__(self, other: PerConstraint) -> PerConstraint:
        return PerConstraint(*(a + b for a, b in zip(self.tensors(), other.tensors(), strict=True)))

    def __neg__(self) -> PerConstraint:
        return PerConstraint(*(-each for each in self.tensors()))

    def at(self, chosen_B: Tensor) -> PerConstraint:
        """Returns a copy with only the sequences at the indices `chosen_B`."""
        return PerConstraint(*(each.index_select(1, chosen_B) for each in self.tensors()))

    def set_at(self, chosen_B: Tensor, other: PerConstraint) -> None:
        """Overwrites the values of the sequences at the indices `chosen_B` with those of `other`, in place."""
        for each, new in zip(self.tensors(), other.tensors(), strict=True):
            each.index_copy_(1, chosen_B, new)


@dataclass(frozen=True)
class Data:
    """Data to train on or to evaluate.

    Attributes:
        x_NBI: input sequences, (time steps, sequences, inputs of a step), in the weights' dtype.
        y_MB: int64 target classes, (1, sequences) for a class per sequence or (time steps, sequences) for a class per
            step.
    """

    x_NBI: Tensor
    y_MB: Tensor

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.x_NBI.shape[1]

    def at(self, chosen_B: Tensor) -> Data:
        """Returns the sequences at the indices `chosen_B`, with their targets."""
        return Data(self.x_NBI.index_select(1, chosen_B), self.y_MB.index_select(1, chosen_B))


@dataclass(frozen=True)
class ForwardPass:
    """All values of a forward pass over B sequences of N time steps. The head reads M steps: all, or only the last one.

    Attributes:
        cell_NBF: the RNN cell's inputs at each step: input x_n, previous state s_{n-1} and 1, concatenated.
        s_NBH: the hidden states.
        head_MBG: the head's inputs: state s_m and 1, concatenated.
        o_MBC: the outputs, for C classes.
    """

    cell_NBF: Tensor
    s_NBH: Tensor
    head_MBG: Tensor
    o_MBC: Tensor


def run_forward(
    weights: Weights, x_NBI: Tensor, head_steps: int, residuals: PerConstraint | None = None
) -> ForwardPass:
    """Runs the RNN with these weights on all time steps, and its head on the last `head_steps` steps.

    Args:
        x_NBI: the inputs, (time steps, sequences, inputs of a step).
        residuals: values to add to preactivations, states and outputs, or None for a plain forward pass.
    """
    (N, B, inputs), (H, F) = x_NBI.shape, weights.cell_HF.shape
    read = x_NBI.new_empty(N + 1, B, F)
    read[:N, :, :inputs], read[0, :, inputs:-1], read[..., -1] = x_NBI, 0, 1
    s_NBH, cell_FH = read[1:, :, inputs:-1], weights.cell_HF.t()
    a_BH = x_NBI.new_empty(B, H)
    for n in range(N):
        torch.mm(read[n], cell_FH, out=a_BH)
        if residuals is None:
            torch.tanh(a_BH, out=s_NBH[n])
        else:
            torch.add((a_BH + residuals.a_NBH[n]).tanh_(), residuals.s_NBH[n], out=s_NBH[n])
    head_MBG = read[N + 1 - head_steps :, :, inputs:]
    o_MBC = head_MBG @ weights.head_CG.t()
    return ForwardPass(read[:N], s_NBH, head_MBG, o_MBC if residuals is None else o_MBC + residuals.o_MBC)


def read_weights(rnn: nn.RNN, head: nn.Linear) -> Weights:
    """Copies the weights of the user's RNN and head. The RNN's two biases are added up. Raises `ValueError` for
    unsupported modules.
    """
    _check_modules(rnn, head)
    with torch.no_grad():
        own = dict(rnn.named_parameters())
        bias_H = own["bias_ih_l0"] + own["bias_hh_l0"]
        cell_HF = torch.cat([own["weight_ih_l0"], own["weight_hh_l0"], bias_H[:, None]], 1)
        return Weights(cell_HF, torch.cat([head.weight, head.bias[:, None]], 1))


def write_weights(weights: Weights, rnn: nn.RNN, head: nn.Linear) -> None:
    """Copies weights into the user's RNN and head. `bias_ih_l0` gets the RNN's whole bias, and `bias_hh_l0` becomes
    zero.
    """
    own = dict(rnn.named_parameters())
    with torch.no_grad():
        own["weight_ih_l0"].copy_(weights.cell_HF[:, : rnn.input_size])
        own["weight_hh_l0"].copy_(weights.W_HH)
        own["bias_ih_l0"].copy_(weights.cell_HF[:, -1])
        own["bias_hh_l0"].zero_()
        head.weight.copy_(weights.V_CH)
        head.bias.copy_(weights.head_CG[:, -1])


def read_data(data: tuple[Tensor, Tensor], weights: Weights, *, batch_first: bool, name: str = "data") -> Data:
    """Checks that inputs and targets fit the weights, and returns them with time as the first dimension.

    Args:
        data: (inputs, targets). Inputs have the shape (B, N, I) if `batch_first`, else (N, B, I). Targets have the
            shape (B,) for a class per sequence, or the inputs' first two dimensions for a class per step.
        name: the name of the data in error messages.

    Raises:
        ValueError: the data does not fit.
    """
    (inputs, targets), cell, where = data, weights.cell_HF, f"admm.train(): {name}"
    size, layout = cell.shape[1] - cell.shape[0] - 1, "(B, N, I)" if batch_first else "(N, B, I)"
    require(
        inputs.dim() == 3 and inputs.shape[2] == size and 0 not in inputs.shape,
        f"{where}: the inputs have shape {tuple(inputs.shape)} and must have shape {layout}, with I = {size} and no "
        "size 0. Pad sequences to one length, and convert ids to one-hot vectors.",
    )
    require(
        inputs.dtype == cell.dtype and inputs.device == cell.device,
        f"{where}: the inputs are {inputs.dtype} on {inputs.device}, but the RNN's weights are {cell.dtype} on "
        f"{cell.device}. Convert one of them.",
    )
    per_sequence, per_step = (inputs.shape[0 if batch_first else 1],), tuple(inputs.shape[:2])
    require(
        tuple(targets.shape) in {per_sequence, per_step} and targets.dtype == torch.int64,
        f"{where}: the targets are {targets.dtype} of shape {tuple(targets.shape)}. Pass int64 targets of shape "
        f"{per_sequence}, a class per sequence, or {per_step}, a class per step.",
    )
    classes, lowest, highest = len(weights.head_CG), int(targets.min()), int(targets.max())
    require(
        0 <= lowest <= highest < classes,
        f"{where}: the targets go from {lowest} to {highest}, but the head has {classes} outputs. Give the head an "
        "output for each class.",
    )
    require(bool(inputs.isfinite().all()), f"{where}: the inputs contain inf or nan. Remove those values.")
    targets = targets.to(inputs.device)
    y_MB = targets[None] if targets.dim() == 1 else targets.t() if batch_first else targets
    x_NBI = inputs.transpose(0, 1) if batch_first else inputs
    return Data(x_NBI.detach().contiguous(), y_MB.contiguous())


def _check_modules(rnn: nn.RNN, head: nn.Linear) -> None:
    """Raises `ValueError` unless ADMM supports the RNN and the head, and the head has one input per hidden unit."""
    require(
        (type(rnn), type(head)) == (nn.RNN, nn.Linear),
        f"admm.train() supports a torch.nn.RNN and a torch.nn.Linear, not {type(rnn).__qualname__} and "
        f"{type(head).__qualname__}. Train other models with an optimizer.",
    )
    wanted = {"nonlinearity": "tanh", "num_layers": 1, "bidirectional": False, "bias": True, "dropout": 0.0}
    has = {name: getattr(rnn, name) for name in wanted} | {"bias": rnn.bias and head.bias is not None}
    others = ", ".join(f"{name}={has[name]!r}" for name in wanted if has[name] != wanted[name])
    require(
        has == wanted,
        f"admm.train() does not support {others}. Use an RNN of one tanh layer in one direction without dropout, with "
        "biases in RNN and head, or train the model with an optimizer.",
    )
    require(
        head.in_features == rnn.hidden_size,
        f"admm.train(): the head has in_features={head.in_features}, but the RNN has hidden_size={rnn.hidden_size}. "
        "Make them equal.",
    )
    parameters = [*rnn.parameters(), *head.parameters()]
    kinds = sorted({f"{parameter.dtype} on {parameter.device}" for parameter in parameters})
    require(
        len(kinds) == 1 and parameters[0].dtype in {torch.float32, torch.float64},
        f"admm.train(): the parameters of RNN and head are {', '.join(kinds)}. Convert all to float32 or all to "
        "float64, on one device.",
    )
    finite = all(bool(parameter.isfinite().all()) for parameter in parameters)
    require(finite, "admm.train(): a parameter contains inf or nan. Initialize the modules again.")
