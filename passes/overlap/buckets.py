"""Sends buckets of dense gradients in chunks, and updates parameters where the next forward first reads them.

rewrite, `ChunkBuckets`:
    backward   flat = wait(all_reduce_(bucket)); m1, m2 = unpack_bucket(flat, [p1, p2])
->  backward   sent0 = submit_chunk(bucket, 0, n, "bucket k [0]"); sent1 = submit_chunk(sent0, n, m, "bucket k [1]")
               there0 = await_chunk(sent1, "bucket k [0]"); there1 = await_chunk(there0, "bucket k [1]")
               m1, m2 = unpack_bucket(there1, [p1, p2])
A sparse exchange (`exchange_gradient_`) is one chunk.

rewrite, `UpdateBeforeRead`, which follows:
    backward   there1 = ...; m1, m2 = unpack_bucket(there1, [p1, p2])
    forward    ... p1 ... p2 ...
->  backward   defer_bucket(sent1, k)
    forward    there = await_chunk(await_chunk(p1, "bucket k [0]"), "bucket k [1]")
               p1', p2' = update_bucket([there, p2], k); ... p1' ... p2' ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import fx

from embrace_fx.passes.overlap.launches import Phases, calls_of, erase_chain, rewrite_phases
from embrace_fx.passes.reduce import ALL_REDUCE, EXCHANGE
from embrace_fx.passes.rewriter import Rewriter
from embrace_fx.vocabulary.graph import (
    Gradient,
    OutputRole,
    Parameter,
    PendingGradients,
    TrainingGraph,
    outputs_of,
    parameters_of,
    set_outputs,
)
from embrace_fx.vocabulary.operation_id import chunk_id

embrace = torch.ops.embrace


@dataclass(frozen=True)
class ChunkBuckets:
    """The pass that splits the AllReduce of each bucket of dense gradients into chunks, so that urgent collectives need
    not wait for a whole bucket.

    Attributes:
        chunks: for each bucket, in launch order, the number of elements in each chunk.
    """

    chunks: tuple[tuple[int, ...], ...]

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        return rewrite_phases(graph, self._rewrite)

    def _rewrite(self, phases: Phases) -> None:
        """Splits the AllReduce of each bucket in the backward into chunks."""
        backward = phases["backward"]
        launches = [
            node
            for node in backward.graph.nodes
            if node.target in (ALL_REDUCE, EXCHANGE)
            # Skip reductions of counts, which other passes insert: they are not packed into buckets.
            and node.all_input_nodes[0].target is embrace.pack_bucket.default
        ]
        for bucket, launch in enumerate(launches):
            _split_reduction(Rewriter(backward), launch, bucket, self.chunks[bucket])


def _await_chunks(rewriter: Rewriter, flat: fx.Node, bucket: int, count: int) -> list[fx.Node]:
    """Inserts waits for the chunks of a bucket, in order. Returns the waits, the last one first, followed by `flat`.

    Args:
        flat: the node of the bucket's tensor.
        bucket: the index of the bucket.
        count: the number of chunks.
    """
    awaits = [flat]
    for k in range(count):
        launch, name = chunk_id(bucket, k), f"bucket_{bucket}_there_{k}"
        awaits.insert(0, rewriter.launch(embrace.await_chunk.default, awaits[0], launch=launch, name=name))
    return awaits


def _split_reduction(rewriter: Rewriter, launch: fx.Node, bucket: int, chunks: Sequence[int]) -> None:
    """Replaces the AllReduce of a bucket by one submission per chunk, and its wait by one wait per chunk."""
    (wait,) = launch.users
    flat = launch.all_input_nodes[0]
    starts = accumulate(chunks, initial=0)
    with rewriter.before(launch):
        for k, (start, length) in enumerate(zip(starts, chunks, strict=False)):
            flat = rewriter.launch(
                embrace.submit_chunk.default,
                flat,
                start,
                length,
                launch=chunk_id(bucket, k),
                name=f"bucket_{bucket}_sent_{k}",
            )
    with rewriter.before(wait):
        flat, *_ = _await_chunks(rewriter, flat, bucket, len(chunks))
    wait.replace_all_uses_with(flat)
    rewriter.graph.erase_node(wait)
    rewriter.graph.erase_node(launch)


@dataclass(frozen=True)
class UpdateBeforeRead:
    """The pass that moves the optimizer's updates of dense parameters into the next forward, before each parameter's
    first read.

    Attributes:
        buckets: names of each bucket's parameters, in launch order.
        chunks: for each bucket, the number of elements in each chunk.
    """

    buckets: tuple[tuple[str, ...], ...]
    chunks: tuple[tuple[int, ...], ...]

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        return rewrite_phases(graph, self._rewrite)

    def _rewrite(self, phases: Phases) -> None:
        """Moves the updates of each bucket's parameters from the end of the backward into the next forward."""
        _defer_buckets(phases["backward"], self.buckets)
        _await_updates(phases, self.buckets, self.chunks)


