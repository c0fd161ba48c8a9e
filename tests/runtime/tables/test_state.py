"""State: names, checkpoints across numbers of ranks, resumed optimizers, meta models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

import embrace_fx
from embrace_fx.compiled_model import CompiledModel
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.exactness import RowUpdates
from tests.support.cases import long_but
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same, train_reference
from tests.support.training import whole_parameters, whole_state

NUM_WORDS, DIM = 30, 10
"""Ten columns: over 2 ranks 5 + 5, over 3 ranks 4 + 4 + 2."""

Batch = tuple[Tensor, Tensor]


class Words(nn.Module):
    """Predicts a word from the two words before it, with two tables. Its evaluation differs from its training."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, DIM, padding_idx=0)
        self.linear = nn.Linear(DIM, DIM)
        self.output = nn.Embedding(NUM_WORDS, DIM)
        self.vocabulary = "letters"

    def describe(self) -> str:
        return f"{NUM_WORDS} {self.vocabulary}"

    def forward(self, context_BL: Tensor, target_B: Tensor) -> Tensor:
        x_BD = self.words(context_BL).sum(1)
        if self.training:
            x_BD = x_BD * 0.5
        scores_B = (self.linear(x_BD) * self.output(target_B)).sum(-1)
        return F.softplus(-scores_B).mean()


def _model() -> Words:
    torch.manual_seed(0)
    return Words().double()


def _batch(step: int, rank: int) -> Batch:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(NUM_WORDS, (4, 2), generator=random), torch.randint(NUM_WORDS, (4,), generator=random)


OPTIMIZERS: dict[str, tuple[Callable[[Words], Optimizer], RowUpdates]] = {
    "Adagrad": (lambda model: Adagrad(model.parameters(), lr=0.1, eps=1e-3), "exact"),
    "SGD with momentum": (lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9), "lazy"),
    "Adam": (lambda model: Adam(model.parameters(), lr=0.1, eps=1e-3), "exact"),
    "lazy Adam": (lambda model: Adam(model.parameters(), lr=0.1, eps=1e-3), "lazy"),
    "SparseAdam": (lambda model: SparseAdam([model.words.weight, model.output.weight], lr=0.1, eps=1e-3), "exact"),
}
TABLES = ("words.weight", "output.weight")
LOADS = ((3, "a model not yet called"), (3, "shards"), (3, "shards and their state"), (1, "shards and their state"))


def _compiled(plain: nn.Module, optimizer: Optimizer | None, row_updates: RowUpdates = "exact") -> CompiledModel:
    return embrace_fx.compile(plain, optimizer=optimizer, strategy="alltoall", row_updates=row_updates)


