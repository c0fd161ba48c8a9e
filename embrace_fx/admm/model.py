"""The RNN unfolded in time, as tensors: its weights, its data, and the way between them and the user's modules.

    a_n = U x_n + W s_{n-1} + b     s_n = tanh(a_n)     o_m = V s_m + c

Legend, here and in all of `embrace_fx.admm`
    N   time steps, n = 0 .. N-1          I   inputs of a step
    B   sequences                         H   hidden units
    M   steps the head reads: the last one (M = 1: classification of sequences), or all (M = N: language model)
    C   classes
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Weights:
    """The parameters, or one tensor of each parameter's shape."""

    U_HI: Tensor
    W_HH: Tensor
    b_H: Tensor
    V_CH: Tensor
    c_C: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def flat(self) -> Tensor:
        """All of it as one vector: what travels between ranks."""
        return torch.cat([tensor.reshape(-1) for tensor in self.tensors()])

    def unflat(self, vector: Tensor) -> Weights:
        """A vector cut and shaped as these weights are."""
        pieces = vector.split([tensor.numel() for tensor in self.tensors()])
        return Weights(*(p.view(t.shape).clone() for p, t in zip(pieces, self.tensors(), strict=True)))


@dataclass(frozen=True)
class Data:
    """Sequences and what the head is to say of them.

    Attributes:
        x_NBI: inputs, in the weights' dtype.
        y_MB: classes, int64.
    """

    x_NBI: Tensor
    y_MB: Tensor

    @property
    def steps(self) -> int:
        return self.x_NBI.shape[0]

    @property
    def sequences(self) -> int:
        return self.x_NBI.shape[1]


def read_weights(rnn: nn.RNN, head: nn.Linear) -> Weights:
    """Copies the modules' parameters; the RNN's two biases are one.

    Raises:
        ValueError: for modules that the method is not written for.
    """
    _check_modules(rnn, head)
    own = dict(rnn.named_parameters())
    with torch.no_grad():
        return Weights(
            own["weight_ih_l0"].clone(),
            own["weight_hh_l0"].clone(),
            own["bias_ih_l0"] + own["bias_hh_l0"],
            head.weight.clone(),
            head.bias.clone(),
        )


def write_weights(weights: Weights, rnn: nn.RNN, head: nn.Linear) -> None:
    """Leaves the weights in the modules, the whole bias of the RNN in `bias_ih_l0`."""
    own = dict(rnn.named_parameters())
    with torch.no_grad():
        own["weight_ih_l0"].copy_(weights.U_HI)
        own["weight_hh_l0"].copy_(weights.W_HH)
        own["bias_ih_l0"].copy_(weights.b_H)
        own["bias_hh_l0"].zero_()
        head.weight.copy_(weights.V_CH)
        head.bias.copy_(weights.c_C)


