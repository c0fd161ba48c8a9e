"""What `torch.compile(model, backend="embrace_fx")` is told: it is not how a model is compiled here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def refuse(graph: fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
    """Registered as Dynamo's backend "embrace_fx", so that who tries it is told what to do.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        'expected embrace_fx.compile(model), found torch.compile(model, backend="embrace_fx"): a backend gets parts '
        "of a forward, and tables are sharded by a whole training step. Call embrace_fx.compile(model); torch.compile "
        "around the result is fine."
    )
