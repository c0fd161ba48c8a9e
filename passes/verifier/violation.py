"""A broken invariant, as the verifier reports it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Violation:
    """A broken invariant: the node that breaks it (None if no single node does) and what is wrong."""

    node: fx.Node | None
    expected: str
    found: str
    remedy: str
