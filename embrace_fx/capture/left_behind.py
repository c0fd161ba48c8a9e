"""What a forward leaves on its modules while Python runs it on fake tensors: found, put back, refused.

The direct route has no code that would do it again at each call, so that a state would stand still and an auxiliary
loss would be a tensor of the trace.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from embrace_fx.capture.errors import RefusedError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class LeftBehind:
    """A model's attributes before a trace, to be compared with those after it.

    Attributes:
        numbers: the names of attributes whose numbers or texts have changed, as of the last `put_back`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kind = type(model).__name__
        self._before = [(name, module, dict(vars(module)), _copies(module)) for name, module in model.named_modules()]
        self.numbers: list[str] = []

    def put_back(self) -> str | None:
        """Takes away tensors that the trace has left; the name of an attribute that held one, None where none did."""
        found = []
        self.numbers = []
        for prefix, module, before, copies in self._before:
            for key, value in list(vars(module).items()):
                name, old = f"{prefix}.{key}" if prefix else key, before.get(key, _NOTHING)
                if key in copies and value is old and _differs(copies[key], value):
                    _fill(value, copies[key])
                    found.append(name)
                elif value is not old and _holds_tensors(value):
                    _set(module, key, old)
                    found.append(name)
                elif isinstance(value, _PLAIN) and (type(value) is not type(old) or value != old):
                    self.numbers.append(name)
        return next(iter(found), None)

    def reset_numbers(self) -> None:
        """Puts the numbers back too."""
        for prefix, module, before, _ in self._before:
            for key in list(vars(module)):
                if (f"{prefix}.{key}" if prefix else key) in self.numbers:
                    _set(module, key, before.get(key, _NOTHING))

    def refuse(self, name: str) -> None:
        """Raises for an attribute.

        Raises:
            RefusedError: always.
        """
        raise RefusedError(
            f"expected a forward that only returns results, in {self._kind}, found that it also sets {name}, while "
            "Dynamo cannot read it, so that this would not happen at each call. Return the value, or make the forward "
            "readable for torch.compile: `torch.compile(model, fullgraph=True)` names the line."
        )


_NOTHING = object()


def _set(module: nn.Module, key: str, value: Any) -> None:
    if value is _NOTHING:
        del vars(module)[key]
    else:
        vars(module)[key] = value


def _copies(module: nn.Module) -> dict[str, Any]:
    """The contents of a module's own containers, without those that every module has."""
    return {
        key: value.copy()
        for key, value in vars(module).items()
        if key not in _OF_EVERY_MODULE and isinstance(value, _CONTAINERS)
    }


def _differs(before: Any, now: Any) -> bool:
    """Whether a container has got tensors that it did not hold."""
    held = {id(leaf) for leaf in pytree.tree_leaves(before)}
    leaves = pytree.tree_leaves(list(now) if isinstance(now, set) else now)
    return any(isinstance(leaf, Tensor) and id(leaf) not in held for leaf in leaves)


def _fill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(contents)
    else:
        container.update(contents)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
