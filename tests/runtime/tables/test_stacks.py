"""Tables whose rows travel together: which ones, how ids and rows are joined, and that training stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import embrace_fx
from embrace_fx.passes.planner.stacking import Stackable, plan_stacks
from embrace_fx.runtime.flow.routing import routed
from embrace_fx.runtime.kernels import stack_ids, unstack_rows
from embrace_fx.runtime.tables import stacks as stacks_module
from embrace_fx.vocabulary.plan import STACK_BYTES, Stack
from embrace_fx.vocabulary.schedule import SCHEDULES
from tests.support.cases import long_but
from tests.support.graphs import analysed
from tests.support.models import Batch, Workload
from tests.support.ranks import run_ranks, run_ranks_expecting_errors
from tests.support.reference import assert_same
from tests.support.stacks import ROWS, Many
from tests.support.training import SEED, Way, expected_parameters, train_compiled, whole, whole_parameters

DTYPE = torch.float64


@dataclass(frozen=True)
class ManyWorkload:
    dim: int = 6
    batch_size: int = 5
    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Many(self.dim).to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
        size = self.batch_size if not self.vary else int(torch.randint(0, self.batch_size, (1,), generator=random))
        ids = torch.rand(size, len(ROWS) + 1, generator=random).square() * torch.tensor([*ROWS, ROWS[0]])
        return ids.to(torch.int64), torch.rand(size, generator=random, dtype=DTYPE)


# ---- which tables ----


def stacks(
    model: nn.Module, *batch: Tensor, groups: dict[str, int] | None = None, part_bytes: int = 1
) -> list[set[str]]:
    graph = analysed(model, *batch)
    tables = [Stackable(table, (groups or {}).get(table.parameter, 0), part_bytes) for table in graph.tables]
    return [set(stack.tables) for stack in plan_stacks(graph, tables)]


def names(*numbers: int) -> set[str]:
    return {f"tables.{k}.weight" for k in numbers}


BATCH = ManyWorkload().batches(0, 0, 0)


def test_tables_read_together_are_one_stack() -> None:
    assert stacks(Many(6).double(), *BATCH) == [names(0, 1, 2, 3, 4)]


def test_their_rows_are_below_each_other() -> None:
    graph = analysed(Many(6).double(), *BATCH)
    (stack,) = plan_stacks(graph, [Stackable(table, 0, 1) for table in graph.tables])

    assert stack.tables[0] == "tables.0.weight"
    rows = [ROWS[int(name.split(".")[1])] for name in stack.tables]
    assert stack.first_rows == tuple(sum(rows[:k]) for k in range(len(rows)))
    assert stack.name == "tables.0.weight and 4 more"


def test_each_of_a_kind() -> None:
    model = Many(6).double()
    model.tables[3] = nn.Embedding(ROWS[3], 6, padding_idx=0).double()

    assert stacks(model, *BATCH) == [names(0, 1, 2, 4)]
    assert stacks(Many(6).double(), *BATCH, groups={"tables.2.weight": 1, "tables.3.weight": 1}) == [
        names(0, 1, 4),
        names(2, 3),
    ]
    assert stacks(Many(6).double(), *BATCH, part_bytes=STACK_BYTES // 3) == [names(0, 1, 2), names(3, 4)]


class Apart(nn.Module):
    """What is looked up second is wanted only after a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(9, 6), nn.Embedding(9, 6)
        self.linear = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.linear(self.first(ids))
        loss: Tensor = self.linear(hidden + self.second(ids)).square().mean()
        return loss


def test_not_across_computation() -> None:
    assert stacks(Apart(), torch.randint(9, (5,))) == []


# ---- ids and rows ----


def test_ids_and_rows_of_two_tables() -> None:
    ids = [torch.tensor([2, 5, 5]), torch.tensor([0, 3, 4])]
    counts = [torch.tensor([2, 1]), torch.tensor([1, 2])]

    stacked, of_ranks = stack_ids(ids, counts, [0, 10])

    assert stacked.tolist() == [2, 5, 10, 5, 13, 14]
    assert of_ranks.tolist() == [3, 3]
    flat = torch.arange(6.0)  # rank 0's three rows of two columns
    assert [part.tolist() for part in unstack_rows(flat, counts, 0)] == [[0, 1, 2, 3], [4, 5]]
    assert [part.tolist() for part in unstack_rows(flat, counts, 1)] == [[0, 1], [2, 3, 4, 5]]
    assert [part.tolist() for part in unstack_rows(flat[:0], [torch.tensor([0, 3])] * 2, 0)] == [[], []]


