"""Predicts the bytes and time of exchanging gradients of replicated parameters, from the gradients' sparsity.

Legend of the formulas: N ranks, V units in the tensor (rows, elements or blocks) of s bytes, u units on a rank, U in
the union of all ranks, i bytes of an index (4, or 8 from 2^31 on), r = i + s bytes of a unit with its index.

| strategy | bytes that a rank sends, the mean over ranks |
|---|---|
| allreduce | 2 (N-1)/N V s |
| allgather | (N-1) (8 + u r) |
| ps | (N-1) (16 + (u + U) r / N) |
| zen, balanced | (N-1) (8 + (u r + U s + V/8) / N) |
| zen, hierarchical | sum over k = 1, 2, 4, .. of 8 + U(k) r |
| omnireduce | (N-1) (2 p L + (u + U) r / N), L lanes of an aggregator, whose places take p bytes, 1 or 4 |

and the passes over units of the rank with the most work; p and q are the units that the fullest server sums and their
union, about u and U/N if servers are even:

| strategy | searched | to send | to add up | to give out, receive and write | units | rounds |
|---|---|---|---|---|---|---|
| allreduce | | | | V, to divide | | |
| allgather | V | 3 u | 2 N u + 2 U | U | N u | 2 |
| ps | V | 2 u | 2 p + 2 q | 2 q + U | p | 4 |
| zen, balanced | V | 3 u | 2 p + 2 q | q + U | p + u | 6, two of them for hashes and bitmaps |
| zen, hierarchical | V | u | sum over k = 1, 2, 4, .. of 7 U(k) + 2 U(2k) | 2 U | sum of 2 U(k) | 2 log2 N |
| omnireduce | V | 3 u | 2 p + 2 q | q + U | p + 3 N L | twice its own |

`embrace_fx.runtime.exchanges` describes what each strategy does.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from embrace_fx.cost.blocks import (
    COUNT_BYTES,
    Streaming,
    blocks_per_lane,
    choose_streaming,
    expected_rounds,
    position_bytes,
    record_bytes,
)
from embrace_fx.cost.links import Cluster, Collective, Exchange, Work, all_reduce, new_memory_work, passes_work
from embrace_fx.cost.sparsity import Sparsity

Scheme = Literal["balanced", "hierarchical"]


UNITS_PER_LANE = 3
"""Work of `omnireduce` to find the first block of an aggregator's lane, in units handled."""


@dataclass(frozen=True)
class Prediction:
    """Predicted bytes and processor work of exchanging one tensor's gradient.

    Attributes:
        mean: the bytes and messages that a rank sends, averaged over ranks.
        critical: the bytes and messages that determine the time of the exchange. For each round, they count those of
            the rank that sends or receives the most.
        work: the processor work of the rank that has the most to do, if the result is written to a dense gradient in
            place.
        collective: the collective whose link the exchange uses.
    """

    mean: Exchange
    critical: Exchange
    work: Work
    collective: Collective = "messages"

    def time_ms(self, cluster: Cluster) -> float:
        """Predicts the time in ms of the exchange on idle links of a cluster. In each round, all ranks wait for the
        slowest.
        """
        return self.critical.time_ms(cluster, self.collective) + self.work.time_ms(cluster)


def predict(
    strategy: str,
    sparsity: Sparsity,
    *,
    scheme: Scheme = "balanced",
    cluster: Cluster = Cluster(),
) -> Prediction:
    """Predicts the bytes and processor work of exchanging one tensor's gradient with a strategy for replicas.

    Args:
        sparsity: the sparsity of the tensor's rows or elements; for `omnireduce` of its blocks
            (`embrace_fx.cost.sparsity.in_blocks`).
        scheme: the scheme of "zen".
        cluster: the cluster for which `omnireduce` chooses lanes and slots.

    Raises:
        ValueError: the strategy does not replicate the tensor.
    """
    if strategy == "allreduce":
        cost = all_reduce(sparsity.tensor_bytes, sparsity.world_size)
        return Prediction(cost, cost, passes_work(sparsity.tensor_bytes), "all_reduce")
    if strategy == "allgather":
        return _predict_all_gather(sparsity)
    if strategy == "ps":
        return _predict_parameter_server(sparsity)
    if strategy == "zen":
        return _predict_balanced(sparsity) if scheme == "balanced" else _predict_hierarchical(sparsity)
    if strategy == "omnireduce":
        shape = sparsity.num_units, sparsity.width, sparsity.itemsize
        return _predict_omnireduce(sparsity, choose_streaming(*shape, sparsity.world_size, cluster))
    raise ValueError(
        f"predict(): strategy {strategy!r} does not exchange gradients of replicas. Pass 'allreduce', 'allgather', "
        "'ps', 'zen' or 'omnireduce'."
    )


