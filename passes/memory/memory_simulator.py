"""Predicts the memory and time of a choice without rewriting the graph, so that hundreds of choices can be compared.

The forward's nodes keep their positions, and the backward's keep their order. Reads in the backward
(`StepMemory.reads`) are redirected to recomputed values, and each recomputed node reads the inputs of its original.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from embrace_fx.passes.memory.choose import Choice, TimedStep
from embrace_fx.passes.memory.copy_placement import place_copies
from embrace_fx.passes.step_memory import NEVER_READ, Numbers, bytes_over_time, first_reads, last_reads


@dataclass(frozen=True)
class SimulatedMemory:
    """The predicted memory and time of a step under a choice of values to evict (offload or recompute).

    Attributes:
        peak_bytes: the maximum bytes that the step holds.
        added_ms: the time that the choice adds to the step.
    """

    choice: Choice
    peak_bytes: int
    added_ms: float


@dataclass(frozen=True)
class _Positions:
    """The positions of all nodes of a step after copies of the recomputed nodes are inserted into its backward.

    Attributes:
        own: the new position of each original node, followed by the number of all nodes.
        again: indices of the original nodes that run again, in execution order.
        copies: for each original node in `again`, the position at which it runs again. The values of other nodes are
            meaningless.
    """

    own: Numbers
    again: Numbers
    copies: Numbers


class MemorySimulator:
    """Simulates which bytes a step holds, and how long it takes, for choices of values to evict (offload or recompute).

    Saved random states are ignored, so that `step_memory` may give slightly more bytes.
    """

    def __init__(self, step: TimedStep) -> None:
        self._step, self._memory = step, step.memory
        self._count = len(step.memory.nodes)
        # `inputs` leaves out views of parameters: they use no memory of the step.
        backward, inputs = step.memory.backward, step.memory.inputs
        late = [(v, k) for k in range(backward, self._count) for v in inputs[k] if v < backward]
        value, reader = np.array(late, dtype=np.int64).reshape(-1, 2).T
        self._first_read = first_reads(value, reader, self._count)
        self._read_late = np.flatnonzero(self._first_read != NEVER_READ).tolist()

    def simulate(self, choice: Choice, limit: int) -> SimulatedMemory:
        """Predicts the peak memory and the added time of a choice.

        Args:
            limit: maximum bytes that the step may hold, used to place offloads and reloads.
        """
        again = self._recomputed_nodes(choice)
        added_ms = sum(self._step.ms[node] for node in again)
        places = self._positions(choice, again)
        storage, position = self._reads(choice, places)
        count, end = len(self._memory.storages), int(places.own[-1])
        dies = last_reads(storage, position, 2 * count)
        dies[self._memory.outliving] = end
        copied = np.flatnonzero(dies[count:] >= 0)
        born = np.concatenate([places.own[self._memory.allocated_at], places.copies[self._memory.allocated_at[copied]]])
        nbytes = np.concatenate([self._memory.nbytes, self._memory.nbytes[copied]])
        by_time = bytes_over_time(born, np.concatenate([dies[:count], dies[count + copied]]), nbytes, end)
        if not choice.offloaded:
            return SimulatedMemory(choice, int(by_time.max(initial=0)), added_ms)
        late = position >= self._memory.backward
        first = first_reads(storage[late], position[late], 2 * count)
        leaving = [
            replace(each, first_backward=int(first[each.number]))
            for each in choice.offloaded
            if first[each.number] != NEVER_READ
        ]
        starts_ms = self._starts_ms(places)
        placed = place_copies(leaving, by_time.tolist(), starts_ms, self._memory.backward, limit, self._step.copies)
        return SimulatedMemory(choice, placed.peak_bytes, added_ms + placed.added_ms)

    def recomputed_ms(self, choice: Choice) -> float:
        """Returns the milliseconds to recompute what a choice evicts, without simulating its memory."""
        return sum(self._step.ms[node] for node in self._recomputed_nodes(choice))

    def _recomputed_nodes(self, choice: Choice) -> set[int]:
        """Returns the positions of the nodes that the backward runs again under a choice."""
        segment, kept, inputs = choice.segment, choice.kept, self._memory.inputs
        found = {node for node in self._read_late if segment[node] >= 0 and node not in kept}
        waiting = list(found)
        while waiting:
            node = waiting.pop()
            for value in inputs[node]:
                if segment[value] == segment[node] and value not in kept and value not in found:
                    found.add(value)
                    waiting.append(value)
        return found

    def _positions(self, choice: Choice, again: set[int]) -> _Positions:
        """Returns the positions of all nodes after the recomputed nodes are inserted. All nodes of a segment (nodes
        that are recomputed together) are inserted before the backward's first node that reads one of them.

        Args:
            again: indices of the nodes that the backward runs again.
        """
        nodes = np.array(sorted(again), dtype=np.int64)
        segment = np.array(choice.segment, dtype=np.int64)[nodes]
        before = first_reads(segment, self._first_read[nodes], segment.max(initial=-1) + 1)[segment]
        order = np.lexsort((nodes, before))
        nodes, before = nodes[order], before[order]
        own = np.arange(self._count + 1)
        copies = np.zeros(self._count, dtype=np.int64)
        copies[nodes] = before + np.arange(len(nodes))
        return _Positions(own + np.searchsorted(before, own, side="right"), nodes, copies)

    def _reads(self, choice: Choice, positions: _Positions) -> tuple[Numbers, Numbers]:
        """Returns two arrays that list every read under a choice: the number of the storage that is read, and the
        position of the reading node. A recomputed copy of storage s has the number s + (number of storages).
        """
        reads, count, backward = self._memory.reads, len(self._memory.storages), self._memory.backward
        again = np.zeros(self._count, dtype=bool)
        again[positions.again] = True
        segment = np.full(self._count, -1, dtype=np.int64)
        segment[:backward] = choice.segment
        copied = again[self._memory.allocated_at][reads.storage]
        # Views that the backward computes read the recomputed copy, if there is one, and otherwise the original.
        own = copied & (reads.reader >= backward) & (again[reads.value] | (reads.value >= backward))
        by_copy = again[reads.reader]
        of_copy = (copied & again[reads.value] & (segment[reads.value] == segment[reads.reader]))[by_copy]
        storage = np.concatenate([reads.storage + count * own, reads.storage[by_copy] + count * of_copy])
        return storage, np.concatenate([positions.own[reads.reader], positions.copies[reads.reader[by_copy]]])

    def _starts_ms(self, positions: _Positions) -> list[float]:
        """Returns the start time in milliseconds of each node, recomputed ones included, by position, followed by the
        end of the last node.
        """
        of_nodes, ms = np.array(self._step.ms), np.zeros(positions.own[-1])
        ms[positions.own[:-1]] = of_nodes
        ms[positions.copies[positions.again]] = of_nodes[positions.again]
        return list(accumulate(ms.tolist(), initial=0.0))
