"""Makes buffers equal on all ranks before a forward reads them.

Contract
    A forward begins with rank 0's buffers, as under DDP. Usually only the buffers that forwards have changed since the
    last time are sent. All buffers are sent if code outside of a forward has changed one on any rank, or if another
    rank's buffers are used in place of rank 0's (`join`). As under DDP, forwards that follow one under `no_sync` share
    no buffers until gradients have been reduced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from torch import Tensor

from embrace_fx.runtime.ranks.checksums import checksum_of_text
from embrace_fx.runtime.ranks.step_handshake import CHANGED_BUFFERS
from embrace_fx.session.program_cache import StepCounters
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.graph import Buffer, TrainingGraph, written_by
from embrace_fx.vocabulary.version_snapshot import VersionSnapshot


class BufferSharing:
    """Makes one model's buffers equal on all ranks.

    Attributes:
        due: whether the next forward must first make buffers equal.
    """

    def __init__(self, context: Context, counters: StepCounters) -> None:
        self._context = context
        self._state = context.state
        self._counters = counters
        self._stale = frozenset[str]()  # buffers that forwards have changed since the ranks last shared them
        self._written: set[str] = set()  # buffers that forwards write
        self.due = True
        self._were = VersionSnapshot()

    def prepare_forward(
        self, graph: TrainingGraph, assigned: frozenset[str], *, reduce: bool
    ) -> tuple[Callable[[], int], Callable[[], None] | None]:
        """Prepares to make buffers equal on all ranks before a program's forward.

        Args:
            graph: the program's captured graph.
            assigned: names of buffers that the forward replaces with other tensors.
            reduce: whether the program reduces gradients, so that the next forward must make buffers equal again.

        Returns:
            A function that hashes the names of the buffers to broadcast, for ranks to compare in their announcements of
            the step; and a collective function that broadcasts them, to call before the forward, or None if ranks have
            no buffers to share.
        """
        if self._context.communicator.world_size == 1 or not self.shared_names():
            return lambda: 0, None
        written = written_by(graph.module)
        inputs = {role.name for _, role in graph.inputs() if isinstance(role, Buffer) and role in written}
        mutated = assigned.union(inputs) - self._state.unshared_buffers
        self._written |= mutated
        self._were = VersionSnapshot.of_tensors_in(self._never_written())

        def number_to_announce() -> int:
            """Returns a hash of the names of the buffers to broadcast, or `CHANGED_BUFFERS` if code outside of a
            forward has written a buffer.
            """
            changed = self.due and not self._were.is_current_for(self._never_written())
            return CHANGED_BUFFERS if changed else _hash_names(self._stale)

        def share() -> None:
            """Broadcasts the buffers from one rank, and records which buffers this forward will change."""
            due, self.due = self.due, reduce
            if due:
                # If the rank whose buffers are authoritative runs out of batches, another rank takes over. It then
                # broadcasts all buffers.
                every = self._context.announcements.buffers_differ or self._counters.authority != 0
                shared = self.shared_names() if every else sorted(self._stale)
                places = map(self._state.place_of_buffer, shared)
                tensors = [owner[key] for owner, key in places if owner.get(key) is not None]
                self._context.communicator.broadcast(tensors, self._counters.authority)
                self._stale = self._stale.difference(shared)
                self._were = VersionSnapshot.of_tensors_in(self._never_written())
            self._stale |= mutated

        return number_to_announce, share

    def _never_written(self) -> Iterable[Tensor]:
        """Yields the buffers that no forward writes."""
        return self._state.buffers_except(self._written | self._state.unshared_buffers)

    def shares_next(self) -> bool:
        """Returns whether the next forward first makes buffers equal on all ranks."""
        return self.due and bool(self.shared_names())

    def shared_names(self) -> list[str]:
        """Returns the names of the buffers that must be equal on all ranks. Returns an empty list if the options share
        no buffers.
        """
        apart, shares = self._state.unshared_buffers, self._context.options.shares_buffers
        return [name for name in self._state.buffer_names() if shares and name not in apart]


@functools.lru_cache(maxsize=64)
def _hash_names(names: frozenset[str]) -> int:
    """Returns a hash of names that is the same on all ranks."""
    return checksum_of_text("\n".join(sorted(names)))
