"""Training with Accelerate: write `EmbraceAccelerator` in place of `Accelerator`. Nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

import embrace_fx


class EmbraceAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """An `Accelerator` whose `prepare` compiles models with embrace_fx instead of wrapping them in
    DistributedDataParallel.

    It saves whole (unsharded) tensors under any plan. Any number of ranks can load these, with or without embrace_fx.

    Args:
        compile_options: options of `embrace_fx.compile`.
    """

    def __init__(self, *args: Any, compile_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compile_options = dict(compile_options or {})

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares models, optimizers and loaders as Accelerate does. An optimizer must be prepared in the same call as
        its model.
        """
        self._prepared_together = [each for each in args if isinstance(each, Optimizer)]
        return super().prepare(*args, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Compiles a model and returns it. A model that is already compiled is returned unchanged. With
        `evaluation_mode`, the model is prepared but not compiled. The arguments are those of
        `Accelerator.prepare_model`.
        """
        if isinstance(model, embrace_fx.CompiledModel):
            self._models.append(model)
            return model
        # In evaluation mode, Accelerate prepares the model without wrapping it in DDP.
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode:
            return prepared
        options = getattr(self, "compile_options", {})
        compiled = embrace_fx.compile(prepared, optimizer=getattr(self, "_prepared_together", None) or None, **options)
        compiled.__dict__["_is_accelerate_prepared"] = True
        return compiled

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Returns a prepared optimizer whose state dict has whole (unsharded) tensors. The arguments are those of
        `Accelerator.prepare_optimizer`.
        """
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = _WholeStateOptimizer
        return prepared

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns the plain model of a compiled model. Unwraps any other model as Accelerate does.
        (`transformers.Trainer` reads the class of the result to decide how to shift labels.)
        """
        plain = model.module if isinstance(model, embrace_fx.CompiledModel) else model
        found: nn.Module = super().unwrap_model(plain, *args, **kwargs)
        return found

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the model's state dict with whole tensors. Ignores `unwrap`. Collective."""
        return embrace_fx.full_state_dict(model)


class _WholeStateOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An accelerated optimizer whose state dict contains whole tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state dict with whole tensors. Collective."""
        return embrace_fx.full_state_dict(self.optimizer)
