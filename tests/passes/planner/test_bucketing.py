"""Cutting dense gradients into buckets."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from embrace_fx.cost import links as cost
from embrace_fx.passes.planner.grouping import with_buckets
from embrace_fx.vocabulary.graph import Gradient, Parameter, TrainingGraph
from embrace_fx.vocabulary.plan import Decision, Plan
from tests.support.planned import TABLE, planned

LINK = cost.Cluster(bandwidth_bytes_per_ms=1e6, latency_ms=0.05)


def graph_with_gradients(gradients: list[tuple[int, torch.dtype]], order: list[int]) -> TrainingGraph:
    """Returns a graph of parameters p0, p1, ... with these sizes and dtypes. The forward reads them in `order`."""
    graph = fx.Graph()
    parameters = [graph.placeholder(f"p{k}") for k in range(len(gradients))]
    for k, (parameter, (count, dtype)) in enumerate(zip(parameters, gradients, strict=True)):
        parameter.meta.update(role=Parameter(f"p{k}"), val=torch.empty(count, dtype=dtype, device="meta"))
    nodes: dict[int, fx.Node] = {}
    for k in order:
        nodes[k] = graph.call_function(torch.ops.aten.neg.default, (parameters[k],))
        nodes[k].meta["val"] = parameters[k].meta["val"]
    output = graph.output(tuple(nodes[k] for k in range(len(gradients))))
    output.meta["roles"] = tuple(Gradient(Parameter(f"p{k}")) for k in range(len(gradients)))
    return TrainingGraph(fx.GraphModule(torch.nn.Module(), graph))


COUNTS = st.sampled_from([1, 1000, 2**18, 2**20, 2**22])
DTYPES = st.sampled_from([torch.float32, torch.float64])


@given(st.data(), st.lists(st.tuples(COUNTS, DTYPES), min_size=1, max_size=12))
def test_buckets_are_blocks_of_the_forward_the_last_one_first(
    data: st.DataObject, gradients: list[tuple[int, torch.dtype]]
) -> None:
    order = data.draw(st.permutations(range(len(gradients))))
    reduced = {f"p{k}" for k in range(len(gradients)) if data.draw(st.booleans())}
    alone = {name for name in sorted(reduced) if data.draw(st.integers(0, 3)) == 0}
    absent = {f"absent{k}" for k in range(data.draw(st.integers(0, 2)))}
    sizes = {f"p{k}": count * dtype.itemsize for k, (count, dtype) in enumerate(gradients)}
    ways = {name: "zen" if name in alone else "allreduce" for name in sorted(reduced | absent)}
    decisions = tuple(Decision(name, (1,), False, way, "", 0, 0, 0.0) for name, way in ways.items())

    buckets = with_buckets(Plan(4, decisions, (), links=LINK), graph_with_gradients(gradients, order)).buckets

    blocks = buckets[: len(buckets) - len(absent)]
    assert [name for bucket in reversed(blocks) for name in bucket] == [f"p{k}" for k in order if f"p{k}" in reduced]
    assert [name for bucket in buckets[len(blocks) :] for name in bucket] == sorted(absent)
    assert all(buckets)
    dtypes = {f"p{k}": dtype for k, (_, dtype) in enumerate(gradients)}
    assert {bucket[0] for bucket in blocks if set(bucket) & alone} == alone
    limit = cost.choose_bucket_bytes(LINK, 4, sum(sizes[name] for name in reduced - alone))
    for bucket in blocks:
        assert len(bucket) == 1 or not set(bucket) & alone
        assert len({dtypes[name] for name in bucket}) == 1
        assert len(bucket) == 1 or sum(sizes[name] for name in bucket) <= limit


def test_buckets_follow_the_forward_and_not_the_names() -> None:
    (bucket,) = planned(10_000, strategy="allreduce").buckets
    assert bucket.index(TABLE) < bucket.index("linear.weight")
