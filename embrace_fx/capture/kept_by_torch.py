"""Frees memory that torch would keep of every capture until the process ends."""

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
"""Most cached results of operations on fake tensors, about 200 bytes each; a model has some hundreds."""


@contextlib.contextmanager
def capture_metrics() -> Iterator[None]:
    """Opens Dynamo's metrics context, which reading a forward needs, without the record that ends it.

    Torch keeps the last 64 records, each with its whole configuration as text, and torch 2.11 logs an error where
    the configuration holds functions.
    """
    metrics = get_metrics_context()
    record, metrics._on_exit = metrics._on_exit, lambda *_: None
    try:
        with metrics:
            yield
    finally:
        metrics._on_exit = record


def forget_captures() -> None:
    """Empties torch's caches of entries from earlier captures that nobody uses."""
    _forget_shapes()
    _forget_texts()


def _forget_shapes() -> None:
    """Empties torch's caches over symbolic sizes.

    These caches belong to the class and keep the sizes of every capture, with their fake tensors, for ever. Up to
    `MOST_RESULTS` results of operations are kept, because the next capture of a model finds most of its own there.
    """
    if FakeTensorMode.cache_info().size > MOST_RESULTS:
        FakeTensorMode.cache_clear()
    for method in vars(ShapeEnv).values():
        if (clear := getattr(method, "cache_clear", None)) is not None:
            clear()


def _forget_texts() -> None:
    """Drops the generated code of graph modules that no longer live.

    Torch keeps the code of every graph module, for tracebacks, for ever. Each module has its own class, whose forward
    knows the name of its code.
    """
    texts = fx.graph_module._loader.eval_cache
    for name in set(texts).difference(_living(fx.GraphModule)):
        texts.pop(name, None)
        linecache.cache.pop(name, None)


def _living(base: type) -> Iterator[str]:
    """Yields the names of the code of all living graph modules."""
    classes: list[type] = base.__subclasses__()
    for each in classes:
        code: CodeType | None = getattr(vars(each).get("forward"), "__code__", None)
        if code is not None:
            yield code.co_filename
        yield from _living(each)
