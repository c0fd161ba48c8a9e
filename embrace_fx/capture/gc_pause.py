"""Disables Python's cyclic garbage collection while a graph is captured and compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Opens a context in which Python's cyclic garbage collector does not run.

    A capture creates millions of objects that live until its end, so collections would find nothing and take a sixth of
    the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
