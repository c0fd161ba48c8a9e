"""The context of a compiled model: the model, its optimizers, the ranks, the options."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from embrace_fx.runtime.ranks.announcement import Announcements, activity_of
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.stepping import Stepping
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.setup.options import Options


@dataclass(frozen=True)
class Context:
    """The model, options, ranks and tables for which a plan is made and applied."""

    model: nn.Module
    stepping: Stepping  # knows the optimizers
    state: ModelState
    announcements: Announcements
    options: Options

    @property
    def communicator(self) -> Communicator:
        """The communicator of the ranks."""
        return self.announcements.communicator

    @property
    def device(self) -> torch.device:
        """The device of the model, not counting parameters on the meta device."""
        devices = (parameter.device for parameter in self.model.parameters())
        return next((each for each in devices if each.type != "meta"), torch.get_default_device())

    def activity(self, *, train: bool) -> int:
        """Returns the activity that ranks announce for a call made now."""
        return activity_of(train=train, reduces=self.state.synchronised)
