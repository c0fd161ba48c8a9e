"""What the lab measures: systems on models, over numbers of ranks and rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.lab.cell import Cell
from benchmarks.peers import FORCED_STRATEGIES, SYSTEMS


class Block(NamedTuple):
    """What is measured together, in turns, over one network."""

    model: str
    ranks: int
    rate_mbit: float
    group: str

    @property
    def title(self) -> str:
        return f"{self.model}, {self.ranks} ranks, {self.rate_mbit:g} Mb/s, {self.group}"

    @property
    def stem(self) -> str:
        return f"{self.model}-{self.ranks}-{self.rate_mbit:g}-{self.group}"


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        name: of the results' files.
        models: of `MODELS`.
        groups: name -> its systems, in the order of their turns: as many as the machine's memory holds at once.
        rounds: at least 5 for results worth quoting.
        ranks, rates_mbit: what is measured first stands first; a rate is what a rank can send, and receive.
        elsewhere: groups that are measured over fewer ranks and other rates too; all of them at `ranks[0]` and
            `rates_mbit[0]`.
        together: of fewer than `MOST_RANKS`, the systems of all groups but `CHOSEN` are one block, for the memory
            holds them.
        turn_ms: a system's turn has as many steps as this is long, at least `fewest_steps` and at most `most_steps`.
            One alone would not show what a step that hides its communication behind the next one costs.
    """

    name: str
    models: tuple[str, ...]
    groups: dict[str, tuple[str, ...]]
    rounds: int
    ranks: tuple[int, ...]
    rates_mbit: tuple[float, ...]
    elsewhere: tuple[str, ...] = ()
    together: bool = False
    turn_ms: float = 1_000.0
    fewest_steps: int = 2
    most_steps: int = 4
    size: str = "lab"
    optimizer: str = "adagrad"
    learning_rate: float = 0.001
    seed: int = 0
    timeout_s: float = 300.0

    def blocks(self) -> Iterator[Block]:
        for rate_mbit in self.rates_mbit:
            for ranks in self.ranks:
                first = ranks == self.ranks[0] and rate_mbit == self.rates_mbit[0]
                groups = [group for group in self.groups if first or group in self.elsewhere]
                if self.together and ranks < MOST_RANKS:
                    groups = list(dict.fromkeys(CHOSEN if group == CHOSEN else TOGETHER for group in groups))
                for model in self.models:
                    for group in groups:
                        yield Block(model, ranks, rate_mbit, group)

    def systems(self, block: Block) -> tuple[str, ...]:
        if block.group != TOGETHER:
            return self.groups[block.group]
        merged = [group for group in self.groups if group in self.elsewhere and group != CHOSEN]
        return tuple(dict.fromkeys(system for group in merged for system in self.groups[group]))

    def cell(self, block: Block, system: str, port: int) -> Cell:
        return Cell(
            block.model,
            self.size,
            system,
            self.optimizer,
            self.learning_rate,
            self.seed,
            block.rate_mbit,
            SYSTEMS[system].warm_up_steps,
            port,
            self.timeout_s,
        )


TOGETHER, MOST_RANKS = "together", 8
CHOSEN = "chosen"
"""The group of systems that a user names."""
MODELS = ("lm", "transformer", "bert", "gnmt", "recommender")
FORCED = "forced"
"""The group of `embrace_2d`, whose planner chooses, beside each strategy forced on all tables."""
GROUPS = {
    "replicas": (
        "alone_dense",
        "alone_sparse",
        "embrace_alone",
        "ddp",
        "ddp_sparse",
        "ddp_compiled",
        "horovod",
        "horovod_sparse",
        "embrace_2d",
    ),
    "shards": (
        "alone_sparse",
        "embrace_alone",
        "torchrec_column",
        "torchrec_row",
        "torchrec_planner",
        "ours_parameter_server",
        "ours_parallax",
        "embrace_2d",
    ),
    "ablation": (
        "embrace_alone",
        "embrace_none",
        "embrace_vertical",
        "embrace_horizontal",
        "embrace_2d",
        "embrace_2d_rows10",
    ),
}
"""All of them have `embrace_2d`, which the others of the group are compared with."""

SETTINGS = {
    "quick": Setting(
        "quick",
        ("lm", "transformer"),
        {"quick": ("alone_sparse", "embrace_alone", "ddp", "ddp_sparse", "embrace_none", "embrace_2d")},
        rounds=5,
        ranks=(4,),
        rates_mbit=(200.0,),
    ),
    "full": Setting(
        "full",
        MODELS,
        GROUPS,
        rounds=5,
        ranks=(8, 4, 2),
        rates_mbit=(200.0, 2_000.0),
        elsewhere=("replicas", "shards"),
        together=True,
    ),
    "strategies": Setting(
        "strategies",
        MODELS,
        {FORCED: ("embrace_alone", "embrace_2d", *(f"forced_{strategy}" for strategy in FORCED_STRATEGIES))},
        rounds=5,
        ranks=(8, 4, 2),
        rates_mbit=(200.0, 2_000.0),
        elsewhere=(FORCED,),
    ),
}
