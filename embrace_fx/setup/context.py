"""The context of a compiled model: the model, its optimizers, the ranks, the options."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.step_handshake import StepHandshake, activity_code
from embrace_fx.runtime.step.optimizer_hooks import OptimizerHooks
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.setup.options import Options


@dataclass(frozen=True)
class Context:
    """Everything that the parts of a compiled model share: the model, its optimizers and tables, the ranks and the
    options.

    Attributes:
        model: the user's model.
        optimizer_hooks: the hooks on the model's optimizers.
        state: the model's parameters and tables.
        announcements: the messages in which ranks announce each step to one another.
        options: the options of `compile`.
    """

    model: nn.Module
    optimizer_hooks: OptimizerHooks
    state: ModelState
    announcements: StepHandshake
    options: Options

    @property
    def communicator(self) -> Communicator:
        """The communicator of the ranks that train together."""
        return self.announcements.communicator

    @property
    def device(self) -> torch.device:
        """The device of the first parameter that is not on the meta device, or torch's default device."""
        devices = (parameter.device for parameter in self.model.parameters())
        return next((each for each in devices if each.type != "meta"), torch.get_default_device())

    def activity(self, *, train: bool) -> int:
        """Returns the code with which ranks announce the mode of a call: training, accumulating (under `no_sync`) or
        evaluating.
        """
        return activity_code(train=train, reduces=self.state.synchronised)
