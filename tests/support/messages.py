"""What errors and the log say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def assert_says(message: str, *parts: str) -> None:
    """Checks that an error has all of these phrases: what is wrong, what was found, what to do."""
    for part in parts:
        assert part in message, f"{part!r} is not in the message: {message}"


@contextmanager
def logged() -> Iterator[list[str]]:
    """Yields the lines that this rank's package logs while it is entered."""
    lines, logger, handler = list[str](), logging.getLogger("embrace_fx"), logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
