"""Bad input: a clear error on every rank within seconds, nothing half-applied, and training goes on afterwards."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

import embrace_fx
from embrace_fx.capture.errors import CaptureError
from tests.support.cases import long_but
from tests.support.messages import assert_says
from tests.support.ranks import fresh_ranks, run_ranks
from tests.support.reference import assert_same, train_reference
from tests.support.training import whole_parameters, whole_state
from tests.support.words import (
    DIM,
    NUM_CLASSES,
    NUM_WORDS,
    UNTRACEABLE_LENGTH,
    Batch,
    Sentences,
    Words,
    words_batch,
    words_model,
)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Fault:
    """What rank 1 does in the step that fails, and the error that every rank must then raise."""

    does: str
    parts: tuple[str, ...]


FAULTS = (
    Fault("id too large", ("PeerFailure", "ids go from 0 to 19", "table.weight", "got id 20", "Check the batch")),
    Fault("negative id", ("PeerFailure", "ids go from 0 to 19", "table.weight", "got id -1", "Check the batch")),
    Fault("nan loss", ("FloatingPointError", "nan or inf on rank", "Skip the batch")),
    Fault("cannot be captured", ("Words", "words.py:", "in forward", "Rewrite that line")),
    Fault("evaluates", ("PeerFailure", "rank 0", "training", "evaluating")),
)


def _faulty_batch(does: str, batch: Batch) -> Batch:
    ids, labels, scale = batch
    if does == "id too large":
        ids[0, 0] = NUM_WORDS
    elif does == "negative id":
        ids[0, 0] = -1
    elif does == "nan loss":
        scale.fill_(torch.nan)
    elif does == "cannot be captured":
        ids = ids[:, :1].expand(-1, UNTRACEABLE_LENGTH).contiguous()
    return ids, labels, scale


def _snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies all values that a step may change."""
    found = whole_parameters(model) | whole_state(model, optimizer)
    found |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found


def _train_with_faults(rank: int, world_size: int, at: dict[int, str], steps: int, strategy: str) -> dict[str, Any]:
    """What each of rank 1's faults, by step, was told as and has changed; and the parameters at the end."""
    plain = words_model()
    optimizer = Adagrad(plain.parameters(), lr=0.1, eps=1e-3)
    route: Literal["graph"] | None = "graph" if "cannot be captured" in at.values() else None  # otherwise runs eagerly
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy=strategy, route=route)
    errors, changed = {}, []
    for step in range(steps):
        batch, does = words_batch(step, rank), at.get(step, "")
        if not does:
            model(*batch).backward()
            optimizer.step()
        else:
            before = _snapshot(model, optimizer)
            try:
                with torch.set_grad_enabled(not (rank == 1 and does == "evaluates")):
                    model(*(_faulty_batch(does, batch) if rank == 1 else batch)).backward()
            except Exception as error:
                errors[does] = _message(error)
            after = _snapshot(model, optimizer)
            changed += [k for k in before | after if k not in before or not torch.equal(before[k], after[k])]
        optimizer.zero_grad()
    return {"errors": errors, "changed": changed, "parameters": whole_parameters(model)}


def _check_faults(at: dict[int, Fault], strategy: str) -> None:
    steps = max(at) + 2
    good = [step for step in range(steps) if step not in at]
    batches = [[words_batch(step, rank) for step in good] for rank in range(2)]
    expected = train_reference(words_model, lambda m: [Adagrad(m.parameters(), lr=0.1, eps=1e-3)], batches, len(good))

    by_rank = run_ranks(2, _train_with_faults, {k: fault.does for k, fault in at.items()}, steps, strategy)

    for fault in at.values():
        assert re.search(r"rank(\(s\))? 1\b", by_rank[0]["errors"][fault.does])
    for found in by_rank:
        for fault in at.values():
            assert_says(found["errors"][fault.does], *fault.parts)
        assert found["changed"] == []
        assert_same(found["parameters"], expected, torch.float64)


@pytest.mark.parametrize("strategy", long_but(("alltoall",), {each: (each,) for each in ("alltoall", "allreduce")}))
@pytest.mark.parametrize(
    "fault", long_but(("cannot be captured", "evaluates", "id too large"), {fault.does: (fault,) for fault in FAULTS})
)
def test_a_fault_of_one_rank_in_the_first_step_is_an_error_on_all(fault: Fault, strategy: str) -> None:
    _check_faults({0: fault}, strategy)


