"""The report of an invariant that does not hold."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Violation:
    """One place where an invariant does not hold; `node` is None where no single node is to blame."""

    node: fx.Node | None
    expected: str
    found: str
    remedy: str
