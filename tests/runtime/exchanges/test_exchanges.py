"""Every exchange on real ranks: the mean is the dense AllReduce's, the same bits on all ranks.

Gradients of float64 hold integers, whose sums are exact, so that means must be equal; other types are allowed a
rounding per summand.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.exchanges import omnireduce
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.in_place import STRATEGY_OF, create_exchanges, exchange_gradient_
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.plan import EXCHANGES, Decision, Plan
from tests.support.exchange_cases import DTYPES, PATTERNS, WAYS, D, V, Way, bernoulli
from tests.support.ranks import run_ranks

Form = Literal["dense", "rows"]
"""A dense tensor, or rows of layout COO."""


@dataclass(frozen=True)
class Case:
    way: str
    pattern: str
    dtype: torch.dtype
    form: Form

    def __str__(self) -> str:
        return f"{self.way}, {self.pattern}, {self.dtype}, {self.form}"


EVERYTHING = [
    Case(name, pattern, dtype, form)
    for name, way in WAYS.items()
    for pattern in PATTERNS
    for dtype in DTYPES
    for form in get_args(Form)
    if form == "dense" or (way.strategy != "omnireduce" and not way.elements)
]
QUICK = [case for case in EVERYTHING if case.dtype == torch.float64 or case.pattern in {"rows", "density_by_rank"}]


def gradient_of(case: Case, rank: int, world_size: int) -> Tensor:
    torch.manual_seed(100 * list(PATTERNS).index(case.pattern) + rank)
    mask = PATTERNS[case.pattern](rank, world_size)
    values = torch.randint(1, 100, (V, D)).double() if case.dtype == torch.float64 else torch.randn(V, D)
    dense = torch.where(mask, values, 0).to(case.dtype)
    if case.form == "dense":
        return dense
    ids = (mask.any(dim=1) | bernoulli(0.1, V)).nonzero().view(-1)  # also zero rows, as lookups may leave them
    return torch.sparse_coo_tensor(ids.view(1, -1), dense[ids], (V, D), is_coalesced=True)


def exchanged(gradient: Tensor, way: Way, channel: Channel) -> Tensor:
    """Returns the mean over ranks, in the gradient's shape and layout."""
    if gradient.is_sparse:
        return exchange_gradient_(gradient.clone(), way.kind(gradient), channel, Cluster())
    flat = gradient.clone(memory_format=torch.contiguous_format).view(-1)
    with way.chosen():
        return exchange_gradient_(flat, way.kind(gradient), channel, Cluster()).view(gradient.shape)


def dense_of(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def digest(gradient: Tensor) -> str:
    tensors = (gradient.indices(), gradient.values()) if gradient.is_sparse else (gradient,)
    return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()


def fault(case: Case, found: Tensor, world_size: int) -> str | None:
    """Returns how the mean differs from that of a dense AllReduce, or None if it does not."""
    by_rank = [gradient_of(case, rank, world_size) for rank in range(world_size)]
    if found.is_sparse != (case.form == "rows"):
        return f"found layout {found.layout}"
    if found.is_sparse:
        union = torch.cat([each.indices()[0] for each in by_rank]).unique()
        if not torch.equal(found.indices()[0], union):
            return f"expected rows {union.tolist()}, found {found.indices()[0].tolist()}"
    reference = dense_of(by_rank[dist.get_rank()]).double()
    dist.all_reduce(reference)
    reference /= world_size
    mean = dense_of(found)
    if mean.dtype != case.dtype:
        return f"found {mean.dtype}"
    largest = max(float(dense_of(gradient).abs().max()) for gradient in by_rank)
    allowed = 0.0 if case.dtype == torch.float64 else (world_size + 1) * torch.finfo(case.dtype).eps * largest
    off = float((mean.double() - reference).abs().max())
    return None if off <= allowed else f"off by {off}, allowed {allowed}"


Results = dict[Case, tuple[str | None, str]]
"""For each case the fault, if any, and the digest of the result."""


def exchange_all(rank: int, world_size: int, cases: list[Case]) -> Results:
    channel = Channel(dist.group.WORLD)
    results = {}
    for case in cases:
        mean = exchanged(gradient_of(case, rank, world_size), WAYS[case.way], channel)
        results[case] = (fault(case, mean, world_size), digest(mean))
    return results


def faults_of(by_rank: list[Results], cases: list[Case]) -> list[str]:
    faults = [
        f"rank {rank}: {case}: {results[case][0]}"
        for rank, results in enumerate(by_rank)
        for case in cases
        if results[case][0] is not None
    ]
    differing = [f"{case}: ranks differ" for case in cases if len({results[case][1] for results in by_rank}) > 1]
    return faults + differing


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [3, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 2, 4))])
def test_the_mean_is_the_dense_all_reduces(world_size: int, way: str) -> None:
    """The mean must also have the same bits on all ranks: otherwise replicas would diverge."""
    cases = [case for case in QUICK if case.way == way]
    assert not faults_of(run_ranks(world_size, exchange_all, cases), cases)


