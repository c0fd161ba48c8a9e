"""What is measured of an iteration: sums that add up over ranks, and the figures made of them."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

from embrace_fx.admm.lagrangian import Penalties, Residuals, Variables, lagrangian_with, summed_loss
from embrace_fx.admm.model import Data, Weights, run_forward


@dataclass(frozen=True)
class Scores:
    """The model of some weights on some data, by a plain forward pass, as sums."""

    loss: float
    correct: float
    targets: float

    @classmethod
    def of(cls, weights: Weights, data: Data) -> Scores:
        o_MBC = run_forward(weights, data.x_NBI, data.y_MB.shape[0])[2]
        correct = (o_MBC.argmax(-1) == data.y_MB).sum()
        return cls(float(summed_loss(o_MBC, data.y_MB)), float(correct), float(data.y_MB.numel()))


@dataclass(frozen=True)
class Splits:
    """How far the split problem is from the model, as sums: the Lagrangian, the squared residuals, and ranks' weights.

    Attributes:
        states, outputs: numbers that the squares are summed over.
        gap: mean square of the rank's weights less the agreed ones.
        ranks: over which `gap` is summed.
    """

    lagrangian: float
    sequences: float
    ra: float
    rs: float
    ro: float
    states: float
    outputs: float
    gap: float
    ranks: float = 1.0

    @classmethod
    def of(cls, residuals: Residuals, variables: Variables, data: Data, penalties: Penalties, gap: float) -> Splits:
        ra, rs, ro = (float(r.square().sum()) for r in (residuals.ra_NBH, residuals.rs_NBH, residuals.ro_MBC))
        return cls(
            lagrangian=float(lagrangian_with(residuals, variables, data, penalties)),
            sequences=float(data.sequences),
            ra=ra,
            rs=rs,
            ro=ro,
            states=float(residuals.rs_NBH.numel()),
            outputs=float(residuals.ro_MBC.numel()),
            gap=gap,
        )


@dataclass(frozen=True)
class Progress:
    """An iteration's figures, over all ranks.

    Attributes:
        iteration: from 1; 0 is the start.
        loss: mean cross entropy of the model, by a plain forward pass over the monitored data.
        accuracy: share of right answers there.
        lagrangian: the augmented Lagrangian per sequence, with the multipliers that the iteration ends with.
        ra, rs, ro: root mean squares of the residuals.
        disagreement: root mean square of the ranks' weights less the agreed ones; 0 in a single process.
        staleness: most updates by which a rank's contribution is behind; 0 unless ranks are asynchronous.
        elapsed_s: wall time since training began, earlier parts of a resumed training included.
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

    def row(self) -> tuple[float, ...]:
        return astuple(self)

    @classmethod
    def of_row(cls, row: list[float]) -> Progress:
        numbers: dict[str, Any] = dict(zip((f.name for f in fields(cls)), row, strict=True))
        return cls(**numbers | {name: int(numbers[name]) for name in ("iteration", "staleness")})


def progress_of(iteration: int, scores: Scores, splits: Splits, *, staleness: int, elapsed_s: float) -> Progress:
    """Sums over all ranks as figures."""
    return Progress(
        iteration=iteration,
        loss=scores.loss / scores.targets,
        accuracy=scores.correct / scores.targets,
        lagrangian=splits.lagrangian / splits.sequences,
        ra=(splits.ra / splits.states) ** 0.5,
        rs=(splits.rs / splits.states) ** 0.5,
        ro=(splits.ro / splits.outputs) ** 0.5,
        disagreement=(splits.gap / splits.ranks) ** 0.5,
        staleness=staleness,
        elapsed_s=elapsed_s,
    )
