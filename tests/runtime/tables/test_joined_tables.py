"""Tables that are one joined table: which ones, how ids are joined, and that training stays what it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.passes.planner.grouping import Joinable, plan_joined_tables
from embrace_fx.runtime.flow.routing import route_padded
from embrace_fx.runtime.kernels import join_ids
from embrace_fx.vocabulary.joined_table import JOINED_TABLE_BYTES, JoinedTable
from embrace_fx.vocabulary.schedule import SCHEDULES
from tests.support.cases import long_but
from tests.support.graphs import analysed
from tests.support.models import Batch, Workload
from tests.support.ranks import run_ranks, run_ranks_expecting_errors
from tests.support.reference import assert_same
from tests.support.stacks import ROWS, Many
from tests.support.training import SEED, Way, expected_parameters, train_compiled

DTYPE = torch.float64


@dataclass(frozen=True)
class ManyWorkload:
    dim: int = 6
    batch_size: int = 5
    vary: bool = False
    padded: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = Many(self.dim)
        if self.padded:  # the new tables' padding rows are set to non-zero values below
            for k, padding in ((1, 0), (3, 2)):
                model.tables[k] = nn.Embedding(ROWS[k], self.dim, padding_idx=padding)
                nn.init.normal_(model.tables[k].weight)  # type: ignore[arg-type]
        return model.to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
        size = self.batch_size if not self.vary else int(torch.randint(0, self.batch_size, (1,), generator=random))
        ids = torch.rand(size, len(ROWS) + 1, generator=random).square() * torch.tensor([*ROWS, ROWS[0]])
        return ids.to(torch.int64), torch.rand(size, generator=random, dtype=DTYPE)


def spaces(
    model: nn.Module, *batch: Tensor, groups: dict[str, int] | None = None, part_bytes: int = 1, overlaps: bool = True
) -> list[set[str]]:
    graph = analysed(model, *batch)
    tables = [Joinable(table, (groups or {}).get(table.parameter, 0), part_bytes) for table in graph.tables]
    return [set(space.tables) for space in plan_joined_tables(graph, tables, overlaps=overlaps)]


def names(*numbers: int) -> set[str]:
    return {f"tables.{k}.weight" for k in numbers}


BATCH = ManyWorkload().batches(0, 0, 0)


def test_tables_read_together_are_one_space() -> None:
    assert spaces(Many(6).double(), *BATCH) == [names(0, 1, 2, 3, 4)]


def test_their_rows_are_below_each_other() -> None:
    graph = analysed(Many(6).double(), *BATCH)
    (space,) = plan_joined_tables(graph, [Joinable(table, 0, 1) for table in graph.tables], overlaps=True)
    assert space.tables[0] == "tables.0.weight"
    rows = [ROWS[int(name.split(".")[1])] for name in space.tables]
    assert space.bounds == tuple(sum(rows[:k]) for k in range(len(rows) + 1))
    assert space.name == "tables.0.weight and 4 more"


def test_each_of_a_kind() -> None:
    assert spaces(ManyWorkload(padded=True).make(DTYPE, 0), *BATCH) == [names(0, 1, 2, 3, 4)]
    assert spaces(Many(6).double(), *BATCH, groups={"tables.2.weight": 1, "tables.3.weight": 1}) == [
        names(0, 1, 4),
        names(2, 3),
    ]
    assert spaces(Many(6).double(), *BATCH, part_bytes=JOINED_TABLE_BYTES // 3) == [names(0, 1, 2), names(3, 4)]


class Apart(nn.Module):
    """A model whose second lookup is read only after a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(9, 6), nn.Embedding(9, 6)
        self.linear = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.linear(self.first(ids))
        return self.linear(hidden + self.second(ids)).square().mean()


def test_not_across_computation_that_hides_communication() -> None:
    assert spaces(Apart(), torch.randint(9, (5,))) == []
    assert spaces(Apart(), torch.randint(9, (5,)), overlaps=False) == [{"first.weight", "second.weight"}]