def test_ids_are_joined_alike_before_their_sizes_are_known() -> None:
    # Two ranks, three tables with room for 3, 2 and 2 ids.
    packed = torch.tensor([[2, 1, 2, 2, 5, -7, 0, -7, 1, 3], [1, 2, 0, 5, -7, -7, 3, 4, -7, -7]], dtype=torch.int32)
    found = routed(packed, [[3, 2, 2], [3, 2, 2]], [(0, 0), (2, 10)])

    assert found.counts.tolist() == [4, 1]
    assert found.ids[:5].tolist() == [2, 5, 11, 13, 5]
    assert found.owner[:5].tolist() == [0, 0, 0, 0, 1]
    assert found.is_row.tolist() == [True] * 5 + [False] * 5


# ---- training ----


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
    "no lookahead": Case(2, way=Way(lookahead=False, steps=12)),
    "inductor": Case(2, way=Way(backend="inductor", steps=3)),
    "fewer columns than ranks": Case(4, workload=ManyWorkload(dim=2)),
    "uneven and empty batches": Case(3, "sgd", workload=ManyWorkload(vary=True)),
}


@pytest.mark.parametrize("case", long_but(("replay adamw",), {name: (case,) for name, case in CASES.items()}))
def test_training_equals_the_reference(case: Case) -> None:
    steps = case.way.steps
    expected = expected_parameters(case.ranks, case.workload, DTYPE, case.optimizer, case.row_updates, steps=steps)
    for found in run_ranks(
        case.ranks, train_compiled, case.workload, DTYPE, case.optimizer, case.row_updates, case.way
    ):
        assert set(found.strategies.values()) == {"alltoall"}
        assert_same(found.parameters, expected, DTYPE)


Act = Callable[[embrace_fx.CompiledModel, Optimizer, int], None]


def reload(compiled: embrace_fx.CompiledModel, optimizer: Optimizer, step: int) -> None:
    """State and parameters by way of copies, as a checkpoint puts them back."""
    if step == 3:
        held, state = whole(compiled.state_dict().items()), optimizer.state_dict()
        optimizer.load_state_dict({**state, "state": {k: whole(each.items()) for k, each in state["state"].items()}})
        compiled.load_state_dict(held)


def move_group(compiled: embrace_fx.CompiledModel, optimizer: Optimizer, step: int) -> None:
    """From the fourth step on one table learns faster than its stack."""
    if step == 3:
        moved = optimizer.param_groups[0]["params"].pop(1)
        optimizer.add_param_group({"params": [moved], "lr": 0.2})


def write(compiled: embrace_fx.CompiledModel, optimizer: Optimizer, step: int) -> None:
    """In place, between two steps."""
    if step == 3:
        with torch.no_grad():
            for parameter in compiled.parameters():
                parameter.mul_(0.5)


def swap(compiled: embrace_fx.CompiledModel, optimizer: Optimizer, step: int) -> None:
    """What `Module.to` may do: other memory under the same parameters."""
    if step == 3:
        compiled.synchronize()
        for parameter in compiled.parameters():
            parameter.data = parameter.data.clone()


def clip(compiled: embrace_fx.CompiledModel, optimizer: Optimizer, step: int) -> None:
    compiled.clip_grad_norm_(0.01)


def read(compiled: embrace_fx.CompiledModel, optimizer: Optimizer, step: int) -> None:
    """Of one table alone, so that its rows take what they have skipped."""
    if step in (3, 5):
        next(iter(compiled.state_dict().values())).to_local().sum()


def leave_out(compiled: embrace_fx.CompiledModel, optimizer: Optimizer, step: int) -> None:
    """Two steps that one table does not take."""
    if step in (3, 5):
        optimizer.param_groups[0]["params"][1].grad = None


ACTS: dict[str, tuple[Act, bool]] = {  # and whether gradients of two batches are summed up
    "reload": (reload, False),
    "move_group": (move_group, False),
    "write": (write, False),
    "swap": (swap, False),
    "read": (read, False),
    "clip": (clip, False),
    "leave_out": (leave_out, False),
    "accumulate": (lambda *_: None, True),
}


def _train(
    rank: int, size: int, act: str, schedule: Any, kind: type[Optimizer], row_updates: Any, stack_bytes: int
) -> tuple[dict[str, Tensor], int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacks_module, "STACK_BYTES", stack_bytes)  # of those that are found as tables step
        return _train_under(rank, act, schedule, kind, row_updates)


