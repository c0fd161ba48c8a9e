"""Records the constants of a captured graph: values that the forward reads besides the batch, parameters and
buffers.

Examples are `self.temperature`, the `p` of a Dropout, and a number in a global dict. The graph contains their values at
the capture. Each call compares them with the current values. If one has changed, the forward is captured again.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from embrace_fx.vocabulary.version_snapshot import VersionSnapshot

MOST_COMPARED = 4096
"""Elements of a tensor, read as a number, up to which its values are compared at each call."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
"""Types of values that cannot change in place."""
_OF_CLASS = re.compile(r"dict\(type\((L\['self'\].*)\)\.__dict__\)\['(\w+)'\]")
"""Dynamo's name for a class attribute, which an instance attribute may hide later."""


@dataclass(frozen=True)
class Changed:
    """A constant of a captured graph whose value has changed since the capture.

    Attributes:
        name: the expression that reads it: `L['self'].scale`, or `L['weight']` for an argument. "" if unknown.
        before: its value at the capture.
        now: its current value.
        owner: the argument that contains it, if its name is unknown.
    """

    name: str
    before: Any
    now: Any
    owner: str = ""

    @property
    def can_be_input(self) -> bool:
        """Whether the value can become an input of the graph: a tensor, or an int or float of unchanged type."""
        kind = type(self.now)
        is_tensor = isinstance(self.before, Tensor) and isinstance(self.now, Tensor)
        return is_tensor or (kind is type(self.before) and kind in (int, float))

    def __str__(self) -> str:
        values = "" if isinstance(self.now, Tensor | np.ndarray) else f" ({self.before!r}, {self.now!r})"
        of_owner = f"a value of the argument {to_user_expression(self.owner)}" if self.owner else "an argument"
        what = to_user_expression(self.name) if self.name else of_owner
        return f"the forward reads {what}, which keeps changing{values}"


@dataclass(frozen=True)
class ReadValues:
    """Expressions that a forward reads, with their values at the capture.

    Attributes:
        names: the expressions, as source text.
        code: compiled code that evaluates all expressions to a tuple.
        scope: the variables that the expressions refer to.
        values: the value of each expression at the capture. Numbers and strings are compared by value, tuples by item,
            others by identity.
    """

    names: tuple[str, ...]
    code: types.CodeType
    scope: dict[str, Any]
    values: tuple[Any, ...]

    @staticmethod
    def evaluate(names: Iterable[str], scope: Mapping[str, Any]) -> ReadValues:
        """Evaluates expressions, and returns them with their values. Leaves out expressions that cannot be evaluated,
        or whose values cannot be compared.

        Args:
            names: the expressions, as source text.
            scope: the variables that the expressions refer to.
        """
        own = dict(scope)
        return ReadValues._compile({name: v for name, v in _evaluate(names, own).items() if _comparable(v)}, own)

    @staticmethod
    def _compile(values: Mapping[str, Any], scope: dict[str, Any]) -> ReadValues:
        """Compiles expressions to one piece of code, and returns them with their values as `ReadValues`.

        Args:
            values: maps each expression, as source text, to its value.
            scope: the variables that the expressions refer to.
        """
        code = compile("(" + "".join(f"{name}, " for name in values) + ")", "<values read>", "eval")
        return ReadValues(tuple(values), code, scope, tuple(values.values()))

    def without(self, names: Collection[str | int]) -> ReadValues:
        """Returns a copy without the expressions in `names`."""
        return ReadValues.evaluate([name for name in self.names if name not in names], self.scope)

    def only_arrays(self) -> ReadValues:
        """Returns a copy with only the expressions whose values are tensors or NumPy values. Dynamo's guards check only
        the type of such values, not their content.
        """
        kinds = (Tensor, np.generic, np.ndarray)
        names = [n for n, value in zip(self.names, self.values, strict=True) if isinstance(value, kinds)]
        return ReadValues.evaluate(names, self.scope)

    def without_changed(self) -> ReadValues:
        """Returns a copy without the expressions whose values have changed while the capture ran the forward."""
        now = _evaluate(self.names, self.scope)
        same = {n: v for n, v in zip(self.names, self.values, strict=True) if n in now and _same(v, now[n])}
        return ReadValues._compile(same, self.scope)

    def changed(self) -> list[Changed]:
        """Returns the values that differ from those at the capture. Leaves out expressions that can no longer be
        evaluated.
        """
        now, before = _evaluate(self.names, self.scope), zip(self.names, self.values, strict=True)
        return [Changed(n, v, now[n]) for n, v in before if n in now and not _same(v, now[n])]

    def are_unchanged(self) -> bool:
        """Returns whether all expressions still have their values at the capture."""
        try:
            now = eval(self.code, self.scope)
        except Exception:  # an attribute was removed, or a list became shorter
            return False
        return all(map(_same, self.values, now))


