"""Converts values to and from plain data (JSON types), for files and for messages between ranks.

Contract
    Reading accepts only data of the expected type: text, numbers, integer tensors, tuples, lists and mappings of these,
    and dataclasses and named tuples with such fields. Unlike unpickling, it executes nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

T = TypeVar("T")

_INTEGERS = {"int32": torch.int32, "int64": torch.int64}


def to_plain(value: Any) -> Any:
    """Converts a value to JSON types. A mapping becomes a list of pairs, because its keys need not be strings."""
    kind: Any = type(value)
    if (names := _field_names(kind)) is not None:
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    if isinstance(value, Mapping):
        return [[to_plain(key), to_plain(each)] for key, each in value.items()]
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), base64.b64encode(value.cpu().numpy().tobytes()).decode()]
    return value


def from_plain(kind: Any, value: Any, where: str = "it") -> Any:
    """Converts the result of `to_plain` back to a value of type `kind`.

    >>> from_plain(tuple[int, ...], [1, 2], "shape")
    (1, 2)

    Args:
        kind: the type of the value, as a type hint.
        value: the result of `to_plain`.
        where: the name of the value in error messages.

    Raises:
        ValueError: the data has another type.
    """
    origin, arguments = _split_hint(kind)
    if origin in (Union, UnionType):
        return _from_union(arguments, value, where)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            raise ValueError(f"{where} has {len(value)} values, but must have {len(kinds)}")
        return tuple(from_plain(each, v, f"{where}[{k}]") for k, (each, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is list and isinstance(value, list):
        return [from_plain(arguments[0], v, f"{where}[{k}]") for k, v in enumerate(value)]
    if origin is dict and isinstance(value, list):
        pair: Any = tuple.__class_getitem__(arguments)  # a type hint for a pair of key and value
        return dict(from_plain(pair, each, where) for each in value)
    if kind is Tensor and isinstance(value, list):
        return _integer_tensor(value, where)
    if (names := _field_names(kind)) is not None and isinstance(value, dict):
        hints = _hints(cast("Any", kind))
        if unknown := value.keys() - names:
            raise ValueError(f"{where} has unknown fields {sorted(unknown)}. Expected fields: {sorted(names)}")
        try:
            found = kind(**{name: from_plain(hints[name], v, f"{where}.{name}") for name, v in value.items()})
        except TypeError as error:
            raise ValueError(f"{where} lacks a field: {error}. Expected fields: {sorted(names)}") from error
        return found
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(f"{where} is {str(value)[:80]!r}, but must be of type {getattr(kind, '__name__', kind)}")


_hints = cache(get_type_hints)


@cache
def _split_hint(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns (origin, arguments) of a type hint: (tuple, (int, str)) for `tuple[int, str]`, (None, ()) for `int`."""
    return get_origin(hint), get_args(hint)


@cache
def _field_names(hint: Any) -> tuple[str, ...] | None:
    """Returns the field names of a type hint that is a dataclass or named tuple, or None for any other type."""
    if is_dataclass(hint):
        return tuple(field.name for field in fields(hint))
    return getattr(hint, "_fields", None) if isinstance(hint, type) and issubclass(hint, tuple) else None


def _from_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """Converts plain data to the first type of a union that accepts it. Raises `ValueError` if no type does.

    Args:
        kinds: the types of the union.
        value: the plain data.
        where: the name of the value in error messages.
    """
    if value is None and NoneType in kinds:
        return None
    *others, last = (kind for kind in kinds if kind is not NoneType)
    for kind in others:
        try:
            return from_plain(kind, value, where)
        except ValueError:
            continue
    return from_plain(last, value, where)


def _integer_tensor(value: list[Any], where: str) -> Tensor:
    """Converts [dtype name, base64 text], the plain form of an integer tensor, to the tensor. Raises `ValueError` for
    anything else.

    Args:
        where: the name of the value in error messages.
    """
    try:
        dtype, data = value
        content = bytearray(base64.b64decode(data, validate=True))
        return (
            torch.frombuffer(content, dtype=_INTEGERS[dtype])
            if content
            else torch.empty(0, dtype=_INTEGERS[dtype], device="cpu")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where} is not a tensor of integers: decoding it failed with {error!r}") from error


def write_json(value: Any, path: str | Path) -> None:
    """Writes a value made of dataclasses, tuples, numbers and strings to a JSON file, with the name of its class."""
    Path(path).write_text(json.dumps({"what": type(value).__name__, "value": to_plain(value)}, indent=1) + "\n")


def read_json(kind: type[T], path: str | Path) -> T:
    """Reads a value of class `kind` from a file that `write_json` has written.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file contains something else.
    """
    content = json.loads(Path(path).read_text())
    if not isinstance(content, dict) or content.get("what") != kind.__name__:
        raise ValueError(f"the file does not contain a saved {kind.__name__}")
    found: T = from_plain(kind, content.get("value"), kind.__name__)
    return found
