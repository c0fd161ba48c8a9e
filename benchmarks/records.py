"""Reads and writes the numbers of a measurement: JSON, compressed where it is kept beside its page."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

SUFFIX = ".json.xz"


def write_record(stem: Path, data: Any) -> Path:
    """Writes `data` as compressed JSON. Returns the file; `stem` is its path without the suffix.

    Equal data gives equal files, so that version control stores only one of them.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    file = stem.parent / f"{stem.name}{SUFFIX}"
    partial = file.with_name(f"{file.name}.partial")
    text = json.dumps(data, separators=(",", ":")) + "\n"
    partial.write_bytes(lzma.compress(text.encode(), preset=9))
    return partial.replace(file)  # an atomic replacement: if it is interrupted, the old file remains


def read_record(file: Path) -> Any:
    """Returns the content of a JSON file, compressed or not.

    Raises:
        FileNotFoundError: there is no such file.
    """
    found = file.read_bytes()
    return json.loads(lzma.decompress(found) if file.suffix == ".xz" else found)
