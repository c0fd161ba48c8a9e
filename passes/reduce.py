"""Buckets dense gradients and AllReduces them during the backward (Li et al., VLDB 2020, section 4.2).

Contract
    Every gradient of a bucket is replaced by its mean over ranks. A bucket is launched once its last gradient is
    computed and the previous bucket is launched. All waits are at the end of the backward.

    rewrite:  g1 = ...; g2 = ...; return (g1, g2)
    ->        g1 = ...; g2 = ...
              bucket = embrace.pack_bucket([g1, g2], 1 / N)
              reduced = _c10d_functional.all_reduce_(bucket, "sum", "dense"); done = wait_tensor(reduced)
              m1, m2 = embrace.unpack_bucket(done, [p1, p2]); return (m1, m2)

    A parameter of `exchanged` has its own bucket, and its zeros are not sent:
              bucket = embrace.pack_bucket([g1], 1.0)
              reduced = embrace.exchange_gradient_(bucket, rows, strategy, scheme, "dense", N); ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

import embrace_fx.vocabulary.ops  # noqa: F401  (declares the ops)
from embrace_fx.passes.rewriter import Rewriter, first_after_placeholders
from embrace_fx.vocabulary.graph import (
    Gradient,
    OutputRole,
    Parameter,
    TrainingGraph,
    gradients_of,
    parameters_of,
    set_outputs,
)
from embrace_fx.vocabulary.operation_id import chunk_id

embrace = torch.ops.embrace
ALL_REDUCE = torch.ops._c10d_functional.all_reduce_.default
EXCHANGE = torch.ops.embrace.exchange_gradient_.default

Exchanged = Mapping[str, tuple[str, str]]
"""Parameter -> (strategy, scheme) of its exchange."""


@dataclass(frozen=True)
class ReduceGradients:
    """The pass that all-reduces dense gradients in buckets.

    Attributes:
        buckets: names of each bucket's parameters, in launch order; equal on all ranks.
        world_size: the number of ranks.
        exchanged: parameter -> (strategy, scheme) of the sparse exchange that its gradient has instead of an AllReduce.
    """

    buckets: tuple[tuple[str, ...], ...]
    world_size: int
    exchanged: Exchanged = field(default_factory=dict)

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        if not self.buckets:
            return graph
        result = graph.edit()
        reduce_gradients(result, self.buckets, self.world_size, self.exchanged)
        return result


def reduce_gradients(
    graph: TrainingGraph, buckets: tuple[tuple[str, ...], ...], world_size: int, exchanged: Exchanged
) -> None:
    """Replaces the gradients of each bucket by their means over ranks, in place. All collectives are launched before
    the first wait.

    Args:
        buckets: names of each bucket's parameters, in launch order.
        exchanged: parameter -> (strategy, scheme) of the sparse exchange that its gradient has instead of an AllReduce.
    """
    rewriter = Rewriter(graph.module)
    parameters, gradients = parameters_of(graph.module), gradients_of(graph.module)
    means: dict[str, fx.Node] = {}
    launches: list[tuple[fx.Node, tuple[str, ...]]] = []
    output, head = graph.graph.output_node(), first_after_placeholders(graph.graph)
    for k, bucket in enumerate(buckets):
        # A parameter that this rank's batch does not use adds zeros, because all ranks need the same collectives.
        present = tuple(name for name in bucket if name in parameters)
        missing = [name for name in present if gradients.get(name) is None]
        with rewriter.before(head):  # all launches come before the first wait
            zeros = {
                n: rewriter.call(torch.ops.aten.zeros_like.default, parameters[n], name=f"no_gradient_{k}")
                for n in missing
            }
        parts = [zeros.get(name) or gradients[name] for name in present]
        last = max([p for p in parts if p is not None] + [launch for launch, _ in launches[-1:]])
        with rewriter.before(last.next):
            sparsely = exchanged.get(bucket[0])
            scale = 1.0 / world_size if sparsely is None else 1.0  # a sparse exchange computes the mean itself
            flat = rewriter.call(embrace.pack_bucket.default, parts, scale, name=f"bucket_{k}")
            flat.meta["bucket"] = k
            if sparsely is None:
                launch = rewriter.call(ALL_REDUCE, flat, "sum", "dense", name=f"bucket_{k}_reduced")
            else:
                rows = next(iter(parameters[bucket[0]].meta["val"].shape), 1)
                launch = rewriter.call(
                    EXCHANGE, flat, rows, *sparsely, "dense", world_size, name=f"bucket_{k}_exchanged"
                )
        launch.meta |= {"launch": chunk_id(k, 0), "parameters": present}
        launches.append((launch, present))
    with rewriter.before(output):
        for k, (launch, present) in enumerate(launches):
            done = rewriter.wait(launch)
            like = [parameters[name] for name in present]
            unpacked = rewriter.call(embrace.unpack_bucket.default, done, like, name=f"bucket_{k}_gradients")
            for position, name in enumerate(present):
                means[name] = rewriter.item(unpacked, position, f"mean_{parameters[name].name}")
    set_outputs(graph.module, _outputs_with_means(graph, means))


def _outputs_with_means(graph: TrainingGraph, means: dict[str, fx.Node]) -> list[tuple[fx.Node | None, OutputRole]]:
    """Returns the graph's outputs, with each gradient replaced by its mean over ranks. Means of parameters without a
    gradient output are appended.

    Args:
        means: maps each parameter to the mean of its gradient.
    """
    outputs: list[tuple[fx.Node | None, OutputRole]] = []
    waiting = dict(means)
    for value, role in graph.outputs():
        if isinstance(role, Gradient) and isinstance(role.of, Parameter) and role.of.name in waiting:
            value = waiting.pop(role.of.name)
        outputs.append((value, role))
    return outputs + [(node, Gradient(Parameter(name))) for name, node in waiting.items()]
