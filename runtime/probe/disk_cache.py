"""Caches plain data in files for later runs, each named by a hash of everything that the data depends on.

Contract
    Files can be deleted at any time. They contain JSON that is read by type, so nothing is executed, and an unreadable
    file counts as missing. If the folder is not writable, nothing is cached, without an error.

    The folder is the value of the variable `EMBRACE_FX_CACHE`, else `embrace_fx` in the user's cache folder. An empty
    variable turns the cache off.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from embrace_fx.vocabulary.plain_data import read_json, write_json

T = TypeVar("T")
VARIABLE = "EMBRACE_FX_CACHE"


def cache_folder() -> Path | None:
    """Returns the folder of the cache files, or None if caching is disabled."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "embrace_fx"
    except RuntimeError:  # the user has no home directory
        return None


def read_cached(kind: type[T], *key: Any) -> T | None:
    """Reads a value of class `kind` that `write_cached` has stored under the same key, or returns None.

    Args:
        key: everything that the value depends on, printable by `repr`. The versions of torch and embrace_fx are added
            to the key.
    """
    folder = cache_folder()
    if folder is None:
        return None
    try:
        return read_json(kind, folder / _file_name(kind, key))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def write_cached(value: Any, *key: Any) -> None:
    """Stores a value made of dataclasses, tuples, numbers and strings under a key, for later runs."""
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=folder, suffix=".tmp")
        os.close(handle)
        try:
            write_json(value, draft)
            os.replace(draft, folder / _file_name(type(value), key))  # atomic: other processes may write it too
        finally:
            Path(draft).unlink(missing_ok=True)
    except OSError:
        return


def _file_name(kind: type[Any], key: tuple[Any, ...]) -> str:
    """Returns the name of the cache file for a class of values and a key. The name differs for each version of torch
    and of this package.
    """
    versions = torch.__version__, metadata.version("embrace-fx")
    return f"{kind.__name__.lower()}-{hashlib.sha256(repr((versions, key)).encode()).hexdigest()[:32]}.json"
