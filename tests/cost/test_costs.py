"""What all costs, as one text: links, exchanges, sparsities, blocks, storage and devices, on several clusters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from embrace_fx.cost import blocks, links
from embrace_fx.cost.devices import DEVICES, NVME
from embrace_fx.cost.exchanges import Scheme, cheaper_scheme, predict
from embrace_fx.cost.links import COLLECTIVES, Cluster, Handling, Link
from embrace_fx.cost.sparsity import Sparsity, extrapolate, in_blocks, independent_ranks, measure_sparsity
from embrace_fx.cost.sparsity import with_units_by_rank as with_units
from embrace_fx.cost.storage import Draws, RowMemory, StorageTier, combine_memories
from embrace_fx.cost.wire import FORMATS, Wire
from tests.support.golden import brief, check_golden, check_transcript, run_lines

SLOW = Handling(2e5, 3e5, 7e4, 3e-3, 0.7)
OF_EACH = tuple((each, Link(9e3 * k, 0.3 / k, 0.4 * k % 1)) for k, each in enumerate(COLLECTIVES, start=1))
CLUSTERS = {
    "default": Cluster(),
    "a link each": Cluster(5e4, 0.2, OF_EACH, handling=SLOW),
    "machines of 3": Cluster(2e4, 0.07, OF_EACH[:2], 3, Link(7e5, 0.01, 0.02)),
    "H100, 8 a machine": DEVICES["H100"].cluster(5e7, devices_per_machine=8),
}
RANDOM = torch.Generator().manual_seed(0)
DRAWN = [(torch.rand(900 + 90 * rank, generator=RANDOM) ** 3 * 5000).long() for rank in range(9)]
MEASURED = measure_sparsity([each.unique() for each in DRAWN], 5000, 48, 4, total_ids=11_340)
SPARSITIES: dict[str, Sparsity] = {
    "measured on 9": MEASURED,
    "measured on 2": measure_sparsity([each.unique() for each in DRAWN[::4][:2]], 5000, 48, 4),
    "extrapolated to 6": extrapolate(DRAWN[:3], 9000, 24, 2, 6),
    "drawn on 3": independent_ranks(2**31 + 7, 3, 4, (2_000_000, 500_000, 1_000_000)),
    "with other rows": with_units(MEASURED, tuple(range(3000, 4800, 200))),
    "with fewer rows": with_units(replace(MEASURED, push_imbalance=9.0, unions=(1e9,) * 9), (5, *(3,) * 8)),
    "blocks of 256": in_blocks(MEASURED, 256),
    "blocks of 16": in_blocks(MEASURED, 16),
    "one row of one rank": measure_sparsity([torch.tensor([1])], 2, 8, 4),
}
WAYS: list[tuple[str, Scheme]] = [
    *((name, "balanced") for name in ("allreduce", "allgather", "ps", "zen", "omnireduce")),
    ("zen", "hierarchical"),
]


def of_links() -> Iterator[tuple[str, Any]]:
    for name, cluster in CLUSTERS.items():
        for ranks in (1, 2, 3, 16):
            flat = cluster.flattened(ranks)
            yield f"{name}, {ranks} ranks", [flat.link(), *map(flat.link, COLLECTIVES)]
            yield (
                "  ms of 0, 100 kB, 1 GB",
                [[links.launch_ms(cluster, each, size, ranks) for size in (0, 100_000, 10**9)] for each in COLLECTIVES],
            )
            yield "  chunks", [links.choose_chunk_bytes(cluster, ranks, each) for each in COLLECTIVES]
            yield (
                "  buckets awaited by a forward, a backward",
                [
                    [links.choose_bucket_bytes(cluster, ranks, size, read_later=later) for size in (0, 10**6, 10**8)]
                    for later in (True, False)
                ],
            )
    yield "bytes of ids", [links.predict_id_exchange((7, 9, 8), rows) for rows in (2**31 - 1, 2**31)]
    for form in FORMATS:
        wires = [Wire(itemsize, form) for itemsize in (1, 2, 4, 8)]
        yield (
            f"wire {form}",
            [[each.is_narrower, *map(each.row_bytes, (0, 5)), each.dense_bytes(257)] for each in wires],
        )


def of_exchanges() -> Iterator[tuple[str, Any]]:
    for name, sparsity in SPARSITIES.items():
        yield name, sparsity
        yield "  told", str(sparsity)
        for strategy, scheme in WAYS:
            yield f"  {strategy}, {scheme}", predict(strategy, sparsity, scheme=scheme)
        slow = CLUSTERS["a link each"]
        yield "  omnireduce on a link each", predict("omnireduce", sparsity, cluster=slow)
        for cluster, of in CLUSTERS.items():
            times = [predict(strategy, sparsity, scheme=scheme, cluster=of).time_ms(of) for strategy, scheme in WAYS]
            yield f"  ms on {cluster}", [*times, cheaper_scheme(sparsity, of)]


def of_blocks() -> Iterator[tuple[str, Any]]:
    for name, cluster in CLUSTERS.items():
        runs = (1, 24, 300)
        yield f"blocks, {name}", [[blocks.fastest_block_size(run, size, cluster) for run in runs] for size in (2, 4)]
        for num_blocks, ranks in ((1, 2), (300, 2), (40_000, 8), (40_000, 300)):
            streaming = blocks.choose_streaming(num_blocks, 32, 4, ranks, cluster)
            rounds = [blocks.expected_rounds(num_blocks, ranks, streaming, present) for present in (0, 1, 300)]
            yield f"  {num_blocks} blocks, {ranks} ranks", (streaming, rounds)
    places = [*map(blocks.index_bytes, (2**31 - 1, 2**31)), *map(blocks.position_bytes, (255, 256))]
    yield "bytes of indices and positions", places


def of_storage() -> Iterator[tuple[str, Any]]:
    for name, device in DEVICES.items():
        of = [device.memory_bytes, device.compute, device.handling, device.inside, device.to_host, device.storage(1e9)]
        yield name, of
    fitted = Draws.fit(MEASURED)
    host = StorageTier("host memory", 1e-3, 2e-3, 1e-6, holds_bytes=48e3)
    found = RowMemory(5000, 2500, 200.0, 4.0, 1000, 96, 1100, fitted, (host, NVME), 2)
    even = RowMemory(3000, 900, 200.0, 4.0, 1000, 96, 50, Draws(3000, 0.0, 400), (NVME,))
    for which, each in {"fitted": found, "even": even, "both": combine_memories([found, even])}.items():
        yield f"rows of {which}", [each.draws.exponent, each.draws.ids, each.draws.rows, each.num_rows, each.at_once]
        yield "  bytes", [each.nbytes, each.smallest.nbytes, each.moved_bytes, each.hit_rate]
        yield "  ms", [each.read_ms, each.write_ms, *[(tier.name, rows) for tier, rows in each.moved_by_tier]]
        yield "  told", each.describe(None if each is even else 3.0)
    yield "rows for steps of 1 ms, two ahead", found.for_step(1.0, 2).slots


def test_costs() -> None:
    sections = (of_links(), of_exchanges(), of_blocks(), of_storage())
    check_golden("costs", "\n\n".join("\n".join(f"{name}: {brief(of)}" for name, of in each) for each in sections))


def test_costs_counted_by_hand() -> None:
    check_transcript("cost", partial(run_lines, "cost", ("links", "sparsity")))
