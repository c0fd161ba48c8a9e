"""Tables on row x column grids of ranks: training equals the reference, bytes the prediction, and state re-shards.

What is asserted of column shards elsewhere (clipping, scaling, accumulation, evaluation) is asserted here of grids by
comparison with column shards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, Adagrad, Adam, Optimizer

import embrace_fx
from embrace_fx.compiler import run_passes
from embrace_fx.exactness import RowUpdates
from embrace_fx.ops import own_columns
from embrace_fx.passes.collectives import sequence_hash
from embrace_fx.passes.partition import Partition
from embrace_fx.passes.planner import CLEARLY
from embrace_fx.passes.relax import RelaxDependences
from embrace_fx.passes.shard import ShardTables
from embrace_fx.passes.shard_cost import FEWEST_RANKS, USEFUL_COLUMNS
from embrace_fx.passes.verify import verify
from embrace_fx.passes.verify_streams import hazards
from embrace_fx.plan import Grid
from embrace_fx.planning import place_anew
from embrace_fx.runtime.kernels.grid import join_grid, route_grid, split_grid
from tests.cases import long_but
from tests.golden import check_golden
from tests.graphs import IDS, analysed, classifier, text
from tests.models import MODELS, Batch, Workload
from tests.ranks import run_ranks
from tests.reference import assert_same
from tests.test_recorded_streams import on_paper
from tests.test_training_variants import Lookups, LookupsWorkload, ManyUsesWorkload
from tests.test_wire import OneTableWorkload, assert_predicted, on_ranks
from tests.training import SEED, Way, expected_parameters, make_optimizers, train_compiled, whole

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
    relaxed = RelaxDependences((), horizontal=False)(sharded)
    verify(relaxed, after="RelaxDependences", captured=sharded, previous=sharded)

    check_golden("grid_shard", text(sharded.module))
    phases = (f"# {name}\n{text(relaxed.phases[name])}" for name in ("forward", "backward"))
    check_golden("grid_relax", "\n".join(phases))


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


@pytest.mark.parametrize(
    ("grid", "optimizer", "row_updates", "schedule"),
    long_but(("adagrad, 2 x 1 grid, 2d", "adam, 2 x 1 grid, none"), TRAINED),
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


@pytest.mark.parametrize(
    ("workload", "grid", "schedule"),
    long_but(("some empty, 2 x 2 grid, 2d",), ODD),
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
    return found | whole(compiled.named_parameters())


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


def _on_streams(rank: int, world_size: int, grid: Grid, schedule: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """Trains on streams on paper, as on a GPU; what is not ordered in three steps, and the parameters."""
    with on_paper() as recorded:
        workload = WORKLOADS["padded"]
        module = workload.make(DTYPE, seed=SEED + rank)
        optimizers = make_optimizers("adagrad", module)
        compiled = embrace_fx.compile(module, optimizer=optimizers, strategy=grid, schedule=schedule)
        coming = iter(compiled.lookahead([workload.batches(step, rank, SEED) for step in range(STEPS)]))

        def train(steps: int) -> None:
            for batch in islice(coming, steps):
                compiled(*batch).backward()
                for each in optimizers:
                    each.step()
                    each.zero_grad()

        train(2)
        with recorded:
            train(3)
        train(1)
        found = recorded.program(f"a grid under {schedule}, rank {rank}")
        return list(hazards(found)), whole(compiled.named_parameters())


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["none", "2d"])
def test_a_grid_trains_on_streams(schedule: str) -> None:
    expected = expected_parameters(4, WORKLOADS["padded"], DTYPE, "adagrad", "exact", STEPS)

    for unordered, parameters in run_ranks(4, _on_streams, Grid(2, 2), schedule):
        assert unordered == []
        assert_same(parameters, expected, DTYPE)


# ---- state ----

ROWS, COLUMNS = 31, 10


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, COLUMNS, padding_idx=3), nn.Linear(COLUMNS, 2)).double()


def _trained_model(
    rank: int, strategy: Any, steps: range, start: Callable[[embrace_fx.CompiledModel, Optimizer], None] | None = None
) -> tuple[embrace_fx.CompiledModel, Optimizer]:
    plain = _model()
    optimizer = Adam(plain.parameters(), lr=0.1, eps=1e-3)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy=strategy, row_updates="lazy")
    if start is not None:
        _train(model, optimizer, rank, range(1))
        start(model, optimizer)
    _train(model, optimizer, rank, steps)
    return model, optimizer


def _train(model: embrace_fx.CompiledModel, optimizer: Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)  # the same on all ranks: their number may change
        model(torch.randint(ROWS, (3, 4), generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _save(rank: int, world_size: int, strategy: Any, path: Path) -> dict[str, Any]:
    model, optimizer = _trained_model(rank, strategy, range(3))
    found: Any = get_state_dict(model, optimizer)
    weights, state = found
    save({"model": weights, "optimizer": state}, checkpoint_id=path)
    table = weights["0.weight"]
    return {
        "placements": table.placements,
        "local": tuple(table.to_local().shape),
        "equal": torch.equal(table.full_tensor(), next(model.parameters()).full_tensor().detach()),  # type: ignore[attr-defined]
        "state": [type(value) for value in state["state"]["0.weight"].values()],
    }


def _load_and_continue(rank: int, world_size: int, strategy: Any, path: Path) -> dict[str, Tensor]:
    def from_checkpoint(model: embrace_fx.CompiledModel, optimizer: Optimizer) -> None:
        weights, state = get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    model, optimizer = _trained_model(rank, strategy, range(3, 5), from_checkpoint)
    states = {str(k): v for k, v in optimizer.state[next(model.parameters())].items()}
    return whole(model.named_parameters()) | whole((k, v) for k, v in states.items() if v.dim())


def _expected_state() -> dict[str, Tensor]:
    model, optimizer = _trained_model(0, "alltoall", range(5))
    states = {str(k): v for k, v in optimizer.state[next(model.parameters())].items()}
    return whole(model.named_parameters()) | whole((k, v) for k, v in states.items() if v.dim())


CHECKPOINTS: dict[str, tuple[Any, tuple[tuple[int, Any], ...]]] = {
    "2 x 1 grid -> columns": (Grid(2, 1), ((2, "alltoall"),)),
    "2 x 2 grid -> others": (Grid(2, 2), ((4, Grid(4, 1)), (3, Grid(3, 1)), (2, "alltoall"), (1, "alltoall"))),
    "columns -> grids": ("alltoall", ((4, Grid(2, 2)), (3, Grid(3, 1)), (2, Grid(2, 1)))),
}


@pytest.mark.parametrize(("saved", "loads"), long_but(("2 x 1 grid -> columns",), CHECKPOINTS))
def test_a_checkpoint_is_of_columns_and_continues_on_any_grid(saved: Any, loads: Any, tmp_path: Path) -> None:
    ranks = saved.rows * saved.columns if isinstance(saved, Grid) else 4
    for rank, facts in enumerate(run_ranks(ranks, _save, saved, tmp_path)):
        first, last = own_columns(COLUMNS, ranks, rank)
        assert facts["placements"] == (Shard(1),)
        assert facts["local"] == (ROWS, last - first)
        assert facts["equal"]
        assert facts["state"].count(DTensor) == 2

    expected = _expected_state()
    for world_size, strategy in loads:
        for found in run_ranks(world_size, _load_and_continue, strategy, tmp_path):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=f"{strategy} {name}")


def _loads_whole_values(rank: int, world_size: int, grid: Grid) -> bool:
    model, optimizer = _trained_model(rank, grid, range(1))
    torch.manual_seed(5)
    plain = _model()
    nn.init.normal_(next(plain.parameters()))
    state = plain.state_dict()
    model.load_state_dict(state)
    own = optimizer.state_dict()
    torch.manual_seed(6)
    momenta = torch.randn(ROWS, COLUMNS, dtype=DTYPE)
    own["state"][0]["exp_avg"] = momenta
    optimizer.load_state_dict(own)
    found = whole(model.state_dict().items())
    kept = optimizer.state_dict()["state"][0]["exp_avg"]
    return torch.equal(found["0.weight"], state["0.weight"]) and torch.equal(kept.full_tensor(), momenta)


@pytest.mark.long
def test_whole_values_are_loaded_into_a_grid() -> None:
    assert all(run_ranks(4, _loads_whole_values, Grid(2, 2)))


def _is_placed_anew(rank: int, world_size: int, grid: Grid) -> dict[str, Any]:
    """From the grid to whole replicas, with a gradient that no step has taken, and back."""
    model, _ = _trained_model(rank, grid, range(2))
    model(torch.arange(9)).square().mean().backward()
    session = model._session
    session.synchronize()
    assert session._flow is not None
    session._flow.close()
    before = whole(model.named_parameters())
    old, graph = session.plan, next(iter(session._kinds.values())).variants[0].analysed
    decisions = tuple(replace(d, strategy="allreduce", grid=None) if d.grid else d for d in old)
    replicated = replace(old, decisions=decisions)
    found: dict[str, Any] = {}
    place_anew(session._setting, graph, old, replicated)
    table = next(session.model.parameters())
    found["replica"] = torch.equal(table.detach(), before["0.weight"])
    assert table.grad is not None
    gradient = table.grad.clone()
    place_anew(session._setting, graph, replicated, old)
    found["grid"] = torch.equal(whole(session.model.named_parameters())["0.weight"], before["0.weight"])
    again = session._state.tables["0.weight"].dense_gradient(session._communicator.group)
    assert again is not None
    found["gradient"] = bool(gradient.any()) and torch.equal(again, gradient)
    return found


@pytest.mark.long
def test_a_table_leaves_its_grid_and_returns_with_its_gradient() -> None:
    for found in run_ranks(4, _is_placed_anew, Grid(2, 2)):
        assert found == {"replica": True, "grid": True, "gradient": True}


def _meta_values(rank: int, world_size: int, grid: Grid) -> dict[str, Tensor]:
    torch.manual_seed(5 + rank)
    with torch.device("meta"):
        plain = nn.Sequential(nn.Embedding(12_001, 100, padding_idx=3), nn.Linear(100, 3))
    optimizer = Adagrad(plain.parameters(), lr=0.1)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy=grid)
    model(torch.arange(4)).sum().backward()
    return whole(model.named_parameters())


@pytest.mark.long
@pytest.mark.parametrize("grid", [Grid(3, 1), Grid(2, 2)], ids=str)
def test_a_meta_model_has_the_values_of_one_rank(grid: Grid) -> None:
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Embedding(12_001, 100, padding_idx=3), nn.Linear(100, 3))

    for found in run_ranks(grid.rows * grid.columns, _meta_values, grid):
        for name, value in plain.named_parameters():
            assert torch.equal(found[name], value), name


# ---- bytes ----


@dataclass(frozen=True)
class OwnRowsWorkload(OneTableWorkload):
    """Of the rows that a rank reads, its own row of a grid of two has five sixths, or one sixth."""

    at_home: bool = True

    def batches(self, step: int, rank: int, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(rank)
        different = torch.randperm(self.num_rows // 2, generator=generator)[: self.num_ids]
        own = (torch.arange(self.num_ids) % 6 > 0) == self.at_home
        return (2 * different + torch.where(own, rank, 1 - rank),)


@pytest.mark.parametrize(
    ("grid", "workload", "autocast"),
    long_but(
        ("its own rows",),
        {
            "its own rows": (Grid(2, 1), OwnRowsWorkload(), False),
            "the others' rows": (Grid(2, 1), OwnRowsWorkload(at_home=False), False),
            "uneven columns": (Grid(2, 2), OneTableWorkload(embedding_dim=101, padding_idx=0), False),
            "bfloat16": (Grid(4, 1), OneTableWorkload(2000, num_ids=600), True),
        },
    ),
)
def test_bytes_equal_the_prediction(grid: Grid, workload: Workload, autocast: bool) -> None:
    by_rank = on_ranks(grid.rows * grid.columns, workload, grid, autocast)  # type: ignore[arg-type]

    assert_predicted(by_rank)


# ---- the choice ----


ROWS_OF_MANY = 100_000


class Language(nn.Module):
    """A table of `dim` columns, of which a batch reads a few rows of many."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS_OF_MANY, dim, _weight=torch.empty(ROWS_OF_MANY, dim))  # never read
        self.out = nn.Linear(dim, 4)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.out(self.table(ids)).square().mean()
        return loss


