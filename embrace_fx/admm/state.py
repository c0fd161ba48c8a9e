"""All that a training is between two iterations: saved, and resumed to the same bits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from embrace_fx.admm.lagrangian import Penalties, Variables
from embrace_fx.admm.model import Data, Weights
from embrace_fx.admm.progress import Progress
from embrace_fx.admm.stopping import Best, Stopping

FORMAT = 1


@dataclass
class State:
    """A rank's training.

    Attributes:
        penalties: of the Lagrangian.
        weights: this rank's own.
        variables: a, s, o and the multipliers, of this rank's sequences; None on an asynchronous training's master.
        agreed: weights that all ranks agree on (z); in a single process the rank's own.
        duals: this rank's scaled multipliers of the agreement (u); zero in a single process.
        best: the agreed weights with the lowest loss; what training leaves in the modules.
        history: an entry per iteration; the same on all synchronous ranks.
        stopped: why training ended before all its iterations.
    """

    penalties: Penalties
    weights: Weights
    variables: Variables | None
    agreed: Weights
    duals: Weights
    best: Best
    iteration: int = 0
    history: list[Progress] = field(default_factory=list)
    stopped: str | None = None

    @classmethod
    def begin(cls, weights: Weights, data: Data | None, penalties: Penalties, loss: float) -> State:
        """Before the first iteration: residuals and multipliers are zero.

        Args:
            data: the rank's sequences; None on a rank that has no variables.
            loss: of the weights, on the monitored data.
        """
        variables = Variables.of_forward(weights, data) if data is not None else None
        duals = Weights(*map(torch.zeros_like, weights.tensors()))
        return cls(penalties, weights, variables, weights, duals, Best(0, loss, weights))

    @property
    def elapsed_s(self) -> float:
        return self.history[-1].elapsed_s if self.history else 0.0

    def gap(self) -> float:
        """Mean square of the rank's weights less the agreed ones."""
        return float((self.weights.flat() - self.agreed.flat()).square().mean())

    def advance(self, progress: Progress, stopping: Stopping) -> None:
        """Enters an iteration's figures, keeps the agreed weights if they are the best, and decides whether to stop."""
        self.history.append(progress)
        self.best = self.best.or_better(progress, self.agreed)
        self.stopped = stopping.reason(progress, self.best)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file of plain tensors, numbers and strings, which `torch.load(weights_only=True)` reads."""
        torch.save(
            {
                "format": FORMAT,
                "penalties": asdict(self.penalties),
                "weights": _tensors(self.weights),
                "variables": _tensors(self.variables) if self.variables is not None else None,
                "agreed": _tensors(self.agreed),
                "duals": _tensors(self.duals),
                "best": {"iteration": self.best.iteration, "loss": self.best.loss, **_tensors(self.best.weights)},
                "iteration": self.iteration,
                "history": torch.tensor([p.row() for p in self.history], dtype=torch.float64),
                "stopped": self.stopped,
            },
            path,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], map_location: torch.device | str | None = None) -> State:
        """Reads what `save` wrote.

        Raises:
            ValueError: for another file.
        """
        saved: Any = torch.load(path, weights_only=True, map_location=map_location)
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise ValueError(
                f"expected a state written by admm.State.save(), format {FORMAT}, in admm.State.load(), found "
                f"something else in {os.fspath(path)!r}. Give the file of a saved state."
            )
        variables, best = saved["variables"], saved["best"]
        return cls(
            Penalties(**saved["penalties"]),
            Weights(**saved["weights"]),
            Variables(**variables) if variables is not None else None,
            Weights(**saved["agreed"]),
            Weights(**saved["duals"]),
            Best(best.pop("iteration"), best.pop("loss"), Weights(**best)),
            saved["iteration"],
            [Progress.of_row(row) for row in saved["history"].tolist()],
            saved["stopped"],
        )

    def check_fits(self, weights: Weights, data: Data | None, penalties: Penalties) -> None:
        """Raises ValueError where modules, data or penalties are not those that the state was saved with."""
        _check_same("penalties", asdict(self.penalties), asdict(penalties))
        _check_same("weights", _kinds(self.weights), _kinds(weights))
        if (data is None) != (self.variables is None):
            raise ValueError(
                "expected a state saved by the same rank of the same kind of training, in admm.train(state=...), found "
                f"one {'with' if data is None else 'without'} variables."
            )
        if self.variables is not None and data is not None:
            steps, sequences = data.x_NBI.shape[:2]
            wanted = {"steps": steps, "sequences": sequences, "head steps": data.y_MB.shape[0]}
            found = [*self.variables.a_NBH.shape[:2], self.variables.o_MBC.shape[0]]
            _check_same("data", dict(zip(wanted, found, strict=True)), wanted)


def _tensors(holder: Weights | Variables) -> dict[str, Tensor]:
    return {f.name: getattr(holder, f.name) for f in fields(holder)}


def _kinds(holder: Weights) -> dict[str, str]:
    return {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in _tensors(holder).items()}


def _check_same(what: str, saved: Mapping[str, object], given: Mapping[str, object]) -> None:
    other = {name: f"{value} (now {given[name]})" for name, value in saved.items() if value != given[name]}
    if other:
        raise ValueError(
            f"expected the {what} that the state was saved with, in admm.train(state=...), found that it has {other}. "
            "Resume with the same modules, data and penalties, or begin without a state."
        )
