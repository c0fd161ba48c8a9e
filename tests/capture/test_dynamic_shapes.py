"""Batches of other shapes than the first: few captures, the right results, and ranks that stay in step.

What counts as a new capture is asserted by number: the first batch is captured with its sizes as constants; a size that
differs later becomes symbolic; sizes 0 and 1, another structure or another number are graphs of their own.

Shape legend
    B examples; L positions; D columns of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.capture.errors import CaptureError
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.session import graph_calls as capturing
from tests.support.inside import captures_of
from tests.support.ranks import run_ranks_expecting_errors
from tests.support.reference import assert_same
from tests.support.training import whole_parameters

NUM_WORDS, DIM, NUM_CLASSES = 40, 6, 5
TABLE = "table.weight"


class Tagger(nn.Module):
    """Returns the loss and the number of positions. The loss is a sum, so that an empty batch has a loss too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, DIM)
        self.classify = nn.Linear(DIM, NUM_CLASSES)

    def hidden(self, ids_BL: Tensor) -> Tensor:
        rows_BLD: Tensor = self.table(ids_BL)
        return rows_BLD.tanh()

    def forward(self, ids_BL: Tensor, weight_BL: Tensor | None = None, times: int = 1) -> tuple[Tensor, int]:
        logits = self.classify(self.hidden(ids_BL)).flatten(0, 1)
        losses = F.cross_entropy(logits, (ids_BL % NUM_CLASSES).flatten(), reduction="none")
        if weight_BL is not None:
            losses = losses * weight_BL.flatten()
        return times * losses.sum() / 10, ids_BL.shape[0] * ids_BL.shape[1]


class LongAndShort(Tagger):
    """Runs different code for long texts than for short ones."""

    def hidden(self, ids_BL: Tensor) -> Tensor:
        rows_BLD = super().hidden(ids_BL)
        return rows_BLD if ids_BL.shape[1] <= 6 else rows_BLD.cumsum(1)


