"""What an error says."""

from __future__ import annotations


def assert_grammar(message: str, *parts: str) -> None:
    """Every error says what was expected and what was found, and the test's parts of where and what to do."""
    for part in ("expected", "found", *parts):
        assert part in message.replace("Found:", "found"), f"expected {part!r} in the message, found: {message}"
