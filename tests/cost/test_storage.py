"""Rows that a working set lacks, against one that is simulated; budgets that follow from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from embrace_fx.cost.sparsity import measure_sparsity
from embrace_fx.cost.storage import Draws, RowMemory, StorageTier

V, IDS = 2000, 64
FILE = StorageTier("file", 0.01, 0.02)

Law = Callable[[torch.Generator], Tensor]
LAWS: Mapping[str, Law] = {
    "uniform": lambda random: torch.randint(V, (IDS,), generator=random),
    "Zipf, 1": lambda random: (V ** torch.rand(IDS, generator=random) - 1).long(),
    "power, 4": lambda random: (torch.rand(IDS, generator=random) ** 4 * V).long(),
}


def drawn(law: Law, steps: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [law(random) for _ in range(steps)]


def lacked(steps: list[Tensor], slots: int) -> float:
    """Returns the mean number of rows that a step loads into an LRU cache, over the second half of the steps."""
    there: OrderedDict[int, None] = OrderedDict()
    brought = 0
    for k, ids in enumerate(steps):
        for row in ids.unique().tolist():
            brought += row not in there and k >= len(steps) // 2
            there[row] = None
            there.move_to_end(row)
            if len(there) > slots:
                there.popitem(last=False)
    return brought / (len(steps) - len(steps) // 2)


def memory(slots: int, storage: tuple[StorageTier, ...], law: str = "Zipf, 1") -> RowMemory:
    """What is predicted from twenty batches of as many ranks, whose steps are one batch's."""
    unique = [ids.unique() for ids in drawn(LAWS[law], 20)]
    found = Draws.fit(measure_sparsity(unique, V, 8, 4, total_ids=20 * IDS))
    return RowMemory(V, slots, 100.0, 4.0, 0, 64, 50, replace(found, ids=IDS), storage)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("slots", [100, 300, 1000])
def test_rows_lacked_are_those_of_a_simulated_set(law: str, slots: int) -> None:
    found, steps = memory(slots, (FILE,), law), drawn(LAWS[law], 600)
    assert found.moved_rows == pytest.approx(lacked(steps, slots), rel=0.3)
    assert found.draws.rows == pytest.approx(sum(len(each.unique()) for each in steps) / len(steps), rel=0.03)


def test_nearer_places_keep_rows_from_farther_ones() -> None:
    host, file = StorageTier("host", 0.0, 0.0, 1e-6, holds_bytes=64 * 300), FILE
    found = memory(100, (host, file))
    assert [rows for _, rows in found.moved_by_tier] == [memory(slots, (file,)).moved_rows for slots in (100, 400)]
    assert found.read_ms == pytest.approx(found.moved_by_tier[0][1] * 64e-6 + found.moved_by_tier[1][1] * 0.01)


def test_more_memory_takes_less_time_and_the_least_at_speed_is_just_enough() -> None:
    found = memory(100, (FILE,))
    assert found.with_slots(300).read_ms < found.read_ms
    enough = found.for_step(0.5)
    less = enough.with_slots(enough.slots - 2)
    assert enough.read_ms + enough.write_ms <= 0.5 < less.read_ms + less.write_ms
    assert found.for_step(1e9).slots == 2 * found.at_once
    assert found.for_step(0.0).slots == V
    assert found.smallest.slots == found.at_once
