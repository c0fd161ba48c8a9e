"""Checks at each call that a captured graph is still valid, with Dynamo's guards on everything but the batch.

Dynamo guards everything that the forward has read from the model, globals and closures: numbers, functions, objects,
lengths of lists, hooks, patched methods. Its guard manager, a tree of checks in C++, verifies in microseconds that it
is unchanged.

Guards on the batch, on modes, and on the values of parameters and buffers are left out: programs read parameters and
buffers at each call, and the batch and modes have already selected the capture.
"""

from __future__ import annotations

import inspect
import re
import types
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.guards import CheckFunctionManager

from embrace_fx.capture.read_values import NO_VALUES, PLAIN, NumbersRead, ReadValues

OF_PROGRAMS = re.compile(
    r"(.*)\.(?:__dict__\[')?_(parameters|buffers)\b(?:'\])?(\['[^']*'\])?(.*)|(.*)\.training", re.DOTALL
)
"""Names of values that programs read at each call (parameters, buffers) or that select the capture (training). Groups:
the module, "parameters" or "buffers", the entry there, an attribute of the entry, the module whose mode it is.
"""

_OF_NUMPY = re.compile(r"^___from_numpy\((.*)\)$")
"""Dynamo's name for a NumPy value, which it guards as a tensor, without its numbers."""

_VALUE_GUARDS = ("CONSTANT_MATCH", "EQUALS_MATCH", "TENSOR_MATCH")


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a captured graph stays valid: Dynamo's guards, except those on the batch.

    Attributes:
        values: the guarded values at the capture. They are compared with the current values if `manager` is None.
        manager: torch's guard manager, or None if the guards do not hold even right after the capture.
        frame: the local variables that the guards refer to: the model, and mutable defaults of arguments.
        cells: maps the name of each closure variable of the forward to its cell.
        kept: objects that are guarded by identity, kept alive so that no other object gets their address.
        tensors: constants of the graph whose content the guards do not check: tensors, which are compared by identity,
            and NumPy numbers, which are compared by value.
        numbers: tensors whose values the forward has read as Python numbers, for example by `.item()`, which makes the
            numbers constants of the graph. Parameters and buffers are excluded, because graphs read these at each call.
    """

    values: ReadValues
    manager: Any = None
    frame: Mapping[str, Any] = field(default_factory=dict)
    cells: Mapping[str, Any] = field(default_factory=dict)
    kept: Sequence[Any] = ()
    tensors: ReadValues = NO_VALUES
    numbers: NumbersRead = field(default_factory=NumbersRead)

    def are_met(self) -> bool:
        """Returns whether all guarded values are the same as at the capture."""
        if self.numbers.tensors and self.numbers.changed():
            return False
        if self.manager is None:
            return self.values.are_unchanged()
        frame = self.frame
        if self.cells:
            frame = {**frame, **{name: cell.cell_contents for name, cell in self.cells.items()}}
        return bool(self.manager.check(frame)) and self.tensors.are_unchanged()

    def to_scope_name(self, name: str, model_name: str) -> str:
        """Converts Dynamo's name of a value to the expression that reads the value in the scope of `values`.

        Args:
            name: Dynamo's name of the value.
            model_name: Dynamo's name for the model.
        """
        name = name.replace(model_name, "L['self']")
        root = re.match(r"L\['(\w+)'\]", name)
        cell = root is not None and root[1] in self.cells
        return name if root is None or not cell else f"C[{root[1]!r}].cell_contents{name[root.end() :]}"

    def without(self, tensors: Collection[str | int]) -> Conditions:
        """Returns a copy without the conditions on some values, for values that became inputs of the graph.

        Args:
            tensors: the expressions that read the values. Indices of arguments among them are ignored.
        """
        return replace(self, tensors=self.tensors.without(tensors), values=self.values.without(tensors))

    def without_broken(self) -> Conditions:
        """Returns a copy without the conditions that no longer hold because the capture itself has run the forward."""
        written = {id(each) for each in self.numbers.changed()}
        own = replace(self, numbers=NumbersRead.of(each for each in self.numbers.tensors if id(each) not in written))
        return own if own.are_met() else replace(own, manager=None, values=self.values.without_changed())


def to_dynamo_name(name: str, model_name: str) -> str:
    """Converts the expression that reads a value to Dynamo's name of the value. This is the inverse of
    `Conditions.to_scope_name`.

    Args:
        name: the expression.
        model_name: Dynamo's name for the model.
    """
    return re.sub(r"C\['(\w+)'\]\.cell_contents", r"L['\1']", name.replace("L['self']", model_name))


def name_of_model(model: nn.Module) -> str:
    """Returns Dynamo's name for the model among the local variables of its forward, such as `L['self']`."""
    code = traced_function(model).__code__
    # If the forward is decorated, the model is the first item of `*args`.
    return f"L[{code.co_varnames[0]!r}]" if code.co_argcount else "L['args'][0]"


def traced_function(model: nn.Module) -> types.FunctionType:
    """Returns the function that Dynamo traces for a model, unbound; usually the forward of the model's class."""
    found: types.FunctionType = torch._dynamo.convert_frame.get_traced_fn(model)[0]
    return found


def _mutable_defaults(function: types.FunctionType, given: Collection[str]) -> dict[str, Any]:
    """Maps the name of each argument of a forward that is not `given` to its default, if the default can be changed in
    place, such as a dict or a config object.
    """
    found = inspect.signature(function).parameters.values()
    plain = (*PLAIN, tuple, torch.dtype, torch.device, Tensor)
    return {
        each.name: each.default
        for each in found
        if each.name not in given and each.default is not each.empty and not isinstance(each.default, plain)
    }