def cheaper_scheme(sparsity: Sparsity, cluster: Cluster) -> Scheme:
    """Returns the scheme of "zen" with the lower predicted time on a cluster, for a tensor of this sparsity. (The paper
    chooses by measuring a few steps.)
    """
    balanced, hierarchical = (
        predict("zen", sparsity, scheme=scheme).time_ms(cluster) for scheme in ("balanced", "hierarchical")
    )
    return "hierarchical" if hierarchical < balanced else "balanced"


def power_of_two_below(world_size: int) -> int:
    """Returns the largest power of two that is at most `world_size`. In an exchange by recursive doubling, that many
    ranks take part.
    """
    return 1 << (world_size.bit_length() - 1)


def _predict_all_gather(sparsity: Sparsity) -> Prediction:
    """Predicts strategy "allgather" for a tensor of this sparsity. The slowest rank is the one with the most units
    (rows or elements) to send.
    """
    others, record = sparsity.world_size - 1, _record_bytes(sparsity)
    most, everyone = max(sparsity.units_by_rank), sparsity.world_size * sparsity.mean_units
    work = _find_work(sparsity, most, copies=3) + _add_work(sparsity, everyone, sparsity.union) + _write_work(sparsity)
    return _predict_one_round(
        others * (COUNT_BYTES + sparsity.mean_units * record),
        others * (COUNT_BYTES + most * record),
        2 * others,
        work + new_memory_work(everyone * record) + Work(rounds=2),
    )


def _predict_parameter_server(sparsity: Sparsity) -> Prediction:
    """Predicts strategy "ps" for a tensor of this sparsity. Each rank is the parameter server for one range of the
    tensor's units (rows or elements). The slowest rank has the most units to send, or is the server with the most
    units.
    """
    others, record = sparsity.world_size - 1, _record_bytes(sparsity)
    pushed, push_critical = _push_bytes(sparsity, record, sparsity.push_imbalance)
    pulled, pull_critical = _pull_bytes(sparsity, record, sparsity.pull_imbalance)
    counts = 2 * others * COUNT_BYTES
    work = _server_work(sparsity, 2, sparsity.push_imbalance, sparsity.pull_imbalance, passes_before_pull=2)
    return _predict_one_round(
        counts + pushed + pulled,
        counts + push_critical + pull_critical,
        4 * others,
        work + new_memory_work(sparsity.union * record) + Work(rounds=4),
    )


def _predict_balanced(sparsity: Sparsity) -> Prediction:
    """Predicts strategy "zen" in the balanced scheme, for a tensor of this sparsity. Hashing gives all servers equally
    many units (rows or elements). Each server returns the means of its units with a bitmap instead of indices.
    """
    others, values = sparsity.world_size - 1, _value_bytes(sparsity)
    pushed, push_critical = _push_bytes(sparsity, _record_bytes(sparsity), imbalance=1.0)
    pulled, pull_critical = _pull_bytes(sparsity, values, imbalance=1.0)
    fixed = others * (COUNT_BYTES + sparsity.num_units / sparsity.world_size / 8)
    hashed = Work(units=max(sparsity.units_by_rank), rounds=2)
    return _predict_one_round(
        fixed + pushed + pulled,
        fixed + push_critical + pull_critical,
        4 * others,
        _server_work(sparsity, 3, 1.0, 1.0, passes_before_pull=1)
        + hashed
        + new_memory_work(sparsity.union * values)
        + Work(rounds=4),
    )


