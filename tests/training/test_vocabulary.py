"""Tables that an output layer reads, with rows dealt out over ranks, train as in the single-process reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import embrace_fx
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.support.beside import take_steps
from tests.support.cases import long_but
from tests.support.heads import HeadModel, HeadWorkload, Predicts, PredictsBoth, Smooths, Weighs
from tests.support.ranks import run_ranks, run_ranks_expecting_errors
from tests.support.reference import assert_same
from tests.support.scenario import own
from tests.support.training import Way, expected_parameters, make_optimizers, train_compiled, whole_parameters

DTYPE = torch.float64
STEPS = 7

CASES = {
    "tied": HeadWorkload(),
    "tied, bias, none": HeadWorkload(bias=True, reduction="none"),
    "untied, bias": HeadWorkload(tied=False, bias=True),
    "tied, capped, shifted": HeadWorkload(cap=2.0, shifts=True),
    "class weights": HeadWorkload(kind=Weighs),
    "label smoothing": HeadWorkload(kind=Smooths, bias=True, cap=2.0),
    "label smoothing, none": HeadWorkload(kind=Smooths, tied=False, reduction="none"),
}


def _check(workload: HeadWorkload, ranks: int, optimizer: str, schedule: ScheduleName) -> None:
    workload = replace(workload, ranks=ranks)
    way = Way({workload.table: "vocabulary"}, schedule, steps=STEPS)
    expected = expected_parameters(ranks, workload, DTYPE, optimizer, steps=STEPS)
    for found in run_ranks(ranks, train_compiled, workload, DTYPE, optimizer, "exact", way):
        assert found.plan[workload.table].strategy == "vocabulary"
        assert_same(found.parameters, expected, DTYPE)


@pytest.mark.parametrize("case", long_but(("tied, capped, shifted",), {each: (each,) for each in CASES}))
def test_training_equals_the_reference(case: str) -> None:
    _check(CASES[case], 2, "adamw", "2d")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "optimizer", "schedule"),
    [(3, "sgd", "none"), (4, "adagrad", "2d"), (2, "sgd", "vertical"), (3, "adamw", "horizontal")],
)
def test_ranks_optimizers_and_schedules(ranks: int, optimizer: str, schedule: ScheduleName) -> None:
    _check(CASES["tied"], ranks, optimizer, schedule)


@pytest.mark.long
@pytest.mark.parametrize(("case", "ranks"), [("tied, bias, none", 2), ("tied, capped, shifted", 3)])
def test_a_budget_computes_the_head_in_chunks(case: str, ranks: int) -> None:
    workload = replace(CASES[case], ranks=ranks)
    expected = expected_parameters(ranks, workload, DTYPE, "adamw", steps=STEPS)
    way = Way({workload.table: "vocabulary"}, "2d", steps=STEPS, memory_budget=0.99)
    for found in run_ranks(ranks, train_compiled, workload, DTYPE, "adamw", "exact", way):
        of_head = found.plan[workload.table].head
        assert of_head is not None
        assert of_head.chunks > 1
        assert_same(found.parameters, expected, DTYPE)


def _recorded(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int], set[str]]:
    """Returns the bytes of each exchange of positions, recorded and predicted, and the exchanges that were awaited."""
    workload = HeadWorkload(length=32, ignored=0.0)
    compiled = embrace_fx.compile(workload.make(DTYPE, seed=0), strategy={workload.table: "vocabulary"})
    batch = workload.batches(0, 0, 0)  # the same batch on every rank
    with compiled.record():
        for _ in range(4):
            compiled(*batch).backward()
    seen = [span.operation for span in compiled.timeline.spans if (span.rank, span.window) == (rank, 1)]
    waits = {wait.launch for wait in compiled.timeline.waits if wait.launch.startswith(workload.table)}
    exchanges = [
        {each.name: each.sent_bytes for each in operations if each.kind == "positions"}
        for operations in (seen, compiled.schedule.steps.operations)
    ]
    assert {each.name for each in seen} >= {each for each in compiled.schedule.steps.compute_order if "up to" in each}
    return exchanges[0], exchanges[1], waits


def test_exchanges_of_positions_are_recorded_as_predicted() -> None:
    for recorded, predicted, waited_for in run_ranks(2, _recorded):
        assert recorded == predicted
        assert set(recorded) <= waited_for


@pytest.mark.long
def test_regions_are_compiled_beside_an_output_layer() -> None:
    workload = CASES["tied, capped, shifted"]
    way = Way({workload.table: "vocabulary"}, "2d", steps=STEPS, backend="inductor")
    expected = expected_parameters(2, workload, DTYPE, "adamw", steps=STEPS)
    for found in run_ranks(2, train_compiled, workload, DTYPE, "adamw", "exact", way):
        assert found.plan[workload.table].strategy == "vocabulary"
        assert_same(found.parameters, expected, DTYPE)


def _next_word(logits: Tensor, labels_BT: Tensor) -> Tensor:
    flat = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
    return F.cross_entropy(flat, labels_BT[..., 1:].reshape(-1), reduction="sum")


def _train_outside(rank: int, world_size: int, workload: HeadWorkload) -> dict[str, Tensor]:
    model = workload.make(DTYPE, seed=rank)
    (optimizer,) = make_optimizers("adamw", model)
    compiled = embrace_fx.compile(model, strategy={workload.table: "vocabulary"}, schedule="2d", memory_budget=0.99)
    for step in range(STEPS):
        words, labels = workload.batches(step, rank, 0)
        _next_word(compiled(words, labels), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert compiled.plan[workload.table].strategy == "vocabulary"
    return whole_parameters(compiled)


def _train_alone(workload: HeadWorkload) -> dict[str, Tensor]:
    model = workload.make(DTYPE, seed=0)
    (optimizer,) = make_optimizers("adamw", model)
    for step in range(STEPS):
        batches = [workload.batches(step, rank, 0) for rank in range(workload.ranks)]
        losses = [_next_word(model(*batch), batch[1]) for batch in batches]
        (torch.stack(losses).sum() / workload.ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize("case", ["tied", "untied, bias"])
def test_losses_outside_of_the_model_in_chunks(case: str) -> None:
    workload = replace(CASES[case], kind=Predicts, ranks=3)
    expected = _train_alone(workload)
    for found in run_ranks(3, _train_outside, workload):
        assert_same(found, expected, DTYPE)


def _evaluates(rank: int, world_size: int) -> dict[str, Tensor]:
    workload = replace(CASES["tied, bias, none"], reduction="sum")
    model = workload.make(DTYPE, seed=rank)
    (optimizer,) = make_optimizers("adamw", model)
    compiled = embrace_fx.compile(model, strategy={workload.table: "vocabulary"})
    batches = [workload.batches(step, rank, 0) for step in range(STEPS)]
    take_steps(compiled, optimizer, batches[:3])
    compiled.eval()
    with torch.no_grad():
        found = compiled(*batches[3])
    with compiled.whole() as plain, torch.no_grad():
        torch.testing.assert_close(found, plain(*batches[3]), rtol=1e-9, atol=1e-9)
    compiled.train()
    take_steps(compiled, optimizer, batches[3:])
    return whole_parameters(compiled)


@pytest.mark.long
def test_evaluation_and_whole_tables_between_steps() -> None:
    expected = expected_parameters(2, replace(CASES["tied, bias, none"], reduction="sum"), DTYPE, "adamw", steps=STEPS)
    for found in run_ranks(2, _evaluates):
        assert_same(found, expected, DTYPE)


def _saves(rank: int, world_size: int, folder: str, first: int, last: int) -> dict[str, Tensor]:
    """Trains for some steps on the batches of two ranks, independent of the number of ranks."""
    workload = CASES["untied, bias"]
    model = workload.make(DTYPE, seed=0)
    (optimizer,) = make_optimizers("adamw", model)
    compiled = embrace_fx.compile(model, optimizer=optimizer, strategy={workload.table: "vocabulary"})
    if first:
        compiled.load_checkpoint(folder)
    take_steps(compiled, optimizer, [workload.batches(step, 0, 0) for step in range(first, last)])
    compiled.save_checkpoint(folder)
    return whole_parameters(compiled)


@pytest.mark.long
def test_checkpoints_go_to_other_numbers_of_ranks(tmp_path: Path) -> None:
    whole = run_ranks(2, _saves, str(tmp_path / "whole"), 0, 6)[0]
    run_ranks(2, _saves, str(tmp_path / "cut"), 0, 3)
    for found in run_ranks(3, _saves, str(tmp_path / "cut"), 3, 6):
        assert_same(found, whole, DTYPE)


def _in_bfloat16(rank: int, world_size: int, strategy: str) -> tuple[dict[str, Tensor], Tensor]:
    workload = replace(CASES["tied, bias, none"], kind=PredictsBoth)
    model = workload.make(torch.float32, seed=0)
    (optimizer,) = make_optimizers("sgd", model)
    compiled = embrace_fx.compile(model, strategy={workload.table: strategy})
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            words, labels = workload.batches(step, 0, rank)
            loss, logits = compiled(words, labels.clamp(min=0))
            assert logits.dtype == torch.bfloat16
        (loss + 0.1 * F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert compiled.plan[workload.table].strategy == strategy
    return whole_parameters(compiled), loss.detach()


@pytest.mark.long
def test_autocast_trains_as_whole_tables_do() -> None:
    (found, loss), _ = run_ranks(2, _in_bfloat16, "vocabulary")
    (expected, expected_loss), _ = run_ranks(2, _in_bfloat16, "allreduce")
    torch.testing.assert_close(loss, expected_loss, rtol=2e-2, atol=1e-3)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-2, atol=5e-3)


def _holds(rank: int, world_size: int) -> list[tuple[int, ...]]:
    workload = CASES["tied"]
    model = workload.make(DTYPE, seed=0)
    (optimizer,) = make_optimizers("adamw", model)
    compiled = embrace_fx.compile(model, strategy={workload.table: "vocabulary"})
    take_steps(compiled, optimizer, [workload.batches(0, rank, 0)])
    table = compiled.get_parameter(workload.table)
    held = [table, table.grad, *optimizer.state[table].values()]
    return [tuple(own(each).shape) for each in held if each is not None and each.dim()]


@pytest.mark.long
def test_a_rank_holds_its_rows_of_the_table_and_of_its_state() -> None:
    for rank, held in enumerate(run_ranks(3, _holds)):
        assert held == [(14 - rank // 2, 6)] * 3


class _MayPredict(HeadModel):
    """Skips its output layer if a batch has no labels."""

    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        if labels_BT is None:
            return self.body(self.words(words_BT)).square().mean()
        return super().forward(words_BT, labels_BT)


def _differs(rank: int, world_size: int, deed: str, budget: float | None) -> None:
    workload = HeadWorkload(kind=_MayPredict)
    model = workload.make(DTYPE, seed=0)
    compiled = embrace_fx.compile(model, strategy={workload.table: "vocabulary"}, memory_budget=budget)
    words, labels = workload.batches(0, rank, 0)
    compiled(words, labels).backward()
    if deed == "path":
        loss = compiled(*(words, labels) if rank == 0 else (words,))
    else:
        loss = compiled(words, labels.fill_(workload.num_words) if rank == 0 else labels)
    loss.backward()


@pytest.mark.parametrize(
    ("deed", "told", "budget"),
    [
        ("label", "labels go from 0", None),
        pytest.param("label", "labels go from 0", 0.99, marks=pytest.mark.long),
        pytest.param("path", "launches other collectives", None, marks=pytest.mark.long),
        pytest.param("path", "launches other collectives", 0.99, marks=pytest.mark.long),
    ],
)
def test_ranks_that_differ_are_told_at_once(deed: str, told: str, budget: float | None) -> None:
    assert all(told in str(error) for error in run_ranks_expecting_errors(2, _differs, deed, budget))
