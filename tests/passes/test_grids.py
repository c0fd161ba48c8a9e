"""Tables on row x column grids of ranks: graphs, and training that equals the reference.

What is asserted of column shards elsewhere (clipping, scaling, accumulation, evaluation) is asserted here of grids by
comparison with column shards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import embrace_fx
from embrace_fx.passes.collectives import sequence_hash
from embrace_fx.passes.overlap.rows import SubmitRows
from embrace_fx.passes.partition import Partition
from embrace_fx.passes.pipeline import run_passes
from embrace_fx.passes.shard import ShardTables
from embrace_fx.passes.verifier.invariants import verify
from embrace_fx.planning.findings import grid_rows
from embrace_fx.vocabulary.plan import Grid
from tests.support.cases import long_but
from tests.support.golden import check_golden
from tests.support.graphs import IDS, analysed, classifier, text
from tests.support.lookups import Lookups, LookupsWorkload
from tests.support.ranks import run_ranks
from tests.support.training import whole_parameters


def test_a_grid_has_any_divisor_above_one_as_its_number_of_rows() -> None:
    assert grid_rows(6) == [2, 3, 6]


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


@pytest.mark.filterwarnings("ignore:the model was called with a batch")
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
