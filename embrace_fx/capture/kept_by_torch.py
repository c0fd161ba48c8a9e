"""Frees memory of captures that torch would otherwise keep until the process ends."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Iterator
from types import CodeType

from torch import fx
from torch._dynamo.utils import get_metrics_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

MOST_RESULTS = 4_000
"""Maximum number of cached results of fake tensor operations, about 200 bytes each; a model has some hundreds."""


@contextlib.contextmanager
def capture_metrics() -> Iterator[None]:
    """Opens Dynamo's metrics context, which tracing requires, and discards the record that it would keep.

    Torch keeps the last 64 records, each with its whole configuration as text, and torch 2.11 logs an error if the
    configuration contains functions.
    """
    metrics = get_metrics_context()
    record, metrics._on_exit = metrics._on_exit, lambda *_: None
    try:
        with metrics:
            yield
    finally:
        metrics._on_exit = record


def forget_captures() -> None:
    """Clears entries of earlier captures from torch's caches."""
    _clear_shape_caches()
    _clear_generated_code()


def _clear_shape_caches() -> None:
    """Clears torch's caches of symbolic sizes, which would keep the fake tensors of every capture forever.

    Keeps up to `MOST_RESULTS` cached results of fake tensor operations, because the next capture of a model can reuse
    most of these.
    """
    if FakeTensorMode.cache_info().size > MOST_RESULTS:
        FakeTensorMode.cache_clear()
    for method in vars(ShapeEnv).values():
        if (clear := getattr(method, "cache_clear", None)) is not None:
            clear()


def _clear_generated_code() -> None:
    """Removes the generated code of graph modules that no longer exist from Python's line cache.

    Torch keeps the code of every graph module forever, for tracebacks. Each module has its own class, whose forward has
    the name of the code.
    """
    texts = fx.graph_module._loader.eval_cache
    for name in set(texts).difference(_code_names(fx.GraphModule)):
        texts.pop(name, None)
        linecache.cache.pop(name, None)


def _code_names(base: type) -> Iterator[str]:
    """Yields the names of the generated code of all graph modules that still exist, found as the subclasses of
    `base`.
    """
    classes: list[type] = base.__subclasses__()
    for each in classes:
        code: CodeType | None = getattr(vars(each).get("forward"), "__code__", None)
        if code is not None:
            yield code.co_filename
        yield from _code_names(each)
