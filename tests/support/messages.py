"""What an error says."""

from __future__ import annotations


def assert_says(message: str, *parts: str) -> None:
    """Checks that an error has all of these phrases: what is wrong, what was found, what to do."""
    for part in parts:
        assert part in message, f"{part!r} is not in the message: {message}"
