"""Few cases of a product in which any two values of two properties occur together."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Values = dict[str, Any]
DRAWN = 40
"""Candidates for each case, of which the one with most new pairs is taken."""


def pairwise(properties: Mapping[str, Sequence[Any]]) -> list[Values]:
    """Cases, the same in every run, about as many as the two properties of most values have pairs."""
    chance, found = random.Random(0), list[Values]()
    left = {
        frozenset({(one, a), (other, b)})
        for one, other in combinations(properties, 2)
        for a in properties[one]
        for b in properties[other]
    }
    while left:
        pair = min(left, key=lambda each: sorted(map(repr, each)))
        drawn = [
            {name: chance.choice(values) for name, values in properties.items()} | dict(pair) for _ in range(DRAWN)
        ]
        best = max(drawn, key=lambda case: len(left & pairs_of(case)))
        found.append(best)
        left -= pairs_of(best)
    return found


def pairs_of(case: Values) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}
