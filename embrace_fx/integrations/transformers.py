"""Training with Transformers: write `EmbraceTrainer` in place of `Trainer`. Nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import Trainer

import embrace_fx
from embrace_fx.integrations.accelerate import EmbraceAccelerator


class EmbraceTrainer(Trainer):
    """A `Trainer` that compiles its model with embrace_fx instead of wrapping it in DistributedDataParallel.

    It saves whole (unsharded) tensors under any plan. Evaluation runs on the compiled model, on all ranks.

    Attributes:
        logs_metrics: whether to log `CompiledModel.metrics()` of the last step together with the loss.
    """

    logs_metrics = False

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the trainer's accelerator, as an `EmbraceAccelerator`."""
        super().create_accelerator_and_postprocess()
        # `super()` has created a plain Accelerator from the trainer's arguments. Change its class, to keep its
        # settings.
        self.accelerator.__class__ = EmbraceAccelerator

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Wraps the model for training as `Trainer._wrap_model` does. For evaluation, returns the compiled model if
        there is one.
        """
        compiled = getattr(self, "model_wrapped", None)
        if not training and isinstance(compiled, embrace_fx.CompiledModel):
            return compiled
        wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
        return wrapped

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs `logs`. If `logs` contains a loss and `logs_metrics` is set, adds the compiled model's metrics."""
        compiled = getattr(self, "model_wrapped", None)
        if self.logs_metrics and "loss" in logs and isinstance(compiled, embrace_fx.CompiledModel):
            logs = logs | {f"embrace_fx/{name}": value for name, value in compiled.metrics().items()}
        super().log(logs, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves a state dict to a directory. Collective.

        Args:
            state_dict: the state dict to save, or None for the model's state dict with whole (unsharded) tables.
        """
        assert self.model is not None
        super()._save(output_dir, embrace_fx.full_state_dict(self.model) if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves the states of the optimizer, gathered from all ranks, and of the scheduler. Collective.

        Args:
            output_dir: the directory to save to.
        """
        optimizer: Any = self.optimizer
        state = optimizer.state_dict()  # collective: every rank builds the state dict, and one writes it
        saved: Any = SimpleNamespace(state_dict=lambda: state)
        self.optimizer = saved
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer
