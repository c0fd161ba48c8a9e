"""Frees what torch keeps of every capture for as long as a process lives."""

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
"""Of operations on fake tensors, some 200 bytes each and their sizes; a model has some hundreds."""


@contextlib.contextmanager
def capture_metrics() -> Iterator[None]:
    """Dynamo's context of metrics, which it writes into while it reads a forward, without a record at its end.

    Torch keeps the last 64 records, with its whole configuration as text in each, and torch 2.11 logs an error where
    functions stand in the configuration.
    """
    metrics = get_metrics_context()
    record, metrics._on_exit = metrics._on_exit, lambda *_: None
    try:
        with metrics:
            yield
    finally:
        metrics._on_exit = record


def forget_captures() -> None:
    """Empties torch's caches of what came from captures before this one, as far as nobody uses it."""
    _forget_shapes()
    _forget_texts()


def _forget_shapes() -> None:
    """Empties torch's caches over symbolic sizes.

    They are of the class, and keep the sizes of every capture, with the fake tensors that have them, for ever. Results
    of operations are kept up to a number: another capture of a model finds most of its own there.
    """
    if FakeTensorMode.cache_info().size > MOST_RESULTS:
        FakeTensorMode.cache_clear()
    for method in vars(ShapeEnv).values():
        if (clear := getattr(method, "cache_clear", None)) is not None:
            clear()


def _forget_texts() -> None:
    """Drops the generated code of graphs that have gone.

    Torch keeps the code of every graph module for tracebacks, and for ever. Each module has a class of its own, whose
    forward knows the name of its code.
    """
    texts = fx.graph_module._loader.eval_cache
    for name in set(texts).difference(_living(fx.GraphModule)):
        texts.pop(name, None)
        linecache.cache.pop(name, None)


def _living(base: type) -> Iterator[str]:
    """The names of the code of all graph modules that live."""
    classes: list[type] = base.__subclasses__()
    for each in classes:
        code: CodeType | None = getattr(vars(each).get("forward"), "__code__", None)
        if code is not None:
            yield code.co_filename
        yield from _living(each)
