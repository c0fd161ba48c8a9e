"""Logs on rank 0 each long stage of a first call, and one line about the plan.

All lines go to the logger "embrace_fx" at INFO. If the program has configured logging, its own handlers and levels
apply. Otherwise the lines are printed on stderr, because seconds without output look like a hang. They can be silenced
by a level of the logger, by `logging.disable`, or by handlers.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger("embrace_fx")

LINE_EVERY_S = 1.8
"""Interval in seconds at which the running stage is logged."""

_of_thread = threading.local()
"""Holds a thread's nested stages, outermost first, with their start times."""


def log(message: str, *args: object) -> None:
    """Logs one line at INFO. `args` fill in `message`, as for `logging.info`. Call it on rank 0 only."""
    if logger.hasHandlers():  # the program has configured logging
        logger.info(message, *args)
    elif not (logger.disabled or logger.level > logging.INFO or logging.root.manager.disable >= logging.INFO):
        print(f"embrace_fx: {message % args if args else message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def stage(what: str, rank: int = 0) -> Iterator[None]:
    """Opens a context for a stage of the first call. While stages run, a thread logs the name of the innermost stage at
    intervals.

    Args:
        what: the name of the stage, such as "probing links".
        rank: this rank; only rank 0 logs.
    """
    if rank != 0:
        yield
        return
    stages: list[tuple[str, float]] = vars(_of_thread).setdefault("stages", [])
    stages.append((what, time.monotonic()))
    ended, watch = threading.Event(), None
    try:
        if len(stages) == 1:
            watch = threading.Thread(target=_watch, args=(stages, ended), name="embrace_fx progress", daemon=True)
            watch.start()
        yield
    finally:
        stages.pop()
        ended.set()
        if watch is not None:
            watch.join()


def _watch(stages: list[tuple[str, float]], ended: threading.Event) -> None:
    """Logs the innermost running stage every `LINE_EVERY_S` seconds until `ended` is set.

    Args:
        stages: the running stages, outermost first, as (name, start time in seconds).
    """
    while not ended.wait(LINE_EVERY_S):
        for what, began_s in stages[-1:]:  # the last stage may have ended in the meantime
            log("%s, %.0f s so far", what, time.monotonic() - began_s)
