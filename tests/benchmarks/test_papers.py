"""The papers' experiments as the cost model predicts them: gradients as dense as asked for, ratios that make sense."""

from __future__ import annotations

import pytest

from benchmarks.papers import embrace, omnireduce
from benchmarks.papers.zen import Embedding, by_elements, drawn_evenly, speedups
from embrace_fx.cost.devices import DEVICES

SMALL = Embedding(parameters=1e6, width=10, density=0.02)


def test_gradients_are_as_dense_as_asked_for_and_overlap_like_words() -> None:
    lying = SMALL.sparsity(4)

    assert lying.units_by_rank == (2_000,) * 4
    assert 2_000 < lying.union < 4 * 2_000
    assert lying.densification(2) < 1.9  # rows drawn evenly would overlap by 2 %
    assert SMALL.sparsity(4) == lying


def test_elements_have_an_index_each() -> None:
    lying = SMALL.sparsity(2)
    elements = by_elements(lying)

    assert elements.tensor_bytes == lying.tensor_bytes
    assert elements.density == pytest.approx(lying.density)
    assert elements.densification(2) == pytest.approx(lying.densification(2))


def test_fewer_indices_and_fewer_machines_are_faster() -> None:
    few, many = (speedups(SMALL.sparsity(n), DEVICES["V100"].cluster(3.125e6)) for n in (4, 16))

    assert few["zen by rows"] > few["zen"] > 1
    assert few["zen"] > many["zen"]
    assert many["zen"] > many["allgather"]


def test_machines_that_share_no_words_have_more_to_exchange() -> None:
    lying = SMALL.sparsity(4)
    even = drawn_evenly(lying)

    assert even.units_by_rank == lying.units_by_rank
    assert even.densification(4) > lying.densification(4)
    found = speedups(lying, DEVICES["V100"].cluster(3.125e6))
    assert found["zen"] > found["zen, no words in common"] > 1


def test_omnireduce_gains_as_blocks_are_zero() -> None:
    found = {(row.workers, row.density): row for row in omnireduce.rows()}

    of_eight = [found[8, density] for density in omnireduce.DENSITIES]
    assert [row.by_bytes for row in of_eight] == sorted(row.by_bytes for row in of_eight)
    assert of_eight[0].speedup < 1 < of_eight[-1].speedup < of_eight[-1].by_bytes
    assert [row.published for row in of_eight if row.published] == [5.5]


def test_a_step_of_each_system_is_foreseen() -> None:
    device = DEVICES["RTX 3090"]
    steps = {
        name: embrace.predicted_ms("bert", "tiny", device, 8, embrace.SYSTEMS[name]) for name in ("embrace", "Parallax")
    }
    row = embrace.Row("bert", device.name, 8, steps)

    assert row.best == "Parallax"
    assert row.speedup == steps["Parallax"] / steps["embrace"]
    assert all(step > 0 for step in steps.values())
