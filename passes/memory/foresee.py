"""What a choice would make of a step's memory and time, foreseen without rewriting the graph: hundreds are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from embrace_fx.passes.memory.choose import Choice, Costs
from embrace_fx.passes.memory.held import Held, Storage
from embrace_fx.passes.memory.place import place


@dataclass(frozen=True)
class Foreseen:
    """A choice, the most that the step holds under it, and the time that it adds."""

    choice: Choice
    peak_bytes: int
    added_ms: float


def foresee(held: Held, choice: Choice, limit: int, costs: Costs) -> Foreseen:
    """Simulates a choice. What `held` says of the graph that comes of it may differ in what random draws save."""
    again = _computed_again(held, choice)
    order = _order(held, choice, again)
    lives = _lives(held, choice, order, again)
    by_time = _by_time(lives.values(), len(order))
    recomputed_ms = sum(map(costs.node_ms, again))
    offloaded = [lives[id(s), False] for s in choice.offloaded if lives[id(s), False].first_backward is not None]
    if not offloaded:
        return Foreseen(choice, max(by_time, default=0), recomputed_ms)
    starts_ms = list(accumulate((costs.node_ms(node) for node, _ in order), initial=0.0))
    placed = place(offloaded, by_time, starts_ms, held.backward, limit, costs.copies)
    return Foreseen(choice, placed.peak_bytes, recomputed_ms + placed.added_ms)


_Order = Sequence[tuple[fx.Node, bool]]
"""Nodes, and whether each is a copy that runs again."""

_Key = tuple[int, bool]
"""A storage, and whether it is a copy's."""


def _order(held: Held, choice: Choice, again: set[fx.Node]) -> _Order:
    order: list[tuple[fx.Node, bool]] = [(node, False) for node in held.nodes[: held.backward]]
    placed: set[int] = set()
    copies: dict[int, list[fx.Node]] = {}
    for node in held.nodes:
        if node in again:
            copies.setdefault(choice.segment[node], []).append(node)
    for node in held.nodes[held.backward :]:
        for value in node.all_input_nodes:
            number = choice.segment.get(value)
            if number is not None and value in again and number not in placed:
                placed.add(number)
                order += [(copied, True) for copied in copies[number]]
        order.append((node, False))
    return order


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


def _lives(held: Held, choice: Choice, order: _Order, again: set[fx.Node]) -> dict[_Key, Storage]:
    """Storages and their copies, at their places in an order."""
    lives = {  # the forward is what it was
        (id(s), False): Storage(s.node, s.nbytes, s.born, s.last_forward, s.last_forward)
        for s in held.storages
        if s.born < held.backward
    }
    in_backward = set(held.nodes[held.backward :])
    for position, (node, is_copy) in enumerate(order[held.backward :], held.backward):
        for storage in held.memory[node]:  # a view that the backward makes is one of the copy
            key = _key(storage, is_copy or node in in_backward, again)
            if key not in lives:
                lives[key] = Storage(storage.node, storage.nbytes, position, position, position)
            lives[key].dies = position
        for value in node.all_input_nodes:
            if value not in held.memory:
                continue
            of_copy = value in in_backward or (value in again and position >= held.backward)
            if is_copy:
                of_copy = value in again and choice.segment[node] == choice.segment[value]
            for storage in held.memory[value]:
                life = lives[_key(storage, of_copy, again)]
                life.dies = position
                if life.born < held.backward and life.first_backward is None:
                    life.first_backward = position
    for storage in held.storages:
        if storage.dies == len(held.nodes):
            lives[id(storage), False].dies = len(order)
    return lives


def _by_time(lives: Iterable[Storage], count: int) -> list[int]:
    changes = [0] * (count + 2)
    for life in lives:
        changes[life.born] += life.nbytes
        changes[min(life.dies + 1, count)] -= life.nbytes
    return list(accumulate(changes[:count]))


def _key(storage: Storage, of_copy: bool, again: set[fx.Node]) -> _Key:
    """A storage, or its copy's: a copied view of what is not copied is a view of the original."""
    return id(storage), of_copy and storage.node in again
