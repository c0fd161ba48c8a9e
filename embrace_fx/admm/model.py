"""The RNN unfolded in time, as tensors: its weights, its data, and the way between them and the user's modules.

    a_n = U x_n + W s_{n-1} + b     s_n = tanh(a_n)     o_m = V s_m + c

Legend, here and in all of `embrace_fx.admm`
    N   time steps, n = 0 .. N-1          I   inputs of a step
    B   sequences                         H   hidden units
    M   steps the head reads: the last one (M = 1: classification of sequences), or all (M = N: language model)
    C   classes                           F, G   numbers that cell and head read: I + H + 1, H + 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


def expect(fits: bool, expected: str, found: str, remedy: str) -> None:
    """Raises ValueError where something does not fit."""
    if not fits:
        raise ValueError(f"expected {expected}, found {found}. {remedy}")


@dataclass(frozen=True)
class Weights:
    """The parameters, [U W b] of the cell and [V c] of the head, or tensors of their shapes.

    The cell multiplies what it reads, [x_n; s_{n-1}; 1], the head [s_m; 1].
    """

    cell_HF: Tensor
    head_CG: Tensor

    @property
    def W_HH(self) -> Tensor:
        return self.cell_HF[:, -1 - self.cell_HF.shape[0] : -1]

    @property
    def V_CH(self) -> Tensor:
        return self.head_CG[:, :-1]

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.cell_HF, self.head_CG

    def flat(self) -> Tensor:
        """All of it as one vector: what travels between ranks."""
        return torch.cat([tensor.flatten() for tensor in self.tensors()])

    def unflat(self, vector: Tensor) -> Weights:
        """A vector cut and shaped as these weights are."""
        pieces = vector.split([tensor.numel() for tensor in self.tensors()])
        return Weights(*(p.view(t.shape).clone() for p, t in zip(pieces, self.tensors(), strict=True)))


@dataclass(frozen=True)
class PerConstraint:
    """A number for each constraint a_n = ..., s_n = ..., o_m = ... of each sequence: a residual, or a multiplier."""

    a_NBH: Tensor
    s_NBH: Tensor
    o_MBC: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.a_NBH, self.s_NBH, self.o_MBC

    def __add__(self, other: PerConstraint) -> PerConstraint:
        return PerConstraint(*(a + b for a, b in zip(self.tensors(), other.tensors(), strict=True)))

    def __neg__(self) -> PerConstraint:
        return PerConstraint(*(-each for each in self.tensors()))

    def of(self, chosen_B: Tensor) -> PerConstraint:
        """A copy of those of some sequences."""
        return PerConstraint(*(each.index_select(1, chosen_B) for each in self.tensors()))

    def put(self, chosen_B: Tensor, other: PerConstraint) -> None:
        """Overwrites those of some sequences."""
        for each, new in zip(self.tensors(), other.tensors(), strict=True):
            each.index_copy_(1, chosen_B, new)


@dataclass(frozen=True)
class Data:
    """Sequences, in the weights' dtype, and the classes, int64, that the head is to say of them."""

    x_NBI: Tensor
    y_MB: Tensor

    @property
    def sequences(self) -> int:
        return self.x_NBI.shape[1]

    def of(self, chosen_B: Tensor) -> Data:
        """Some of the sequences."""
        return Data(self.x_NBI.index_select(1, chosen_B), self.y_MB.index_select(1, chosen_B))


@dataclass(frozen=True)
class Pass:
    """A forward pass: what cell and head read, [x_n; s_{n-1}; 1] and [s_m; 1], states and outputs."""

    cell_NBF: Tensor
    s_NBH: Tensor
    head_MBG: Tensor
    o_MBC: Tensor


def run_forward(weights: Weights, x_NBI: Tensor, head_steps: int, residuals: PerConstraint | None = None) -> Pass:
    """Computes what the modules do, head on the last `head_steps` steps, or what a, s, o with given residuals are."""
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
    return Pass(read[:N], s_NBH, head_MBG, o_MBC if residuals is None else o_MBC + residuals.o_MBC)


def read_weights(rnn: nn.RNN, head: nn.Linear) -> Weights:
    """Copies the parameters, the RNN's two biases as one; ValueError for modules that the method is not written for."""
    _check_modules(rnn, head)
    with torch.no_grad():
        own = dict(rnn.named_parameters())
        bias_H = own["bias_ih_l0"] + own["bias_hh_l0"]
        cell_HF = torch.cat([own["weight_ih_l0"], own["weight_hh_l0"], bias_H[:, None]], 1)
        return Weights(cell_HF, torch.cat([head.weight, head.bias[:, None]], 1))


