"""Rows that a working set lacks, against one that is simulated; budgets that follow from them."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor

from embrace_fx.cost.storage import Draws, RowMemory, Storage

V, IDS = 2000, 64


def zipf(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(V ** torch.rand(IDS, generator=generator) - 1).long() for _ in range(steps)]


def lacked(steps: list[Tensor], slots: int) -> float:
    """Rows that a step brings into a set of those used last, the mean over the second half of the steps."""
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


def memory(slots: int, storage: tuple[Storage, ...], sample: int = 200) -> RowMemory:
    draws = Draws.of(torch.cat(zipf(sample)), V, 1 / sample)
    return RowMemory(V, slots, 100.0, 4, 64, 50, draws, storage)


@pytest.mark.parametrize("slots", [100, 300, 1000])
def test_rows_lacked_are_those_of_a_simulated_set(slots: int) -> None:
    found = memory(slots, (Storage("file", 0.01, 0.02),))
    assert found.moved_rows == pytest.approx(lacked(zipf(1000), slots), rel=0.1)
    assert found.draws.rows == pytest.approx(sum(len(each.unique()) for each in zipf(1000)) / 1000, rel=0.02)


def test_one_batch_is_a_sample_whose_singles_stand_for_other_rows() -> None:
    found, known = (memory(300, (Storage("file", 0.01, 0.02),), sample) for sample in (1, 200))
    assert known.moved_rows < found.moved_rows < 2 * known.moved_rows


def test_nearer_places_keep_rows_from_farther_ones() -> None:
    host, file = Storage("host", 0.0, 0.0, 1e-6, holds_bytes=64 * 300), Storage("file", 0.01, 0.02)
    found = memory(100, (host, file))
    assert [rows for _, rows in found.moved] == [memory(slots, (file,)).moved_rows for slots in (100, 400)]
    assert found.read_ms == pytest.approx(found.moved[0][1] * 64e-6 + found.moved[1][1] * 0.01)


def test_more_memory_takes_less_time_and_the_least_at_speed_is_just_enough() -> None:
    found = memory(100, (Storage("file", 0.01, 0.02),))
    assert found.with_slots(300).read_ms < found.read_ms
    enough = found.at_speed(0.5)
    less = enough.with_slots(enough.slots - 2)
    assert enough.read_ms + enough.write_ms <= 0.5 < less.read_ms + less.write_ms
    assert found.at_speed(1e9).slots == 2 * found.at_once
    assert found.at_speed(0.0).slots == V
    assert found.least.slots == found.at_once
