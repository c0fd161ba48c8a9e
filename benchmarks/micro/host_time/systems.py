"""Models and systems whose work on the host is measured: the lab's five, and some whose compute is next to nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer, SparseAdam

import embrace_fx
from benchmarks.models import MODELS
from benchmarks.models.base import Batch, Lookups, TableModel, Workload
from benchmarks.models.language_model import LanguageModelWorkload
from benchmarks.models.recommender import CRITEO_ROWS, RecommenderWorkload
from benchmarks.peers import SYSTEMS
from benchmarks.peers.base import Task, with_sparse_tables
from benchmarks.peers.embrace import EmbraceFx
from benchmarks.peers.tiered import Tiered
from embrace_fx.vocabulary.exactness import RowUpdates
from embrace_fx.vocabulary.schedule import ScheduleName

SMALL = "small"
MANY = {f"tables-{count}": count for count in (4, 26, 120)}
"""Models of so many small tables of one width."""
NAMES = (SMALL, *MANY, *MODELS)
EAGER = "embrace_eager"
"""embrace_fx where models run as they are written, which is DDP's way too."""
LR, SEED, BATCHES, FRESH = 1e-3, 0, 48, 64
"""`FRESH` batches are as many as a run measures: rows that come again would all be in memory."""
BEYOND: dict[str, float | None] = {"in_memory": None, "beyond_memory": 0.1}
"""System of the lab's LM and recommender under AdamW -> the share of a large table's rows that memory holds."""
BEYOND_ROWS = 100_000
"""The rows of the largest tables under these systems. Tables of at least half as many are large."""
DDP = {"ddp_sparse": True, "ddp": False}
"""DDP of the small model -> whether its tables have sparse gradients, under SparseAdam, which leaves rows without a
gradient as they are, as lazy updates do. With dense gradients, Adam updates all rows, as exact updates do."""
SMALL_SYSTEMS: dict[str, tuple[ScheduleName, RowUpdates]] = {
    "embrace_none": ("none", "exact"),
    "embrace_2d": ("2d", "exact"),
    "embrace_none_lazy": ("none", "lazy"),
    "embrace_2d_lazy": ("2d", "lazy"),
}
"""System of the small model -> its schedule and its row updates."""


@dataclass(frozen=True)
class SmallWorkload:
    """Two tables and eight small layers, so that the host's work dominates a step."""

    rows: int = 50_000
    width: int = 32
    layers: int = 8
    batch_size: int = 16
    length: int = 20

    def make(self) -> TableModel:
        return _Small(self)

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed(hash((step, rank, seed)) & 0x7FFFFFFF)
        return tuple(torch.randint(self.rows, (self.batch_size, self.length), generator=random) for _ in range(2))


class _Small(TableModel):
    def __init__(self, sizes: SmallWorkload) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(sizes.rows, sizes.width) for name in ("users", "goods")})
        self.layers = nn.Sequential(*(nn.Linear(sizes.width, sizes.width) for _ in range(sizes.layers)))

    def lookups(self, *batch: Tensor) -> Lookups:
        users, goods = batch
        return {"users": ("users", users), "goods": ("goods", goods)}

    def loss(self, rows: Mapping[str, Tensor], *_: Tensor) -> Tensor:
        loss: Tensor = self.layers(rows["users"] * rows["goods"]).square().mean()
        return loss


@dataclass(frozen=True)
class ManyTables:
    """Many tables of the same width, each of which a batch looks up once, and two small layers."""

    tables: int
    rows: int = 1000
    width: int = 16
    batch_size: int = 64

    def make(self) -> TableModel:
        return _Many(self)

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed(hash((step, rank, seed)) & 0x7FFFFFFF)
        return (torch.randint(self.rows, (self.batch_size, self.tables), generator=random),)


