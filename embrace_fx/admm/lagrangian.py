"""The augmented Lagrangian of the unfolded RNN: penalties, and its value.

P-ADMMiRNN (arXiv 2006.05622) makes the pre-activations a, the states s and the outputs o separate variables. The
model's
equations become constraints, with residuals at every step n, and at every step m that the head reads:

    ra_n = a_n - U x_n - W s_{n-1} - b     rs_n = s_n - tanh(a_n)     ro_m = o_m - V s_m - c

    L = loss(o, y) + p1/2 sum |ra^|^2 + p2/2 sum |rs^|^2 + p3/2 sum |ro^|^2     r^ = r - l

Multipliers l are divided by their penalties. L omits -p/2 |l|^2, which is constant in every update. Losses are summed
over sequences, so that penalties do not depend on their number. `model` has the legend of shapes.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from torch import Tensor
from torch.nn.functional import cross_entropy

from embrace_fx.admm.model import PerConstraint, require


@dataclass(frozen=True)
class Penalties:
    """The factors of the penalties in the augmented Lagrangian of ADMM.

    Attributes:
        p1, p2, p3: factors for the residuals of the preactivations (a), of the states (s) and of the outputs (o).
        damping: the damping of the least-squares update of the weights, relative to the mean square of each weight's
            input.
    """

    p1: float = 4.0
    p2: float = 12.0
    p3: float = 0.5
    damping: float = 5.0

    def __post_init__(self) -> None:
        fits = all(0 < value < float("inf") for value in astuple(self))
        require(fits, f"Penalties must be positive and finite. Got admm.{self}.")


def lagrangian(o_MBC: Tensor, y_MB: Tensor, shifted: PerConstraint, penalties: Penalties) -> Tensor:
    """Returns the augmented Lagrangian, summed over sequences, as a scalar tensor.

    Args:
        o_MBC: the model's outputs, (steps that the head reads, sequences, classes).
        y_MB: the target classes, (steps that the head reads, sequences).
        shifted: residuals of the constraints, minus scaled multipliers.
        penalties: the factors of the squared residuals.
    """
    total = summed_loss(o_MBC, y_MB)
    for r, p in zip(shifted.tensors(), (penalties.p1, penalties.p2, penalties.p3), strict=True):
        total = total + p / 2 * r.square().sum()
    return total


def summed_loss(o_MBC: Tensor, y_MB: Tensor) -> Tensor:
    """Returns the cross entropy of logits `o_MBC` (steps, sequences, classes) for target classes `y_MB`, summed over
    steps and sequences.
    """
    return cross_entropy(o_MBC.flatten(0, 1), y_MB.flatten(), reduction="sum")