def _predict_hierarchical(sparsity: Sparsity) -> Prediction:
    """Predicts strategy "zen" in the hierarchical scheme, for a tensor of this sparsity.

    P ranks exchange units (rows or elements) by recursive doubling, where P is the largest power of two that is at most
    the number of ranks. Each of the remaining ranks first sends its units to one of the P ranks, and receives the
    result at the end.
    """
    world_size = sparsity.world_size
    paired = power_of_two_below(world_size)
    extra = world_size - paired
    record, values = _record_bytes(sparsity), _value_bytes(sparsity)

    def sent_bytes(units: float) -> float:
        """Returns the bytes of a message with this many units (rows or blocks)."""
        return COUNT_BYTES + units * record

    def largest_union(ranks: int) -> float:
        """Estimates the number of distinct units (rows or elements) of a group of `ranks` ranks, for the group that has
        the most.

        The estimate is the mean over groups, multiplied by a ratio: the mean number of units of the `ranks` fullest
        ranks, divided by the mean over all ranks. It is at most the number of distinct units of all ranks together.
        """
        most = sorted(sparsity.units_by_rank)[-ranks:]
        grown = sparsity.unions[ranks - 1] * fmean(most) / max(sparsity.mean_units, 1.0)
        return min(sparsity.union, max(grown, most[-1]))

    def round_work(units: float, union: float) -> Work:
        """Returns the work of one of two ranks that exchange `units` units (rows or elements) each in a round, and sum
        them to `union` distinct units.
        """
        received, joined = new_memory_work(units * record), new_memory_work(2 * units * values)
        return passes_work(3 * units * values) + received + joined + _add_work(sparsity, 2 * units, union)

    mean = critical = 0.0
    work = _find_work(sparsity, max(sparsity.units_by_rank), copies=1)
    distance = 1
    while distance < paired:
        # After the previous rounds, every rank in a group of `distance` neighbours has the union of the group's units.
        sizes = [distance + max(0, min(distance, extra - first)) for first in range(0, paired, distance)]
        unions = [sent_bytes(sparsity.unions[size - 1]) for size in sizes]
        mean += fmean(unions) * paired / world_size
        critical += sent_bytes(largest_union(max(sizes)))
        work += round_work(largest_union(max(sizes)), largest_union(min(2 * max(sizes), world_size)))
        distance *= 2
    rounds = distance.bit_length() - 1
    if extra:
        result = sent_bytes(sparsity.union)
        mean += (sent_bytes(sparsity.mean_units) + result) * extra / world_size
        critical += sent_bytes(largest_union(1)) + result
        work += round_work(largest_union(1), largest_union(2)) + passes_work(sparsity.union * values)
        rounds += 2
    divided = passes_work(sparsity.union * values) + new_memory_work(sparsity.union * values)
    return _predict_one_round(
        mean, critical, 2 * rounds, work + divided + _write_work(sparsity) + Work(rounds=2 * rounds)
    )


def _predict_omnireduce(blocks: Sparsity, streaming: Streaming) -> Prediction:
    """Predicts strategy "omnireduce". Each rank aggregates one range of blocks, and the slowest rank is the aggregator
    whose range has the most non-zero blocks.

    With more than one stream, an aggregator receives blocks while it sends means. With a single stream, it sums all
    blocks of a round before it replies. Each rank stores the means it receives until the last one has arrived.

    Args:
        blocks: the sparsity of the tensor, counted in blocks.
        streaming: the lanes and streams of each aggregator.
    """
    world_size, record = blocks.world_size, _record_bytes(blocks)
    others = world_size - 1
    pushed, push_critical = _push_bytes(blocks, record, blocks.push_imbalance)
    pulled, pull_critical = _pull_bytes(blocks, record, blocks.pull_imbalance)
    places = blocks_per_lane(blocks.num_units, world_size, streaming.lanes)
    first = 2 * others * streaming.lanes * position_bytes(places)
    present = blocks.pull_imbalance * blocks.union / world_size
    rounds = expected_rounds(blocks.num_units, world_size, streaming, present)
    critical = push_critical + pull_critical
    if streaming.busy_streams(streaming.busy_lanes(present)) > 1:
        own_blocks = others / world_size * record * max(blocks.units_by_rank)
        means_of_others = record * (blocks.union - min(present, blocks.union))
        critical = max(own_blocks + pull_critical, push_critical + means_of_others)
    lanes = Work(units=UNITS_PER_LANE * world_size * streaming.lanes, rounds=2 * 2 * (1 + rounds))
    return _predict_one_round(
        first + pushed + pulled,
        first + critical,
        round(2 * others * (1 + rounds)),
        _server_work(blocks, 3, blocks.push_imbalance, blocks.pull_imbalance, passes_before_pull=1)
        + lanes
        + new_memory_work(blocks.union * record),
    )


