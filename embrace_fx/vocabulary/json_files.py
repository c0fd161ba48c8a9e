"""Frozen dataclasses as JSON files, and back. Nothing but data is read."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def write_json(value: Any, path: str | Path) -> None:
    """Writes a dataclass, of dataclasses, tuples, numbers and text, beside the name of its class."""
    Path(path).write_text(json.dumps({"what": type(value).__name__, "value": asdict(value)}, indent=1) + "\n")


def read_json(kind: type[T], path: str | Path) -> T:
    """The value in a file.

    Raises:
        OSError: there is no such file.
        ValueError: it holds something else; with what is wrong.
    """
    content = json.loads(Path(path).read_text())
    if not isinstance(content, dict) or content.get("what") != kind.__name__:
        raise ValueError(f"it does not say that it is a {kind.__name__}")
    found: T = _read(kind, content.get("value"), kind.__name__)
    return found


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of a type hint from what JSON makes of it.

    >>> _read(tuple[int, ...], [1, 2], "shape")
    (1, 2)
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kind = NoneType if value is None else next(each for each in arguments if each is not NoneType)
        return _read(kind, value, where)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_read(each, v, f"{where}[{k}]") for k, (each, v) in enumerate(zip(kinds, value, strict=True)))
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        if unknown := value.keys() - {field.name for field in fields(kind)}:
            raise ValueError(f"{where} has {sorted(unknown)}, which it should not have")
        return kind(**{name: _read(hints[name], v, f"{where}.{name}") for name, v in value.items()})  # type: ignore[operator]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(f"{where} is {value!r}")
