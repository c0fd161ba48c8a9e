"""ExchangeOptions of the exchanges, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embrace_fx.cost.links import Cluster


@dataclass(frozen=True)
class ExchangeOptions:
    """Options of exchanges; each strategy reads those that concern it.

    Attributes:
        unit: what has an index of its own in a dense gradient, for all but `allreduce` and `omnireduce`: a row (an
            index of the first dimension) or an element. Row sets travel by rows.
        block_size: elements of a block of `omnireduce`; None: the cheapest on `cluster`
            (`exchange_cost.cheapest_block`).
        slots: blocks that each aggregator adds up per round and stream of `omnireduce`; None: so many that a round's
            bytes outweigh its start-ups on `cluster` (`exchange_cost.streaming_of`).
        scheme: of `zen`: balanced parallelism, or hierarchical centralisation (`exchange_cost.cheaper_scheme`).
        seed: of the hash functions of `zen`, any 64-bit signed number.
        cluster: the links that defaults are chosen for.
    """

    unit: Literal["row", "element"] = "row"
    block_size: int | None = None
    slots: int | None = None
    scheme: Literal["balanced", "hierarchical"] = "balanced"
    seed: int = 0
    cluster: Cluster = Cluster()

    def __post_init__(self) -> None:
        for name, value in (("block_size", self.block_size), ("slots", self.slots)):
            if value is not None and value < 1:
                raise ValueError(f"expected {name} of at least 1 in the options of an exchange, found {value}; or None")
