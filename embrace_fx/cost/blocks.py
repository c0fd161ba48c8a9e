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
    """Returns the number of bytes that an index from 0 to `limit` takes in a message."""
    return 4 if limit < 2**31 else 8


def record_bytes(limit: int, width: int, itemsize: int) -> int:
    """Returns the number of bytes that a record of a sparse gradient takes in a message: an index up to `limit`, and
    `width` values of `itemsize` bytes.
    """
    return index_bytes(limit) + width * itemsize


def fastest_block_size(run_length: int, itemsize: int, cluster: Cluster) -> int:
    """Returns the size of blocks, in elements, with which sending the non-zero blocks of a typical sparse gradient
    takes the least time. A typical gradient has the density `TYPICAL_DENSITY`.

    Small blocks need more indices and more handling, and large blocks contain more zeros. The faster the link, the
    larger the best block. An index takes at most an eighth of its block, because a gradient may be denser than assumed.

    Args:
        run_length: the number of consecutive elements that are zero or non-zero together, such as a row's width.
        itemsize: bytes of an element.
        cluster: gives the links' bandwidth, and the speed of handling blocks.
    """

    def time_ms_per_element(size: int) -> float:
        """Returns the expected time to send the non-zero blocks of `size` elements, in ms per element of the tensor."""
        density = 1 - (1 - TYPICAL_DENSITY) ** math.ceil(size / run_length)
        bytes_per_block = record_bytes(0, size, itemsize)
        handled = Work(passed_bytes=PASSES_PER_BLOCK * bytes_per_block, units=1)
        return density * (handled.time_ms(cluster) + bytes_per_block / cluster.bandwidth_bytes_per_ms) / size

    candidates = (size for size in sorted({run_length, *BLOCK_SIZES}) if size * itemsize >= 8 * index_bytes(0))
    return min(candidates, key=time_ms_per_element)


@dataclass(frozen=True)
class Streaming:
    """The division of a gradient into lanes and streams by the strategy "omnireduce". An aggregator is the rank that
    sums one range of the gradient. It divides the blocks of the range into lanes, which it processes in parallel.
    Several lanes form a stream, which sends their blocks in one message.

    Attributes:
        lanes: the number of lanes of an aggregator.
        slots: the number of lanes in a stream.
    """

    lanes: int
    slots: int

    def busy_lanes(self, present: float) -> float:
        """Returns the expected number of an aggregator's lanes (sequences of blocks) that have a block to process.

        Args:
            present: the number of blocks with non-zero values in the aggregator's range, at random places.
        """
        return self.lanes * -math.expm1(-present / self.lanes)

    def busy_streams(self, busy_lanes: float) -> int:
        """Returns the expected number of an aggregator's streams with at least one busy lane.

        Args:
            busy_lanes: the number of lanes that have a block to process.
        """
        return max(1, math.ceil(busy_lanes / self.slots))


def choose_streaming(num_blocks: int, width: int, itemsize: int, world_size: int, cluster: Cluster) -> Streaming:
    """Chooses the number of lanes and slots with which the strategy "omnireduce" exchanges a tensor. Lanes are
    sequences of blocks that an aggregator processes in parallel. Slots are the lanes that share a message.

    With many lanes, the first block of each lane takes many bytes; with few lanes, the exchange takes many rounds. The
    cheapest number of lanes for gradients of `TYPICAL_DENSITY` is chosen, and enough slots that sending a round's bytes
    takes longer than starting it.

    Args:
        num_blocks: the number of blocks of the tensor.
        width: the elements of a block.
        itemsize: the bytes of an element.
        world_size: the number of ranks, each of which aggregates one range of the tensor.
        cluster: gives the links' bandwidth and start-up times, and the speed of handling blocks.
    """
    of_aggregator = math.ceil(num_blocks / world_size)
    link = cluster.link("messages")
    message_bytes = START_UP_SHARE * link.start_up_ms * link.bandwidth_bytes_per_ms
    slots = max(1, round(message_bytes / record_bytes(num_blocks, width, itemsize)))
    present = of_aggregator * (1 - (1 - TYPICAL_DENSITY) ** world_size)

    def time_ms(lanes: int) -> float:
        """Returns the start-up time of all rounds, plus the time to send the position of each lane's first block."""
        streaming = Streaming(lanes, slots)
        rounds = expected_rounds(num_blocks, world_size, streaming, present)
        first_bytes = lanes * position_bytes(blocks_per_lane(num_blocks, world_size, lanes))
        return rounds * link.start_up_ms + first_bytes / link.bandwidth_bytes_per_ms

    halvings = range(of_aggregator.bit_length() + 1)
    return Streaming(min((max(1, of_aggregator >> k) for k in halvings), key=time_ms), slots)


def blocks_per_lane(num_blocks: int, world_size: int, lanes: int) -> int:
    """Returns the number of blocks, zero or not, in the longest lane of an aggregator, the rank that sums one range of
    a tensor. Blocks are divided among aggregators, and then among their lanes, which are processed in parallel.

    Args:
        num_blocks: the number of blocks of the tensor.
        lanes: the number of lanes of each aggregator. Every rank is an aggregator.
    """
    return math.ceil(math.ceil(num_blocks / world_size) / lanes)


def position_bytes(num_blocks: int) -> int:
    """Returns the number of bytes that encode a block's position in a sequence of `num_blocks` blocks."""
    return 1 if num_blocks < 2**8 else 4


def expected_rounds(num_blocks: int, world_size: int, streaming: Streaming, present: float) -> float:
    """Returns the expected number of message rounds, summed over the streams of an aggregator (the rank that sums one
    range of a tensor). A stream has as many rounds as its longest lane has blocks with non-zero values.

    Args:
        num_blocks: the number of blocks of the tensor.
        streaming: the aggregator's lanes and streams.
        present: the number of blocks with non-zero values in the aggregator's range, at random places.
    """
    per_lane = present / streaming.lanes
    longest = per_lane + math.sqrt(2 * per_lane * math.log(world_size * streaming.lanes))
    places = blocks_per_lane(num_blocks, world_size, streaming.lanes)
    return streaming.busy_streams(streaming.busy_lanes(present)) * math.ceil(min(longest, places))
