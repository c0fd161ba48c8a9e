"""Metrics of an iteration, computed from sums over ranks, and the criteria to stop."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from embrace_fx.admm.lagrangian import summed_loss
from embrace_fx.admm.model import Data, Weights, require, run_forward


@dataclass(frozen=True)
class Progress:
    """The metrics of one iteration, over all ranks.

    Attributes:
        iteration: the iteration's number, from 1; 0 is the state before training.
        loss: mean cross entropy of a plain forward pass over the validation data, or over the training data if there is
            none.
        accuracy: the share of correctly classified targets in the same forward pass.
        lagrangian: the augmented Lagrangian per sequence, after the batches' updates of preactivations, states and
            outputs.
        ra, rs, ro: root mean squares of the residuals of preactivations, states and outputs after these updates.
        disagreement: root mean square of the ranks' weights minus the averaged weights; 0 in a single process.
        staleness: the age, in updates of the average, of the oldest weights in it; 0 if ranks are synchronous.
        elapsed_s: wall time in seconds since training began, including earlier parts of a resumed training.
    """

    iteration: int
    loss: float
    accuracy: float
    lagrangian: float
    ra: float
    rs: float
    ro: float
    disagreement: float
    staleness: int
    elapsed_s: float


@dataclass(frozen=True)
class Sums:
    """Sums from which the metrics of an iteration are computed, each with its number of terms. The sums of several
    ranks can be added.

    Attributes:
        loss, correct: the summed cross entropy, and the number of correctly classified targets, over `targets` targets.
        lagrangian: the augmented Lagrangian, summed over `sequences` sequences.
        ra, rs: squared residuals of preactivations and of states, summed over `states` elements each.
        ro: squared residuals of outputs, summed over `outputs` elements.
        gap: mean squared differences of ranks' weights from the averaged weights, summed over `ranks` ranks.
    """

    loss: float = 0.0
    correct: float = 0.0
    targets: float = 0.0
    lagrangian: float = 0.0
    sequences: float = 0.0
    ra: float = 0.0
    rs: float = 0.0
    states: float = 0.0
    ro: float = 0.0
    outputs: float = 0.0
    gap: float = 0.0
    ranks: float = 0.0

    @classmethod
    def of_model(cls, weights: Weights, data: Data) -> Sums:
        """Runs a plain forward pass over `data`. Returns the sums for loss and accuracy; the other sums are 0."""
        o_MBC = run_forward(weights, data.x_NBI, len(data.y_MB)).o_MBC
        correct = (o_MBC.argmax(-1) == data.y_MB).sum()
        return cls(float(summed_loss(o_MBC, data.y_MB)), float(correct), float(data.y_MB.numel()))

    @classmethod
    def of_disagreement(cls, weights: Weights, agreed: Weights) -> Sums:
        """Returns the sums for one rank's disagreement: the mean squared difference of its weights from the averaged
        weights `agreed`; the other sums are 0.
        """
        return cls(gap=float((weights.flat() - agreed.flat()).square().mean()), ranks=1.0)

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def progress(self, iteration: int, *, staleness: int, elapsed_s: float) -> Progress:
        """Computes an iteration's metrics from these sums. The arguments are stored in the result."""
        loss, accuracy, after = self.loss / self.targets, self.correct / self.targets, self.lagrangian / self.sequences
        squares = self.ra / self.states, self.rs / self.states, self.ro / self.outputs, self.gap / self.ranks
        ra, rs, ro, gap = (square**0.5 for square in squares)
        return Progress(iteration, loss, accuracy, after, ra, rs, ro, gap, staleness, elapsed_s)


@dataclass(frozen=True)
class Best:
    """The weights with the lowest loss so far, their loss and their iteration."""

    iteration: int
    loss: float
    weights: Weights

    def better_of(self, progress: Progress, weights: Weights) -> Best:
        """Returns `Best` for the given metrics and weights if their loss is lower, otherwise `self`. A loss of nan is
        never lower.
        """
        return Best(progress.iteration, progress.loss, weights) if progress.loss < self.loss else self


@dataclass(frozen=True)
class Stopping:
    """Criteria to end training early. Training also ends if the loss is not finite.

    Attributes:
        patience: the number of iterations without a lower loss after which training ends, or None for no limit.
        accuracy: the accuracy, above 0 and at most 1, at which training ends, or None for no limit.
    """

    patience: int | None = 100
    accuracy: float | None = None

    def __post_init__(self) -> None:
        fits = self.patience is None or self.patience >= 1
        require(fits, f"admm.Stopping(): patience is {self.patience}. Pass at least 1 iteration.")
        fits = self.accuracy is None or 0 < self.accuracy <= 1
        require(fits, f"admm.Stopping(): accuracy is {self.accuracy}. Pass a number above 0 and at most 1.")

    def reason(self, progress: Progress, best: Best) -> str | None:
        """Returns the reason to end training after an iteration, as text, or None to continue.

        Args:
            progress: the iteration's metrics.
            best: the lowest loss so far, with its iteration.
        """
        if not (math.isfinite(progress.loss) and math.isfinite(progress.lagrangian)):
            return f"the loss was not finite at iteration {progress.iteration}"
        if self.accuracy is not None and progress.accuracy >= self.accuracy:
            return f"accuracy {self.accuracy:g} was reached"
        if self.patience is not None and progress.iteration - best.iteration >= self.patience:
            return f"{self.patience} iterations brought no lower loss than iteration {best.iteration}"
        return None
