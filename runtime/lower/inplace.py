"""Lets ops write into inputs that they are the last to read: a functional graph would allocate new memory.

Contract
    Same values; `embrace_fx/vocabulary/in_place.py` decides which op may write where. Called only on the lowered copy,
    never on a graph that users see.
"""

from __future__ import annotations

from torch import fx

from embrace_fx.vocabulary.in_place import IN_PLACE, written_into


def write_in_place(graph: fx.Graph) -> None:
    """Replaces ops of a phase by their in-place forms where that is safe."""
    for node in graph.nodes:
        position = written_into(node)
        if position is not None:
            node.args = (node.args[position], *(a for k, a in enumerate(node.args) if k != position))
            node.target = IN_PLACE[node.target]
