"""A model's modules and parameters as programs were made for them, and what has changed of them since."""

from __future__ import annotations

from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch import nn

OTHER_PARAMETERS = (
    "expected the parameters of compile(), in the model's call, found that {} came, went or was replaced: gradients "
    "are exchanged, and tables sharded, for those that there were. Change layers, resize embeddings, tie weights and "
    "parametrize before the first call, or compile the changed model anew"
)


class ModelWatch:
    """Checks at each call whether a model still is as its programs were built for.

    Which modules there are and what their methods are decides what the forward does; which parameters there are decides
    what is exchanged. What the forward reads besides, captures guard by themselves.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.note()

    def note(self) -> None:
        """Takes the model as it is now for given."""
        self._modules = list(self._model.modules())
        self._children = [module._modules for module in self._modules]
        self._parameters = [module._parameters for module in self._modules]
        kinds = {type(module): None for module in self._modules}
        self._kinds = [kind for kind in kinds if not issubclass(kind, torch.jit.ScriptModule)]  # theirs have no method
        self._were = self._now()
        self._root_was = self._root()
        self._buffers = list(self._model.buffers())
        self.note_parameters()

    def note_parameters(self) -> None:
        """Remembers the present parameters as the right ones, once tables have been placed or loaded."""
        self._held = [*chain.from_iterable(map(_values, self._parameters))]  # no other gets a freed one's address
        self._ids = [*map(id, self._held)]
        self._names = self._named()

    def all_stand_ins(self, *, buffers: bool) -> bool:
        """Tells whether tensors stand in the places of all parameters for the time of a call, as of `functional_call`.

        Args:
            buffers: whether in those of all buffers too.
        """
        own = {id(buffer) for buffer in self._buffers}
        return not any(isinstance(parameter, nn.Parameter) for parameter in self._model.parameters()) and not (
            buffers and any(id(buffer) in own for buffer in self._model.buffers())
        )

    def modes(self) -> tuple[bool, ...]:
        """Reads the training mode of every module."""
        return tuple([module.training for module in self._modules])

    def modules_changed(self) -> bool:
        """Tells whether there are other modules than before, or methods of other classes or of the model itself."""
        return self._now() != self._were or self._root() != self._root_was

    def refusal(self) -> RuntimeError | None:
        """Makes the error for a model with other parameters than before; None: they are the same."""
        name = self.parameters_changed()
        return None if name is None else RuntimeError(OTHER_PARAMETERS.format(name))

    def parameters_changed(self) -> str | None:
        """Returns the name of a parameter that came, went or was replaced; None where all are those that were."""
        if [*map(id, chain.from_iterable(map(_values, self._parameters)))] == self._ids and self._now() == self._were:
            return None
        now = self._named()
        found = (name for name in {**self._names, **now} if self._names.get(name) != now.get(name))
        return next(found, None)

    def _now(self) -> tuple[list[Any], list[Any]]:
        return [*map(tuple, map(_values, self._children))], [kind.forward for kind in self._kinds]

    def _root(self) -> tuple[Any, ...]:
        """Reads the model's own forward and hooks. Captures guard those of its modules."""
        root = self._model
        hooks = root._forward_pre_hooks, root._forward_hooks, root._backward_pre_hooks, root._backward_hooks
        return root.forward, *map(tuple, hooks)

    def _named(self) -> dict[str, int]:
        return {name: id(each) for name, each in self._model.named_parameters(remove_duplicate=False)}


_values = methodcaller("values")  # of a module's dict of members; TorchScript's modules have one of their own kind
