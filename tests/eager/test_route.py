"""Which models are captured, decided once at the first training call; beside DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from embrace_fx.planning import findings
from tests.support.beside import train
from tests.support.ranks import run_ranks

STEPS = 6
LINEARS = 20


class Chain(nn.Module):
    """A table, followed by layers."""

    def __init__(self, rows: int = 500, width: int = 8, linears: int = LINEARS) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, width)
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(linears))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        for linear in self.linears:
            hidden = hidden + linear(hidden).tanh()
        return hidden.square().mean()


def _train(model: Any, rank: int, steps: int = STEPS, words: int = 20) -> list[float]:
    generator = torch.Generator().manual_seed(rank)
    batches = [(torch.randint(words, (4, 6), generator=generator),) for _ in range(steps)]
    return [loss.item() for loss in train(model, batches, partial(torch.optim.Adam, lr=1e-2, eps=1e-3))]


def _beside_ddp(
    rank: int, world_size: int, cluster: embrace_fx.Cluster, made: dict[str, int], options: dict[str, Any]
) -> tuple[str, tuple[str, ...]]:
    """Returns why the model is not captured ("" if it is captured), and the names of sharded tables."""
    torch.manual_seed(0)
    plain = Chain(**made)
    other = DistributedDataParallel(copy.deepcopy(plain))
    model = embrace_fx.compile(plain, cluster=cluster, **options)
    words = plain.words.num_embeddings
    ours, theirs = _train(model, rank, words=words), _train(other, rank, words=words)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    whole = model.full_state_dict()
    for name, parameter in other.module.named_parameters():
        torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-4, atol=1e-6)
    found = model.graphs.reason, model.plan.sharded
    assert ("route: eager" in model.report()) is bool(found[0])
    model.close()
    return found


def test_runs_as_written_where_shards_would_save_nothing() -> None:
    for reason, sharded in run_ranks(2, _beside_ddp, embrace_fx.Cluster(1e6, 0.05), {}, {}):
        assert reason.startswith("shards of words.weight would save 0.0 ms")
        assert sharded == ()


@pytest.mark.long
def test_is_captured_where_its_table_is_worth_sharding() -> None:
    for found in run_ranks(2, _beside_ddp, embrace_fx.Cluster(1e3, 20.0), {"rows": 20_000}, {}):
        assert found == ("", ("words.weight",))


def test_is_captured_where_a_forward_hides_much_of_slow_buckets() -> None:
    made = {"rows": 8, "width": 256, "linears": 12}
    for reason, sharded in run_ranks(2, _beside_ddp, embrace_fx.Cluster(1e4, 0.05), made, {}):
        assert (reason, sharded) == ("", ())
    for reason, _ in run_ranks(2, _beside_ddp, embrace_fx.Cluster(1e6, 0.05), made, {}):
        assert reason.startswith("shards of words.weight would save 0.0 ms of a step")


@pytest.mark.long
def test_is_captured_where_that_is_asked_for() -> None:
    for options in ({"route": "graph"}, {"schedule": "vertical"}):
        for reason, _ in run_ranks(2, _beside_ddp, embrace_fx.Cluster(1e6, 0.05), {}, options):
            assert reason == ""


def _by_a_glance(
    rank: int, world_size: int, glanced: embrace_fx.Cluster, probed: embrace_fx.Cluster
) -> tuple[str, int]:
    """Returns why the model is not captured ("" if it is captured), and how often the links were probed."""
    probes: list[int] = []

    def links_between(*_: object) -> embrace_fx.Cluster:
        probes.append(1)
        return probed

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(findings, "estimate_links", lambda *_: glanced)
        patch.setattr(findings, "measure_links", links_between)
        model = embrace_fx.compile(Chain(20_000))
        _train(model, rank, 2, words=20_000)
    found: str = model.graphs.reason
    model.close()
    return found, len(probes)


def test_links_are_probed_only_where_a_glance_leaves_a_doubt() -> None:
    fast, slow = embrace_fx.Cluster(1e7, 0.01), embrace_fx.Cluster(1e3, 20.0)
    for reason, probes in run_ranks(2, _by_a_glance, fast, slow):
        assert "shards of words.weight would save" in reason
        assert probes == 0
    for reason, probes in run_ranks(2, _by_a_glance, slow, fast):
        assert "shards of words.weight would save" in reason
        assert probes == 1
    assert run_ranks(2, _by_a_glance, slow, slow) == [("", 1)] * 2


class Tied(Chain):
    """The output layer reads the table too, and positions are read by no number of the batch."""

    def __init__(self) -> None:
        super().__init__(20_000)
        self.places = nn.Embedding(6, 8)
        self.out = nn.Linear(8, 20_000, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return torch.nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), ids.flatten())


def _reason(rank: int, world_size: int, kind: Callable[[], Chain], words: int) -> str:
    torch.manual_seed(0)
    model = embrace_fx.compile(kind(), cluster=embrace_fx.Cluster(1e3, 20.0))
    _train(model, rank, 2, words=words)
    found: str = model.graphs.reason
    model.close()
    return found


@pytest.mark.long
def test_is_captured_where_the_first_batch_reads_the_first_rows() -> None:
    assert run_ranks(2, _reason, partial(Chain, 20_000), 64) == ["", ""]


def test_a_tied_table_and_positions_are_no_reason_to_capture() -> None:
    for reason in run_ranks(2, _reason, Tied, 20_000):
        assert reason.startswith("shards of places.weight would save 0.0 ms")


def _one_evaluates(rank: int, world_size: int) -> str:
    model = embrace_fx.compile(Chain(), cluster=embrace_fx.Cluster(1e6, 0.05))
    try:
        with torch.set_grad_enabled(rank == 0):
            model(torch.zeros(4, 6, dtype=torch.int64))
    except embrace_fx.PeerFailure as error:
        return str(error)
    return ""


def test_a_rank_that_evaluates_first_is_told() -> None:
    for said in run_ranks(2, _one_evaluates):
        assert "rank 1: ranks call the model in different modes" in said


class Labelled(Tied):
    """A model whose batch contains the labels."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return torch.nn.functional.cross_entropy(self.out(self.words(ids)).flatten(0, 1), labels.flatten())


