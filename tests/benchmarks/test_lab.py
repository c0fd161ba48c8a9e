"""The lab end to end, at tiny sizes: its models, systems on real ranks, runs that go on where they were."""

from __future__ import annotations

import pytest
import torch

from benchmarks.device.emulated import Emulated
from benchmarks.models import MODELS
from benchmarks.models.base import Workload, on_meta, sizes
from benchmarks.peers import SYSTEMS
from tests.support.lab import LEARNING_RATES, means, reference_losses, train
from tests.support.ranks import run_ranks

RANKS = 2
PUBLISHED_MIB = {"lm": (3186.5, 3099.5), "gnmt": (739.1, 252.5), "transformer": (1067.5, 263.4), "bert": (417.7, 89.4)}
"""Whole model and its tables, of EmbRace (Li et al. 2022)."""

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.mark.parametrize("model", PUBLISHED_MIB)
def test_a_model_has_its_published_size_and_the_labs_form_of_it_the_same_share_of_tables(model: str) -> None:
    paper, (total_mib, tables_mib) = sizes(on_meta(MODELS[model]["paper"])), PUBLISHED_MIB[model]
    assert (paper.total_bytes, paper.table_bytes) == pytest.approx((total_mib * 2**20, tables_mib * 2**20), rel=0.02)
    assert sizes(on_meta(MODELS[model]["lab"])).table_share == pytest.approx(tables_mib / total_mib, abs=0.03)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_a_batch_is_a_pure_function_of_its_place(model: str) -> None:
    places = ((3, 1, 0), (3, 1, 0), (3, 2, 0))
    first, again, other = (torch.cat([*map(torch.flatten, MODELS[model]["tiny"].batch(*place))]) for place in places)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", LEARNING_RATES)
@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_systems_train_as_one_process_unless_they_are_alone(model: str, emulated: bool, optimizer: str) -> None:
    """SGD shows a gradient that is added and not averaged, Adagrad an update that is made twice for a row."""
    plain = MODELS[model]["tiny"]
    workload: Workload = Emulated(model, "tiny", plain, 0.05) if emulated else plain
    expected = reference_losses(workload, optimizer, RANKS)
    names = [name for name, system in SYSTEMS.items() if system.environment == "project" and name != "ddp_compiled"]
    for name in ("ddp", "ddp_sparse", "embrace_2d", "alone_sparse") if emulated or model == "lm" else names:
        found = means(run_ranks(RANKS, train, name, workload, optimizer))
        assert (found == pytest.approx(expected, rel=1e-4)) == bool(SYSTEMS[name].alone), name