def _train_under(
    rank: int, act: str, schedule: Any, kind: type[Optimizer], row_updates: Any
) -> tuple[dict[str, Tensor], int]:
    workload = ManyWorkload()
    model = workload.make(DTYPE, SEED)
    optimizer = kind(model.parameters(), lr=0.05, eps=1e-3)  # type: ignore[call-arg]
    compiled = embrace_fx.compile(
        model, optimizer=optimizer, strategy="alltoall", schedule=schedule, row_updates=row_updates
    )
    do, accumulate = ACTS[act]
    for step, batch in enumerate(compiled.lookahead([workload.batches(step, rank, SEED) for step in range(8)])):
        with compiled.no_sync() if accumulate and step % 2 == 0 else nullcontext():
            compiled(*batch).backward()
        if accumulate and step % 2 == 0:
            continue
        do(compiled, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    tables: Any = model.tables
    shards = [table.weight for table in tables]
    return whole_parameters(compiled), len({shard.to_local().untyped_storage().data_ptr() for shard in shards})


@pytest.mark.parametrize(
    ("act", "kind", "row_updates"),
    long_but(
        ("reload-Adam-replay", "move_group-Adam-lazy"),
        {
            f"{act}-{kind.__name__}-{updates}": (act, kind, updates)
            for act in ACTS
            for kind, updates in ((Adagrad, "lazy"), (Adam, "lazy"), (Adam, "replay"))
        },
    ),
)
def test_what_users_do_between_steps_does_to_a_stack_what_it_does_to_tables(
    act: str, kind: type[Optimizer], row_updates: str
) -> None:
    """Schedule "none" exchanges table by table."""
    by_table = run_ranks(2, _train, act, "none", kind, row_updates, 0)
    for schedule in ("none", "2d"):
        stacked = run_ranks(2, _train, act, schedule, kind, row_updates, STACK_BYTES)

        for (found, memories), (expected, apart) in zip(stacked, by_table, strict=True):
            assert memories == 1
            assert apart == len(ROWS)
            assert_same(found, expected, DTYPE)


class Narrow(nn.Module):
    """Two tables that are read in bfloat16 alone, and whose gradients are made of one product's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Embedding(20, 6), nn.Embedding(30, 6)
        self.of_both = nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        one, other = self.one(ids).bfloat16(), self.other(ids + 7).bfloat16()
        loss: Tensor = self.of_both(one * other).float().square().mean()
        return loss


def _train_narrow(rank: int, size: int, schedule: Any) -> tuple[dict[str, Tensor], set[str], int]:
    torch.manual_seed(SEED)
    model = Narrow()
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1), strategy="alltoall", schedule=schedule)
    random = torch.Generator().manual_seed(rank)
    for ids in compiled.lookahead([torch.randint(20, (9,), generator=random) for _ in range(6)]):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(ids)
        loss.backward()
        compiled.optimizer.step()
        compiled.optimizer.zero_grad()
    awaited = {str(n.args[3]) for n in compiled.graphs["forward"].graph.nodes if "await_rows" in str(n.target)}
    return whole_parameters(compiled), awaited, len(compiled.plan.stacks)


@pytest.mark.long
def test_a_stack_travels_in_the_narrow_dtype_of_its_tables() -> None:
    stacked, by_table = (run_ranks(2, _train_narrow, schedule) for schedule in ("2d", "none"))
    for (found, awaited, stacks_found), (expected, _, _) in zip(stacked, by_table, strict=True):
        assert awaited == {"torch.bfloat16"}
        assert stacks_found == 1
        assert_same(found, expected, torch.float32)


def _bad_id(rank: int, size: int) -> None:
    workload = ManyWorkload()
    model = workload.make(DTYPE, SEED)
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1), strategy="alltoall")
    for step in range(3):
        ids, wanted = workload.batches(step, rank, SEED)
        if step == 2 and rank == 1:
            ids[0, 3] = ROWS[3]  # another table's row of the stack
        compiled(ids, wanted).backward()
        compiled.optimizer.step()
        compiled.optimizer.zero_grad()


def test_an_id_outside_its_table_is_not_another_tables_row() -> None:
    for error in run_ranks_expecting_errors(2, _bad_id):
        assert "tables.3.weight" in str(error)
        assert f"found {ROWS[3]}" in str(error)


def _launched(rank: int, size: int, schedule: Any) -> list[str]:
    workload = ManyWorkload()
    model = workload.make(DTYPE, SEED)
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1), strategy="alltoall", schedule=schedule)
    compiled(*workload.batches(0, rank, SEED)).backward()
    return [name for name in compiled.schedule.launch_order if "bucket" not in name and name != "ids"]


@pytest.mark.long
def test_a_stack_launches_what_one_table_does() -> None:
    stack = Stack(tuple(f"tables.{k}.weight" for k in range(5)), (0, 23, 27, 28, 59)).name
    for found in run_ranks(2, _launched, "2d"):
        assert set(found) == {f"{stack} {what}" for what in ("rows", "early rows", "prior", "delayed [0]")}
    for found in run_ranks(2, _launched, "none"):
        assert len(found) == 2 * len(ROWS)
