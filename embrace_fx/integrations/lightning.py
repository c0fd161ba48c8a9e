"""Training with Lightning: write `Trainer(strategy=EmbraceStrategy())`, or `"embrace_fx"`, in place of `"ddp"`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

import embrace_fx


class EmbraceStrategy(DDPStrategy):
    """A strategy that compiles the network of a LightningModule instead of wrapping the module in
    DistributedDataParallel.

    The steps of a LightningModule cannot be captured in a graph, because they log, update metrics and use the trainer.
    So only a part of the module is compiled: its child that has all trainable parameters. If there is no such child,
    the module's own forward is compiled, and the steps must call it as `self(...)`.

    State dicts contain whole (unsharded) tensors under any plan.

    Args:
        compile_options: options of `embrace_fx.compile`.
    """

    def __init__(self, *args: Any, compile_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compile_options = dict(compile_options or {})
        self.compiled: embrace_fx.CompiledModel | None = None
        self._calls = 0

    def setup(self, trainer: Trainer) -> None:
        """Sets up the strategy for a trainer. An evaluation after `fit()` reuses the network compiled by `fit()`."""
        if self.compiled is None or trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
            return
        # Skip DDPStrategy's setup: it would broadcast parameters, but each rank has its own shards.
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Compiles the network instead of wrapping the module in DDP. The network is the only child module with
        trainable parameters, or, if there is no such child, the module itself.
        """
        assert self.model is not None
        if self.compiled is not None:  # fit() may be called several times
            return
        children = _trained_children(self.model)
        if len(children) == 1 and children[0] in dict(self.model.named_children()):
            found = getattr(self.model, children[0])
            self.compiled = found if isinstance(found, embrace_fx.CompiledModel) else self._compile(found)
            setattr(self.model, children[0], self.compiled)
        elif type(self.model).forward is LightningModule.forward:
            raise ValueError(
                f"EmbraceStrategy: {type(self.model).__name__} has no forward(), and no child module has all of its "
                f"trainable parameters: they are in {', '.join(children) or 'none'}. Define forward() and call "
                "self(...) in training_step(), or put the network into one child module."
            )
        else:
            network = copy.copy(self.model)  # shares parameters and children, without the trainer
            self.compiled = self._compile(network)
            self.model.forward = self._call_compiled

    def _compile(self, network: nn.Module) -> embrace_fx.CompiledModel:
        """Compiles a network with the strategy's options."""
        return embrace_fx.compile(network, **self._compile_options)

    def _call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled network. This method replaces the module's `forward`."""
        assert self.compiled is not None
        assert self.model is not None
        self._calls += 1
        self.compiled.module.training = self.compiled.training = self.model.training
        return self.compiled(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's `training_step` and returns its result. Checks that the step has called the compiled
        forward.

        Raises:
            RuntimeError: the step has not called the compiled forward, so its gradients would not be reduced.
        """
        assert self.model is not None
        calls, stands_in = self._calls, self.model.__dict__.get("forward") == self._call_compiled
        found = super().training_step(*args, **kwargs)
        if stands_in and self._calls == calls:
            raise RuntimeError(
                f"EmbraceStrategy: {type(self.model).__name__}.training_step() did not call self(...), so gradients "
                "would not be reduced. Call self(...) in training_step(), or put the network into one child module."
            )
        return found

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Opens a context in which backwards accumulate gradients without reducing them."""
        assert self.compiled is not None
        with self.compiled.no_sync():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state dict with whole tensors. Collective."""
        assert self.lightning_module is not None
        return embrace_fx.full_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state dict with whole tensors. Collective."""
        return embrace_fx.full_state_dict(optimizer)


class EmbraceMetrics(Callback):
    """A callback that logs `CompiledModel.metrics()` every `log_every_n_steps` steps of the trainer. The metrics are
    those of the last step. Pass the callback to the trainer: `Trainer(callbacks=[EmbraceMetrics()])`.
    """

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Logs the compiled model's metrics through the LightningModule, every `log_every_n_steps` steps of the
        trainer.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, EmbraceStrategy) or strategy.compiled is None:
            return
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            metrics = strategy.compiled.metrics()
            pl_module.log_dict({f"embrace_fx/{name}": value for name, value in metrics.items()})


StrategyRegistry.register("embrace_fx", EmbraceStrategy, description="tables in shards, where DDP replicates them")


def _trained_children(module: nn.Module) -> list[str]:
    """Returns the sorted names of the module's direct children with trainable parameters, and of its own trainable
    parameters.
    """
    trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return sorted({name.split(".")[0] for name in trainable})