def _defer_buckets(backward: fx.GraphModule, buckets: Sequence[tuple[str, ...]]) -> None:
    """Lets the backward end while its buckets are still being all-reduced. Removes the waits for the buckets and the
    gradients unpacked from them, and adds an output for each pending bucket.
    """
    rewriter = Rewriter(backward)
    outputs = list(outputs_of(backward))
    handed_over: list[tuple[fx.Node | None, OutputRole]] = []
    unpacked = [
        node
        for node in calls_of(backward, embrace.unpack_bucket.default)
        if node.all_input_nodes[0].target is embrace.await_chunk.default
    ]
    for k, unpack in enumerate(unpacked):
        sent = unpack.all_input_nodes[0]
        while sent.target is embrace.await_chunk.default:
            sent = sent.all_input_nodes[0]
        means = set(unpack.users)
        names = {
            role.of.name
            for value, role in outputs
            if value in means and isinstance(role, Gradient) and isinstance(role.of, Parameter)
        }
        assert names <= set(buckets[k])
        with rewriter.before(sent.next):
            token = rewriter.call(embrace.defer_bucket.default, sent, k, name=f"bucket_{k}_deferred")
        outputs = [(value, role) for value, role in outputs if value not in means]
        handed_over.append((token, PendingGradients(k, tuple(n for n in buckets[k] if n in names))))
        set_outputs(backward, outputs)
        for mean in list(means):
            erase_chain(backward.graph, mean, keep={token, sent})
    set_outputs(backward, outputs + handed_over)


def _await_updates(phases: Phases, buckets: Sequence[tuple[str, ...]], chunks: Sequence[Sequence[int]]) -> None:
    """Inserts, before the forward's first read of a bucket's parameters, a wait for the bucket and the optimizer's
    update of these parameters.

    Args:
        buckets: names of each bucket's parameters, in launch order.
        chunks: for each bucket, the number of elements in each chunk.
    """
    forward = phases["forward"]
    rewriter = Rewriter(forward)
    elsewhere, parameters = parameters_of(phases["backward"]), parameters_of(forward)
    for k, bucket in enumerate(buckets):
        read = [parameters[name] for name in bucket if name in parameters and parameters[name].users]
        if not read:  # the forward does not read the bucket's parameters, but they must be updated
            read = [rewriter.copy_placeholder(elsewhere[bucket[0]])]
        readers = [min(node.users) for node in read if node.users] or [forward.graph.output_node()]
        with rewriter.before(min(readers)):
            there, *others = _await_chunks(rewriter, read[0], k, len(chunks[k]))
            updated = rewriter.call(embrace.update_bucket.default, [there, *read[1:]], k, name=f"bucket_{k}_updated")
            inserted = {there, *others, updated}
            items = [rewriter.item(updated, i, f"{node.name}_updated") for i, node in enumerate(read)]
        for node, item in zip(read, items, strict=True):
            item.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(item, delete_user_cb=partial(_is_not_inserted, inserted))


def _is_not_inserted(inserted: set[fx.Node], user: fx.Node) -> bool:
    """Returns whether the node `user` is not in `inserted`."""
    return user not in inserted
