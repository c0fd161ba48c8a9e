"""Predicted bytes and messages of the exchanges: against what channels counted, and what TCP connections carried."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.cost.exchanges import Prediction, Scheme, predict
from embrace_fx.cost.links import Cluster
from embrace_fx.cost.sparsity import Sparsity, measure_sparsity
from embrace_fx.runtime.exchanges.blocks import cut_rows
from embrace_fx.runtime.exchanges.gradient import RowSet
from embrace_fx.runtime.exchanges.in_place import STRATEGY_OF, exchange_gradient_
from tests.support.counting_channel import CountingChannel
from tests.support.exchange_cases import PLAIN, Way
from tests.support.ranks import run_ranks, store
from tests.support.wire import sent_by_connection

V, D = 12_000, 24
TOLERANCE = 0.04

FRAME_BYTES = 144
"""Of gloo, for each message (`test_wire.py`)."""

WAYS: dict[str, Way | None] = {
    "allreduce": None,
    **PLAIN,
    "omnireduce": Way("omnireduce", block_size=4 * D),
    "omnireduce_many_rounds": Way("omnireduce", block_size=D, slots=100),
    "zen_elements": Way("zen", "balanced", elements=True),
}
"""None: the collective of that name."""


def few_rows(rank: int) -> Tensor:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(V, D, generator=random) * (torch.rand(V, 1, generator=random) < 0.1)


def skewed_rows(rank: int) -> Tensor:
    """Rows as words sorted by frequency are read; more of them on later ranks."""
    random = torch.Generator().manual_seed(rank)
    ids = (torch.rand(1500 + 500 * rank, generator=random) ** 5 * V).long().unique()
    return torch.zeros(V, D).index_copy_(0, ids, torch.randn(ids.numel(), D, generator=random))


GRADIENTS: dict[str, Callable[[int], Tensor]] = {"few rows": few_rows, "skewed rows": skewed_rows}


@dataclass(frozen=True)
class Sent:
    """The bytes and the messages that one rank has sent in one exchange."""

    counted_bytes: int
    tcp_bytes: int
    messages: int


def all_ranks_here(world_size: int) -> None:
    """A barrier through the store's file: everything has arrived, so that connections have sent it, and no more."""
    visits = store().add("visits", 1)
    while store().add("visits", 0) < -(-visits // world_size) * world_size:
        time.sleep(0.001)


def exchange_all(rank: int, world_size: int) -> dict[tuple[str, str], Sent]:
    channel = CountingChannel(dist.group.WORLD)
    sent = {}
    for variant, way in WAYS.items():
        for name, gradient_of in GRADIENTS.items():
            counted, messages = channel.sent_bytes, channel.messages
            all_ranks_here(world_size)
            before = sent_by_connection()
            gradient = gradient_of(rank)
            if way is None:
                channel.all_reduce_(gradient.view(-1))
            else:
                with way.chosen():
                    exchange_gradient_(gradient.view(-1), way.kind(gradient), channel, Cluster())
            all_ranks_here(world_size)
            after = sent_by_connection()
            tcp_bytes = sum(after.values()) - sum(before.values())
            sent[variant, name] = Sent(channel.sent_bytes - counted, tcp_bytes, channel.messages - messages)
    return sent


@cache
def visit(world_size: int) -> list[dict[tuple[str, str], Sent]]:
    return run_ranks(world_size, exchange_all)


def predicted(variant: str, gradient: str, world_size: int) -> Prediction:
    by_rank, way = [GRADIENTS[gradient](rank) for rank in range(world_size)], WAYS[variant]
    if way is None:
        return predict("allreduce", sparsity_of([cut_rows(each, Cluster()) for each in by_rank]))
    strategy = STRATEGY_OF[way.strategy, way.scheme]
    with way.chosen():
        units = [strategy.units(each.view(way.kind(each).rows, -1), Cluster()) for each in by_rank]
        return predict(way.strategy, sparsity_of(units), scheme=scheme_of(way))


def sparsity_of(units: Sequence[RowSet]) -> Sparsity:
    first = units[0]
    return measure_sparsity([each.ids for each in units], first.num_rows, first.width, first.rows.itemsize)


def scheme_of(way: Way) -> Scheme:
    return "hierarchical" if way.scheme == "hierarchical" else "balanced"


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("variant", WAYS)
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_bytes_are_as_predicted(world_size: int, variant: str, gradient: str) -> None:
    by_rank = [results[variant, gradient] for results in visit(world_size)]
    prediction = predicted(variant, gradient, world_size)
    counted = fmean(sent.counted_bytes for sent in by_rank)
    assert counted == pytest.approx(prediction.mean.sent_bytes, rel=TOLERANCE)
    # `critical` sums each round's slowest rank. It is an estimate, because it does not know which units a rank has.
    assert max(sent.counted_bytes for sent in by_rank) <= 1.1 * prediction.critical.sent_bytes


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("variant", WAYS)
def test_channels_count_what_connections_carry(variant: str, gradient: str) -> None:
    for sent in (results[variant, gradient] for results in visit(3)):
        # Messages without payload are not counted; they consist of a frame only.
        assert sent.counted_bytes + FRAME_BYTES * sent.messages == pytest.approx(sent.tcp_bytes, rel=TOLERANCE)


@pytest.mark.parametrize("variant", [v for v in WAYS if not v.startswith(("omnireduce", "zen_hierarchical"))])
def test_messages_are_as_predicted(variant: str) -> None:
    """Compares the number of messages of the rank that sends most."""
    most = max(results[variant, "few rows"].messages for results in visit(4))
    assert most == predicted(variant, "few rows", 4).mean.messages


def test_messages_of_doubling_are_as_predicted() -> None:
    """Of four ranks, each sends a count and records to one other, twice. Of three, rank 0 has most to do."""
    for world_size in (2, 3, 4):
        busiest = max(results["zen_hierarchical", "few rows"].messages for results in visit(world_size))
        assert busiest == predicted("zen_hierarchical", "few rows", world_size).mean.messages - 2 * (world_size == 3)
