"""Strategy `omnireduce`: streaming aggregation of non-zero blocks (OmniReduce, SIGCOMM 2021). Each rank aggregates one
range of the tensor.

Every rank aggregates an even range of the blocks. The blocks of a range are assigned to *lanes* in turn, and a lane
processes one block at a time. Before the first round, an AlltoAll and an AllGather exchange each lane's first block.
Lanes with blocks are assigned to *streams*. The blocks of a stream's lanes in one round share one message per pair of
ranks, and the rounds of two streams overlap. One round of a stream:

    push    AlltoAll: a rank with a lane's current block sends it, and the number of its next block in the lane
    add     each aggregator sums in rank order; the lane's next block is the smallest next block of any rank
    reply   AllGather of the mean and the lane's next block

Thus a block that no rank has is never sent. Messages have no length, because the previous round determines which rank
sends which block. With many lanes, the exchange of first blocks is large and rounds are few
(`embrace_fx.cost.blocks.choose_streaming`).

    two ranks, one lane       rank 0 has blocks 0, 3    rank 1 has blocks 3, 7
    round 0                   sends block 0, next 3     (has announced 3: nothing)   reply: mean of 0, next 3
    round 1                   sends block 3, next none  sends block 3, next 7        reply: mean of 3, next 7
    round 2                                             sends block 7, next none     reply: mean of 7, end
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from embrace_fx.cost.blocks import (
    STREAMS,
    blocks_per_lane,
    choose_streaming,
    fastest_block_size,
    position_bytes,
    record_bytes,
)
from embrace_fx.cost.links import Cluster
from embrace_fx.cost.sparsity import range_starts
from embrace_fx.runtime.exchanges.blocks import cut_blocks
from embrace_fx.runtime.exchanges.channel import Channel, Steps
from embrace_fx.runtime.exchanges.gradient import RowSet, sum_by_position
from embrace_fx.runtime.exchanges.record_codec import decode_records, encode_records
from embrace_fx.runtime.ranks.communicator import InFlight


def nonzero_blocks(dense: Tensor, cluster: Cluster) -> RowSet:
    """Returns the non-zero blocks of a dense gradient (rows, width). Chooses the block size that is fastest on the
    links of the cluster.
    """
    return cut_blocks(dense, fastest_block_size(max(1, dense.shape[1]), dense.itemsize, cluster))


def mean_parts(blocks: RowSet, channel: Channel, cluster: Cluster) -> Steps[list[RowSet]]:
    """Averages sparse gradients over ranks by streaming aggregation of non-zero blocks. Returns the mean as one set of
    blocks for each round. The ids of a set are not sorted.

    Args:
        blocks: this rank's non-zero blocks.
        channel: sends the messages.
        cluster: the links, which determine how many sequences of blocks are aggregated concurrently.
    """
    shape = blocks.num_rows, blocks.width, blocks.rows.itemsize
    streaming = choose_streaming(*shape, channel.world_size, cluster)
    lanes = streaming.lanes
    ranges = _BlockLanes(blocks.num_rows, channel.world_size, lanes, blocks.ids.device)
    queues = _BlockQueues(blocks, ranges)
    own_start = ranges.starts[channel.rank].view(1, 1)
    places = ranges.encode(queues.heads(), ranges.starts)
    sizes = [places.numel() // channel.world_size] * channel.world_size
    places = yield channel.all_to_all_equal(places)
    upcoming_of_ranks = ranges.decode(places, own_start)
    places = ranges.encode(upcoming_of_ranks.amin(dim=0, keepdim=True), own_start)
    places = yield channel.all_gather(places, sizes)
    current = ranges.decode(places, ranges.starts)
    aggregation = _Aggregation(blocks, channel, queues, upcoming_of_ranks, current)

    # Assign lanes to streams in turn, so that each stream gets its share of busy lanes even if ids are skewed.
    count = streaming.busy_streams(int((current < blocks.num_rows).sum(dim=1).max()))
    streams = (slice(first, None, count) for first in range(count))
    waiting = deque(stream for stream in streams if aggregation.active(stream))
    in_flight: deque[tuple[slice, InFlight]] = deque()
    while True:
        while waiting and len(in_flight) < STREAMS:
            stream = waiting.popleft()
            in_flight.append((stream, aggregation.push(stream)))
        if not in_flight:
            return aggregation.means
        stream, pushed = in_flight.popleft()
        received = yield pushed
        replies = yield aggregation.reply(stream, received)
        aggregation.accept(stream, replies)
        if aggregation.active(stream):
            in_flight.append((stream, aggregation.push(stream)))


class _BlockLanes:
    """Assigns blocks of a tensor to lanes. A lane is a sequence of blocks that are aggregated one after another.

    Each of N aggregators has a range of the blocks and L lanes. Lane l of an aggregator has every L-th block of its
    range, beginning with the l-th. Blocks are sent with their *place* in the lane, which needs fewer bytes than their
    index. The place after the last one means no block.
    """

    def __init__(self, num_blocks: int, world_size: int, lanes: int, device: torch.device) -> None:
        self.num_blocks, self.lanes = num_blocks, lanes
        # The first block of each aggregator's range (N, 1).
        self.starts = torch.tensor(range_starts(num_blocks, world_size), device=device).unsqueeze(1)
        self._none = blocks_per_lane(num_blocks, world_size, lanes)
        self._dtype = torch.uint8 if position_bytes(self._none) == 1 else torch.int32
        self._lane = torch.arange(lanes, device=device)

    def encode(self, blocks: Tensor, starts: Tensor) -> Tensor:
        """Encodes block indices as places in their lanes (sequences of blocks). Returns the places as a flat tensor of
        bytes.

        Args:
            blocks: (R, L), the index of a block in each lane, or `num_blocks` for no block.
            starts: (R, 1), the index of the first block of each aggregator's range.
        """
        places = (blocks - starts) // self.lanes
        return torch.where(blocks < self.num_blocks, places, self._none).to(self._dtype).view(-1).view(torch.uint8)

    def decode(self, places: Tensor, starts: Tensor) -> Tensor:
        """Decodes the block indices (R, L) that `encode` has encoded.

        Args:
            places: the result of `encode`.
            starts: (R, 1), as for `encode`.
        """
        of_lanes = places.view(self._dtype).view(-1, self.lanes).long()
        return torch.where(of_lanes < self._none, starts + of_lanes * self.lanes + self._lane, self.num_blocks)


class _BlockQueues:
    """This rank's non-zero blocks, in queues in ascending order. There is one queue for each of the L lanes (sequences
    of blocks) of each of the N ranks that aggregate blocks.
    """

    def __init__(self, blocks: RowSet, ranges: _BlockLanes) -> None:
        starts, lanes = ranges.starts.view(-1), ranges.lanes
        world_size = starts.numel()
        aggregator = torch.searchsorted(starts, blocks.ids, right=True) - 1
        queue = aggregator * lanes + (blocks.ids - starts[aggregator]) % lanes
        lengths = torch.bincount(queue, minlength=world_size * lanes).view(world_size, lanes)
        self._order = torch.argsort(queue, stable=True)
        self._blocks = blocks
        # Append an entry, so that the head of the last queue can be read even if it is empty.
        self._ids = torch.cat([blocks.ids[self._order], blocks.ids.new_full((1,), blocks.num_rows)])
        self._end = lengths.view(-1).cumsum(0).view(world_size, lanes)
        self._head = self._end - lengths

    def heads(self) -> Tensor:
        """Returns the index of the first block of each queue (N, L), or `num_rows` for an empty queue."""
        return torch.where(self._head < self._end, self._ids[self._head], self._blocks.num_rows)

    def take(self, stream: slice, mine: Tensor) -> Tensor:
        """Removes the first block of each queue that a mask selects. Returns the values of these blocks.

        Args:
            stream: the group of lanes (sequences of blocks), one for each column of `mine`.
            mine: the mask (N, lanes in the stream).
        """
        heads = self._head[:, stream]
        taken = self._blocks.rows.index_select(0, self._order[heads[mine]])
        heads += mine
        return taken


class _Aggregation:
    """The state of streaming aggregation on one rank. The rank sends its blocks to aggregators, and is itself one of
    them.

    Args:
        blocks: this rank's non-zero blocks.
        channel: sends the messages.
        queues: the blocks in queues, one for each lane (sequence of blocks) of each aggregator.
        upcoming_of_ranks: (N, L), the index of every rank's next block in each of the L lanes that this rank
            aggregates.
        current: (N, L), the index of the current block of every lane of every aggregator; equal on all ranks.
    """

    def __init__(
        self, blocks: RowSet, channel: Channel, queues: _BlockQueues, upcoming_of_ranks: Tensor, current: Tensor
    ) -> None:
        self._channel = channel
        self._queues = queues
        self._upcoming_of_ranks = upcoming_of_ranks
        self._current = current
        self._end = blocks.num_rows
        self._width = blocks.width
        self._dtype = blocks.rows.dtype
        self._record_bytes = record_bytes(self._end, self._width, self._dtype.itemsize)
        self.means: list[RowSet] = [RowSet(blocks.ids[:0], blocks.rows[:0], self._end)]

    def active(self, stream: slice) -> bool:
        """Returns whether any rank still has blocks to send in a stream (a group of lanes)."""
        return bool((self._current[:, stream] < self._end).any())

    def push(self, stream: slice) -> InFlight:
        """Sends this rank's current blocks of a stream (a group of lanes) to their aggregators. Each block is sent with
        the index of the rank's next block in the same lane.
        """
        current = self._current[:, stream]
        mine = (self._queues.heads()[:, stream] == current) & (current < self._end)
        blocks = self._queues.take(stream, mine)
        records = encode_records(self._queues.heads()[:, stream][mine], blocks, self._end)
        return self._channel.all_to_all(records.view(-1), self._sizes(mine), self._sizes(self._senders(stream)))

    def _senders(self, stream: slice) -> Tensor:
        """Returns a mask (N, lanes in the stream) that tells which ranks have the current block of each lane (sequence
        of blocks) of a stream. Covers the lanes that this rank aggregates.
        """
        current = self._current[self._channel.rank, stream]
        return (self._upcoming_of_ranks[:, stream] == current) & (current < self._end)

    def _sizes(self, selected: Tensor) -> list[int]:
        """Returns the size in bytes of the message to or from each rank.

        Args:
            selected: a mask (N, lanes in a stream) of the blocks in the messages.
        """
        sizes: list[int] = (selected.sum(dim=1) * self._record_bytes).tolist()
        return sizes

    def reply(self, stream: slice, received: Tensor) -> InFlight:
        """Sends to all ranks the means of the current blocks in the lanes (sequences of blocks) that this rank
        aggregates in a stream. Each mean is sent with the index of the lane's next block.

        Args:
            stream: a group of lanes.
            received: the records that the ranks have pushed.
        """
        senders = self._senders(stream)
        upcoming, blocks = decode_records(received, self._end, self._width, self._dtype)
        lane = senders.nonzero()[:, 1]
        total = sum_by_position(lane, blocks, senders.sum(dim=1).tolist(), senders.shape[1])
        self._upcoming_of_ranks[:, stream][senders] = upcoming
        active = self._current[:, stream] < self._end
        own = active[self._channel.rank]
        means = total[own].div_(self._channel.world_size).to(self._dtype)
        records = encode_records(self._upcoming_of_ranks[:, stream].amin(dim=0)[own], means, self._end)
        return self._channel.all_gather(records.view(-1), self._sizes(active))

    def accept(self, stream: slice, replies: Tensor) -> None:
        """Stores the means that all aggregators have sent, and advances each lane of the stream to its next block.

        Args:
            replies: the records received from the aggregators.
        """
        current = self._current[:, stream]
        active = current < self._end
        upcoming, means = decode_records(replies, self._end, self._width, self._dtype)
        self.means.append(RowSet(current[active], means, self._end))
        current[active] = upcoming