_AS_NUMBERS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__")


@dataclass(frozen=True)
class NumbersRead:
    """Tensors whose values the forward has read as Python numbers, for example by `.item()`.

    Attributes:
        tensors: the tensors.
        were: their version counters at the capture.
        values: the bytes of the small ones in host memory, which code can also write without changing their version, by
            `.data` or through NumPy. None for others.
    """

    tensors: tuple[Tensor, ...] = ()
    were: VersionSnapshot = field(default_factory=VersionSnapshot)
    values: tuple[Tensor | None, ...] = ()

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> NumbersRead:
        """Records the current values of tensors."""
        found = tuple(tensors)
        copies = (_bytes_of(t) if t.device.type == "cpu" and t.numel() <= MOST_COMPARED else None for t in found)
        return NumbersRead(found, VersionSnapshot.of_tensors(found), tuple(copies))

    def changed(self) -> list[Tensor]:
        """Returns the tensors that have been written since the capture."""
        written = self.were.written()
        known = zip(self.tensors, self.values, strict=True)
        return written + [now for now, old in known if old is not None and not torch.equal(_bytes_of(now), old)]


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor's values as bytes, which are also equal if both are nan."""
    return tensor.detach().flatten().view(torch.uint8).clone()


def tensors_read_as_numbers(graph: fx.Graph, constants: Mapping[fx.Node, Tensor]) -> NumbersRead:
    """Returns the tensors from which the graph reads Python numbers, by calls such as `.item()`.

    Args:
        constants: maps an input of the graph to its tensor.
    """
    made = {node: {node} for node in constants}
    read: set[fx.Node] = set()
    for node in graph.nodes if constants else ():
        of_inputs = [made[each] for each in node.all_input_nodes if each in made]
        if of_inputs:
            made[node] = set().union(*of_inputs)
            if node.op == "call_method" and node.target in _AS_NUMBERS:
                read |= made[node]
    return NumbersRead.of({id(constants[node]): constants[node] for node in read}.values())


def _read_through_instance(match: re.Match[str], scope: dict[str, Any]) -> str:
    """Rewrites an expression that reads a class attribute, so that it reads the attribute from the instance. An
    instance attribute of that name may shadow the class attribute.

    Args:
        match: a match of `_OF_CLASS`, with the instance and the attribute's name.
        scope: the variables that the expression refers to.
    """
    whole, instance, name = match[0], match[1], match[2]
    try:
        found = inspect.getattr_static(eval(f"type({instance})", scope), name)
    except Exception:  # the expression refers to an object of the trace that no longer exists
        return whole
    return whole if hasattr(type(found), "__set__") else f"{instance}.{name}"


def to_user_expression(name: str) -> str:
    """Converts an expression of Dynamo to what users write: `L['self'].scale` -> `self.scale`."""
    name = re.sub(r"^L\['(\w+)'\]|^[GC]\['(\w+)'\](\.cell_contents)?", r"\1\2", name)
    return re.sub(r"\._modules\['(.*?)'\]", r".\1", name)


def _evaluate(names: Iterable[str], scope: dict[str, Any]) -> dict[str, Any]:
    """Maps each expression in `names` to its value, with the variables of `scope`. Skips expressions that cannot be
    evaluated, for example because they refer to temporary objects of the trace.
    """
    found = {}
    for name in (_OF_CLASS.sub(lambda match: _read_through_instance(match, scope), each) for each in names):
        with contextlib.suppress(Exception):
            found[name] = eval(name, scope)
    return found


def _comparable(value: Any) -> bool:
    """Returns whether a change of a value can be detected. This is true for plain values, arrays, and tensors other
    than parameters.
    """
    return isinstance(value, (*PLAIN, np.ndarray)) or (
        isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    )


def _same(a: Any, b: Any) -> bool:
    """Returns whether two values are the same. Plain values are compared by type and value, tuples by item, and others
    by identity.
    """
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, PLAIN) and bool(a == b)


NO_VALUES = ReadValues.evaluate((), {})