def _find_work(sparsity: Sparsity, units: float, copies: float) -> Work:
    """Returns the work to search a tensor of this sparsity for `units` non-zero units (rows or blocks), and to gather
    and encode them `copies` times.
    """
    return Work(scanned_bytes=sparsity.tensor_bytes) + passes_work(units * _value_bytes(sparsity), copies)


def _add_work(sparsity: Sparsity, units: float, union: float) -> Work:
    """Returns the work to sum `units` received units (rows or blocks), of which `union` are distinct, into a zeroed
    tensor, and to divide the sums by the number of ranks. `sparsity` gives the bytes of a unit.
    """
    added, total = units * _value_bytes(sparsity), union * _value_bytes(sparsity)
    return Work(units=units) + passes_work(2 * added + 2 * total) + new_memory_work(total)


def _write_work(sparsity: Sparsity) -> Work:
    """Returns the work to write the mean of all ranks into the dense gradient of a tensor of this sparsity."""
    return passes_work(sparsity.union * _value_bytes(sparsity))


def _server_work(
    sparsity: Sparsity,
    passes_before_push: float,
    push_imbalance: float,
    pull_imbalance: float,
    passes_before_pull: float,
) -> Work:
    """Returns the work of the rank that serves the most units (rows or elements). Each rank is the server for one range
    of units.

    Args:
        sparsity: the sparsity of the tensor.
        passes_before_push: how often a rank reads its units before it sends them to servers.
        push_imbalance: the units that the fullest server receives, divided by the mean over servers.
        pull_imbalance: the units that the fullest server returns, divided by the mean over servers.
        passes_before_pull: how often a server reads its means before it returns them.
    """
    union = min(pull_imbalance * sparsity.union / sparsity.world_size, sparsity.union)
    return (
        _find_work(sparsity, max(sparsity.units_by_rank), passes_before_push)
        + _add_work(sparsity, push_imbalance * sparsity.mean_units, union)
        + passes_work(union * _value_bytes(sparsity), passes_before_pull)
        + _write_work(sparsity)
    )


def _value_bytes(sparsity: Sparsity) -> int:
    """Returns the bytes of one unit's values (a row's or a block's), without its index."""
    return sparsity.width * sparsity.itemsize


def _record_bytes(sparsity: Sparsity) -> int:
    """Returns the bytes of one unit (a row or a block) in a message: its index and its values."""
    return record_bytes(sparsity.num_units, sparsity.width, sparsity.itemsize)


def _predict_one_round(mean_bytes: float, critical_bytes: float, messages: int, work: Work) -> Prediction:
    """Builds the prediction for an exchange in a single round.

    Args:
        mean_bytes: the bytes that a rank sends, averaged over ranks.
        critical_bytes: the bytes that the slowest rank sends.
        messages: the number of messages that a rank sends.
        work: the processor work of the rank that has the most to do.
    """
    return Prediction(Exchange(round(mean_bytes), messages), Exchange(round(critical_bytes), messages), work)


def _push_bytes(sparsity: Sparsity, record: int, imbalance: float) -> tuple[float, float]:
    """Predicts the bytes that a rank sends if every rank sends its units (rows or elements) to their servers. Each rank
    is the server for one range of units.

    Args:
        sparsity: the sparsity of the tensor, which counts the units of each rank.
        record: bytes of one unit in a message.
        imbalance: units of the fullest server, divided by the mean over servers.

    Returns:
        (the mean over ranks, the bytes of the slowest rank). The slowest rank has the most units to send, or is the
            server that receives the most units.
    """
    to_others = (sparsity.world_size - 1) / sparsity.world_size * record
    return (
        to_others * sparsity.mean_units,
        to_others * max(*sparsity.units_by_rank, imbalance * sparsity.mean_units),
    )


def _pull_bytes(sparsity: Sparsity, record: int, imbalance: float) -> tuple[float, float]:
    """Predicts the bytes that a server sends if each server returns its part of the union of all ranks' units (rows or
    elements) to all other ranks. Each rank is the server for one range of units.

    Args:
        sparsity: the sparsity of the tensor, which counts the units of the union.
        record: bytes of one unit in a message.
        imbalance: units of the fullest server, divided by the mean over servers.

    Returns:
        (the mean over servers, the bytes of the slowest server).
    """
    to_others = (sparsity.world_size - 1) / sparsity.world_size * record * sparsity.union
    return to_others, to_others * imbalance