@pytest.mark.parametrize("strategy", long_but(("alltoall",), {each: (each,) for each in ("alltoall", "allreduce")}))
def test_a_fault_of_one_rank_is_an_error_on_all_and_changes_nothing(strategy: str) -> None:
    """Of whole tables an evaluation needs no other rank, as under DDP: it is no fault from the second step on."""
    faults = [fault for fault in FAULTS if fault.does != "evaluates" or strategy == "alltoall"]
    _check_faults({1 + 2 * k: fault for k, fault in enumerate(faults)}, strategy)


class Mapped(nn.Module):
    """Maps keys to the ids of a table by a buffer with `KEYS` entries."""

    KEYS = 50

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("map", torch.arange(self.KEYS) % NUM_WORDS)
        self.table = nn.Embedding(NUM_WORDS, DIM)
        self.linear = nn.Linear(DIM, 1)

    def forward(self, keys_B: Tensor) -> Tensor:
        return self.linear(self.table(self.map[keys_B])).square().mean()  # type: ignore[index]


def _mapped_batch(step: int, rank: int) -> tuple[Tensor]:
    return (torch.randint(Mapped.KEYS, (6,), generator=torch.Generator().manual_seed(10 * step + rank)),)


BAD_STEP = 3


def _train_with_a_bad_key(
    rank: int, world_size: int, options: dict[str, Any]
) -> tuple[list[tuple[int, str]], dict[str, Tensor]]:
    """Returns the failed steps with their errors, and the parameters after the other steps."""
    plain = words_model(Mapped)
    model = embrace_fx.compile(plain, optimizer=Adagrad(plain.parameters(), lr=0.1, eps=1e-3), **options)
    batches = [_mapped_batch(step, rank) for step in range(6)]
    if rank == 1:
        batches[BAD_STEP][0][2] = Mapped.KEYS
    failed = []
    for step, batch in enumerate(model.lookahead(batches)):
        try:
            model(*batch).backward()
        except embrace_fx.PeerFailure as error:
            failed.append((step, str(error)))
            continue
        model.optimizer.step()
        model.optimizer.zero_grad()
    return failed, whole_parameters(model)


@pytest.mark.parametrize(
    "options",
    long_but(
        ("sharded",),
        {
            "sharded": ({"strategy": "alltoall"},),
            "sharded, at once": ({"strategy": "alltoall", "schedule": "none"},),
            "replicated": ({"strategy": "allreduce"},),
        },
    ),
)
def test_ids_that_cannot_be_computed_fail_at_their_turn_on_all_ranks(options: dict[str, Any]) -> None:
    """The step of the batch fails even if the batch is read one step ahead."""
    good = [step for step in range(6) if step != BAD_STEP]
    batches = [[_mapped_batch(step, rank) for step in good] for rank in range(2)]
    expected = train_reference(
        lambda: words_model(Mapped), lambda m: [Adagrad(m.parameters(), lr=0.1, eps=1e-3)], batches, len(good)
    )
    for failed, parameters in run_ranks(2, _train_with_a_bad_key, options):
        ((step, message),) = failed
        assert step == BAD_STEP
        assert_says(message, "rank 1: the batch's ids cannot be computed", "IndexError", "Check the batch")
        assert_same(parameters, expected, torch.float64)


def test_a_forward_that_cannot_be_captured_names_the_users_line() -> None:
    model = embrace_fx.compile(words_model(), route="graph")
    code = Words.forward.__code__
    line = f"{code.co_filename}:{code.co_firstlineno + 4} in forward"
    with pytest.raises(CaptureError) as caught:
        model(*words_batch(0, 0, UNTRACEABLE_LENGTH))
    assert_says(str(caught.value), line, "`.item()`, `if tensor:`")


def _compile_another(rank: int, world_size: int, other: str) -> str:
    odd = rank == 1
    model = words_model(Sentences if odd and other == "model" else Words)
    if odd and other == "parameter":
        model.linear = nn.Linear(DIM, NUM_CLASSES + 1).double()
    if odd and other == "frozen parameter":
        model.table.requires_grad_(False)
    if odd and other == "nothing to train":
        model.requires_grad_(False)
    kind = Adagrad if odd and other == "optimizer" else SGD
    optimizer = kind(model.parameters(), lr=0.2 if odd and other == "optimizer setting" else 0.1)
    options: dict[str, Any] = {"strategy": STRATEGIES.get(other, "auto")}
    if odd and other == "option":
        options = {"row_updates": "lazy"}
    if odd and other == "unknown option":
        options = {"row_updates": "sloppy"}
    try:
        compiled = embrace_fx.compile(model, optimizer=optimizer, **options)
        if odd and other == "frozen since":
            model.get_parameter("linear.weight").requires_grad_(False)
        compiled(*words_batch(0, rank))
    except Exception as error:
        return _message(error)
    return "no error"


