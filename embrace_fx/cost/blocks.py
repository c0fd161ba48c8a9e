"""The records and blocks in which sparse gradients travel: their bytes, a block's size, how blocks are streamed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from embrace_fx.cost.links import Cluster, Work

COUNT_BYTES = 8
"""An int64 that tells a peer how many records come."""

STREAMS = 2
"""Of `omnireduce`: while one stream's blocks are added up, the other's are on their way."""

START_UP_SHARE = 32
"""A reply's bytes take this many times its start-up, where there are blocks enough. The push has a start-up too, and of
blocks that few ranks have, few bytes.
"""

PASSES_PER_BLOCK = 7
"""From gathering it to writing its mean, over a block that no other rank has."""

TYPICAL_DENSITY = 0.01
"""Of a gradient that nothing is known about: the LSTM's in Zen (OSDI 2025) is 1.13 %."""

BLOCK_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


def index_bytes(limit: int) -> int:
    """Bytes of an index from 0 to `limit` on the wire."""
    return 4 if limit < 2**31 else 8


def record_bytes(limit: int, width: int, itemsize: int) -> int:
    """Bytes of a record: an index up to `limit` and `width` values of `itemsize` bytes."""
    return index_bytes(limit) + width * itemsize


def cheapest_block(run: int, itemsize: int, cluster: Cluster) -> int:
    """Returns the block size, in elements, that moves gradients of `TYPICAL_DENSITY` in the least time.

    Small blocks need more indices and more handling, large ones carry more zeros; the faster the link, the larger. An
    index is at most an eighth of its block, for a gradient may be denser than assumed.

    Args:
        run: how many consecutive elements are non-zero together: a row's.
        itemsize: bytes of an element.
        cluster: for the links' bandwidth, and for how fast blocks are handled.
    """

    def time_ms_per_element(size: int) -> float:
        density = 1 - (1 - TYPICAL_DENSITY) ** math.ceil(size / run)
        bytes_per_block = record_bytes(0, size, itemsize)
        handled = Work(passed_bytes=PASSES_PER_BLOCK * bytes_per_block, units=1)
        return density * (handled.time_ms(cluster) + bytes_per_block / cluster.bandwidth_bytes_per_ms) / size

    candidates = (size for size in sorted({run, *BLOCK_SIZES}) if size * itemsize >= 8 * index_bytes(0))
    return min(candidates, key=time_ms_per_element)


@dataclass(frozen=True)
class Streaming:
    """The way in which `omnireduce` deals out the blocks of an aggregator.

    Attributes:
        lanes: of an aggregator, each with one block at work.
        slots: lanes of an aggregator in a stream, whose blocks travel in one message.
    """

    lanes: int
    slots: int

    def busy(self, present: float) -> float:
        """Lanes of an aggregator that have any of `present` blocks, which lie at random."""
        return self.lanes * -math.expm1(-present / self.lanes)

    def streams(self, busy_lanes: float) -> int:
        """Streams of an aggregator, `busy_lanes` of whose lanes have any block."""
        return max(1, math.ceil(busy_lanes / self.slots))


def streaming_of(num_blocks: int, width: int, itemsize: int, world_size: int, cluster: Cluster) -> Streaming:
    """Chooses lanes and slots for a tensor in blocks.

    Many lanes need many bytes to tell the block with which each begins; few lanes need many rounds. It takes the
    lanes that are cheapest for gradients of `TYPICAL_DENSITY`, and so many slots that a round's bytes outweigh its
    start-ups.

    Args:
        num_blocks, width, itemsize: of the tensor.
    """
    of_aggregator = math.ceil(num_blocks / world_size)
    link = cluster.link("messages")
    message_bytes = START_UP_SHARE * link.start_up_ms * link.bandwidth_bytes_per_ms
    slots = max(1, round(message_bytes / record_bytes(num_blocks, width, itemsize)))
    present = of_aggregator * (1 - (1 - TYPICAL_DENSITY) ** world_size)

    def time_ms(lanes: int) -> float:
        streaming = Streaming(lanes, slots)
        rounds = expected_rounds(num_blocks, world_size, streaming, present)
        first_bytes = lanes * place_bytes(places_of_lane(num_blocks, world_size, lanes))
        return rounds * link.start_up_ms + first_bytes / link.bandwidth_bytes_per_ms

    halvings = range(max(1, of_aggregator).bit_length())
    return Streaming(min((max(1, of_aggregator >> k) for k in halvings), key=time_ms), slots)


def places_of_lane(num_blocks: int, world_size: int, lanes: int) -> int:
    """Blocks of the longest lane, present or not."""
    return math.ceil(math.ceil(num_blocks / world_size) / lanes)


def place_bytes(places: int) -> int:
    """Bytes that tell one of so many places of a lane, or none."""
    return 1 if places < 2**8 else 4


def expected_rounds(num_blocks: int, world_size: int, streaming: Streaming, present: float) -> float:
    """Estimate of the rounds of all streams, for `present` blocks of an aggregator's range that lie at random: of each
    stream as many as its longest lane has blocks.
    """
    per_lane = present / streaming.lanes
    longest = per_lane + math.sqrt(2 * per_lane * math.log(world_size * streaming.lanes))
    places = places_of_lane(num_blocks, world_size, streaming.lanes)
    return streaming.streams(streaming.busy(present)) * math.ceil(min(longest, places))
