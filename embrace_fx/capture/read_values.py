"""What a captured forward has read besides its batch, parameters and buffers: constants of its graph.

`self.temperature`, the `p` of a Dropout, a number in a global dict: the graph holds what they were when it was made.
Each call asks whether they still are; where one has changed, the graph is not valid, and the forward is captured again.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_EVERY_MODULE = frozenset(dir(nn.Module()))
_OF_CLASS = re.compile(r"dict\(type\((L\['self'\].*)\)\.__dict__\)\['(\w+)'\]")
"""How Dynamo writes an attribute that the class has; the instance may get one of its own later."""


@dataclass(frozen=True)
class ReadValues:
    """Expressions, and their values at the capture.

    Attributes:
        names: the expressions.
        code: a tuple of all of them.
        scope: the names in them.
        values: numbers and texts, compared by value, and tensors, compared by identity.
    """

    names: tuple[str, ...]
    code: types.CodeType
    scope: dict[str, Any]
    values: tuple[Any, ...]

    @staticmethod
    def of(names: Iterable[str], scope: Mapping[str, Any]) -> ReadValues:
        """Of the expressions, those whose values can be compared."""
        scope, kept = dict(scope), {}
        for name in (_OF_CLASS.sub(r"\1.\2", each) for each in names):
            try:
                value = eval(name, scope)
            except Exception:  # of something that the trace has made, which is gone
                continue
            if isinstance(value, _PLAIN) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter)):
                kept[name] = value
        code = compile("(" + "".join(f"{name}, " for name in kept) + ")", "<values read>", "eval")
        return ReadValues(tuple(kept), code, scope, tuple(kept.values()))

    @staticmethod
    def of_modules(model: nn.Module) -> ReadValues:
        """All attributes of all modules: for a trace that does not tell which of them it reads."""
        modules = list(model.modules())
        names = (f"getattr(M[{k}], {key!r})" for k, module in enumerate(modules) for key in _attributes(module))
        return ReadValues.of(names, {"M": modules})

    def unchanged(self) -> ReadValues:
        """Without those that have changed since: the forward itself writes them, or its tracing did."""
        now = ReadValues.of(self.names, self.scope)
        values = dict(zip(now.names, now.values, strict=True))
        same = [n for n, v in zip(self.names, self.values, strict=True) if n in values and _same(v, values[n])]
        return ReadValues.of(same, self.scope)

    def hold(self) -> bool:
        """Whether all of them are what they were."""
        try:
            now = eval(self.code, self.scope)
        except Exception:  # an attribute has gone, a list has become shorter
            return False
        return all(map(_same, self.values, now))


def _attributes(module: nn.Module) -> list[str]:
    """The names of a module's attributes, the numbers and texts of its classes included, that not every module has."""
    of_classes = {
        name
        for kind in type(module).__mro__
        for name, value in vars(kind).items()
        if isinstance(value, _PLAIN) and not name.startswith("__")
    }
    return sorted(of_classes.union(vars(module)) - _OF_EVERY_MODULE)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))
