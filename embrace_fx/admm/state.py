"""The state of a training between two iterations, which can be saved and resumed with the same bits."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from embrace_fx.admm.lagrangian import Penalties
from embrace_fx.admm.model import Data, PerConstraint, Weights, require
from embrace_fx.admm.progress import Best, Progress, Stopping
from embrace_fx.admm.weights import Grams

FORMAT = 2


@dataclass
class State:
    """The state of one rank's training.

    Attributes:
        penalties: the factors of the penalties in the Lagrangian.
        weights: this rank's own weights.
        multipliers: the multipliers of the constraints of this rank's sequences, divided by the penalties' factors.
            None on an asynchronous master.
        agreed: the weights averaged over ranks (z); in a single process, its own weights.
        duals: the scaled multipliers (u) of the constraint that this rank's weights equal the averaged weights; zero in
            a single process.
        best: the averaged weights with the lowest loss. At the end of training, they are copied into the modules.
        seed: the seed for the order of batches.
        grams: running means of the Gram matrices of the inputs of cell and head, used to fit the weights.
        iteration: the number of completed iterations.
        history: the metrics of each iteration; equal on all synchronous ranks.
        stopped: the reason why training ended early, or None.
    """

    penalties: Penalties
    weights: Weights
    multipliers: PerConstraint | None
    agreed: Weights
    duals: Weights
    best: Best
    seed: int
    grams: Grams = field(default_factory=Grams)
    iteration: int = 0
    history: list[Progress] = field(default_factory=list)
    stopped: str | None = None

    @classmethod
    def begin(cls, weights: Weights, data: Data | None, penalties: Penalties, best: Best, seed: int) -> State:
        """Returns the state before the first iteration.

        Args:
            weights: the weights to start from, equal on all ranks.
            data: the data to train on, which determines the multipliers' shapes. None for an asynchronous master, which
                does not train and has no multipliers.
            penalties: the factors of the penalties.
            best: the modules' weights before rescaling, with their loss.
            seed: the seed for the order of batches.
        """
        zeros = Weights(*map(torch.zeros_like, weights.tensors()))
        multipliers = None
        if data is not None:
            multipliers = PerConstraint(*map(data.x_NBI.new_zeros, multiplier_sizes(weights, data)))
        return cls(penalties, weights, multipliers, weights, zeros, best, seed)

    @property
    def elapsed_s(self) -> float:
        """The wall time of the training so far, in seconds."""
        return self.history[-1].elapsed_s if self.history else 0.0

    def advance(self, progress: Progress, stopping: Stopping) -> None:
        """Records the metrics of an iteration. Keeps the averaged weights as `best` if their loss is the lowest so far,
        and sets `stopped` if training should stop.

        Args:
            progress: the iteration's metrics.
            stopping: the criteria to stop early.
        """
        self.history.append(progress)
        self.best = self.best.better_of(progress, self.agreed)
        self.stopped = stopping.reason(progress, self.best)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the state to a file that `torch.load(weights_only=True)` can read."""
        torch.save({"format": FORMAT, **asdict(self)}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], map_location: torch.device | str | None = None) -> State:
        """Loads a state that `save` has written. Raises `ValueError` if the file contains something else.

        Args:
            map_location: as for `torch.load`.
        """
        saved: Any = torch.load(path, weights_only=True, map_location=map_location)
        known = isinstance(saved, dict) and saved.pop("format", None) == FORMAT
        require(
            known,
            f"admm.State.load(): {os.fspath(path)!r} was not written by admm.State.save() in format {FORMAT}. Pass the "
            "file of a saved state.",
        )
        best, multipliers = saved["best"], saved["multipliers"]
        saved["penalties"], saved["grams"] = Penalties(**saved["penalties"]), Grams(**saved["grams"])
        saved["multipliers"] = PerConstraint(**multipliers) if multipliers is not None else None
        saved["best"] = Best(best["iteration"], best["loss"], Weights(**best["weights"]))
        saved["history"] = [Progress(**each) for each in saved["history"]]
        return cls(**saved | {name: Weights(**saved[name]) for name in ("weights", "agreed", "duals")})

    def check_fits(self, weights: Weights, data: Data | None, penalties: Penalties) -> None:
        """Raises `ValueError` if weights, data or penalties differ from those that the state was saved with."""
        saved = () if self.multipliers is None else tuple(tuple(each.shape) for each in self.multipliers.tensors())
        found = _fixed_values(self.weights, saved, self.penalties)
        wanted = _fixed_values(weights, multiplier_sizes(weights, data) if data is not None else (), penalties)
        other = [f"{name} {value} (now {wanted[name]})" for name, value in found.items() if value != wanted[name]]
        require(
            not other,
            f"admm.train(state=...): the state was saved with {'; '.join(other)}. Resume with the same modules, data "
            "and penalties on the same rank, or begin without a state.",
        )


Sizes = tuple[tuple[int, ...], ...]


def multiplier_sizes(weights: Weights, data: Data) -> Sizes:
    """Returns the shapes of the multipliers of preactivations, states and outputs for these weights and this data."""
    states, outputs = (*data.x_NBI.shape[:2], len(weights.cell_HF)), (*data.y_MB.shape, len(weights.head_CG))
    return states, states, outputs


def _fixed_values(weights: Weights, multipliers: Sizes, penalties: Penalties) -> dict[str, str]:
    """Returns name -> text of the values that must be the same when a state is saved and when training resumes from it.

    Args:
        multipliers: the shapes of the multipliers.
    """
    return {
        "weights": ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in weights.tensors()),
        "multipliers of": str(multipliers),
        "penalties": str(penalties),
    }