@given(st.data())
def test_places_in_lanes_tell_the_blocks(data: st.DataObject) -> None:
    """Also where there are fewer blocks than lanes, or ranks; 256 places need more than a byte."""
    world_size, lanes = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    num_blocks = data.draw(st.integers(1, 40) | st.integers(1, 5000))
    ranges = omnireduce._BlockLanes(num_blocks, world_size, lanes, torch.device("cpu"))
    starts = [*ranges.starts.view(-1).tolist(), num_blocks]
    blocks = torch.tensor(
        [
            [data.draw(st.sampled_from([*range(start + lane, end, lanes), num_blocks])) for lane in range(lanes)]
            for start, end in itertools.pairwise(starts)
        ]
    )
    assert torch.equal(ranges.decode(ranges.encode(blocks, ranges.starts), ranges.starts), blocks)


def exchange_shapes(rank: int, world_size: int) -> list[str]:
    """Scalars, vectors, four dimensions, no elements; infinities and NaN; a transposed gradient."""
    channel = Channel(dist.group.WORLD)
    special = torch.tensor([0.0, -0.0, 1.0, torch.inf, torch.nan]) if rank == 0 else torch.arange(5.0)
    gradients = [
        torch.tensor(float(rank)),
        torch.arange(7.0) * rank,
        torch.full((2, 3, 2, 2), float(rank)),
        torch.zeros(0, 4),
        special,
        (torch.arange(12.0).view(3, 4) + rank).T,
    ]
    faults = []
    for gradient in gradients:
        reference = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reference)
        reference /= world_size
        for name, way in WAYS.items():
            mean = exchanged(gradient, way, channel)
            if mean.shape != gradient.shape or not torch.equal(mean.nan_to_num(-1), reference.nan_to_num(-1)):
                faults.append(f"{name}: expected {reference}, found {mean}")
    return faults


def test_shapes_and_special_values() -> None:
    assert run_ranks(2, exchange_shapes) == [[], []]


def messages_of_three(rank: int, world_size: int) -> tuple[list[tuple[str, int, int]], list[float]]:
    """What is posted, in order: kind, peer, elements. Rank r has k elements for rank k, those for rank 0 are none."""
    posted: list[tuple[str, int, int]] = []

    def noted(name: str) -> Callable[..., Any]:
        begin = getattr(dist.ProcessGroup, name)

        def post(group: dist.ProcessGroup, tensors: list[Tensor], peer: int, tag: int) -> Any:
            posted.append((name, peer, tensors[0].numel()))
            return begin(group, tensors, peer, tag)

        return post

    with pytest.MonkeyPatch.context() as patch:
        for name in ("send", "recv"):
            patch.setattr(dist.ProcessGroup, name, noted(name))
        in_flight = Channel(dist.group.WORLD).all_to_all(torch.full((3,), float(rank)), [0, 1, 2], [rank] * world_size)
    in_flight.work.wait()
    return posted, in_flight.value.tolist()


def test_receives_are_posted_before_sends_and_nothing_empty_is_sent() -> None:
    """Over gloo, what tells a sender that its receiver is ready would queue behind the receiver's own bulk."""
    found = run_ranks(3, messages_of_three)
    assert found[0] == ([("send", 1, 1), ("send", 2, 2)], [])
    assert found[1] == ([("recv", 0, 1), ("recv", 2, 1), ("send", 2, 2)], [0.0, 1.0, 2.0])
    assert found[2] == ([("recv", 1, 2), ("recv", 0, 2), ("send", 1, 1)], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0])


def started_exchanges(rank: int, world_size: int) -> list[Any]:
    """Starts the exchanges of a plan's buckets, of which one is AllReduced, on a thread and at once."""
    ways = {"a": "allgather", "b": "allreduce", "c": "omnireduce"}
    decisions = tuple(Decision(name, (4, 2), False, way, "", 0, 0, 0.0) for name, way in ways.items())
    plan, communicator = Plan(world_size, decisions, (("a",), ("b",), ("c",))), Communicator(dist.group.WORLD)
    parameters = dict.fromkeys(ways, torch.zeros(4, 2)).__getitem__
    found: list[Any] = [create_exchanges(replace(plan, buckets=(("b",),)), parameters, communicator, at_once=True)]
    for at_once in (False, True):
        start = create_exchanges(plan, parameters, communicator, at_once=at_once)
        for k, flat in ((0, torch.tensor([0.0, 0, 0, 0, 2, 4, 0, 0])), (2, torch.arange(8.0))):
            launched = start[k](flat * (rank + 1), f"bucket {k}")
            assert (launched.work is None) == at_once
            assert launched.measured is not None
            found.append((k, communicator.wait(launched).tolist(), launched.measured()))
        found.append(sorted(start))
    return found


def test_exchanges_of_buckets_run_on_a_thread_or_at_once() -> None:
    one_row, every = [0, 0, 0, 0, 3, 6, 0, 0], [0, 1.5, 3, 4.5, 6, 7.5, 9, 10.5]
    assert run_ranks(2, started_exchanges) == [[{}, *[(0, one_row, 20), (2, every, 38), [0, 2]] * 2]] * 2


def test_every_sparse_strategy_of_a_plan_has_an_exchange() -> None:
    assert {strategy for strategy, _ in STRATEGY_OF} == set(EXCHANGES)
