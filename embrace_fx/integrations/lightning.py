"""Lightning's loop: `Trainer(strategy=EmbraceStrategy())` where `strategy="ddp"` stands, nothing else changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import Optimizer

import embrace_fx


class EmbraceStrategy(DDPStrategy):
    """A strategy that compiles the network of a LightningModule instead of wrapping the module in
    DistributedDataParallel.

    Steps log, call metrics and the trainer: they are no part of a model's graph. So the network has to be one child of
    the module, which the steps call. What is saved is whole, whatever the plan.

    Args:
        compile_options: of `embrace_fx.compile`.
    """

    def __init__(self, *args: Any, compile_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compile_options = dict(compile_options or {})

    def configure_ddp(self) -> None:
        assert self.model is not None
        name = _network_of(self.model)
        found = getattr(self.model, name)
        if not isinstance(found, embrace_fx.CompiledModel):  # fit() may be called again
            setattr(self.model, name, embrace_fx.compile(found, **self._compile_options))

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.model is not None
        with getattr(self.model, _network_of(self.model)).no_sync():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors. Collective."""
        assert self.lightning_module is not None
        return embrace_fx.full_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole tensors. Collective."""
        return embrace_fx.full_state_dict(optimizer)


def _network_of(module: nn.Module) -> str:
    """The child of a LightningModule that has all of its trainable parameters.

    Raises:
        ValueError: there is none, or parameters lie elsewhere too.
    """
    trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    children = sorted({name.split(".")[0] for name in trainable})
    if len(children) != 1 or children[0] not in dict(module.named_children()):
        raise ValueError(
            "expected the trainable parameters of a LightningModule in one child of it, in EmbraceStrategy, found them "
            f"in {', '.join(children) or 'none'} of {type(module).__name__}. Put the network into a module of its own, "
            "self.net, whose forward the steps call."
        )
    return children[0]
