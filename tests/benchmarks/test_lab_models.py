"""The lab's models: sizes against the published ones, the tables' share, batches as pure functions of their place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.models import MODELS, text
from benchmarks.models.base import MoreRows, on_meta, sizes

MIB = 2**20

PUBLISHED_MIB = {
    "lm": (3186.5, 3099.5),
    "gnmt": (739.1, 252.5),
    "transformer": (1067.5, 263.4),
    "bert": (417.7, 89.4),
}
"""Whole model and its tables, of EmbRace (Li et al. 2022)."""

EVERY = pytest.mark.parametrize("model", MODELS)


@pytest.mark.parametrize("model", PUBLISHED_MIB)
def test_the_paper_size_is_the_published_one_and_the_lab_keeps_its_share_of_tables(model: str) -> None:
    total_mib, tables_mib = PUBLISHED_MIB[model]
    paper = sizes(on_meta(MODELS[model]["paper"]))
    assert paper.total_bytes / MIB == pytest.approx(total_mib, rel=0.02)
    assert paper.table_bytes / MIB == pytest.approx(tables_mib, rel=0.02)

    assert sizes(on_meta(MODELS[model]["lab"])).table_share == pytest.approx(tables_mib / total_mib, abs=0.03)


def test_the_paper_recommender_has_the_tables_of_criteo_kaggle() -> None:
    model = on_meta(MODELS["recommender"]["paper"])

    assert len(model.tables) == 26
    assert sum(table.num_embeddings for table in model.embeddings().values()) == 33_762_577


@EVERY
@pytest.mark.parametrize("size", ["paper", "lab", "tiny"])
def test_on_the_meta_device_a_model_takes_no_memory(model: str, size: str) -> None:
    made = on_meta(MODELS[model][size])

    assert {tensor.device.type for tensor in made.state_dict().values()} == {"meta"}


@EVERY
def test_a_batch_is_a_pure_function_of_step_rank_and_seed(model: str) -> None:
    workload = MODELS[model]["tiny"]
    first = workload.batch(3, 1, 0)
    torch.manual_seed(99)

    again = workload.batch(3, 1, 0)
    assert len(again) == len(first)
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    for other in (workload.batch(4, 1, 0), workload.batch(3, 2, 0), workload.batch(3, 1, 1)):
        assert not all(torch.equal(a, b) for a, b in zip(other, first, strict=True))


@EVERY
@pytest.mark.parametrize("size", ["lab", "tiny"])
def test_ids_are_rows_of_their_tables(model: str, size: str) -> None:
    workload = MODELS[model][size]
    made = on_meta(workload)

    for table, ids in made.lookups(*workload.batch(0, 0, 0)).values():
        assert 0 <= int(ids.min()) <= int(ids.max()) < made.embeddings()[table].num_embeddings


@EVERY
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_training_reaches_every_parameter_and_lowers_the_loss(model: str) -> None:
    workload = MODELS[model]["tiny"]
    torch.manual_seed(0)
    made = workload.make()
    optimizer = torch.optim.Adagrad(made.parameters(), lr=0.02, eps=1e-6)
    batch = workload.batch(0, 0, 0)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = made(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < 0.8 * losses[0]
    assert [name for name, parameter in made.named_parameters() if parameter.grad is None] == []


def test_words_are_as_frequent_as_zipf_has_it() -> None:
    counts = text.words().bincount().double()
    ranks = torch.arange(1, 1001).double()
    slope = torch.linalg.lstsq(
        torch.stack([ranks.log(), torch.ones(1000, dtype=torch.float64)], 1), counts[:1000].log().unsqueeze(1)
    ).solution[0]

    assert bool((counts[:-1] >= counts[1:]).all()), "expected words numbered by falling frequency"
    assert -1.4 < float(slope) < -0.7


def test_words_are_read_from_any_device(tmp_path: Path) -> None:
    """They are kept in a file, whatever the model is made on that asks for them first."""
    (tmp_path / "a.py").write_text("a b a")

    with torch.device("meta"):
        found = text.tokenize(tmp_path)

    assert found.tolist() == [0, 1, 0]


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected Python sources"):
        text.tokenize(tmp_path)


@EVERY
def test_more_rows_leave_the_loss_as_it_is(model: str) -> None:
    workload = MODELS[model]["tiny"]
    torch.manual_seed(0)
    plain = workload.make()
    torch.manual_seed(0)
    larger = MoreRows(workload, 10).make()

    assert sizes(larger).table_bytes == 10 * sizes(plain).table_bytes
    batch = MoreRows(workload, 10).batch(2, 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(batch, workload.batch(2, 1, 0), strict=True))
    assert torch.equal(larger(*batch), plain(*batch))
