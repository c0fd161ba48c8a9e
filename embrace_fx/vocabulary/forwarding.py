"""Gives an object that stands for another one methods that call the other one's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

READ_MEMORY = (
    "numpy",
    "__array__",
    "tolist",
    "data_ptr",
    "const_data_ptr",
    "untyped_storage",
    "storage",
    "__dlpack__",
)
"""Methods of a tensor that read its memory without torch's dispatcher."""


def forward(kind: type, names: Iterable[str], find: Callable[[Any, str], Any]) -> None:
    """Gives a class methods that call the same methods of the objects that its instances stand for.

    Args:
        find: (instance, name of the method) -> the object that it stands for.
    """
    for name in names:
        setattr(kind, name, _forwarded(name, find))


def _forwarded(name: str, find: Callable[[Any, str], Any]) -> Callable[..., Any]:
    def method(itself: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(find(itself, name), name)(*args, **kwargs)

    return method
