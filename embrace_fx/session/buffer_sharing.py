"""Buffers made equal on all ranks before a forward reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from embrace_fx.passes.buffers import live_buffers, mutated_buffers
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.model_state import ModelState
from embrace_fx.vocabulary.graph import TrainingGraph


class BufferSharing:
    """One model's: training shares what its forward lives on, an evaluation what training has changed since."""

    def __init__(self, state: ModelState, communicator: Communicator) -> None:
        self._state = state
        self._communicator = communicator
        self._stale: set[str] = set()  # changed by training since the ranks last shared them

    def before_forward(self, graph: TrainingGraph, assigned: frozenset[str], *, train: bool) -> Callable[[], None]:
        """What is to be called before a forward of the graph. Collective.

        Args:
            assigned: buffers in whose place the forward puts others.
        """
        live = sorted(assigned.union(live_buffers(graph)))
        mutated = assigned.union(mutated_buffers(graph))

        def share_live() -> None:
            self._stale |= mutated
            self._share(live)

        def share_stale() -> None:
            self._share(sorted(self._stale))
            self._stale = set()

        return share_live if train else share_stale

    def _share(self, names: Sequence[str]) -> None:
        self._communicator.broadcast([self._state.buffer_reader(name)() for name in names])
