"""Logits of a sharded head: made when they are read, right, on all ranks or on none."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import embrace_fx
from embrace_fx.runtime.step.promised_logits import Logits
from tests.support.heads import IGNORED, HeadWorkload, Predicts, PredictsBoth
from tests.support.ranks import run_ranks, run_ranks_expecting_errors

DTYPE = torch.float64
BOTH = HeadWorkload(kind=PredictsBoth, bias=True, cap=3.0)


def compiled(workload: HeadWorkload, **options: Any) -> tuple[nn.Module, embrace_fx.CompiledModel]:
    """Returns the plain model and the compiled model."""
    models = [workload.make(DTYPE, seed=0) for _ in range(2)]
    return models[0], embrace_fx.compile(models[1], strategy={workload.table: "vocabulary"}, **options)


READS: dict[str, Callable[[Tensor], Any]] = {
    "values": lambda logits: logits + 0.0,
    "argmax": lambda logits: logits.argmax(-1),
    "top": lambda logits: logits.topk(3).values,
    "numpy": lambda logits: torch.from_numpy(logits.detach().numpy()),
    "one": lambda logits: torch.tensor(logits[0, 1, 2].item()),
    "last position": lambda logits: logits[:, -1].softmax(-1),
    "some words": lambda logits: logits[..., 3:5].clone(),
    "scored": lambda logits: logits[logits.argmax(-1) > 5],
    "float32": lambda logits: logits.float().flatten(0, 1).mean(0),
    "stacked": lambda logits: torch.cat([logits, logits]),
    "copied": lambda logits: copy.deepcopy(logits.detach()),
    "list": lambda logits: torch.tensor(logits.tolist()),
    "rows": lambda logits: torch.stack(list(logits)),
    "written": lambda logits: logits.detach().clone().mul_(2.0),
    "one dimension": lambda logits: logits.view(-1).double() + 0.0,
    "numbers": lambda logits: logits.to(torch.int64),
    "probabilities of positions": lambda logits: logits.log_softmax(1),
    "log softmax twice": lambda logits: F.log_softmax(F.log_softmax(logits, 2).float(), -1),
    "a new dimension": lambda logits: logits[None, 0, ..., None] + logits[:1, -1, 2:][..., :1, None],
}


def _read(rank: int, world_size: int, train: bool) -> None:
    whole, model = compiled(BOTH)
    batch = BOTH.batches(0, rank, 0)
    model(*batch)[0].backward()  # a training call, to make the plan
    model.train(train)
    for name, read in READS.items():
        with torch.set_grad_enabled(train):
            (_, logits), (_, expected) = model(*batch), whole(*batch)
        assert isinstance(logits, Logits)
        found = logits.shape, logits.dtype, logits.requires_grad
        assert found == (expected.shape, DTYPE, train), f"{name}: {found}"
        torch.testing.assert_close(read(logits), read(expected), rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("train", [pytest.param(True, marks=pytest.mark.long), False])
def test_what_is_read_is_right(train: bool) -> None:
    run_ranks(2, _read, train)


def _saved(rank: int, world_size: int) -> None:
    whole, model = compiled(BOTH)
    batch = BOTH.batches(0, rank, 0)
    file = io.BytesIO()
    torch.save(model(*batch)[1], file)
    torch.testing.assert_close(torch.load(io.BytesIO(file.getvalue())), whole(*batch)[1].detach())


@pytest.mark.long
def test_they_are_saved_as_plain_tensors() -> None:
    run_ranks(2, _saved)


def _written(rank: int, world_size: int) -> None:
    _, model = compiled(BOTH)
    logits = model(*BOTH.batches(0, rank, 0))[1].detach()
    flat = logits.view(-1, logits.size(-1))
    logits[:, :, 4] = 100.0
    assert bool((logits.argmax(-1) == 4).all())
    assert bool((flat.argmax(-1) == 4).all())


@pytest.mark.long
def test_writes_are_seen_by_views() -> None:
    run_ranks(2, _written)


def _not_made(rank: int, world_size: int) -> list[bool]:
    workload = HeadWorkload(kind=Predicts)
    _, model = compiled(workload)
    words, labels = workload.batches(0, rank, 0)
    logits = model(words, labels)
    flat = logits.float().double()[:, :-1].contiguous().view(-1, logits.size(-1))
    F.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=IGNORED).backward()
    with pytest.raises(RuntimeError, match="before the loss"):
        flat.retain_grad()
    views = logits[0], logits[..., :], logits[:, None, 1:], logits[labels >= 0], logits[labels[0] * 0]
    shown = *views, logits.unsqueeze(0).squeeze(0), logits.clone().detach().double(), logits.log_softmax(2)[:, -1]
    return [each.is_made for each in (logits, flat, *shown)]


def test_losses_make_none() -> None:
    assert run_ranks(2, _not_made) == [[False] * 10] * 2


def _read_twice(rank: int, world_size: int) -> None:
    whole, model = compiled(BOTH)
    optimizer, of_whole = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, whole))
    for step in range(3):
        batch = BOTH.batches(step, 0, 0)
        for each, own in ((model, optimizer), (whole, of_whole)):
            each(*batch)[0].backward()
            own.step()
            own.zero_grad()
        with torch.no_grad():
            for reads in (True, rank == 0):  # then only rank 0 reads, without communication
                found, expected = model(*batch)[1], whole(*batch)[1]
                if reads:
                    torch.testing.assert_close(found + 0.0, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_an_evaluation_gathers_the_table_once() -> None:
    run_ranks(2, _read_twice)


def _written_between_evaluations(rank: int, world_size: int, how: str) -> None:
    whole, model = compiled(BOTH)
    batch = BOTH.batches(0, 0, 0)
    for each in (whole, model):
        each(*batch)[0].backward()
    tables = [each.get_parameter(BOTH.table) for each in (whole, model)]
    for step in range(3):
        with torch.no_grad():
            found, expected = model(*batch)[1], whole(*batch)[1]
            torch.testing.assert_close(found + 0.0, expected, rtol=1e-9, atol=1e-9)
            for table in tables:
                if how == "data":
                    table.data = torch.full(table.shape, 0.1 * step, dtype=DTYPE)
                else:
                    table.mul_(0.5)


@pytest.mark.long
@pytest.mark.parametrize("how", ["data", "in place"])
def test_an_evaluation_sees_a_table_that_was_written(how: str) -> None:
    run_ranks(2, _written_between_evaluations, how)


def _stale(rank: int, world_size: int) -> None:
    _, model = compiled(BOTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss, logits = model(*BOTH.batches(0, rank, 0))
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="read before optimizer"):
        logits.argmax(-1)


def test_a_read_behind_the_step_is_refused() -> None:
    run_ranks(2, _stale)


def _alone(rank: int, world_size: int, deed: str) -> None:
    _, model = compiled(BOTH)
    words, labels = BOTH.batches(0, rank, 0)
    loss, logits = model(words, labels)
    if rank == 0:
        if deed == "read":
            logits.argmax(-1)
        else:
            F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()


@pytest.mark.parametrize(
    ("deed", "text"),
    [("read", "only this rank"), pytest.param("loss", "only some ranks compute the loss", marks=pytest.mark.long)],
)
def test_a_rank_that_reads_alone_is_told_at_once(deed: str, text: str) -> None:
    began = time.monotonic()
    errors = run_ranks_expecting_errors(2, _alone, deed)
    assert all(text in str(error) for error in errors)
    assert time.monotonic() - began < 60