def _planned(ranks: int, dim: int = 512, strategy: Any = "auto", ids: int = 1000) -> Any:
    model = Language(dim)
    optimizer = SGD(model.parameters(), 0.1)
    batch = torch.randint(ROWS_OF_MANY, (ids,), generator=torch.Generator().manual_seed(0))
    return embrace_fx.plan(model, batch, world_size=ranks, optimizer=optimizer, strategy=strategy)["table.weight"]


@pytest.mark.parametrize(
    ("ranks", "dim", "grid"),
    [
        (2, 512, None),
        (4, 512, None),
        (8, 512, None),
        (64, 512, Grid(16, 4)),
        (256, 512, Grid(64, 4)),
        (1024, 512, Grid(256, 4)),
        (8, 1024, None),
        (256, 100, Grid(256, 1)),
        (96, 300, Grid(48, 2)),
    ],
)
def test_many_ranks_share_rows_so_that_shards_stay_wide(ranks: int, dim: int, grid: Grid | None) -> None:
    decision = _planned(ranks, dim)

    assert (decision.strategy, decision.grid) == ("alltoall", grid)
    if grid is not None:
        width = -(-dim // grid.columns)
        assert width >= min(USEFUL_COLUMNS, dim)
        assert f"{grid}, {width} columns per rank" in decision.reason


def test_a_grid_sends_the_bytes_of_columns_and_must_clearly_save_handling() -> None:
    on_grid, columns = _planned(64), _planned(64, strategy=Grid(1, 64))

    assert on_grid.grid == Grid(16, 4)
    assert columns.grid is None
    assert on_grid.sent_bytes_per_step == pytest.approx(columns.sent_bytes_per_step, rel=1e-3)
    assert on_grid.predicted_ms < CLEARLY * columns.predicted_ms
    assert _planned(64, ids=20).grid is None  # most of the time are start-ups
    assert _planned(FEWEST_RANKS - 1, dim=16, ids=5000).grid is None
    assert _planned(FEWEST_RANKS, dim=16, ids=5000).grid == Grid(FEWEST_RANKS, 1)


def test_explain_prints_the_grid() -> None:
    model = Language(512)
    batch = torch.randint(ROWS_OF_MANY, (1000,), generator=torch.Generator().manual_seed(0))
    plan = embrace_fx.plan(model, batch, world_size=256, optimizer=SGD(model.parameters(), 0.1))

    assert "alltoall, 64 x 4 grid" in plan.explain()
    assert "128 columns per rank" in " ".join(str(plan).split())
    assert plan.grids == {"table.weight": Grid(64, 4)}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Grid(2, 2), r"expected a grid of 8 ranks.*table\.weight.*found 2 rows x 2 columns.*Pass Grid"),
        ({"table.*": Grid(1, 8)}, r"at most 4 columns.*found 1 rows x 8 columns"),
        ({"table.*": Grid(0, 8)}, r"found 0 rows x 8 columns"),
        ({"tabel.*": Grid(2, 4)}, r"expected the pattern 'tabel\.\*' of strategy to match a table"),
    ],
)
def test_grids_that_do_not_fit_are_refused(strategy: Mapping[str, Grid] | Grid, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _planned(8, dim=4, strategy=strategy)


def test_a_table_that_no_equal_rounds_fill_is_refused() -> None:
    assert [rows for rows in range(1, 20) if not Grid(4, 1).takes(rows)] == [5, 6, 9]


def _compiles_a_bad_grid(rank: int, world_size: int) -> str:
    model = _model()
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1), strategy={"0.*": Grid(3, 1)})
    with pytest.raises(ValueError, match="expected a grid of 2 ranks") as raised:
        compiled(torch.arange(3))
    return str(raised.value)


def test_a_bad_grid_is_refused_on_every_rank() -> None:
    first, second = run_ranks(2, _compiles_a_bad_grid)
    assert first == second