def test_ids_are_told_apart_before_their_sizes_are_known() -> None:
    # Two ranks. Each sends three counts, and ids padded to 3, 2 and 2 entries.
    packed = torch.tensor([[2, 1, 2, 2, 5, -7, 0, -7, 1, 3], [1, 2, 0, 5, -7, -7, 3, 4, -7, -7]], dtype=torch.int32)
    found = route_padded(packed, [[3, 2, 2], [3, 2, 2]], 2, 9)
    assert found.counts.tolist() == [2, 0]
    assert found.ids.tolist() == [1, 3, 9, 9]
    assert found.owner[:2].tolist() == [0, 0]


@pytest.mark.parametrize("bad", [-1, 5, -(2**40), 2**40])
def test_an_id_outside_its_table_is_found_again(bad: int) -> None:
    space = JoinedTable(("one", "other"), (0, 10, 15))
    (found,) = join_ids([torch.tensor([2, 5]), torch.tensor([bad, 4])], [0, 1], [0, 10], [10, 5], 2)
    assert [row for row in found.tolist() if 0 <= row < 15] == [2, 5, 14]
    assert space.decode_invalid_id(int(found[2])) == ("other", bad)


@dataclass(frozen=True)
class Case:
    ranks: int
    optimizer: str = "adagrad"
    way: Way = field(default_factory=lambda: Way(steps=12))
    workload: Workload = ManyWorkload()
    row_updates: Any = "exact"


CASES = {
    **{f"{n} ranks": Case(n) for n in (2, 3, 4)},
    **{f"lazy {name}": Case(2, name, row_updates="lazy") for name in ("momentum", "adam", "adamw")},
    **{f"exact {name}": Case(2, name) for name in ("momentum", "adam", "adamw")},
    **{f"replay {name}": Case(2, name, row_updates="replay") for name in ("momentum", "adam", "adamw")},
    "sgd": Case(3, "sgd"),
    "sparse adam": Case(2, "sparse_adam"),
    **{f"schedule {name}": Case(2, way=Way(schedule=name, steps=12)) for name in SCHEDULES if name != "2d"},
    **{
        f"padding, {name}": Case(2, name, workload=ManyWorkload(padded=True))
        for name in ("adagrad", "adamw", "momentum")
    },
    "padding, lazy": Case(2, "adam", row_updates="lazy", workload=ManyWorkload(padded=True)),
    "padding, none": Case(3, "adamw", way=Way(schedule="none", steps=12), workload=ManyWorkload(padded=True)),
    "no lookahead": Case(2, way=Way(lookahead=False, steps=12)),
    "inductor": Case(2, way=Way(backend="inductor", steps=3)),
    "fewer columns than ranks": Case(4, workload=ManyWorkload(dim=2)),
    "uneven and empty batches": Case(3, "sgd", workload=ManyWorkload(vary=True)),
}


@pytest.mark.long
@pytest.mark.parametrize("case", long_but(("replay adamw",), {name: (case,) for name, case in CASES.items()}))
def test_training_equals_the_reference(case: Case) -> None:
    steps = case.way.steps
    expected = expected_parameters(case.ranks, case.workload, DTYPE, case.optimizer, case.row_updates, steps=steps)
    for found in run_ranks(
        case.ranks, train_compiled, case.workload, DTYPE, case.optimizer, case.row_updates, case.way
    ):
        assert set(found.strategies.values()) == {"alltoall"}
        assert_same(found.parameters, expected, DTYPE)


def _bad_id(rank: int, size: int) -> None:
    workload = ManyWorkload()
    model = workload.make(DTYPE, SEED)
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1), strategy="alltoall")
    for step in range(3):
        ids, wanted = workload.batches(step, rank, SEED)
        if step == 2 and rank == 1:
            ids[0, 3] = ROWS[3]  # outside of table 3, but inside the joined table
        compiled(ids, wanted).backward()
        compiled.optimizer.step()
        compiled.optimizer.zero_grad()


def test_an_id_outside_its_table_is_not_another_tables_row() -> None:
    for error in run_ranks_expecting_errors(2, _bad_id):
        assert "tables.3.weight" in str(error)
        assert f"got id {ROWS[3]}" in str(error)
