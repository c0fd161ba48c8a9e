"""Wraps a model so that its results are trees of tensors, as tracing needs them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from embrace_fx.capture.result_objects import open_objects

STATES = "__states"
"""The keyword by which a traced module gets the values that its graph reads from objects."""


class OpenResults(nn.Module):
    """A module with the wrapped one's names, whose results are trees of tensors, each with its own memory.

    Args:
        states: positions, among the inputs of Dynamo's graph, of the values that come as `STATES`; an item is None
            for a value that the graph does not read. Results are then the graph's own, not the forward's. None: the
            forward has no effects to be replayed.
    """

    def __init__(self, module: nn.Module, states: tuple[int | None, ...] | None = None) -> None:
        super().__init__()
        self._call = [module]  # in a list: as a submodule it would give each parameter a second name
        self._states = states
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._modules = module._modules

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields each module once. Tracing replaces parameters by tensors, by name, and puts them back; with a second
        name it would take the tensors for parameters, and leave them there."""
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(memo, prefix)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop(STATES, ())
        if self._states is None:
            results = _run_by_node(self._call[0], args, kwargs)
        else:
            results = _run_graph(self._call[0], args, kwargs, dict(zip(self._states, given, strict=True)))
        every = self._states is not None
        inputs = (*self.parameters(), *pytree.tree_leaves((args, kwargs)), *given)
        return open_objects(results, inputs, every=every)


def _run_by_node(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the module; a graph node by node, because only then ATen nodes inherit the user's lines."""
    if not isinstance(module, fx.GraphModule):
        return module(*args, **kwargs)
    inputs = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    with fx.traceback.preserve_node_meta():
        return fx.Interpreter(module).run(*inputs.values())


def _run_graph(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], states: dict[int | None, Any]
) -> tuple[Any, ...]:
    """Runs a graph of Dynamo's, with some inputs replaced by `states` (position -> value); returns its own results."""
    arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    inputs = list(module._dynamo_bytecode_flatten(*arguments.values()))
    for position, state in states.items():
        if position is not None:
            inputs[position] = state
    with fx.traceback.preserve_node_meta():
        return tuple(fx.Interpreter(module).run(*inputs, enable_io_processing=False))