class Placed(Tagger):
    """Looks up words, positions and previous words. The ids of positions are computed from the sizes of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(20, DIM)
        self.previous = nn.Embedding(NUM_WORDS, DIM)

    def hidden(self, ids_BL: Tensor) -> Tensor:
        previous_BL = ids_BL.new_zeros(ids_BL.shape)
        previous_BL[:, 1:] = ids_BL[:, :-1]
        positions_BL = torch.arange(ids_BL.shape[1]).expand(ids_BL.shape[0], -1)
        rows_BLD: Tensor = self.position(positions_BL) + self.previous(previous_BL)
        return super().hidden(ids_BL) + rows_BLD


class Unreadable(Tagger):
    """Calls a function that Dynamo must not trace."""

    def hidden(self, ids_BL: Tensor) -> Tensor:
        outside: Callable[[Tensor], Tensor] = torch.compiler.disable(_times_length)
        return outside(super().hidden(ids_BL))


def _times_length(rows_BLD: Tensor) -> Tensor:
    return rows_BLD * rows_BLD.shape[1]


def make(kind: Callable[[], nn.Module] = Tagger, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


def compile_model(model: nn.Module, **options: Any) -> embrace_fx.CompiledModel:
    optimizer = SGD(model.parameters(), lr=0.1)
    return embrace_fx.compile(model, optimizer=optimizer, strategy="alltoall", **options)


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(NUM_WORDS, shape, generator=torch.Generator().manual_seed(seed))


def captures(compiled: embrace_fx.CompiledModel) -> int:
    return captures_of(compiled)


def train_step(compiled: embrace_fx.CompiledModel, *args: Any, **kwargs: Any) -> tuple[float, int]:
    loss, size = compiled(*args, **kwargs)
    loss.backward()
    compiled.optimizer.step()
    compiled.optimizer.zero_grad()
    return loss.item(), size


def eager_step(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[float, int]:
    loss, size = model(*args, **kwargs)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    return loss.item(), size


def assert_trains_alike(
    batches: Sequence[tuple[Any, ...]], kind: Callable[[], nn.Module] = Tagger
) -> embrace_fx.CompiledModel:
    """Trains a compiled model and an eager one on the same batches; every loss and the parameters are the same."""
    eager = make(kind)
    compiled = compile_model(make(kind))
    for batch in batches:
        (loss, size), (expected_loss, expected_size) = train_step(compiled, *batch), eager_step(eager, *batch)
        assert loss == pytest.approx(expected_loss, rel=1e-9)
        assert size == expected_size
    assert_same(whole_parameters(compiled), whole_parameters(eager), torch.float64)
    return compiled


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(3, 4), (3, 4), (3, 4)], 1),
        ([(3, 4), (3, 5), (3, 9), (3, 2), (3, 4)], 2),
        pytest.param([(3, 4), (5, 6), (2, 9), (7, 3)], 2, marks=pytest.mark.long),
        pytest.param([(3, 4), (3, 5), (4, 5), (2, 7)], 2, marks=pytest.mark.long),
        pytest.param([(4, 9), *((4, length) for length in range(5, 24)), (3, 20)], 2, marks=pytest.mark.long),
        pytest.param([(4, 9), (4, 9), (3, 9)], 2, marks=pytest.mark.long),
        pytest.param([(4, 9), (4, 4), (4, 6), (3, 5)], 3, marks=pytest.mark.long),
        pytest.param([(3, 4), (3, 1), (3, 1), (1, 4), (3, 0), (3, 7)], 5, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_number_of_captures(shapes: list[tuple[int, int]], expected: int) -> None:
    compiled = assert_trains_alike([(ids_of(*shape, seed=k),) for k, shape in enumerate(shapes)])
    assert captures(compiled) == expected


@pytest.mark.long
def test_other_models_of_a_class_do_not_make_sizes_dynamic() -> None:
    """Dynamo remembers by code object which sizes have varied; a capture must not depend on what ran before it."""
    for length in (4, 5, 6):
        compiled = compile_model(make())
        train_step(compiled, ids_of(3, length))
        train_step(compiled, ids_of(3, length + 1))
        assert captures(compiled) == 2


@pytest.mark.long
def test_ids_made_from_the_same_sizes_are_exchanged_together() -> None:
    compiled = assert_trains_alike([(ids_of(3, length),) for length in (4, 6, 3)], Placed)
    assert captures(compiled) == 2
    assert {each.parameter for each in compiled.plan if each.strategy == "alltoall"} == {
        "table.weight",
        "position.weight",
        "previous.weight",
    }


def test_the_eager_route_takes_varying_sizes() -> None:
    compiled = assert_trains_alike([(ids_of(3, length),) for length in (4, 5, 6, 9)], Unreadable)
    assert compiled.plan[TABLE].strategy in ("allreduce", "allgather", "zen", "omnireduce")
    assert "route: eager" in compiled.report()


@pytest.mark.long
def test_batches_cut_out_of_one_tensor_share_a_capture() -> None:
    """Their storage offsets differ, and the strides between their rows may be larger than the rows are long."""
    text = ids_of(400)
    compiled = assert_trains_alike([(text[12 * k : 12 * k + 12].view(3, 4),) for k in range(5)])
    assert captures(compiled) == 1
    rows = ids_of(3, 100)
    compiled = assert_trains_alike([(rows[:, k : k + 4],) for k in range(5)])
    assert captures(compiled) == 1
    compiled = assert_trains_alike([(ids_of(3, length + 1)[:, 1:],) for length in (4, 5, 6, 9)])
    assert captures(compiled) == 2


def test_a_transposed_batch_is_captured_for_itself() -> None:
    compiled = assert_trains_alike([(ids_of(3, 4),), (ids_of(4, 3).t(),), (ids_of(3, 4),), (ids_of(4, 3).t(),)])
    assert captures(compiled) == 2


@pytest.mark.long
def test_structures_have_captures_of_their_own() -> None:
    ids, weight = ids_of(3, 4), torch.rand(3, 4, dtype=torch.float64)
    batches: list[dict[str, Any]] = [
        {"ids_BL": ids},
        {"ids_BL": ids, "weight_BL": None},
        {"ids_BL": ids, "weight_BL": weight},
        {"ids_BL": ids, "weight_BL": weight, "times": 2},
        {"ids_BL": ids, "weight_BL": weight, "times": 3},
        {"ids_BL": ids, "times": True},
        {"ids_BL": ids, "weight_BL": weight.float()},
    ]
    eager = make()
    compiled = compile_model(make())
    for count, batch in enumerate(batches, start=1):
        assert train_step(compiled, **batch)[0] == pytest.approx(eager_step(eager, **batch)[0], rel=1e-9)
        assert captures(compiled) == count
    for batch in batches:
        assert train_step(compiled, **batch)[0] == pytest.approx(eager_step(eager, **batch)[0], rel=1e-9)
    assert captures(compiled) == len(batches)


def test_evaluation_has_captures_of_its_own() -> None:
    eager, compiled = make(), compile_model(make())
    train_step(compiled, ids_of(3, 4))
    eager_step(eager, ids_of(3, 4))
    for length in (5, 6, 7, 9):
        with torch.no_grad():
            assert compiled(ids_of(3, length))[0].item() == pytest.approx(eager(ids_of(3, length))[0].item(), rel=1e-9)
    assert captures(compiled) == 1 + 1  # one for training, and one with a dynamic length for evaluation


def test_too_many_captures_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "MAX_CAPTURES", 2)
    compiled = compile_model(make(LongAndShort), route="graph")
    train_step(compiled, ids_of(3, 4))
    train_step(compiled, ids_of(3, 5))
    with pytest.raises(CaptureError, match=r"captured 2 times.*Pad batches"):
        compiled(ids_of(3, 8))
    train_step(compiled, ids_of(3, 5))


def _exceed_the_limit(rank: int, world_size: int, who: tuple[int, ...]) -> None:
    """Calls the model with a third shape on the ranks in `who`. Raises that error after a later, valid step."""
    before, capturing.MAX_CAPTURES = capturing.MAX_CAPTURES, 2
    try:
        compiled = compile_model(make(LongAndShort, rank), route="graph")
        for length in (4, 5):
            train_step(compiled, ids_of(3, length))
        start_s = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            train_step(compiled, ids_of(3, 8 if rank in who else 5))
        assert time.monotonic() - start_s < 30
        train_step(compiled, ids_of(3, 5))
        raise caught.value
    finally:
        capturing.MAX_CAPTURES = before


@pytest.mark.long
@pytest.mark.parametrize("who", [(1,), (0, 1)], ids=str)
def test_no_rank_hangs_when_one_meets_the_limit(who: tuple[int, ...]) -> None:
    errors = run_ranks_expecting_errors(2, _exceed_the_limit, who)
    for rank, error in enumerate(errors):
        assert type(error) is (CaptureError if rank in who else PeerFailure)
        assert "2 times, because the shapes" in str(error)
    if who == (1,):
        assert str(errors[0]).startswith("rank 1: ")