def collect_guards(gm: fx.GraphModule, model: nn.Module, given: Collection[str]) -> Conditions:
    """Collects Dynamo's guards of a traced model, except those on arguments, parameters, buffers and training modes.

    Args:
        given: the names of the arguments that the call passes. Guards on the defaults of others are collected.
    """
    flatten: Any = gm._dynamo_bytecode_flatten
    output = flatten.out.graph_capture_output.output_graph
    function, itself = traced_function(model), name_of_model(model)
    code = function.__code__
    first = code.co_varnames[0] if code.co_argcount else "args"
    defaults = _mutable_defaults(function, {first, *given})
    frame = {first: model if code.co_argcount else (model,), **defaults}
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    scope = {"L": {**frame, **{name: cell.cell_contents for name, cell in cells.items()}}, "G": function.__globals__}

    def is_checked(guard: Any) -> bool:
        """Returns whether to check one of Dynamo's guards at each call."""
        root = re.search(r"\b([LG])\['(\w+)'\]", guard.name)
        if root is None or _is_of_programs(guard, scope):
            return False
        return root[1] == "G" or itself in guard.name or root[2] in cells or root[2] in defaults

    # torch would check the guards on the batch's tensors, which are not among the frame's locals.
    output.skip_guards_check = True
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        checks = _Guards(is_checked, code, output)
    manager = checks.guard_manager
    values = _read_guarded_values(checks.kept, output, function, model, itself, cells)
    output.local_scope = {}
    return Conditions(values, manager, frame, cells, [checks.values, checks.guarded], values.only_arrays())


def _is_of_programs(guard: Any, scope: dict[str, Any]) -> bool:
    """Returns whether a guard need not be checked: it is on the value of a parameter or buffer, which programs read at
    each call, or on the training mode of a module, which has selected the capture.

    Checked are, for example, that a parameter or buffer is None, attributes of parameters, and the shapes and dtypes of
    buffers, which may be replaced.

    Args:
        guard: one of Dynamo's guards.
        scope: the variables that names of guarded values refer to.
    """
    found = OF_PROGRAMS.fullmatch(guard.name)
    if found is None:
        return False
    owner = _read(found[1] or found[5], scope)
    if owner is not None and not isinstance(owner, nn.Module):
        return False
    if found[5] is not None:
        return True
    if found[3] is None:
        return "KEYS" not in guard.create_fn_name()
    if found[4] or guard.create_fn_name() == "HASATTR" or found[2] == "buffers":
        return False
    return _read(guard.name, scope) is not None


def _read(name: str, scope: dict[str, Any]) -> object:
    """Returns the value that Dynamo gives a name, or None if it cannot be read."""
    try:
        found: object = eval(name, scope)
    except Exception:  # reading an attribute of a user's object may raise any exception
        return None
    return found


class _Guards(CheckFunctionManager):
    """Torch's guards, changed to hold references to the guarded objects.

    Torch's own guards instead register a callback for the deletion of each guarded object, which keeps guards on a
    library's class or module alive forever.

    Args:
        is_kept: takes one of Dynamo's guards, and returns whether to check it. Torch's own `guard_filter_fn` would
            build all guards first, and then the selected ones again.
    """

    def __init__(self, is_kept: Callable[[Any], bool], *args: Any, **kwargs: Any) -> None:
        self._is_kept = is_kept
        self.guarded: list[object] = []
        self.kept: list[Any] = []
        self.values: list[object] = []
        super().__init__(*args, **kwargs)

    def build_guards(self, sorted_guards: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Builds the guards that `is_kept` selects, and stores the guarded values. Returns torch's guard builder and
        guard manager.
        """
        self.kept = kept = [guard for guard in sorted_guards if self._is_kept(guard)]
        builder, manager = super().build_guards(kept, *args, **kwargs)
        self.values = [_guarded_value(builder, guard) for guard in kept]
        return builder, manager

    def id_ref(self, obj: object, obj_str: str) -> int:
        """Returns the id of an object, and keeps the object alive. Overrides torch's method; ignores `obj_str`, the
        object's name.
        """
        self.guarded.append(obj)
        return id(obj)


def _guarded_value(builder: Any, guard: Any) -> object:
    """Returns the value that a guard checks, read by torch's guard builder, or None if the guard checks that the value
    does not exist.
    """
    try:
        found: object = builder.get(guard.originating_source)
    except Exception:  # reading a value that does not exist may raise any exception
        return None
    return found


def _read_guarded_values(
    guards: Iterable[Any],
    output: Any,
    function: types.FunctionType,
    model: nn.Module,
    model_name: str,
    cells: Mapping[str, Any],
) -> ReadValues:
    """Returns the values that guards check. Later calls compare their current values with these.

    Args:
        guards: Dynamo's guards that are checked at each call.
        output: Dynamo's output graph.
        function: the forward, unbound.
        model_name: Dynamo's name for the model.
        cells: maps the name of each closure variable of the forward to its cell.
    """
    names = []
    for guard in guards:
        name = _OF_NUMPY.sub(r"\1", guard.name.replace(model_name, "L['self']"))
        root = re.match(r"(.*?)([LG])\['(\w+)'\]", name)
        if guard.create_fn_name() not in _VALUE_GUARDS or root is None:
            continue
        if root[2] == "G" or root[3] == "self":
            names.append(name)
        elif root[3] in cells:
            names.append(f"{root[1]}C[{root[3]!r}].cell_contents{name[root.end() :]}")
    of_globals = ChainMap(function.__globals__, output.global_scope)
    return ReadValues.evaluate(dict.fromkeys(names), {"L": {"self": model}, "G": of_globals, "C": cells})
