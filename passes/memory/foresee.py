"""Predicts a choice's memory and time without rewriting the graph, because hundreds of choices are compared.

The forward's nodes keep their positions; the backward's keep their order. Only differences between choices are
simulated: recomputed copies, what they read, and which of the forward's storages the backward still reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from embrace_fx.passes.memory.choose import Choice
from embrace_fx.passes.memory.numbered import Numbered
from embrace_fx.passes.memory.place import place


@dataclass(frozen=True)
class Foreseen:
    """A choice, the peak of the step under it, and the time that it adds."""

    choice: Choice
    peak_bytes: int
    added_ms: float


class Foresight:
    """Simulates choices for one step, but for saved random states: `step_memory` may find a bit more."""

    def __init__(self, step: Numbered) -> None:
        self._step = step
        self._backward, self._count = step.held.backward, len(step.held.nodes)
        storages = step.held.storages
        self._born = [s.born for s in storages]
        self._sizes = [s.nbytes for s in storages]
        # The death of a storage if the backward no longer reads it; of one that the backward makes, as now.
        self._dies = [s.dies if s.born >= self._backward or s.dies == self._count else s.last_forward for s in storages]
        self._read = _read_in_backward(step)
        self._viewed = _viewed_in_backward(step)

    def foresee(self, choice: Choice, limit: int) -> Foreseen:
        """Simulates a choice.

        Args:
            limit: bytes that the step may hold; offloads and reloads are placed to keep it.
        """
        again = self._computed_again(choice)
        added_ms = sum(self._step.ms[node] for node in again)
        stands, copies = self._places(choice, again)
        lives = self._lives(choice, again, stands, copies)
        held = self._held(lives, stands, copies)
        if not choice.offloaded:
            return Foreseen(choice, max(held, default=0), added_ms)
        leaving = [
            replace(storage, first_backward=first, dies=lives.dies[number])
            for storage in choice.offloaded
            if (first := lives.first_read.get(number := self._step.number(storage))) is not None
        ]
        placed = place(leaving, held, self._starts_ms(stands, copies), self._backward, limit, self._step.copies)
        return Foreseen(choice, placed.peak_bytes, added_ms + placed.added_ms)

    def recomputed_ms(self, choice: Choice) -> float:
        """Returns the time of a choice's recomputing, without a simulation."""
        return sum(self._step.ms[node] for node in self._computed_again(choice))

    def _computed_again(self, choice: Choice) -> set[int]:
        """Finds the nodes that the backward recomputes."""
        segment, kept, inputs = choice.segment, choice.kept, self._step.inputs
        found = {node for node in self._read if segment[node] >= 0 and node not in kept}
        waiting = list(found)
        while waiting:
            node = waiting.pop()
            for value in inputs[node]:
                if segment[value] == segment[node] and value not in kept and value not in found:
                    found.add(value)
                    waiting.append(value)
        return found

    def _places(self, choice: Choice, again: set[int]) -> tuple[list[int], dict[int, int]]:
        """Returns (positions of the step's own nodes, and of the end; recomputed node -> its position)."""
        members: dict[int, list[int]] = {}
        begins: dict[int, int] = {}
        for node in sorted(again):
            number = choice.segment[node]
            members.setdefault(number, []).append(node)
            if node in self._read:
                begins[number] = min(begins.get(number, self._count), self._read[node][0])
        stands = list(range(self._backward))
        copies: dict[int, int] = {}
        for number in sorted(begins, key=begins.__getitem__):
            stands += range(len(stands) + len(copies), begins[number] + len(copies))
            copies |= {node: begins[number] + len(copies) + k for k, node in enumerate(members[number])}
        stands += range(len(stands) + len(copies), self._count + 1 + len(copies))
        return stands, copies

    def _lives(self, choice: Choice, again: set[int], stands: Sequence[int], copies: Mapping[int, int]) -> _Lives:
        memory, inputs, makers, segment = self._step.memory, self._step.inputs, self._step.makers, choice.segment
        lives = _Lives([stands[position] for position in self._dies], {}, {})
        for node, (first, last) in self._read.items():
            of_copy = node in again
            for storage in memory[node]:
                lives.read(storage, stands[first], stands[last], of_copy=of_copy and makers[storage] in again)
        for storage, last in self._viewed.items():  # the backward's own views are views of the copy
            lives.lasts(storage, stands[last], of_copy=makers[storage] in again)
        for node, here in copies.items():
            for storage in memory[node]:  # a recomputed view of a storage that is not recomputed views the original
                lives.lasts(storage, here, of_copy=makers[storage] in again)
            for value in inputs[node]:
                of_copy = value in again and segment[value] == segment[node]
                for storage in memory[value]:
                    lives.read(storage, here, here, of_copy=of_copy and makers[storage] in again)
        return lives

    def _held(self, lives: _Lives, stands: Sequence[int], copies: Mapping[int, int]) -> list[int]:
        """Lists the bytes held while each node, copies included, runs."""
        end = stands[-1]
        copied = list(lives.dies_copied)
        born = [*(stands[position] for position in self._born), *(copies[self._step.makers[s]] for s in copied)]
        dies = [*lives.dies, *lives.dies_copied.values()]
        change = [0] * (end + 1)
        for begin, last, nbytes in zip(born, dies, [*self._sizes, *(self._sizes[s] for s in copied)], strict=True):
            change[begin] += nbytes
            change[min(last + 1, end)] -= nbytes
        return list(accumulate(change[:end]))

    def _starts_ms(self, stands: Sequence[int], copies: Mapping[int, int]) -> list[float]:
        """Lists the time at which each node, copies included, begins; and the end of the last."""
        ms = [0.0] * stands[-1]
        for node, position in (*enumerate(stands[:-1]), *copies.items()):
            ms[position] = self._step.ms[node]
        return list(accumulate(ms, initial=0.0))


@dataclass(frozen=True)
class _Lives:
    """The lifetimes of storages under a choice, by number.

    Attributes:
        dies: the position of each storage's last reader.
        dies_copied: recomputed storage -> the position of its copy's last reader.
        first_read: storage that the backward reads -> the position of its first reader there.
    """

    dies: list[int]
    dies_copied: dict[int, int]
    first_read: dict[int, int]

    def read(self, storage: int, first: int, last: int, *, of_copy: bool) -> None:
        self.lasts(storage, last, of_copy=of_copy)
        if not of_copy:
            self.first_read[storage] = min(first, self.first_read.get(storage, first))

    def lasts(self, storage: int, until: int, *, of_copy: bool) -> None:
        if of_copy:
            self.dies_copied[storage] = max(until, self.dies_copied.get(storage, 0))
        else:
            self.dies[storage] = max(until, self.dies[storage])


def _read_in_backward(step: Numbered) -> dict[int, tuple[int, int]]:
    """Finds the nodes of the forward that the backward reads -> (first, last) of their readers there."""
    backward = step.held.backward
    found: dict[int, tuple[int, int]] = {}
    for reader in range(backward, len(step.held.nodes)):
        for value in step.inputs[reader]:
            if value < backward:
                found[value] = (found.get(value, (reader, reader))[0], reader)
    return found


def _viewed_in_backward(step: Numbered) -> dict[int, int]:
    """Finds the storages of the forward that the backward views -> the last node that is such a view, or reads one."""
    backward, storages = step.held.backward, step.held.storages
    found: dict[int, int] = {}
    for node in range(backward, len(step.held.nodes)):
        for of in (node, *(value for value in step.inputs[node] if value >= backward)):
            found |= {storage: node for storage in step.memory[of] if storages[storage].born < backward}
    return found
