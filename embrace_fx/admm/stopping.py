"""When to stop, and what to keep: with small penalties the loss falls, then drifts up again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from embrace_fx.admm.model import Weights
from embrace_fx.admm.progress import Progress


@dataclass(frozen=True)
class Best:
    """The weights with the lowest loss so far, and the iteration that made them."""

    iteration: int
    loss: float
    weights: Weights

    def or_better(self, progress: Progress, weights: Weights) -> Best:
        """These, or others where their loss is lower. A loss that is no number is never lower."""
        return Best(progress.iteration, progress.loss, weights) if progress.loss < self.loss else self


@dataclass(frozen=True)
class Stopping:
    """Ends training before all its iterations.

    Attributes:
        patience: iterations without a lower loss after which it ends; None: it does not end for that.
        accuracy: share of right answers at which it ends; None: it does not end for that.
    """

    patience: int | None = 100
    accuracy: float | None = None

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"expected a patience of at least 1 iteration, in admm.Stopping(), found {self.patience}.")
        if self.accuracy is not None and not 0 < self.accuracy <= 1:
            raise ValueError(f"expected an accuracy above 0, at most 1, in admm.Stopping(), found {self.accuracy}.")

    def reason(self, progress: Progress, best: Best) -> str | None:
        """Why training ends here; None: it goes on."""
        if not (math.isfinite(progress.loss) and math.isfinite(progress.lagrangian)):
            return f"the loss was not finite at iteration {progress.iteration}"
        if self.accuracy is not None and progress.accuracy >= self.accuracy:
            return f"accuracy {self.accuracy:g} was reached"
        if self.patience is not None and progress.iteration - best.iteration >= self.patience:
            return f"{self.patience} iterations brought no lower loss than iteration {best.iteration}"
        return None
