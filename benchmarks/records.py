"""Reads and writes the numbers of a measurement: JSON, compressed where it is kept beside its page."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

SUFFIX = ".json.xz"


def write_record(stem: Path, data: Any) -> Path:
    """Writes `data` as JSON, compressed; returns the file, which `stem` names without its suffix.

    Equal data makes equal files, so that a version control keeps one of them.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    file = stem.parent / f"{stem.name}{SUFFIX}"
    partial = file.with_name(f"{file.name}.partial")
    text = json.dumps(data, separators=(",", ":")) + "\n"
    partial.write_bytes(lzma.compress(text.encode(), preset=9))
    return partial.replace(file)  # atomic: if interrupted, the old file remains


def read_record(file: Path) -> Any:
    """What a file of JSON holds, compressed or not.

    Raises:
        FileNotFoundError: there is no such file.
    """
    found = file.read_bytes()
    return json.loads(lzma.decompress(found) if file.suffix == ".xz" else found)
