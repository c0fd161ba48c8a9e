"""Hugging Face's loop: `EmbraceTrainer` where `Trainer` stands, nothing else changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import Trainer

import embrace_fx
from embrace_fx.integrations.accelerate import EmbraceAccelerator


class EmbraceTrainer(Trainer):
    """A `Trainer` that compiles its model instead of wrapping it in DistributedDataParallel.

    What it saves is whole, whatever the plan. Evaluation runs on the compiled model, on all ranks.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = EmbraceAccelerator  # it is made from the arguments in there

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        compiled = getattr(self, "model_wrapped", None)
        if not training and isinstance(compiled, embrace_fx.CompiledModel):
            return compiled
        wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
        return wrapped

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        assert self.model is not None
        super()._save(output_dir, embrace_fx.full_state_dict(self.model) if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer
        self.optimizer = _Saved(optimizer.state_dict())  # on every rank, of which one writes
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer


@dataclass
class _Saved:
    """An optimizer's state in its place."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state