STRATEGIES = {"pattern without a table": {"tabel.*": "alltoall"}, "unknown strategy": {"table.*": "alltoal"}}


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        ("model", ("compile(): model", "is Sentences", "on rank 1, and Words", "the same code")),
        ("parameter", ("parameter linear.weight is (4, 6)", "on rank 1, and (3, 6)", "the same code")),
        ("frozen parameter", ("parameter table.weight", "frozen", "the same code")),
        ("optimizer", ("optimizer 0", "Adagrad", "on rank 1, and SGD", "the same code")),
        ("optimizer setting", ("optimizer 0, param group 0", "'lr': 0.2", "'lr': 0.1", "the same code")),
        ("option", ("options is", "row_updates='lazy'", "row_updates='exact'", "the same code")),
        ("unknown option", ("rank 1: compile(): row_updates is 'sloppy'",)),
        ("nothing to train", ("rank 1: compile(): ",)),
        ("frozen since", ("rank 1", "parameter linear.weight is", "frozen", "the same code")),
        ("unknown strategy", ("'table.*'", "one of allreduce, allgather, alltoall, omnireduce, zen, ps", "'alltoal'")),
        ("pattern without a table", ("'tabel.*'", "matches no table", "table.weight", "Use a table's")),
    ],
)
def test_a_rank_with_another_model_optimizer_or_option(other: str, parts: tuple[str, ...]) -> None:
    for message in run_ranks(2, _compile_another, other):
        assert_says(message, "ValueError" if other == "pattern without a table" else "SetUpError: ", *parts)


def _backward_twice(rank: int, world_size: int) -> tuple[str, list[str]]:
    plain = words_model()
    optimizer = Adagrad(plain.parameters(), lr=0.1)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy="alltoall")
    loss = model(*words_batch(0, rank))
    loss.backward(retain_graph=True)
    before = _snapshot(model, optimizer)
    try:
        loss.backward()
    except RuntimeError as error:
        after = _snapshot(model, optimizer)
        return str(error), [name for name in before if not torch.equal(before[name], after[name])]
    return "no error", []


def test_a_second_backward_of_one_call() -> None:
    for message, changed in run_ranks(2, _backward_twice):
        assert_says(message, "a second time for the results of the same call", "Call the model again")
        assert changed == []


def _a_planner_that_breaks(rank: int, world_size: int) -> str:
    model = words_model()
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embrace_fx.planning.findings.decide", lambda *_, **__: {"": 0}["cause"])
        with pytest.raises(ValueError, match="cause") as caught:
            compiled(*words_batch(0, rank))
    return str(caught.value)


def test_whatever_stops_the_planner_stops_every_rank() -> None:
    assert run_ranks(2, _a_planner_that_breaks) == ["KeyError: 'cause'"] * 2


def _left_alone(rank: int, world_size: int, fails: bool) -> str:
    """Rank 0 ends in the second step, which may have failed for rank 1's batch; what rank 1's third call raises."""
    model = embrace_fx.compile(words_model(), strategy="alltoall")
    for step, does in enumerate(("", "id too large" if fails and rank else "")):
        with contextlib.suppress(embrace_fx.PeerFailure):
            model(*_faulty_batch(does, words_batch(step, rank))).backward()
    if rank == 0:
        os._exit(3)
    try:
        model(*words_batch(2, rank))
    except Exception as error:
        return _message(error)
    return "no error"


@pytest.mark.long  # slow, because a missing rank is noticed after seconds
@pytest.mark.parametrize(
    ("fails", "told"),
    [(True, "PeerFailure: rank 1: this rank caught the error of a failed call"), (False, "DeadRank")],
)
def test_a_rank_that_goes_on_alone_is_told_of_its_own_failure(fails: bool, told: str) -> None:
    assert str(fresh_ranks(2, _left_alone, fails)[1].result).startswith(told)
