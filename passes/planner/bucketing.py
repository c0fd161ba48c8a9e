"""Groups dense parameters into buckets."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from embrace_fx.cost import links as cost
from embrace_fx.vocabulary.graph import TrainingGraph, gradients_of, parameters_of


def plan_buckets(
    graph: TrainingGraph,
    reduced: set[str],
    sizes: Mapping[str, int],
    cluster: cost.Cluster,
    world_size: int,
    alone: Collection[str] = (),
    *,
    read_later: bool = True,
) -> tuple[tuple[str, ...], ...]:
    """Groups parameters into buckets in launch order, about the order of gradients in the backward.

    Parameters are grouped in the forward's order, so that the forward needs at the same time what is reduced together.
    Parameters that the forward does not read keep their order. A bucket has one dtype and a size chosen by the cost
    model. A parameter with a sparse exchange has its own bucket.

    Args:
        reduced: replicas with a gradient.
        alone: the parameters of `reduced` that have their own bucket.
        read_later: whether the next forward waits for each bucket separately under the schedule.
    """
    position = {node: k for k, node in enumerate(graph.graph.nodes)}
    gradients, parameters = gradients_of(graph.module).items(), parameters_of(graph.module)
    produced = {name: node for name, node in gradients if name in reduced and node is not None}
    read = {n: min((position[user] for user in parameters[n].users), default=len(position)) for n in produced}
    together = sum(sizes[name] for name in produced if name not in alone)
    given = all(node.op == "placeholder" for node in produced.values())  # true for a graph of gradients alone
    limit = cost.bucket_bytes(cluster, world_size, together, read_later=read_later and not given)
    buckets: list[list[str]] = []
    filled, dtype = 0, None
    for name in sorted(produced, key=lambda n: (read[n], n if read[n] < len(position) else "")):
        apart = name in alone or (bool(buckets) and buckets[-1][-1] in alone)
        if not buckets or apart or filled + sizes[name] > limit or produced[name].meta["val"].dtype != dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += sizes[name]
        dtype = produced[name].meta["val"].dtype
    elsewhere = tuple(sorted(reduced - set(produced)))  # read only by other ranks' first batches
    return tuple(tuple(bucket) for bucket in reversed(buckets)) + tuple((name,) for name in elsewhere)
