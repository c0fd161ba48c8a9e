"""Writes frozen dataclasses as JSON files, and reads them back, as data only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from embrace_fx.vocabulary.plain_data import from_plain, to_plain

T = TypeVar("T")


def write_json(value: Any, path: str | Path) -> None:
    """Writes a dataclass of dataclasses, tuples, numbers and text, with the name of its class."""
    Path(path).write_text(json.dumps({"what": type(value).__name__, "value": to_plain(value)}, indent=1) + "\n")


def read_json(kind: type[T], path: str | Path) -> T:
    """Reads a value from a file.

    Raises:
        OSError: there is no such file.
        ValueError: it holds something else; the message says what is wrong.
    """
    content = json.loads(Path(path).read_text())
    if not isinstance(content, dict) or content.get("what") != kind.__name__:
        raise ValueError(f"it does not say that it is a {kind.__name__}")
    found: T = from_plain(kind, content.get("value"), kind.__name__)
    return found
