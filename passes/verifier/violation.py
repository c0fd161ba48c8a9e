"""The report of a broken invariant."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Violation:
    """A place in a graph where an invariant does not hold. `node` is None if no single node is the cause."""

    node: fx.Node | None
    expected: str
    found: str
    remedy: str
