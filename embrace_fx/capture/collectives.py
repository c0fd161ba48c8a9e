"""Detects a forward that calls collectives itself. It is not captured, but runs eagerly."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NoReturn

import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import fx
from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable, UserFunctionVariable

from embrace_fx.capture.errors import CaptureError
from embrace_fx.vocabulary.ops import op_name

_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

_FUNCTIONS = frozenset(
    getattr(module, name)
    for module, names in (
        (dist, ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter")),
        (dist, ("reduce_scatter_tensor", "all_to_all_single")),
        (dist.distributed_c10d, ("_all_gather_base", "_reduce_scatter_base")),
        (differentiable, ("all_reduce", "all_gather", "reduce_scatter", "all_to_all_single", "broadcast")),
    )
    for name in names
)
"""Collectives that Dynamo would trace or replace. It stops at all other collectives by itself."""


class _RefusedCollective(UserFunctionVariable):
    """The variable that Dynamo traces in place of a collective. Calling it raises `CaptureError`."""

    def call_function(self, *_: Any) -> NoReturn:
        """Raises `CaptureError`: a forward that calls a collective cannot be captured."""
        name = getattr(self.fn, "__name__", "")
        raise CaptureError(f"torch.distributed.{name} cannot be captured; call it outside of forward()")


@contextlib.contextmanager
def refuse_collectives() -> Iterator[None]:
    """Opens a context in which tracing raises `CaptureError` if the forward calls a collective."""
    kind: Any = CollectiveFunctionRewriteVariable
    can_rewrite, create = kind.__dict__["can_rewrite"], kind.__dict__["create"]

    def is_collective(variable: Any) -> bool:
        """Returns whether a variable of Dynamo is a collective of torch.distributed."""
        return inspect.isfunction(variable) and variable in _FUNCTIONS

    def refused(tx: Any, old_fn: Any, source: Any, **options: Any) -> _RefusedCollective:
        """Returns the variable that Dynamo traces in place of a collective, and that raises when called. Replaces a
        function of Dynamo, and takes its arguments.
        """
        return _RefusedCollective(old_fn, source=source, **options)

    kind.can_rewrite, kind.create = staticmethod(is_collective), staticmethod(refused)
    try:
        yield
    finally:
        kind.can_rewrite, kind.create = can_rewrite, create


def check_collectives(graph: fx.Graph) -> None:
    """Raises `CaptureError` if a traced graph contains a collective."""
    for node in graph.nodes:
        if op_name(node).partition("::")[0] in _NAMESPACES:
            name = op_name(node).partition("::")[2]
            raise CaptureError(f"torch.distributed.{name} cannot be captured; call it outside of forward()")
