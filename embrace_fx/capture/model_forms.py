"""Wraps Dynamo's graph of a forward as a module that AOTAutograd can trace: its results are trees of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from embrace_fx.capture.result_objects import flatten_result

STATES = "__states"
"""Keyword argument of a traced module, for the values that its graph reads from objects."""


class TreeResults(nn.Module):
    """Wraps Dynamo's graph as a module with the same parameter names. The module returns trees of tensors that share no
    memory.

    Args:
        graph: Dynamo's graph.
        states: for each value in the keyword argument `STATES` of a call, its position among the graph's inputs, or
            None if the graph does not read the value. With `states`, the module returns the outputs of the graph, from
            which side effects can be repeated. Without `states`, it returns the results of the forward.
    """

    def __init__(self, graph: Any, states: tuple[int | None, ...] | None = None) -> None:
        super().__init__()
        self._graph = [graph]  # in a list, because a submodule would give each parameter a second name
        self._states = states
        self._parameters = graph._parameters
        self._buffers = graph._buffers
        self._modules = graph._modules

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields each module once, under one name. Ignores `remove_duplicate`.

        Tracing replaces parameters by tensors, by name, and then restores them. If a module had two names, tracing
        would mistake the tensors for its parameters, and would not restore the parameters.
        """
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(memo, prefix)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs Dynamo's graph node by node, so that ATen nodes inherit the user's source lines."""
        given, graph, effects = kwargs.pop(STATES, ()), self._graph[0], self._states is not None
        arguments = inspect.signature(graph.forward).bind(*args, **kwargs).arguments.values()
        inputs = [*graph._dynamo_bytecode_flatten(*arguments)] if effects else [*arguments]
        for position, state in zip(self._states or (), given, strict=True):
            if position is not None:
                inputs[position] = state
        with fx.traceback.preserve_node_meta():
            results = fx.Interpreter(graph).run(*inputs, enable_io_processing=not effects)
        of_forward = (*self.parameters(), *pytree.tree_leaves((args, kwargs)), *given)
        return flatten_result(tuple(results) if effects else results, of_forward, every=effects)
