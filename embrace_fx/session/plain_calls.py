"""Answers calls by the user's own forward, without capture."""

from __future__ import annotations

from typing import Any

from torch import nn

from embrace_fx.runtime.ranks.announcement import EVALUATING
from embrace_fx.runtime.tables.placement import broadcast_state
from embrace_fx.session.model_watch import ModelWatch
from embrace_fx.setup.agreement import agree_on_first_call
from embrace_fx.setup.setting import Setting


class PlainCalls:
    """Answers calls by the model's own forward: `functional_call`, and evaluations before any training."""

    def __init__(self, setting: Setting, watch: ModelWatch) -> None:
        self._setting = setting
        self._watch = watch
        self._replicated = False

    def is_stateless(self) -> bool:
        """Tells whether other tensors replace all parameters and shared buffers, as in `functional_call`."""
        if isinstance(self._setting.state.any_parameter(), nn.Parameter):
            return False
        return self._watch.all_stand_ins(buffers=self._setting.options.shares_buffers)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model's own forward, before the first training call, when no table is sharded. Collective.

        Raises:
            RuntimeError: the model is on the meta device, and has no values yet.
        """
        setting = self._setting
        agree_on_first_call(setting.communicator, EVALUATING, None)
        if any(parameter.device.type == "meta" for parameter in setting.model.parameters()):
            raise RuntimeError(
                "expected a training call before the first evaluation, in forward(), found a model on the meta device, "
                "and how its tables are sharded is decided with the first training batch. Call it once with gradients "
                "enabled."
            )
        if not self._replicated and setting.communicator.group is not None:
            buffers = setting.options.shares_buffers
            broadcast_state(setting.model, setting.state.ignored, setting.communicator, buffers=buffers)
        self._replicated = True
        return setting.model(*args, **kwargs)
