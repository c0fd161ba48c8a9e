"""Reads at each call the properties that decide on a parameter's gradient: `requires_grad`, dtype, hooks."""

from __future__ import annotations

import torch
from torch import nn

from embrace_fx.runtime.step.gradient_hooks import is_hooked
from embrace_fx.runtime.tables.model_state import ModelState

CONVERTED = (
    "expected every parameter to stay of its dtype, in the model's call, found that that of {} has changed since the "
    "first call: what is exchanged was decided by it. Convert the model before the first call, or compile it anew"
)


class ParameterWatch:
    """Watches one model's parameters.

    Attributes:
        trains: for each parameter, whether it requires a gradient; part of a call's kind.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self.note()

    def note(self) -> None:
        """Records the present dtypes."""
        self._dtypes = [parameter.dtype for parameter in self._state.parameters()]
        self._look(self._now())

    def refusal(self) -> RuntimeError | None:
        """Makes the error for a parameter whose dtype has changed; None: none has."""
        name = self.converted()
        return None if name is None else RuntimeError(CONVERTED.format(name))

    def converted(self) -> str | None:
        """Reads all parameters; returns the name of one whose dtype has changed, or None."""
        now = self._now()
        if now != self._was:
            self._look(now)
            found = zip(self._state.names, self._dtypes, now, strict=True)
            return next((name for name, was, (_, dtype, _) in found if dtype != was), None)
        return None

    def _now(self) -> list[tuple[bool, torch.dtype, bool]]:
        return [(each.requires_grad, each.dtype, is_hooked(each)) for each in self._state.parameters()]

    def _look(self, now: list[tuple[bool, torch.dtype, bool]]) -> None:
        self._was = now
        self.trains = tuple(trains for trains, _, _ in now)
        self._state.hooked = frozenset(n for n, (*_, hooked) in zip(self._state.names, now, strict=True) if hooked)


def check_has_values(model: nn.Module) -> None:
    """Raises where a model without values is evaluated.

    Raises:
        RuntimeError: the model is on the meta device.
    """
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise RuntimeError(
            "expected a training call before the first evaluation, in forward(), found a model on the meta device, "
            "and how its tables are sharded is decided with the first training batch. Call it once with gradients "
            "enabled."
        )
