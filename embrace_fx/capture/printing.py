"""Repeats a forward's prints and logs at each call, after its graph has run.

Dynamo defers `print` of tensors, constants and formatted strings until the graph has run. This module also defers
prints of containers and of `.item()` results, including those in called functions; and calls of loggers' methods,
`logging.info` and the like, and `warnings.warn`. Published models need it: Hugging Face's GPT-2 logs a warning in its
forward, and would keep its table whole if it ran as written.

rewrite: print("norm", x.norm().item()); return x.sum()  ->  graph(x) -> (norm, sum);   then   print("norm", norm)
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch._dynamo import variables
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable, StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable

_LOG_METHODS = ("debug", "info", "warning", "warn", "error", "exception", "critical", "log")
"""Prefixes of names of logging methods, which include libraries' own, such as `warning_once`."""

_HEEDED = {"flush", "stacklevel", "category"}
"""Options of `print`, logs and warnings that do not change the text, or can be passed on."""

_AS_THEY_ARE = (
    variables.TensorVariable,
    variables.ConstantVariable,
    SymNodeVariable,
    StringFormatVariable,
    variables.BuiltinVariable,
    variables.UserDefinedClassVariable,
)


@contextlib.contextmanager
def defer_prints() -> Iterator[None]:
    """Opens a context in which Dynamo records the forward's prints and logs instead of stopping at them."""
    call, log = DebuggingVariable.call_function, LoggingLoggerVariable.call_method

    def call_print(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Makes Dynamo record a call of `print` or `warnings.warn`, to be repeated after the graph has run. Replaces a
        method of Dynamo.
        """
        category = [kwargs["category"]] if "category" in kwargs else []
        args = [_formatted(each) for each in (*args, *category)]
        # A value computed inside a checkpointed region is not available outside of it.
        in_region = tx.output.current_tracer.parent is not None
        known = variables.ConstantVariable if in_region else _AS_THEY_ARE
        if kwargs.keys() - _HEEDED or not all(isinstance(each, known) for each in args):
            _break_graph(self.value)
        # Record the print in the forward's own frame, because Dynamo drops records of functions that it calls.
        tx.output.root_tx.debug_locals.append((self, args))
        return variables.ConstantVariable.create(None)

    def call_logger(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Makes Dynamo record a call of a logger's method `name`, to be repeated after the graph has run. Replaces a
        method of Dynamo.
        """
        if self.source is None or not name.startswith(_LOG_METHODS):
            return log(self, tx, name, args, kwargs)
        method = DebuggingVariable(getattr(self.value, name), source=AttrSource(self.source, name))
        return method.call_function(tx, args, kwargs)

    functions = {print, warnings.warn, *(vars(logging)[name] for name in _LOG_METHODS if name in vars(logging))}
    DebuggingVariable.call_function = call_print  # type: ignore[method-assign]
    LoggingLoggerVariable.call_method = call_logger  # type: ignore[method-assign]
    try:
        with torch._dynamo.config.patch(reorderable_logging_functions=functions):
            yield
    finally:
        DebuggingVariable.call_function = call  # type: ignore[method-assign]
        LoggingLoggerVariable.call_method = log  # type: ignore[method-assign]


def _break_graph(function: Any) -> NoReturn:
    """Raises Dynamo's error for a graph break at a call of `function`, a print or log that cannot be repeated after the
    graph.
    """
    torch._dynamo.exc.unimplemented(
        gb_type="cannot be deferred",
        context="",
        explanation=f"{getattr(function, '__name__', function)} of containers, with options, or in checkpointed code",
        hints=[],
    )


def _formatted(value: Any) -> Any:
    """Converts Dynamo's variable for an argument of `print`. Lists and constant containers become text immediately,
    because the forward may change them before they are printed. Other variables are returned unchanged.
    """
    if isinstance(value, _AS_THEY_ARE):
        return value
    if isinstance(value, variables.ListVariable) and all(isinstance(each, _AS_THEY_ARE) for each in value.items):
        return StringFormatVariable.create(f"[{', '.join('{!r}' for _ in value.items)}]", list(value.items), {})
    fixed = isinstance(value, variables.TupleVariable) or value.is_python_constant()
    return StringFormatVariable.create("{}", [value], {}) if fixed else value
