"""What a choice would make of a step's memory and time, foreseen without rewriting the graph: hundreds are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from embrace_fx.passes.memory.choose import Choice
from embrace_fx.passes.memory.held import Held, Storage


@dataclass(frozen=True)
class Foreseen:
    """A choice, the most that the step holds under it, and the time that it adds."""

    choice: Choice
    peak_bytes: int
    added_ms: float


def foresee(held: Held, choice: Choice, node_ms: Callable[[fx.Node], float]) -> Foreseen:
    """Simulates a choice. What `held` says of the graph that comes of it may differ in what random draws save."""
    again = _computed_again(held, choice)
    backward = held.nodes[held.backward :]
    order: list[tuple[fx.Node, bool]] = [(node, False) for node in held.nodes[: held.backward]]  # node, is it a copy
    placed: set[int] = set()
    copies: dict[int, list[fx.Node]] = {}
    for node in held.nodes:
        if node in again:
            copies.setdefault(choice.segment[node], []).append(node)
    for node in backward:
        for value in node.all_input_nodes:
            number = choice.segment.get(value)
            if number is not None and value in again and number not in placed:
                placed.add(number)
                order += [(copied, True) for copied in copies[number]]
        order.append((node, False))
    peak = _peak(held, choice, order, again)
    return Foreseen(choice, peak, sum(map(node_ms, again)))


def _computed_again(held: Held, choice: Choice) -> set[fx.Node]:
    """The nodes of which the backward has copies."""
    found: set[fx.Node] = set()
    waiting: list[tuple[fx.Node, int | None]] = []
    for node in held.nodes[held.backward :]:
        waiting += [(value, None) for value in node.all_input_nodes]
    while waiting:
        value, reader = waiting.pop()
        own = choice.segment.get(value)
        if own is None or value in choice.kept or value in found or (reader is not None and reader != own):
            continue
        found.add(value)
        waiting += [(each, own) for each in value.all_input_nodes]
    return found


def _peak(held: Held, choice: Choice, order: list[tuple[fx.Node, bool]], again: set[fx.Node]) -> int:
    born: dict[tuple[int, bool], tuple[int, int]] = {}  # storage, is it a copy's -> when, bytes
    dies: dict[tuple[int, bool], int] = {}
    in_backward = set(held.nodes[held.backward :])
    for position, (node, is_copy) in enumerate(order):
        for storage in held.memory[node]:  # a view that the backward makes is one of the copy
            key = _key(storage, is_copy or node in in_backward, again)
            if key not in born:
                born[key] = position, storage.nbytes
            dies[key] = position
        for value in node.all_input_nodes:
            if value not in held.memory:
                continue
            of_copy = value in in_backward or (value in again and position >= held.backward)
            if is_copy:
                of_copy = value in again and choice.segment[node] == choice.segment[value]
            for storage in held.memory[value]:
                dies[_key(storage, of_copy, again)] = position
    changes = [0] * (len(order) + 1)
    lasting = {id(s) for s in held.storages if s.dies == len(held.nodes)}
    for key, (position, size) in born.items():
        changes[position] += size
        last = len(order) if key[0] in lasting and not key[1] else dies[key] + 1
        changes[last] -= size
    peak = total = 0
    for change in changes[:-1]:
        total += change
        peak = max(peak, total)
    return peak


def _key(storage: Storage, of_copy: bool, again: set[fx.Node]) -> tuple[int, bool]:
    """A storage, or its copy's: a copied view of what is not copied is a view of the original."""
    return id(storage), of_copy and storage.node in again
