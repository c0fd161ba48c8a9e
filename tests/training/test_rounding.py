"""Training with rows and buckets in 8 and 16 bits: the bytes that leave, how near the exact losses it stays.

Shape legend: as in `embrace_fx/vocabulary/ops.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
from embrace_fx.cost.wire import Format
from embrace_fx.passes.pipeline import training_passes
from embrace_fx.passes.round_gradients import RoundRowGradients
from embrace_fx.vocabulary.plan import Grid, Plan
from embrace_fx.vocabulary.schedule import SCHEDULES
from tests.support.beside import take_steps
from tests.support.ranks import RankError, reset_torch_state, run_ranks

STEPS = 24
SENDS = torch.ops.embrace.all_to_all_gradients.default


class Words(nn.Module):
    """A model with two tables and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.users = nn.Embedding(3000, 32, padding_idx=0), nn.Embedding(2000, 32)
        self.hidden, self.out = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, words: Tensor, users: Tensor, wanted: Tensor) -> Tensor:
        read = torch.cat([self.words(words).mean(1), self.users(users)], 1)
        return (self.out(self.hidden(read).relu()).squeeze(1) - wanted).square().mean()


@dataclass(frozen=True)
class Trained:
    """The losses, the bytes of the last step, the report, and the whole parameters of one rank."""

    losses: list[float]
    sent_bytes: float
    predicted_bytes: float
    report: str
    parameters: dict[str, Tensor]
    evaluated: float


def batches_of(rank: int) -> list[tuple[Tensor, ...]]:
    random = torch.Generator().manual_seed(rank)
    read = [(torch.rand(16, 8, generator=random) ** 3 * 3000).long() for _ in range(STEPS)]
    return [(words, words[:, 0] % 2000, words.float().mean(1) / 1000) for words in read]


def train(rank: int, _: int, options: dict[str, Any]) -> Trained:
    reset_torch_state()
    torch.manual_seed(0)
    model = embrace_fx.compile(Words(), row_updates="lazy", cluster=embrace_fx.Cluster(1e4, 0.02), **options)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    batches = batches_of(rank)
    losses = [loss.item() for loss in take_steps(model, optimizer, model.lookahead(batches))]
    figures, report = model.metrics(), str(model.report())
    with torch.no_grad():
        evaluated = model.eval()(*batches[0]).item()
    whole = embrace_fx.full_state_dict(model)
    return Trained(losses, figures["sent_bytes"], figures["sent_bytes_predicted"], report, whole, evaluated)


def trained(ranks: int, **options: Any) -> list[Trained]:
    found = run_ranks(ranks, train, {"strategy": "alltoall"} | options)
    for each in found[1:]:
        assert all(torch.equal(each.parameters[name], value) for name, value in found[0].parameters.items())
    return found


def evaluated(found: Trained) -> float:
    """Returns the loss of a single process with the whole parameters of a rank."""
    model = Words()
    model.load_state_dict(found.parameters)
    with torch.no_grad():
        return float(model(*batches_of(0)[0]))


def share(found: list[Trained], exact: list[Trained]) -> float:
    return sum(each.sent_bytes for each in found) / sum(each.sent_bytes for each in exact)


def off(found: list[Trained], exact: list[Trained]) -> float:
    """Returns the difference of the last losses, relative to the exact losses."""
    ends = [sum(sum(each.losses[-6:]) for each in of_ranks) for of_ranks in (found, exact)]
    return abs(ends[0] - ends[1]) / ends[1]


@pytest.mark.parametrize(("form", "most_bytes"), [pytest.param("bf16", 0.52, marks=pytest.mark.long), ("int8", 0.30)])
def test_two_ranks_send_less_and_train_as_well(form: Format, most_bytes: float) -> None:
    exact, found = trained(2), trained(2, rows=form)
    assert share(found, exact) < most_bytes
    assert found[0].predicted_bytes == pytest.approx(found[0].sent_bytes, rel=0.1)
    assert off(found, exact) < 0.01
    assert found[0].losses != exact[0].losses
    assert found[0].evaluated == pytest.approx(evaluated(found[0]), rel=1e-6)  # evaluations read exact rows
    told = [line.partition(f" are sent as {form}: off by ") for line in found[0].report.splitlines()]
    assert [what for what, sent, _ in told if sent] == ["rows", "gradients of rows", "buckets"]


@pytest.mark.long
def test_schedules_agree_in_every_bit() -> None:
    """Each row's gradient is rounded once, whichever part of it is sent first."""
    first, *others = (trained(2, rows="int8", schedule=schedule) for schedule in SCHEDULES)
    for other in others:
        assert other[0].losses == first[0].losses


@pytest.mark.long
def test_four_ranks_on_a_grid() -> None:
    asked = {"strategy": {"words.*": Grid(2, 2), "users.*": "alltoall"}}
    exact, found = trained(4, **asked), trained(4, **asked, rows="int8")
    assert share(found, exact) < 0.35
    assert off(found, exact) < 0.01
    assert "alltoall sends int8, rounded: 2 parameter(s)" in " ".join(found[0].report.split())


@pytest.mark.long
def test_exchanges_of_replicas_stay_exact_and_say_so() -> None:
    exact, found = trained(2, strategy="zen"), trained(2, strategy="zen", rows="int8")
    assert "sent exactly: words.weight, users.weight" in " ".join(found[0].report.split())
    assert 0.3 < share(found, exact) < 1


def test_one_process_sends_nothing_and_rounds_nothing() -> None:
    exact, found = trained(1), trained(1, rows="int8")
    assert found[0].losses == exact[0].losses


def test_exact_plans_round_nothing() -> None:
    passes = training_passes(Plan(2, (), ()), (), 0)
    assert not any(isinstance(each, RoundRowGradients) for each in passes)


def test_formats_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Pass one of 'exact', 'bf16', 'fp16', 'int8'"):
        embrace_fx.compile(Words(), rows="int4")  # type: ignore[arg-type]


def _disagreeing(rank: int, _: int) -> None:
    embrace_fx.compile(Words(), rows="int8" if rank else "exact")


def test_ranks_that_disagree_are_told() -> None:
    with pytest.raises(RankError, match="rows='int8'"):
        run_ranks(2, _disagreeing)


def _hooked(rank: int, _: int) -> str:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415

    model = embrace_fx.compile(Words(), rows="bf16")
    with pytest.raises(ValueError, match="rows='bf16'"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return "refused"


def test_a_communication_hook_besides_is_refused() -> None:
    assert run_ranks(2, _hooked) == ["refused"] * 2


def _planned(rank: int, _: int) -> str:
    torch.manual_seed(0)
    batch = torch.ones(4, 3, dtype=torch.int64), torch.ones(4, dtype=torch.int64), torch.ones(4)
    model = embrace_fx.compile(Words(), strategy="alltoall", rows="int8", cluster=embrace_fx.Cluster())
    model(*batch).backward()
    launches = [each for each in model.graphs["round_row_gradients"].graph.nodes if each.target is SENDS]
    assert launches
    for launch in launches:  # each launch sends a part of the rounded gradients
        assert launch.all_input_nodes[0].all_input_nodes[0].target is torch.ops.embrace.round_rows.default
    again = embrace_fx.compile(Words(), plan=model.plan)
    with pytest.raises(ValueError, match="has rows='exact'"):
        again(*batch)
    return "refused"


def test_a_plan_rounds_what_is_sent_and_is_refused_for_other_formats() -> None:
    assert run_ranks(2, _planned) == ["refused"] * 2
