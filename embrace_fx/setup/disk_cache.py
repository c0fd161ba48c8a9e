"""Keeps plain data for the next run in files, each under a hash of all that it follows from.

Contract
    Safe to delete at any time. Files hold JSON that is read by its type: nothing in them is executed, and what cannot
    be read counts as not there. A folder that cannot be written is no error; nothing is kept then.

    The folder is that of the variable `EMBRACE_FX_CACHE`, else `embrace_fx` in the user's cache folder. An empty
    variable turns it off.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from embrace_fx.vocabulary.json_files import read_json, write_json

T = TypeVar("T")
VARIABLE = "EMBRACE_FX_CACHE"


def cache_folder() -> Path | None:
    """Returns the folder of the files; None: nothing is kept."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "embrace_fx"
    except RuntimeError:  # a user without a home
        return None


def recall(kind: type[T], *key: Any) -> T | None:
    """Reads the value that `keep` has left under a key; None: there is none, or none that can be read.

    Args:
        key: what the value follows from, printable by `repr`; the versions of torch and embrace_fx count too.
    """
    folder = cache_folder()
    if folder is None:
        return None
    try:
        return read_json(kind, folder / _name(kind, key))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def keep(value: Any, *key: Any) -> None:
    """Leaves a value, of dataclasses, tuples, numbers and text, to later runs."""
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=folder, suffix=".tmp")
        os.close(handle)
        try:
            write_json(value, draft)
            os.replace(draft, folder / _name(type(value), key))  # whole or not at all, whoever else writes it
        finally:
            Path(draft).unlink(missing_ok=True)
    except OSError:
        return


def _name(kind: type[Any], key: tuple[Any, ...]) -> str:
    versions = torch.__version__, metadata.version("embrace-fx")
    return f"{kind.__name__.lower()}-{hashlib.sha256(repr((versions, key)).encode()).hexdigest()[:32]}.json"
