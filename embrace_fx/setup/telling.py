"""Logs on rank 0 each long stage of a first call, and one line of the decisions.

All lines go to the logger "embrace_fx" at INFO. A program that has configured logging gets them by its own handlers
and levels. Otherwise they are printed on stderr, because seconds without output look like a hang. Any means of
`logging` silences them: a level of the logger, `logging.disable`, or handlers.
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
"""Longest time without a line where stderr is no terminal, whatever the stages."""

_Stages = list[tuple[str, float]]


_of_thread = threading.local()
"""Holds a thread's nested stages, outermost first, and when they began."""


def tell(message: str, *args: object) -> None:
    """Logs one line at INFO; called on rank 0 only."""
    configured = logger.hasHandlers()
    if logger.isEnabledFor(logging.INFO) and configured:
        logger.info(message, *args)
    elif _shown_by_default():
        print(f"embrace_fx: {message % args if args else message}", file=sys.stderr, flush=True)


def _shown_by_default() -> bool:
    """Tells whether the program has neither configured nor silenced logging of these lines."""
    level_is_silent = logger.level != logging.NOTSET and logger.level > logging.INFO
    off = logger.disabled or logging.root.manager.disable >= logging.INFO
    return not (logger.hasHandlers() or level_is_silent or off)


@contextlib.contextmanager
def stage(what: str, rank: int = 0) -> Iterator[None]:
    """Opens a context that reports a long stage: by a live line on a terminal, by lines at INFO elsewhere.

    Args:
        what: the stage, such as "probing links".
        rank: this rank; only rank 0 reports.
    """
    if rank != 0:
        yield
        return
    stages: _Stages = vars(_of_thread).setdefault("stages", [])
    stages.append((what, time.monotonic()))
    in_main = threading.current_thread() is threading.main_thread()
    try:
        if len(stages) > 1:  # the outer stage's line or thread also reports inner ones
            yield
        elif in_main and _shown_by_default() and sys.stderr.isatty():
            with _live_line(stages):
                yield
        else:
            with _lines(stages):
                yield
    finally:
        stages.pop()


def _current(stages: _Stages) -> tuple[str, float] | None:
    """Returns (the innermost stage, the seconds it has taken); None where the last one has just ended."""
    try:
        what, began_s = stages[-1]
    except IndexError:
        return None
    return what, time.monotonic() - began_s


@contextlib.contextmanager
def _live_line(stages: _Stages) -> Iterator[None]:
    """Shows, while active, a line with the stage and its time, and removes it at the end."""
    from rich.console import Console  # noqa: PLC0415  (only where there is a terminal)
    from rich.live import Live  # noqa: PLC0415
    from rich.spinner import Spinner  # noqa: PLC0415

    spinner = Spinner("dots", "")

    def line() -> Spinner:
        found = _current(stages)
        spinner.update(text=f"embrace_fx: {found[0]}, {found[1]:.0f} s so far" if found else "")
        return spinner

    console = Console(file=sys.stderr)
    with Live(
        get_renderable=line, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ):  # refreshed ten times a second by its own thread
        yield


@contextlib.contextmanager
def _lines(stages: _Stages) -> Iterator[None]:
    """Logs, while active, a line with the present stage every `LINE_EVERY_S`, from a thread."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LINE_EVERY_S):
            found = _current(stages)
            if found is not None:
                tell("%s, %.0f s so far", *found)

    thread = threading.Thread(target=watch, name="embrace_fx progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
