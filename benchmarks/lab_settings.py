"""What the lab measures: systems on models, over numbers of ranks and rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.lab_cell import Cell
from benchmarks.peers import SYSTEMS


class Block(NamedTuple):
    """What is measured together, in turns, over one network."""

    model: str
    ranks: int
    rate_mbit: float

    @property
    def title(self) -> str:
        return f"{self.model}, {self.ranks} ranks, {self.rate_mbit:g} Mb/s"

    @property
    def stem(self) -> str:
        return f"{self.model}-{self.ranks}-{self.rate_mbit:g}"


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        name: of the results' files.
        matrix: model -> its systems, in the order of their turns.
        rounds: at least 5 for results worth quoting.
        ranks, rates_mbit: what is measured first stands first; a rate is what a rank can send, and receive.
        elsewhere: systems that are measured over fewer ranks and other rates too; all of them at `ranks[0]` and
            `rates_mbit[0]`.
        turn_ms: a system's turn has as many steps as this is long, at least one and at most `most_steps`.
    """

    name: str
    matrix: dict[str, tuple[str, ...]]
    rounds: int
    ranks: tuple[int, ...]
    rates_mbit: tuple[float, ...]
    elsewhere: frozenset[str] = frozenset(SYSTEMS)
    turn_ms: float = 1_000.0
    most_steps: int = 4
    size: str = "lab"
    optimizer: str = "adagrad"
    learning_rate: float = 0.001
    seed: int = 0
    timeout_s: float = 300.0

    def blocks(self) -> Iterator[Block]:
        for rate_mbit in self.rates_mbit:
            for ranks in self.ranks:
                for model in self.matrix:
                    yield Block(model, ranks, rate_mbit)

    def systems(self, block: Block) -> tuple[str, ...]:
        first = block.ranks == self.ranks[0] and block.rate_mbit == self.rates_mbit[0]
        return tuple(system for system in self.matrix[block.model] if first or system in self.elsewhere)

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


_ALONE = ("alone_dense", "alone_sparse", "embrace_alone")
_REPLICAS = ("ddp", "ddp_sparse", "ddp_compiled", "horovod", "horovod_sparse")
_TORCHREC = ("torchrec_column", "torchrec_row", "torchrec_planner")
_OURS = ("ours_parameter_server", "ours_parallax")
_ABLATION = ("embrace_none", "embrace_vertical", "embrace_horizontal", "embrace_2d")

EVERY = (*_ALONE, *_REPLICAS, *_TORCHREC, *_OURS, *_ABLATION)

SETTINGS = {
    "quick": Setting(
        "quick",
        {
            "lm": ("alone_sparse", "embrace_alone", "ddp", "ddp_sparse", "embrace_none", "embrace_2d"),
            "transformer": ("alone_sparse", "embrace_alone", "ddp", "ddp_sparse", "embrace_none", "embrace_2d"),
        },
        rounds=5,
        ranks=(4,),
        rates_mbit=(200.0,),
    ),
    "full": Setting(
        "full",
        {
            "lm": (*EVERY, "embrace_2d_rows10"),
            "transformer": EVERY,
            "bert": EVERY,
            "gnmt": EVERY,
            "recommender": EVERY,
        },
        rounds=5,
        ranks=(8, 4, 2),
        rates_mbit=(200.0, 2_000.0),
        elsewhere=frozenset(EVERY) - {"embrace_vertical", "embrace_horizontal"},
    ),
}
