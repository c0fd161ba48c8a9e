"""The report of a broken invariant."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Violation:
    """A place where an invariant does not hold. `node` is None if no single node causes it."""

    node: fx.Node | None
    expected: str
    found: str
    remedy: str
