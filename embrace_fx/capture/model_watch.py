"""Detects changes of a model's modules and parameters after its graphs were compiled.

Modules and their methods determine the forward; parameters and their dtypes determine the exchanges. Captures guard
everything else that the forward reads.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from embrace_fx.runtime.tables.model_state import ModelState

OTHER_PARAMETERS = (
    "the model's parameters have changed since compile(): {} was added, removed or replaced. Gradients are exchanged "
    "only for the original ones. Change layers, resize embeddings, tie weights and parametrize before the first call, "
    "or compile the changed model again"
)
CONVERTED = (
    "the dtype of {} has changed since the first call. Convert the model before the first call, or compile it again"
)


class ModelWatch:
    """Checks at each call whether the model is still as it was when its graphs were compiled.

    Args:
        model: the user's model.
        state: the model's parameters and tables.
    """

    def __init__(self, model: nn.Module, state: ModelState) -> None:
        self._model, self._state = model, state
        self.record()

    def record(self) -> None:
        """Records the model's current modules, methods, parameters and buffers, to compare with later."""
        self._modules = list(self._model.modules())
        self._children = [module._modules for module in self._modules]
        self._parameters = [module._parameters for module in self._modules]
        kinds = {type(module): None for module in self._modules}
        # TorchScript's modules have no Python methods.
        self._kinds = [kind for kind in kinds if not issubclass(kind, torch.jit.ScriptModule)]
        self._were = self._module_state()
        self._root_was = self._root_state()
        self._buffers = list(self._model.buffers())
        self.record_parameters()
        self._dtypes = [parameter.dtype for parameter in self._state.parameters()]
        self._record_gradient_settings(self._gradient_settings())

    def record_parameters(self) -> None:
        """Records the model's current parameters, to compare with later."""
        self._held = [*chain.from_iterable(map(_values, self._parameters))]  # references, so that no id is reused
        self._ids, self._keys = [*map(id, self._held)], self._parameter_keys()
        self._names = self._ids_by_name()

    def all_replaced(self, *, buffers: bool) -> bool:
        """Returns whether all parameters are currently replaced by plain tensors, as during
        `torch.func.functional_call`.

        Args:
            buffers: whether all buffers must be replaced too.
        """
        if isinstance(self._state.any_parameter(), nn.Parameter):
            return False
        own = {id(buffer) for buffer in self._buffers}
        return not any(isinstance(parameter, nn.Parameter) for parameter in self._model.parameters()) and not (
            buffers and any(id(buffer) in own for buffer in self._model.buffers())
        )

    @property
    def trains(self) -> bool:
        """Whether any parameter of the model requires a gradient."""
        return any(self._trains)

    def modes(self) -> tuple[bool, ...]:
        """Returns `training` of each module, then `requires_grad` of each parameter."""
        return (*[module.training for module in self._modules], *self._trains)

    def modules_changed(self) -> bool:
        """Returns whether modules, their forward methods, or the model's own forward or hooks have changed since
        `record`.
        """
        return self._module_state() != self._were or self._root_state() != self._root_was

    def refusal(self) -> RuntimeError | None:
        """Returns the error to raise if a parameter has been added, removed, replaced, or converted to another dtype
        since the last record. Returns None if there is no such parameter.
        """
        if (name := self._replaced_parameter()) is not None:
            return RuntimeError(OTHER_PARAMETERS.format(name))
        return None if (name := self._converted_parameter()) is None else RuntimeError(CONVERTED.format(name))

    def renamed(self) -> dict[str, str]:
        """Maps the old to the new name of each parameter that has been renamed since the last record. Returns an empty
        dict if parameters have also been added, removed or replaced.
        """
        now = self._ids_by_name()
        old, new = ({number: name for name, number in reversed(names.items())} for names in (self._names, now))
        return {} if old.keys() != new.keys() else {old[i]: new[i] for i in old if old[i] != new[i]}

    def _replaced_parameter(self) -> str | None:
        """Returns the name of a parameter that was added, removed or replaced, or None if none was."""
        same = [*map(id, chain.from_iterable(map(_values, self._parameters)))] == self._ids
        if same and self._parameter_keys() == self._keys and self._module_state() == self._were:
            return None
        now = self._ids_by_name()
        found = (name for name in {**self._names, **now} if self._names.get(name) != now.get(name))
        return next(found, None)

    def _converted_parameter(self) -> str | None:
        """Returns the name of a parameter whose dtype has changed, or None if none has."""
        now = self._gradient_settings()
        if now == self._gradients_were:
            return None
        self._record_gradient_settings(now)
        found = zip(self._state.names, self._dtypes, now, strict=True)
        return next((name for name, was, (_, dtype, _) in found if dtype != was), None)

    def _gradient_settings(self) -> list[tuple[bool, torch.dtype, bool]]:
        """Returns, for each parameter, (whether it requires a gradient, its dtype, whether it has hooks)."""
        found = self._state.parameters()
        hooked = [*map(any, map(_HOOKS, found))]  # does the same as `is_hooked`, without a Python call per parameter
        return [(each.requires_grad, each.dtype, has) for each, has in zip(found, hooked, strict=True)]

    def _record_gradient_settings(self, settings: list[tuple[bool, torch.dtype, bool]]) -> None:
        """Stores `settings`, the result of `_gradient_settings`, to compare with later."""
        self._gradients_were = settings
        self._trains = tuple(trains for trains, _, _ in settings)
        self._state.hooked = frozenset(n for n, (*_, hooked) in zip(self._state.names, settings, strict=True) if hooked)

    def _module_state(self) -> tuple[list[Any], list[Any]]:
        """Returns each module's child modules, and the forward method of each module's class, to detect changes."""
        return [*map(tuple, map(_values, self._children))], [kind.forward for kind in self._kinds]

    def _root_state(self) -> tuple[Any, ...]:
        """Returns the forward and the hooks of the outermost module, and the hooks of all modules of the process, to
        detect changes. The guards of captured graphs check the forwards and hooks of submodules.
        """
        root = self._model
        hooks = root._forward_pre_hooks, root._forward_hooks, root._backward_pre_hooks, root._backward_hooks
        return root.forward, *map(tuple, hooks), *map(tuple, _GLOBAL_HOOKS(torch_module))

    def _parameter_keys(self) -> list[str]:
        """Returns the attribute names under which modules hold their parameters."""
        return [*chain.from_iterable(map(_keys, self._parameters))]

    def _ids_by_name(self) -> dict[str, int]:
        """Returns the `id()` of each parameter by name."""
        return {name: id(each) for name, each in self._model.named_parameters(remove_duplicate=False)}


_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
# Hooks of `register_module_forward_hook` and the like.
_GLOBAL_HOOKS = attrgetter(
    *(f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward")),
)
# Look the methods up at each call, because modules of TorchScript use another dict class.
_keys, _values = methodcaller("keys"), methodcaller("values")