def read_data(data: tuple[Tensor, Tensor], weights: Weights, *, batch_first: bool, name: str = "data") -> Data:
    """Checks a pair (inputs, targets) against the weights and lays it out with time first.

    Args:
        data: inputs (B, N, I) if `batch_first`, else (N, B, I), and targets: (B,) for one class per sequence, or laid
            out as the inputs' first two sizes for one class per step.
        name: what the user calls it, for errors.

    Raises:
        ValueError: for shapes, dtypes, devices or classes that do not fit.
    """
    inputs, targets = data
    layout = "(B, N, I)" if batch_first else "(N, B, I)"
    wanted = weights.U_HI
    if inputs.dim() != 3 or inputs.shape[2] != wanted.shape[1] or 0 in inputs.shape:
        raise ValueError(
            f"expected inputs of shape {layout} with I = {wanted.shape[1]}, none of the sizes 0, in the {name} of "
            f"admm.train(), found {tuple(inputs.shape)}. Pad sequences to one length; make ids one-hot vectors."
        )
    if inputs.dtype != wanted.dtype or inputs.device != wanted.device:
        raise ValueError(
            f"expected inputs of {wanted.dtype} on {wanted.device}, as the RNN's weights, in the {name} of "
            f"admm.train(), found {inputs.dtype} on {inputs.device}. Convert one of them."
        )
    sequences = inputs.shape[0 if batch_first else 1]
    if tuple(targets.shape) not in {(sequences,), tuple(inputs.shape[:2])} or targets.dtype != torch.int64:
        raise ValueError(
            f"expected int64 targets of shape {(sequences,)} (a class per sequence) or {tuple(inputs.shape[:2])} (a "
            f"class per step), in the {name} of admm.train(), found {targets.dtype} {tuple(targets.shape)}."
        )
    classes = weights.c_C.shape[0]
    if not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise ValueError(
            f"expected targets from 0 to {classes - 1}, as the head has {classes} outputs, in the {name} of "
            f"admm.train(), found {int(targets.min())} to {int(targets.max())}."
        )
    if not bool(inputs.isfinite().all()):
        raise ValueError(f"expected finite inputs, in the {name} of admm.train(), found inf or nan. Clean the data.")
    targets = targets.to(inputs.device)
    if targets.dim() == 1:
        targets = targets[None]
    elif batch_first:
        targets = targets.t()
    x_NBI = inputs.transpose(0, 1) if batch_first else inputs
    return Data(x_NBI.detach().contiguous(), targets.contiguous())


def run_forward(weights: Weights, x_NBI: Tensor, head_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the modules compute: a_NBH, s_NBH and o_MBC, with the head on the last `head_steps` steps."""
    a_NBH = x_NBI @ weights.U_HI.t() + weights.b_H
    s_NBH = torch.empty_like(a_NBH)
    for n, a_BH in enumerate(a_NBH):
        if n:
            a_BH.addmm_(s_NBH[n - 1], weights.W_HH.t())
        torch.tanh(a_BH, out=s_NBH[n])
    return a_NBH, s_NBH, s_NBH[-head_steps:] @ weights.V_CH.t() + weights.c_C


def _check_modules(rnn: nn.RNN, head: nn.Linear) -> None:
    if type(rnn) is not nn.RNN or type(head) is not nn.Linear:
        raise ValueError(
            f"expected a torch.nn.RNN and a torch.nn.Linear, in admm.train(), found {type(rnn).__qualname__} and "
            f"{type(head).__qualname__}. The method is written for this model; train others with an optimizer."
        )
    found = {
        "nonlinearity": rnn.nonlinearity,
        "num_layers": rnn.num_layers,
        "bidirectional": rnn.bidirectional,
        "bias": rnn.bias and head.bias is not None,
        "dropout": rnn.dropout,
    }
    wanted = {"nonlinearity": "tanh", "num_layers": 1, "bidirectional": False, "bias": True, "dropout": 0.0}
    wrong = [f"{name}={found[name]!r}" for name in wanted if found[name] != wanted[name]]
    if wrong:
        raise ValueError(
            "expected an RNN of one tanh layer in one direction without dropout, and biases in RNN and head, in "
            f"admm.train(), found {', '.join(wrong)}. Make the model so, or train it with an optimizer."
        )
    if head.in_features != rnn.hidden_size:
        raise ValueError(
            f"expected a head with in_features={rnn.hidden_size}, the RNN's hidden_size, in admm.train(), found "
            f"{head.in_features}."
        )
    parameters = [*rnn.parameters(), *head.parameters()]
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    if len(kinds) != 1 or parameters[0].dtype not in {torch.float32, torch.float64}:
        raise ValueError(
            "expected all parameters of RNN and head in float32, or all in float64, on one device, in admm.train(), "
            f"found {', '.join(sorted(f'{dtype} on {device}' for dtype, device in kinds))}."
        )
    if not all(bool(parameter.isfinite().all()) for parameter in parameters):
        raise ValueError("expected finite parameters, in admm.train(), found inf or nan. Initialise the modules again.")
