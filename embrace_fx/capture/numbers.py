"""Makes Python numbers that a forward reads inputs of its graph, such as an annealed temperature or a step count.

Dynamo makes Python numbers constants of the graph. Here, named numbers get a symbol instead, like sizes: conditions on
them are guarded, and each call passes their values to the graph.

rewrite: return x.sum() * weight   ->   graph(x, batch_1) -> mul(sum(x), batch_1)      weight is an argument, or global
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import SymFloat, SymInt, fx
from torch._dynamo.variables.builder import VariableBuilder
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from embrace_fx.capture.errors import CaptureError

Symbol = SymInt | SymFloat


@contextlib.contextmanager
def numbers_as_inputs(names: Collection[str]) -> Iterator[None]:
    """Opens a context in which Dynamo makes the named numbers, such as `L['self'].scale`, inputs of the graph."""
    wrap, config = VariableBuilder.wrap_symfloat, cast(Any, torch.compiler.config)

    def wrap_float(self: VariableBuilder, value: float) -> Any:
        """Returns Dynamo's variable for a float: a graph input if its name is in `names`, otherwise a constant.
        Replaces a method of Dynamo.
        """
        assert self.source is not None
        with torch._dynamo.config.patch(assume_static_by_default=self.source.name not in names):
            return wrap(self, value)

    VariableBuilder.wrap_symfloat = wrap_float  # type: ignore[method-assign]
    try:
        with (
            torch._dynamo.config.patch(specialize_int=not names, specialize_float=not names),
            config.patch(dynamic_sources=",".join(names)),
        ):
            yield
    finally:
        VariableBuilder.wrap_symfloat = wrap  # type: ignore[method-assign]


def symbols_of(sizes: ShapeEnv, names: Collection[str]) -> dict[str, Symbol]:
    """Returns the symbols that Dynamo has created for Python numbers, by the number's name. A number has no symbol if
    its value decided what was traced.

    Args:
        sizes: the shape environment of the trace.
        names: Dynamo's names of the numbers.
    """
    tracked = {each.source.name: each.fake for each in sizes.tracked_fakes or () if isinstance(each.fake, Symbol)}
    return {name: symbol for name, symbol in tracked.items() if name in names}


def number_inputs(graph: fx.Graph, symbols: Mapping[str, Symbol]) -> dict[str, int]:
    """Returns the position of each number among the inputs of Dynamo's graph, by the number's name. Also changes the
    graph to take floats instead of the tensors in which Dynamo wraps them.

    Args:
        symbols: the numbers' symbols by name.

    Raises:
        CaptureError: a float is divided with `//` or `%`. Torch rounds the quotient down, which for 0.5 // 0.1 gives 5,
            while Python returns 4.
    """
    for node in graph.nodes:
        if node.target in (operator.floordiv, operator.mod) and isinstance(node.meta.get("example_value"), SymFloat):
            raise CaptureError(
                f"The forward computes {node.target.__name__}() of a Python float that changes between calls, and a "
                "captured graph would round the result differently. Compute it before the call, and pass the result."
            )
    found = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        if node._dynamo_source.name not in symbols:
            continue
        found[node._dynamo_source.name] = position
        for user in list(node.users):
            if user.op == "call_method" and user.target == "item":
                user.replace_all_uses_with(node)
                graph.erase_node(user)
    return found


def fixed_by_guards(symbols: Mapping[str, Symbol]) -> frozenset[str]:
    """Returns the names of numbers whose value is fixed by a guard, so that the graph is valid for that value only.
    `symbols` contains the numbers' symbols by name.
    """
    values = {name: symbol.node.shape_env.replace(symbol.node._expr) for name, symbol in symbols.items()}
    return frozenset(name for name, value in values.items() if value.is_number)
