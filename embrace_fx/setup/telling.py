"""What rank 0 tells unasked: which stage of a first call takes long, and one line of what was decided.

Everything goes to the logger "embrace_fx" at INFO. A program that has configured logging gets it by its own handlers
and levels. One that has not sees it on stderr, for seconds without a word look like a hang. Any means of `logging`
silences it: a level of the logger, `logging.disable`, or handlers of one's own.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger("embrace_fx")

FIRST_LINE_S = 1.5
"""A stage that takes longer is told of where stderr is no terminal, and again whenever it has taken twice as long."""

_stages: list[tuple[str, float]] = []
"""Stages under way and when they began, each inside of the one before it."""


def tell(message: str, *args: object) -> None:
    """One line at INFO. For rank 0 alone."""
    configured = logger.hasHandlers()
    if logger.isEnabledFor(logging.INFO) and configured:
        logger.info(message, *args)
    elif _shown_by_default():
        print(f"embrace_fx: {message % args if args else message}", file=sys.stderr, flush=True)


def _shown_by_default() -> bool:
    """Whether nobody has said anything to `logging` about these lines."""
    level_is_silent = logger.level != logging.NOTSET and logger.level > logging.INFO
    off = logger.disabled or logging.root.manager.disable >= logging.INFO
    return not (logger.hasHandlers() or level_is_silent or off)


@contextlib.contextmanager
def stage(what: str, rank: int = 0) -> Iterator[None]:
    """Tells of what happens inside while it takes long: a live line on a terminal, lines at INFO elsewhere.

    Args:
        what: happens, as in "probing links".
        rank: this one's; all but rank 0 are silent.
    """
    if rank != 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    _stages.append((what, time.monotonic()))
    try:
        if len(_stages) > 1:  # those around it are told of already
            yield
        elif _shown_by_default() and sys.stderr.isatty():
            with _live_line():
                yield
        else:
            with _lines():
                yield
    finally:
        _stages.pop()


def _current() -> tuple[str, float] | None:
    """The innermost stage and the seconds it has taken; None where the last one has just ended."""
    try:
        what, began_s = _stages[-1]
    except IndexError:
        return None
    return what, time.monotonic() - began_s


@contextlib.contextmanager
def _live_line() -> Iterator[None]:
    """A line that says what happens and for how long, gone at the end."""
    from rich.console import Console  # noqa: PLC0415  (only where there is a terminal)
    from rich.live import Live  # noqa: PLC0415
    from rich.spinner import Spinner  # noqa: PLC0415

    spinner = Spinner("dots", "")

    def line() -> Spinner:
        found = _current()
        spinner.update(text=f"embrace_fx: {found[0]}, {found[1]:.0f} s" if found else "")
        return spinner

    console = Console(file=sys.stderr)
    with Live(
        get_renderable=line, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ):  # ten times a second by a thread of its own
        yield


@contextlib.contextmanager
def _lines() -> Iterator[None]:
    """A line for each stage that takes long, from a thread that sleeps otherwise."""
    ended = threading.Event()

    def watch() -> None:
        told: tuple[str, float] = ("", 0.0)  # what was told last, and after how many of its seconds
        while not ended.wait(0.1):
            found = _current()
            if found is None:
                continue
            what, took_s = found
            again_s = 2 * told[1] if what == told[0] and told[1] <= took_s else FIRST_LINE_S
            if took_s >= again_s:
                tell("%s, %.0f s", what, took_s)
                told = (what, took_s)

    thread = threading.Thread(target=watch, name="embrace_fx progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