def _train(model: CompiledModel, optimizer: Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        model(*_batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, TableShard) else value


class _Reference:
    """One process and one model that train stretch by stretch, each with its own number of ranks."""

    def __init__(self, make_optimizer: Callable[[Words], Optimizer], row_updates: RowUpdates = "exact") -> None:
        self.model = _model()
        self.optimizer = make_optimizer(self.model)
        self._row_updates = row_updates

    def train(self, world_size: int, steps: range) -> dict[str, Tensor]:
        batches = [[_batch(step, rank) for step in steps] for rank in range(world_size)]
        return train_reference(
            lambda: self.model,
            lambda model: [self.optimizer],
            batches,
            len(steps),
            self._row_updates,
            lazy_tables=TABLES if self._row_updates == "lazy" else (),
        )


def _state_dict_facts(rank: int, world_size: int) -> dict[str, Any]:
    plain = _model()
    optimizer = Adagrad(plain.parameters(), lr=0.1)
    model = _compiled(plain, optimizer)
    _train(model, optimizer, rank, range(1))
    state = model.state_dict()
    table = state["words.weight"]
    facts: dict[str, Any] = {
        "names": list(state),
        "shape": tuple(table.shape),
        "local shape": tuple(table.to_local().shape),
        "sharded": [name for name, value in state.items() if isinstance(value, TableShard)],
    }
    torch.manual_seed(1)
    loaded = Words().double().state_dict()
    model.load_state_dict(loaded)
    facts["loaded"] = all(torch.equal(_whole(value), loaded[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Missing key.*linear\.bias"):
        model.load_state_dict({name: value for name, value in loaded.items() if name != "linear.bias"})
    with pytest.raises(RuntimeError, match=r"size mismatch for words\.weight"):
        model.load_state_dict({**loaded, "words.weight": loaded["words.weight"][:-1]})
    return facts


@pytest.mark.long
def test_state_dict_has_the_models_own_names_and_loads_a_plain_one() -> None:
    for rank, facts in enumerate(run_ranks(3, _state_dict_facts)):
        assert facts["names"] == list(_model().state_dict())
        assert facts["sharded"] == list(TABLES)
        assert facts["shape"] == (NUM_WORDS, DIM)
        assert facts["local shape"] == (NUM_WORDS, (4, 4, 2)[rank])
        assert facts["loaded"]


def test_attributes_of_the_model_are_reached_through_the_compiled_one() -> None:
    plain = _model()
    model = embrace_fx.compile(plain)
    assert model.vocabulary == "letters"
    assert model.describe() == "30 letters"
    assert model.linear is plain.linear
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    with pytest.raises(AttributeError, match="no attribute 'grammar'"):
        _ = model.grammar


def _save(rank: int, world_size: int, name: str, path: Path) -> None:
    make_optimizer, row_updates = OPTIMIZERS[name]
    plain = _model()
    optimizer = make_optimizer(plain)
    model = _compiled(plain, optimizer, row_updates)
    _train(model, optimizer, rank, range(3))
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=path)


def _load_and_continue(rank: int, world_size: int, name: str, path: Path, into: str) -> tuple[Any, Any, Any]:
    make_optimizer, row_updates = OPTIMIZERS[name]
    plain = _model()
    optimizer = make_optimizer(plain)
    model = _compiled(plain, optimizer, row_updates)
    if into == "shards":
        model(*_batch(0, rank))
    if into == "shards and their state":
        _train(model, optimizer, rank, range(1))
    weights, state = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    loaded = whole_parameters(model), whole_state(model, optimizer)
    _train(model, optimizer, rank, range(3, 5))
    return *loaded, whole_parameters(model)


@pytest.mark.long
@pytest.mark.parametrize("name", long_but(("Adam",), {name: (name,) for name in OPTIMIZERS}))
def test_a_checkpoint_of_2_ranks_continues_on_3_and_on_1(name: str, tmp_path: Path) -> None:
    make_optimizer, row_updates = OPTIMIZERS[name]
    run_ranks(2, _save, name, tmp_path)

    for world_size, into in LOADS:
        if name == "SparseAdam" and into == "a model not yet called":
            continue  # torch's loader creates state by a dense step, which SparseAdam rejects
        reference = _Reference(make_optimizer, row_updates)
        weights = reference.train(2, range(3))
        state = whole_state(reference.model, reference.optimizer)
        final = reference.train(world_size, range(3, 5))
        for found in run_ranks(world_size, _load_and_continue, name, tmp_path, into):
            assert_same(found[0], weights, torch.float64)
            assert found[1].keys() == state.keys()
            for key, value in state.items():
                torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-12, msg=key)
            assert_same(found[2], final, torch.float64)


def _resume(rank: int, world_size: int, when: str) -> dict[str, Tensor]:
    reference = _Reference(OPTIMIZERS["Adagrad"][0])
    reference.train(2, range(2))
    plain, optimizer = reference.model, reference.optimizer
    if when == "before compile":
        plain.zero_grad()
        model = _compiled(plain, optimizer)
    else:
        weights, state = plain.state_dict(), optimizer.state_dict()
        plain = _model()
        optimizer = OPTIMIZERS["Adagrad"][0](plain)
        model = _compiled(plain, optimizer)
        _train(model, optimizer, rank, range(7, 8))
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    _train(model, optimizer, rank, range(2, 4))
    return whole_parameters(model)


@pytest.mark.parametrize("when", [pytest.param("before compile", marks=pytest.mark.long), "into shards"])
def test_an_optimizer_resumes_from_whole_state(when: str) -> None:
    expected = _Reference(OPTIMIZERS["Adagrad"][0]).train(2, range(4))
    for found in run_ranks(2, _resume, when):
        assert_same(found, expected, torch.float64)


def _initial_values(rank: int, world_size: int, columns: int) -> dict[str, Tensor]:
    torch.manual_seed(5 + rank)  # ranks differ; rank 0's seed must be used
    with torch.device("meta"):
        plain = nn.Sequential(nn.Embedding(12_000, columns, padding_idx=2), nn.Linear(columns, 3))
    optimizer = Adagrad(plain.parameters(), lr=0.1)
    model = _compiled(plain, optimizer)
    model(torch.arange(4)).sum().backward()
    initial = whole_parameters(model)
    optimizer.step()
    assert all(not torch.equal(value, initial[name]) for name, value in whole_parameters(model).items())
    return initial


def test_a_meta_model_has_the_values_of_one_rank_on_any_number() -> None:
    columns = 100  # so many that rows are initialized in more than one block
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Embedding(12_000, columns, padding_idx=2), nn.Linear(columns, 3))
    for world_size in (1, 3):
        for found in run_ranks(world_size, _initial_values, columns):
            for name, value in plain.named_parameters():
                assert torch.equal(found[name], value), f"{name} on {world_size} ranks"


def test_meta_state_that_no_constructor_explains_is_refused() -> None:
    with torch.device("meta"):
        plain = Words()
    optimizer = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    plain(*(t.to("meta") for t in _batch(0, 0))).backward()
    optimizer.step()
    model = embrace_fx.compile(plain, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"already has state .momentum_buffer.*Create a new"):
        model(*_batch(0, 0))


def test_a_meta_model_is_trained_before_it_is_evaluated() -> None:
    with torch.device("meta"):
        model = embrace_fx.compile(Words())
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"meta.*Call it once"):
        model(*_batch(0, 0))
