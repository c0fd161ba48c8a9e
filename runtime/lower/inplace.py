"""Writing into values that die: a functional graph allocates where eager code would not.

Contract
    Same values; which op may write where, `embrace_fx/vocabulary/in_place.py` says. Called on the lowered copy only,
    never on a graph that is shown.
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
