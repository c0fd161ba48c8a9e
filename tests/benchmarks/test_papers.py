"""The papers' experiments as the cost model predicts them: gradients as dense as asked for, ratios that make sense."""

from __future__ import annotations

import pytest

from benchmarks.papers.zen import Embedding, by_elements, speedups
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