def write_weights(weights: Weights, rnn: nn.RNN, head: nn.Linear) -> None:
    """Leaves the weights in the modules, the whole bias of the RNN in `bias_ih_l0`."""
    own = dict(rnn.named_parameters())
    with torch.no_grad():
        own["weight_ih_l0"].copy_(weights.cell_HF[:, : rnn.input_size])
        own["weight_hh_l0"].copy_(weights.W_HH)
        own["bias_ih_l0"].copy_(weights.cell_HF[:, -1])
        own["bias_hh_l0"].zero_()
        head.weight.copy_(weights.V_CH)
        head.bias.copy_(weights.head_CG[:, -1])


def read_data(data: tuple[Tensor, Tensor], weights: Weights, *, batch_first: bool, name: str = "data") -> Data:
    """Checks a pair (inputs, targets) against the weights and lays it out with time first.

    Args:
        data: inputs (B, N, I) if `batch_first`, else (N, B, I), and targets: (B,) for one class per sequence, or laid
            out as the inputs' first two sizes for one class per step. ValueError where these do not fit.
        name: what the user calls it, for errors.
    """
    (inputs, targets), cell, where = data, weights.cell_HF, f"in the {name} of admm.train()"
    size, layout = cell.shape[1] - cell.shape[0] - 1, "(B, N, I)" if batch_first else "(N, B, I)"
    fits = inputs.dim() == 3 and inputs.shape[2] == size and 0 not in inputs.shape
    wanted = f"inputs of shape {layout} with I = {size}, none of the sizes 0, {where}"
    expect(fits, wanted, str(tuple(inputs.shape)), "Pad sequences to one length; make ids one-hot vectors.")
    wanted = f"inputs of {cell.dtype} on {cell.device}, as the RNN's weights, {where}"
    fits, found = inputs.dtype == cell.dtype and inputs.device == cell.device, f"{inputs.dtype} on {inputs.device}"
    expect(fits, wanted, found, "Convert one of them.")
    each, steps = (inputs.shape[0 if batch_first else 1],), tuple(inputs.shape[:2])
    wanted = f"int64 targets of shape {each} (a class per sequence) or {steps} (a class per step), {where}"
    fits, found = tuple(targets.shape) in {each, steps}, f"{targets.dtype} {tuple(targets.shape)}"
    expect(fits and targets.dtype == torch.int64, wanted, found, "Make them so.")
    classes, lowest, highest = len(weights.head_CG), int(targets.min()), int(targets.max())
    wanted = f"targets from 0 to {classes - 1}, as the head has {classes} outputs, {where}"
    fits, found = 0 <= lowest <= highest < classes, f"{lowest} to {highest}"
    expect(fits, wanted, found, "Give the head an output for each class.")
    expect(bool(inputs.isfinite().all()), f"finite inputs, {where}", "inf or nan", "Clean the data.")
    targets = targets.to(inputs.device)
    y_MB = targets[None] if targets.dim() == 1 else targets.t() if batch_first else targets
    x_NBI = inputs.transpose(0, 1) if batch_first else inputs
    return Data(x_NBI.detach().contiguous(), y_MB.contiguous())


def _check_modules(rnn: nn.RNN, head: nn.Linear) -> None:
    where, found = "in admm.train()", f"{type(rnn).__qualname__} and {type(head).__qualname__}"
    remedy, kinds = "The method is written for this model; train others with an optimizer.", (type(rnn), type(head))
    expect(kinds == (nn.RNN, nn.Linear), f"a torch.nn.RNN and a torch.nn.Linear, {where}", found, remedy)
    wanted = {"nonlinearity": "tanh", "num_layers": 1, "bidirectional": False, "bias": True, "dropout": 0.0}
    has = {name: getattr(rnn, name) for name in wanted} | {"bias": rnn.bias and head.bias is not None}
    found = ", ".join(f"{name}={has[name]!r}" for name in wanted if has[name] != wanted[name])
    model = f"an RNN of one tanh layer in one direction without dropout, and biases in RNN and head, {where}"
    expect(has == wanted, model, found, "Make the model so, or train it with an optimizer.")
    fits, size = head.in_features == rnn.hidden_size, f"in_features={rnn.hidden_size}, the RNN's hidden_size"
    expect(fits, f"a head with {size}, {where}", str(head.in_features), "Give it as many inputs.")
    parameters = [*rnn.parameters(), *head.parameters()]
    found_kinds = sorted({f"{parameter.dtype} on {parameter.device}" for parameter in parameters})
    fits = len(found_kinds) == 1 and parameters[0].dtype in {torch.float32, torch.float64}
    one = f"all parameters of RNN and head in float32, or all in float64, on one device, {where}"
    expect(fits, one, ", ".join(found_kinds), "Convert them.")
    finite = all(bool(parameter.isfinite().all()) for parameter in parameters)
    expect(finite, f"finite parameters, {where}", "inf or nan", "Initialise the modules again.")
