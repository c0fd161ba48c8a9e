"""What one compiled model is made of: the model, its optimizers, the ranks, the options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from embrace_fx.runtime.optimizer.stepping import Stepping
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.model_state import ModelState
from embrace_fx.setup.options import Options


@dataclass(frozen=True)
class Setting:
    """What a plan is made for and applied to.

    Attributes:
        classes: id of an optimizer -> the class that defines its update.
        stepping: id of an optimizer -> what its step does beyond that class.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    classes: Mapping[int, type[Optimizer]]
    stepping: Mapping[int, Stepping]
    state: ModelState
    communicator: Communicator
    options: Options
