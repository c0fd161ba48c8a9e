"""Counts how many ranks' backwards give each parameter a gradient, by summing a few integers over ranks.

DDP finds the same with `find_unused_parameters`: a parameter that no backward reaches keeps its `.grad`
as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

_BITS = 62
"""Of a number that is summed up: int64, and no sign."""

_REMEMBERED = 64
"""Different answers kept. Most loops have one or two: the loss is made of the same results each time."""


class UsedParameters:
    """Counts, for each parameter, on how many ranks the backward gives it a gradient.

    A rank encodes its backward as a few integers, which contain a field of a few bits for each parameter. When the
    integers are summed over ranks, each field counts ranks. Fields are in the order of `names`, so that ranks may run
    different programs.

    Args:
        names: all parameters of the model, in the model's order.
        behind: parameter -> indices of the model's results that depend on it.
        delivered: names of the parameters that get a gradient from the program.
        world_size: the number of ranks, which determines the size of a field.
        local: names of parameters that ranks do not synchronize. They have no field.
    """

    def __init__(
        self,
        names: Collection[str],
        behind: Mapping[str, frozenset[int]],
        delivered: Collection[str],
        world_size: int,
        local: Collection[str] = (),
    ) -> None:
        self._field = world_size.bit_length()
        self._per_word = _BITS // self._field
        shared = (name for name in names if name not in local)
        self._place = {name: divmod(k, self._per_word) for k, name in enumerate(shared)}
        self._delivered = tuple(name for name in delivered if name not in local)
        self._local = frozenset(delivered).intersection(local)
        self._behind = behind
        # Attributes, because a call that finds its answer in the cache then makes no Python call.
        self._words = lru_cache(_REMEMBERED)(self._encode)
        self.absent: Callable[[tuple[int, ...]], frozenset[str]] = lru_cache(_REMEMBERED)(self._absent)

    def words(self, given: tuple[int, ...], unreduced: Collection[str] = ()) -> tuple[int, ...]:
        """Encodes, as integers to be summed over ranks, the parameters that this rank's backward reaches.

        Args:
            given: indices of the results from which the backward starts.
            unreduced: parameters with gradients from `no_sync`, encoded even if the backward does not reach them.
        """
        return self._encode(given, unreduced) if unreduced else self._words(given)

    def _encode(self, given: tuple[int, ...], unreduced: Collection[str] = ()) -> tuple[int, ...]:
        """Does the same as `words`, without a cache."""
        words = [0] * -(-len(self._place) // self._per_word)
        for name in self._reached(given).union(unreduced) & self._place.keys():
            word, field = self._place[name]
            words[word] += 1 << field * self._field
        return tuple(words)

    def local_unreached(self, results: tuple[int, ...]) -> frozenset[str]:
        """Returns the parameters that ranks do not synchronize and that no backward from these results reaches."""
        return self._local - self._reached(results) if self._local else self._local

    def _absent(self, counts: tuple[int, ...]) -> frozenset[str]:
        """Returns the parameters of the program that no rank's backward reaches. `counts` are sums of `words`."""
        return frozenset(name for name in self._delivered if not self._is_reached(name, counts))

    def reached_by_any(self, counts: tuple[int, ...]) -> list[str]:
        """Returns the parameters that at least one rank's backward reaches."""
        return [name for name in self._place if self._is_reached(name, counts)] if counts else []

    def _is_reached(self, name: str, counts: tuple[int, ...]) -> bool:
        """Returns whether any rank's backward reaches a parameter."""
        word, field = self._place[name]
        return bool(counts[word] >> field * self._field & (1 << self._field) - 1)

    def _reached(self, given: tuple[int, ...]) -> set[str]:
        """Returns the names of the parameters that a backward reaches from the results with these indices."""
        starts = frozenset(given)
        return {name for name, sources in self._behind.items() if not starts.isdisjoint(sources)}
