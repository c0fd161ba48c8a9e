"""A broken invariant, as the verifier reports it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Violation:
    """A broken invariant.

    Attributes:
        node: the node that breaks it, or None if no single node does.
        expected, found: what should be there, and what is, for the message.
        remedy: how to fix the pass.
    """

    node: fx.Node | None
    expected: str
    found: str
    remedy: str