class _Many(TableModel):
    def __init__(self, sizes: ManyTables) -> None:
        super().__init__()
        names = [f"t{k}" for k in range(sizes.tables)]
        self.tables = nn.ModuleDict({name: nn.Embedding(sizes.rows, sizes.width) for name in names})
        self.layers = nn.Sequential(nn.Linear(sizes.tables * sizes.width, 32), nn.ReLU(), nn.Linear(32, 1))

    def lookups(self, *batch: Tensor) -> Lookups:
        (ids,) = batch
        return {name: (name, ids[:, k]) for k, name in enumerate(self.tables)}

    def loss(self, rows: Mapping[str, Tensor], *_: Tensor) -> Tensor:
        loss: Tensor = self.layers(torch.cat([*rows.values()], 1)).square().mean()
        return loss


def systems_of(model: str) -> tuple[str, ...]:
    """Returns the names of the systems under which a model is measured by default."""
    if model in MANY:
        return ("ddp_sparse", "embrace_none", "embrace_2d")
    return (*DDP, *SMALL_SYSTEMS) if model == SMALL else ("ddp_sparse", "torchrec_column", "embrace_none", "embrace_2d")


def steps_of(model: str, system: str, rank: int) -> Iterator[Tensor]:
    """Trains endlessly; yields this rank's loss of each step. Collective."""
    sizes = ManyTables(MANY[model]) if model in MANY else None
    workload = sizes or (SmallWorkload() if model == SMALL else MODELS[model]["lab"])
    if system in BEYOND:
        workload = _with_large_tables(workload)
    count = FRESH if system in BEYOND else BATCHES
    batches = _again([workload.batch(step, rank, SEED) for step in range(count)])
    if system in BEYOND:
        tiered = Tiered(BEYOND[system], tempfile.gettempdir(), BEYOND_ROWS // 2)
        return tiered.prepare(Task(workload, seed=SEED)).steps(batches)
    if model != SMALL:
        peer = EmbraceFx("auto", route="eager") if system == EAGER else SYSTEMS[system].peer()
        return peer.prepare(Task(workload, seed=SEED)).steps(batches)
    torch.manual_seed(SEED)
    return (_ddp_steps if system in DDP else _small_steps)(workload.make(), system, batches)


def _with_large_tables(workload: Workload) -> Workload:
    """Returns one of the lab's workloads with tables of up to `BEYOND_ROWS` rows.

    Raises:
        ValueError: the model's tables are small.
    """
    if isinstance(workload, LanguageModelWorkload):
        return replace(workload, vocabulary=BEYOND_ROWS)
    if isinstance(workload, RecommenderWorkload):
        return replace(workload, rows=tuple([min(rows, BEYOND_ROWS) for rows in CRITEO_ROWS]))
    raise ValueError(
        "in_memory and beyond_memory train the models lm and recommender alone. Pass --models lm recommender."
    )


def _ddp_steps(plain: TableModel, system: str, batches: Iterator[Batch]) -> Iterator[Tensor]:
    with_sparse_tables(plain, sparse=DDP[system])
    tables = list(plain.tables.parameters())
    layers = [each for name, each in plain.named_parameters() if not name.startswith("tables.")]
    if DDP[system]:
        return _train(DistributedDataParallel(plain), [SparseAdam(tables, lr=LR), Adam(layers, lr=LR)], batches)
    return _train(DistributedDataParallel(plain), [Adam([*tables, *layers], lr=LR)], batches)


def _small_steps(plain: TableModel, system: str, batches: Iterator[Batch]) -> Iterator[Tensor]:
    schedule, updates = SMALL_SYSTEMS[system]
    model = embrace_fx.compile(plain, strategy={"tables.*": "alltoall"}, schedule=schedule, row_updates=updates)
    return _train(model, [Adam(model.parameters(), lr=LR)], model.lookahead(batches))


def _train(model: nn.Module, optimizers: Sequence[Optimizer], batches: Iterable[Batch]) -> Iterator[Tensor]:
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.detach()


def _again(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches
