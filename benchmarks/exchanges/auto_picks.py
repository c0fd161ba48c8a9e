"""What "auto" would pick for one table over clusters, tables and batches, by the cost model alone: nothing is measured.

    python -m benchmarks.exchanges.auto_picks

Every combination of the lists below, decided as a model's plan is (`embrace_fx.passes.planner.decide`), once with a
table that may be sharded and once with one that may not. Ids are drawn either evenly or by Zipf's law in the order of
the rows, as vocabularies have them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf
from typing import Literal

import torch
from torch import nn

from embrace_fx.capture import capture
from embrace_fx.cost.links import Cluster, Handling
from embrace_fx.cost.sparsity import Sparsity, independent, measure
from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.pricing import Findings, ParameterFacts
from embrace_fx.session.pipeline import analyse
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import STRATEGIES, Decision

Draw = Literal["even", "zipf"]

RANKS = (2, 4, 8, 32, 128)
MBIT = (200, 2_000, 25_000)
START_UPS_MS = (0.005, 0.05)
HANDLINGS = {"a core of its own": Handling(), "shared cores": Handling(2e6, 2e6, 1.5e5, 5e-4, 0.4)}
ROWS = (1_000, 20_000, 500_000)
WIDTHS = (16, 128, 512)
DENSITIES = (0.001, 0.01, 0.1, 0.4)
DRAWS: tuple[Draw, ...] = ("even", "zipf")
MOST_DRAWN = 4_000_000
"""Rows of a table, times ranks, of settings whose ids are drawn by Zipf's law."""


@dataclass(frozen=True)
class Setting:
    """A cluster, a table and what batches read of it."""

    world_size: int
    mbit: float
    start_up_ms: float
    handling: str
    rows: int
    width: int
    density: float
    draw: Draw
    may_be_sharded: bool

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.mbit * 125, self.start_up_ms, handling=HANDLINGS[self.handling])


def settings() -> Iterator[Setting]:
    """All combinations, but for Zipf's of so many ids that drawing them takes minutes."""
    lists = (RANKS, MBIT, START_UPS_MS, HANDLINGS, ROWS, WIDTHS, DENSITIES, DRAWS, (True, False))
    everything = (Setting(*values) for values in product(*lists))
    return (each for each in everything if each.draw == "even" or each.world_size * each.rows <= MOST_DRAWN)


class Words(nn.Module):
    """One table, which nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(ids).sum()
        return found


@cache
def captured() -> TrainingGraph:
    return analyse(capture(Words(), (torch.tensor([1, 2]),), {}, train=True))


@cache
def rows_read(draw: Draw, world_size: int, rows: int, density: float) -> Sparsity:
    """Of a table of width 1."""
    of_each = max(1, round(rows * density))
    if draw == "even":
        return independent(rows, 1, 4, (of_each,) * world_size)
    frequency = -torch.arange(1, rows + 1, dtype=torch.float64).log()
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(world_size):  # the largest of frequencies with Gumbel's noise are drawn one by one, none twice
        noise = -torch.empty(rows, dtype=torch.float64).exponential_(generator=generator).log()
        drawn.append((frequency + noise).topk(of_each).indices.sort().values)
    return measure(drawn, rows, 1, 4)


def decision(setting: Setting, strategy: str = "auto") -> Decision:
    """What a plan has of the table."""
    (table,) = (replace(t, num_rows=setting.rows, embedding_dim=setting.width) for t in captured().tables)
    sparsity = replace(rows_read(setting.draw, setting.world_size, setting.rows, setting.density), width=setting.width)
    name, blocker = table.parameter, None if setting.may_be_sharded else "it may not be"
    fact = ParameterFacts(name, (setting.rows, setting.width), 4, True, True, row_update_blocker=blocker)
    graph, rows = replace(captured(), tables=(table,)), {name: sparsity.units_by_rank}
    found = Findings(graph, (fact,), rows, setting.world_size, strategy, sparsity={name: sparsity})
    return decide(found, setting.cluster)[name]


def lead(setting: Setting) -> dict[str, float]:
    """Strategy of replicas -> its predicted time over that of the fastest other one."""
    replicas = {strategy: 0.0 for strategy in STRATEGIES if strategy != "alltoall"}
    for strategy in replicas:
        replicas[strategy] = decision(setting, strategy).predicted_ms
    return {name: ms / min(other for each, other in replicas.items() if each != name) for name, ms in replicas.items()}


def page(found: Iterable[Setting]) -> str:
    """How often each strategy is picked, and the most by which it leads the other exchanges of replicas."""
    picked: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    leads: dict[str, float] = defaultdict(lambda: inf)
    for setting in found:
        picked[setting.may_be_sharded][decision(setting).strategy] += 1
        if not setting.may_be_sharded:
            leads |= {name: min(leads[name], of_setting) for name, of_setting in lead(setting).items()}
    lines = ["| strategy | picked, may be sharded | picked, may not | least time over the fastest other of replicas |"]
    lines.append("|---|---|---|---|")
    for strategy in STRATEGIES:
        counts = " | ".join(str(picked[may][strategy]) for may in (True, False))
        lines.append(f"| `{strategy}` | {counts} | {f'{leads[strategy]:.3f}' if strategy in leads else ''} |")
    totals = " | ".join(str(picked[may].total()) for may in (True, False))
    return "\n".join([*lines, f"| settings | {totals} | |"])


def main() -> None:
    print(page(settings()))


if __name__ == "__main__":
    main()
