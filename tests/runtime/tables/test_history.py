"""Tables of a joined table that rest together, and apart, end where each would by dense updates of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table import Member, Table
from embrace_fx.runtime.tables.table_shard import become_shard
from embrace_fx.runtime.tables.update_rule import DeferredUpdate
from embrace_fx.vocabulary.joined_table import JoinedTable

ROWS, COLUMNS, STEPS = (20, 30), 4, 60
MAKES: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "momentum": partial(SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
}
TAKES = ("together", "apart at times", "one of them at times")


def _tables(values: list[Tensor], make: Callable[..., Optimizer], *, rests: bool) -> list[Member]:
    parameters = [nn.Parameter(each.clone()) for each in values]
    optimizer, found = make(parameters), []
    for k, parameter in enumerate(parameters):
        layout = Layout.of_table(f"t{k}", parameter.shape)
        become_shard(parameter, parameter.detach().clone(), layout)
        found.append(Member(parameter, layout, "exact", optimizer, may_defer=lambda: rests))
    return found


def _space(tables: list[Member]) -> Table:
    return Table.from_members(JoinedTable.from_tables({table.name: table.shape[0] for table in tables}), tables)


@pytest.mark.parametrize("takes", TAKES)
@pytest.mark.parametrize("name", MAKES)
def test_rows_of_a_space_end_where_dense_updates_lead(name: str, takes: str) -> None:
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(rows, COLUMNS, generator=random, dtype=torch.float64) for rows in ROWS]
    tables, dense = (_tables(values, MAKES[name], rests=rests) for rests in (True, False))
    space, together = _space(tables), 0
    for step in range(STEPS):
        if step == 30:
            space = _space(tables)  # joined again, as after a change of plan
        parts = {}
        for k in (0,) if takes == "one of them at times" and step in (20, 40) else (0, 1):
            ids = torch.randperm(ROWS[k], generator=random)[:3].sort().values
            parts[k] = ids, torch.randn(3, COLUMNS, generator=random, dtype=torch.float64)
            dense[k].begin_step().finish([parts[k]])
        apart = takes == "apart at times" and step % 20 in (7, 8, 12)
        if len(parts) == len(tables) and space.can_defer() and not apart:
            together += isinstance(rule := space.begin_step(), DeferredUpdate)
            rule.finish([space.join_gradients([*parts.values()])])
        else:
            for k, part in parts.items():
                tables[k].begin_step().finish([part])
        read = torch.randint(sum(ROWS), (5,), generator=random)
        expected: Any = torch.cat([table.local for table in dense])[read]
        torch.testing.assert_close(space.look_up(read), expected, rtol=1e-12, atol=1e-12)
    space.flush()
    for found, other in zip(tables, dense, strict=True):
        torch.testing.assert_close(found.local, other.local, rtol=1e-12, atol=1e-12)
        assert found.local.data_ptr() in range(space.local.data_ptr(), space.local.data_ptr() + space.local.nbytes)
    assert together > 15
    assert not any(table.history.has_deferred for table in tables)


class Rebinding(Optimizer):
    """Momentum, whose state is another tensor after each step."""

    element_wise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["momentum"] = 0.9 * state.get("momentum", 0.0) + parameter.grad
            parameter.sub_(0.1 * state["momentum"])


def test_state_that_a_step_rebinds_is_that_of_the_next_step() -> None:
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(rows, COLUMNS, generator=random, dtype=torch.float64) for rows in ROWS]
    tables, dense = (_tables(values, Rebinding, rests=False) for _ in range(2))
    space = _space(tables)
    for _ in range(3):
        assert space.can_defer()
        parts = [(torch.tensor([1, 3]), torch.randn(2, COLUMNS, generator=random, dtype=torch.float64)) for _ in ROWS]
        space.begin_step().finish([space.join_gradients(parts)])
        for table, part in zip(dense, parts, strict=True):
            table.begin_step().finish([part])
    for found, other in zip(tables, dense, strict=True):
        assert torch.equal(found.local, other.local)
