"""Tables on row x column grids of ranks: kernels, graphs, and training that equals the reference.

What is asserted of column shards elsewhere (clipping, scaling, accumulation, evaluation) is asserted here of grids by
comparison with column shards.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.passes.collectives import sequence_hash
from embrace_fx.passes.overlap.rows import SubmitRows
from embrace_fx.passes.partition import Partition
from embrace_fx.passes.pipeline import run_passes
from embrace_fx.passes.shard import ShardTables
from embrace_fx.passes.verifier.invariants import verify
from embrace_fx.runtime.kernels.grid import join_grid, route_grid, split_grid
from embrace_fx.vocabulary.exactness import RowUpdates
from embrace_fx.vocabulary.ops import own_columns
from embrace_fx.vocabulary.plan import Grid
from tests.support.cases import long_but
from tests.support.golden import check_golden
from tests.support.graphs import IDS, analysed, classifier, text
from tests.support.lookups import Lookups, LookupsWorkload, ManyUsesWorkload
from tests.support.models import MODELS, Batch, Workload
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import (
    Way,
    expected_parameters,
    train_compiled,
    whole_parameters,
)

DTYPE = torch.float64
STEPS = 6

# ---- the kernels ----


@pytest.mark.parametrize("seed", range(20))
def test_rows_find_their_way_over_the_grid_and_back(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    grid = Grid(*draw.choice([(2, 1), (2, 2), (4, 1), (3, 1), (2, 3), (3, 2), (1, 3)]))
    ranks, rows, columns = grid.rows * grid.columns, draw.choice([1, 2, 5, 9, 30]), draw.choice([3, 4, 6, 7, 12])
    whole_VD = torch.arange(rows * columns, dtype=DTYPE).view(rows, columns)
    reads = [torch.randperm(rows, generator=generator)[: draw.randint(0, rows)] for _ in range(ranks)]
    ids, counts = torch.cat(reads), torch.tensor([len(own) for own in reads])

    sent = []
    routes = [route_grid(ids, counts, rank, grid.rows, grid.columns) for rank in range(ranks)]
    for rank, (own_ids, by_row, _) in enumerate(routes):
        row, column = grid.place(rank)
        shard = whole_VD[grid.own_rows(rows, rank), slice(*own_columns(columns, grid.columns, column))]
        sent.append(shard[own_ids].split(by_row[:, row].tolist()))
    for rank, (_, by_row, order) in enumerate(routes):
        flat = torch.cat([blocks[rank].reshape(-1) for blocks in sent])
        joined = join_grid(flat, order, by_row, columns, rank)
        assert torch.equal(joined, whole_VD[reads[rank]])
        assert torch.equal(split_grid(joined, order, by_row, rank), flat)


# ---- the graphs ----


def test_golden() -> None:
    graph = analysed(classifier(), IDS)
    passes = ShardTables(("words.weight",), (), 3, 4, {"words.weight": Grid(2, 2)}), Partition()
    sharded = run_passes(graph, passes).graph
    overlapped = SubmitRows()(sharded)
    verify(overlapped, after="SubmitRows", captured=sharded, previous=sharded)

    check_golden("grid_shard", text(sharded.module))
    phases = (f"# {name}\n{text(overlapped.phases[name])}" for name in ("forward", "backward"))
    check_golden("grid_overlap", "\n".join(phases))


def test_ranks_of_a_grid_launch_the_same() -> None:
    graph = analysed(classifier(), IDS)
    hashes = {
        grid: {
            sequence_hash(ShardTables(("words.weight",), (), rank, 4, {"words.weight": grid})(graph))
            for rank in range(4)
        }
        for grid in (Grid(2, 2), Grid(4, 1))
    }

    assert [len(found) for found in hashes.values()] == [1, 1]
    assert hashes[Grid(2, 2)] != hashes[Grid(4, 1)]


# ---- training ----


class Small(Lookups):
    """`Lookups` of a table of few rows."""

    def __init__(self, rows: int, dim: int, **options: Any) -> None:
        super().__init__(dim, **options)
        self.table.weight = nn.Parameter(self.table.weight[:rows].detach().clone())
        self.table.num_embeddings = rows


@dataclass(frozen=True)
class SmallWorkload:
    """Fewer rows than a grid has, or columns than there are ranks."""

    rows: int
    dim: int
    padding_idx: int | None = None

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Small(self.rows, self.dim, padding_idx=self.padding_idx).to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed((seed * 100 + step) * 10 + rank)
        return (torch.randint(self.rows, (step % 3, 4), generator=generator),)


WORKLOADS: dict[str, Any] = {
    "two tables": replace(dict(MODELS)["two_table_lm"], vary=True),  # type: ignore[type-var]
    "bags": replace(dict(MODELS)["bag_recommender"], vary=True),  # type: ignore[type-var]
    "padded": dict(MODELS)["transformer_encoder"],
    "many uses": ManyUsesWorkload(),
    "some empty": LookupsWorkload(some_empty=True, padding_idx=3),
    "nothing but padding": LookupsWorkload(padding_idx=7, only_id=7),
    "one id": LookupsWorkload(only_id=7, id_dtype=torch.int32),
    "one column": LookupsWorkload(dim=1),
    "three columns": LookupsWorkload(dim=3),
    "two rows": SmallWorkload(2, 3, padding_idx=1),
    "one row": SmallWorkload(1, 2),
}
OPTIMIZERS: dict[str, RowUpdates] = {"sgd": "exact", "adagrad": "exact", "sparse_adam": "exact", "adam": "lazy"}


def _check(workload: Workload, grid: Grid, optimizer: str, row_updates: RowUpdates, schedule: Any = "2d") -> None:
    __tracebackhide__ = True
    ranks = grid.rows * grid.columns
    expected = expected_parameters(ranks, workload, DTYPE, optimizer, row_updates, STEPS)
    way = Way(grid, schedule, lookahead=schedule != "none", steps=STEPS)
    for result in run_ranks(ranks, train_compiled, workload, DTYPE, optimizer, row_updates, way):
        assert_same(result.parameters, expected, DTYPE)
        if (optimizer, row_updates) != ("adam", "exact"):
            assert {result.plan[name].grid for name in result.strategies} == {grid}


TRAINED = {
    f"{optimizer}, {grid}, {schedule}": (grid, optimizer, row_updates, schedule)
    for optimizer, row_updates in (*OPTIMIZERS.items(), ("adam", "exact"))
    for grid in (Grid(2, 1), Grid(3, 1), Grid(2, 2), Grid(4, 1))
    for schedule in ("none", "2d")
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "optimizer", "row_updates", "schedule"),
    TRAINED.values(),
    ids=TRAINED,
)
def test_training_equals_the_reference(grid: Grid, optimizer: str, row_updates: RowUpdates, schedule: str) -> None:
    _check(WORKLOADS["two tables"], grid, optimizer, row_updates, schedule)


ODD = {
    f"{name}, {grid}, {schedule}": (WORKLOADS[name], grid, schedule)
    for name, grids in {
        "bags": [Grid(2, 2), Grid(3, 1)],
        "padded": [Grid(2, 1), Grid(2, 2)],
        "many uses": [Grid(3, 1), Grid(2, 2)],
        "some empty": [Grid(2, 1), Grid(2, 2)],
        "nothing but padding": [Grid(2, 2), Grid(4, 1)],
        "one id": [Grid(2, 2), Grid(4, 1)],
        "one column": [Grid(4, 1), Grid(2, 1)],
        "three columns": [Grid(2, 2), Grid(4, 1)],
        "two rows": [Grid(4, 1), Grid(2, 2)],
        "one row": [Grid(4, 1), Grid(2, 2)],
    }.items()
    for grid in grids
    for schedule in ("none", "2d")
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "grid", "schedule"),
    ODD.values(),
    ids=ODD,
)
def test_odd_batches_and_odd_tables(workload: Workload, grid: Grid, schedule: str) -> None:
    _check(workload, grid, "adagrad", "exact", schedule)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_other_schedules(schedule: str) -> None:
    _check(WORKLOADS["padded"], Grid(2, 2), "sparse_adam", "exact", schedule)


@pytest.mark.long
def test_one_table_on_a_grid_beside_one_by_columns() -> None:
    workload = WORKLOADS["two tables"]
    strategy: dict[str, str | Grid] = {"embedding.*": Grid(2, 2), "output.*": "alltoall"}
    expected = expected_parameters(4, workload, DTYPE, "adagrad", "exact", STEPS)

    for result in run_ranks(4, train_compiled, workload, DTYPE, "adagrad", "exact", Way(strategy, steps=STEPS)):
        assert_same(result.parameters, expected, DTYPE)
        assert [result.plan[name].grid for name in result.strategies] == [Grid(2, 2), None]


def _everything_else(rank: int, world_size: int, strategy: Any, backend: Any, narrow: bool) -> dict[str, Tensor]:
    """Accumulation, clipping, a GradScaler, evaluation, a batch that was not looked ahead to; under autocast if so."""
    torch.manual_seed(0)
    model = Lookups(8, padding_idx=2)
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    compiled = embrace_fx.compile(model, optimizer=optimizer, strategy=strategy, row_updates="lazy", backend=backend)
    batches = [LookupsWorkload(padding_idx=2).batches(step, rank, 0)[0] for step in range(9)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    found: dict[str, Tensor] = {}

    def loss_of(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss: Tensor = compiled(batch)
        return loss

    with compiled.no_sync():
        loss_of(batches[0]).backward()
    loss_of(batches[1]).backward()
    found["norm"] = compiled.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    for step, batch in enumerate(compiled.lookahead(batches[2:7])):
        scaler.scale(loss_of(batches[8] if step == 3 else batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    compiled.eval()
    with torch.no_grad():
        found["evaluated"] = loss_of(batches[7])
    return found | whole_parameters(compiled)


@pytest.mark.filterwarnings("ignore:expected the batch that lookahead")
@pytest.mark.parametrize(
    ("grid", "backend", "narrow"),
    long_but(
        ("2 x 1",),
        {
            "2 x 1": (Grid(2, 1), "eager", False),
            "2 x 2, bfloat16": (Grid(2, 2), "eager", True),
            "2 x 2, inductor": (Grid(2, 2), "inductor", False),
        },
    ),
)
def test_whatever_else_a_training_does_is_as_on_columns(grid: Grid, backend: str, narrow: bool) -> None:
    ranks = grid.rows * grid.columns
    on_grid, on_columns = (run_ranks(ranks, _everything_else, each, backend, narrow) for each in (grid, "alltoall"))

    for found, expected in zip(on_grid, on_columns, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