def _labelled(rank: int, world_size: int, cluster: embrace_fx.Cluster) -> tuple[str, str]:
    torch.manual_seed(0)
    model = embrace_fx.compile(Labelled(), cluster=cluster)
    ids = torch.randint(20_000, (3, 5))
    model(ids, ids).backward()
    found = model.graphs.reason, model.plan["words.weight"].strategy
    model.close()
    return found


@pytest.mark.long
def test_a_tied_table_with_labels_is_captured_where_its_head_is_worth_sharding() -> None:
    for found in run_ranks(2, _labelled, embrace_fx.Cluster(1e3, 20.0)):
        assert found == ("", "vocabulary")
    for reason, strategy in run_ranks(2, _labelled, embrace_fx.Cluster(1e7, 0.05)):
        assert reason
        assert strategy == "allreduce"


def _priced(rank: int, world_size: int) -> list[float]:
    """Returns the bytes that a step sends under the plan that is made from measured links."""
    sent: list[float] = []
    glance = mock.patch(
        "embrace_fx.planning.findings.estimate_links", lambda of, sent_bytes, on: sent.append(sent_bytes)
    )
    model, ids = embrace_fx.compile(Labelled()), torch.randint(20_000, (3, 5))
    with glance:
        model(ids, ids).backward()
    model.close()
    return sent


def test_links_are_probed_for_the_gradient_of_a_tied_table() -> None:
    for sent in run_ranks(2, _priced):
        assert sent[0] > Labelled().words.weight.nbytes
