"""Records and blocks of sparse gradients on the wire: their bytes, block sizes, and streaming."""

from __future__ import annotations

import math
from dataclasses import dataclass

from embrace_fx.cost.links import Cluster, Work

COUNT_BYTES = 8
"""The bytes of the int64 that holds the number of records."""

STREAMS = 2
"""Streams of `omnireduce`: one stream's blocks are in flight while the other's are summed."""

START_UP_SHARE = 32
"""A reply's bytes take this many times its start-up, where there are blocks enough. The push has a start-up as well,
and few bytes if few ranks have its blocks.
"""

PASSES_PER_BLOCK = 7
"""Passes over a block that no other rank has, from gathering it to writing its mean."""

TYPICAL_DENSITY = 0.01
"""Density assumed of an unknown gradient: the LSTM's in Zen (OSDI 2025) is 1.13 %."""

BLOCK_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


def index_bytes(limit: int) -> int:
    """Returns the bytes of an index from 0 to `limit` on the wire."""
    return 4 if limit < 2**31 else 8


def record_bytes(limit: int, width: int, itemsize: int) -> int:
    """Returns the bytes of a record: an index up to `limit` and `width` values of `itemsize` bytes."""
    return index_bytes(limit) + width * itemsize


def cheapest_block(run: int, itemsize: int, cluster: Cluster) -> int:
    """Returns the block size, in elements, that sends a typical sparse gradient (of density `TYPICAL_DENSITY`) in the
    least time.

    Small blocks need more indices and more handling, large ones carry more zeros; a faster link favours larger ones. An
    index takes at most an eighth of its block, because a gradient may be denser than assumed.

    Args:
        run: number of consecutive elements that are non-zero together: a row's width.
        itemsize: bytes of an element.
        cluster: gives the links' bandwidth, and the speed of handling blocks.
    """

    def time_ms_per_element(size: int) -> float:
        """Returns the time that blocks of a size take per element of the tensor."""
        density = 1 - (1 - TYPICAL_DENSITY) ** math.ceil(size / run)
        bytes_per_block = record_bytes(0, size, itemsize)
        handled = Work(passed_bytes=PASSES_PER_BLOCK * bytes_per_block, units=1)
        return density * (handled.time_ms(cluster) + bytes_per_block / cluster.bandwidth_bytes_per_ms) / size

    candidates = (size for size in sorted({run, *BLOCK_SIZES}) if size * itemsize >= 8 * index_bytes(0))
    return min(candidates, key=time_ms_per_element)


@dataclass(frozen=True)
class Streaming:
    """The parameters of `omnireduce`'s streaming: each aggregator processes `lanes` blocks at a time, grouped into
    messages.

    Attributes:
        lanes: lanes of an aggregator, each of which processes one block at a time.
        slots: lanes of a stream, whose blocks share a message.
    """

    lanes: int
    slots: int

    def busy_lanes(self, present: float) -> float:
        """Returns the expected number of an aggregator's lanes that have a block to process.

        Args:
            present: the number of blocks with values in the aggregator's range, at random places.
        """
        return self.lanes * -math.expm1(-present / self.lanes)

    def busy_streams(self, busy_lanes: float) -> int:
        """Returns the expected number of an aggregator's streams that have a block to process.

        Args:
            busy_lanes: the number of lanes that have one, from `busy_lanes`.
        """
        return max(1, math.ceil(busy_lanes / self.slots))


def streaming_of(num_blocks: int, width: int, itemsize: int, world_size: int, cluster: Cluster) -> Streaming:
    """Chooses how "omnireduce" streams a tensor of `num_blocks` blocks: the lanes and slots with the least time.

    Many lanes need many bytes to send the first block of each; few lanes need many rounds. It chooses the cheapest
    number of lanes for gradients of `TYPICAL_DENSITY`, and so many slots that a round's bytes outweigh its start-ups.

    Args:
        num_blocks, width, itemsize: of the tensor.
    """
    of_aggregator = math.ceil(num_blocks / world_size)
    link = cluster.link("messages")
    message_bytes = START_UP_SHARE * link.start_up_ms * link.bandwidth_bytes_per_ms
    slots = max(1, round(message_bytes / record_bytes(num_blocks, width, itemsize)))
    present = of_aggregator * (1 - (1 - TYPICAL_DENSITY) ** world_size)

    def time_ms(lanes: int) -> float:
        """Returns the time that start-ups and the first block of each lane take with this many lanes."""
        streaming = Streaming(lanes, slots)
        rounds = expected_rounds(num_blocks, world_size, streaming, present)
        first_bytes = lanes * place_bytes(places_of_lane(num_blocks, world_size, lanes))
        return rounds * link.start_up_ms + first_bytes / link.bandwidth_bytes_per_ms

    halvings = range(max(1, of_aggregator).bit_length())
    return Streaming(min((max(1, of_aggregator >> k) for k in halvings), key=time_ms), slots)


def places_of_lane(num_blocks: int, world_size: int, lanes: int) -> int:
    """Returns the number of blocks, with or without values, that the longest lane processes."""
    return math.ceil(math.ceil(num_blocks / world_size) / lanes)


def place_bytes(places: int) -> int:
    """Returns the bytes that encode a position in a lane of `places` positions."""
    return 1 if places < 2**8 else 4


def expected_rounds(num_blocks: int, world_size: int, streaming: Streaming, present: float) -> float:
    """Returns the expected rounds of all streams, for `present` blocks at random places of an aggregator's range.

    A stream has as many rounds as its longest lane has blocks.
    """
    per_lane = present / streaming.lanes
    longest = per_lane + math.sqrt(2 * per_lane * math.log(world_size * streaming.lanes))
    places = places_of_lane(num_blocks, world_size, streaming.lanes)
    return streaming.busy_streams(streaming.busy_lanes(present)) * math.ceil(min(longest, places))
