"""The cost model: bytes and time of each exchange on an alpha-beta link. Units are in the names.

Source: the cost table of EmbRace (ICPP 2022, section 3), start-up `alpha` per message and bandwidth `beta` per link:
    AlltoAll, both ways     2 (N-1) (a M / (N B) + alpha)
    dense AllReduce         2 (N-1) (M / (N B) + alpha)
    sparse AllGather        (N-1) (a M / B + alpha)
with N ranks, M bytes of table, density a of the gradient on each rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """The links between ranks.

    Defaults are the slower testbed of Zen (OSDI 2025, section 4): 25 Gb/s between machines; a start-up of 50 us is what
    a TCP message costs there. They only decide which strategy is *relatively* cheaper.

    Attributes:
        bandwidth_bytes_per_ms: what one rank can send per millisecond.
        latency_ms: start-up of one message.
    """

    bandwidth_bytes_per_ms: float = 25e9 / 8 / 1e3
    latency_ms: float = 0.05

    def transfer_ms(self, sent_bytes: float, messages: int) -> float:
        """Time in which a rank sends `sent_bytes` in `messages` messages one after the other."""
        return sent_bytes / self.bandwidth_bytes_per_ms + messages * self.latency_ms


@dataclass(frozen=True)
class Exchange:
    """What one rank sends per step to keep one tensor consistent."""

    sent_bytes: int
    messages: int

    def time_ms(self, cluster: Cluster) -> float:
        return cluster.transfer_ms(self.sent_bytes, self.messages)

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.sent_bytes + other.sent_bytes, self.messages + other.messages)


def all_reduce(tensor_bytes: int, world_size: int) -> Exchange:
    """Ring AllReduce of a dense tensor: reduce-scatter and all-gather, 2 (N-1)/N of the tensor sent by each rank."""
    steps = 2 * (world_size - 1)
    return Exchange(round(steps * tensor_bytes / world_size), steps)


def all_gather(own_bytes: int, world_size: int) -> Exchange:
    """Ring AllGather of `own_bytes` per rank: each rank sends its own and hands on those of all ranks but one."""
    return Exchange((world_size - 1) * own_bytes, world_size - 1)


def gather_ids(rows_by_rank: tuple[int, ...], num_rows: int) -> Exchange:
    """One table's share of the exchange of ids, two AllGathers at the head of the step.

    The first announces each table's number of ids as an int64 (`Communicator.announce`; the state before it is the
    step's own). The second carries that number again and the ids (`Communicator.all_gather_ids`), int32 where they fit,
    padded to the longest rank's: one length for all tables together, so that of several tables whose longest ranks
    differ a little less travels.
    """
    id_bytes = 4 if num_rows < 2**31 else 8
    return all_gather(8 + id_bytes * (1 + max(rows_by_rank)), len(rows_by_rank))


def all_to_all_rows(rows_by_rank: tuple[int, ...], own_columns: int, itemsize: int, rank: int) -> Exchange:
    """Own columns of every other rank's rows."""
    others = sum(rows_by_rank) - rows_by_rank[rank]
    return Exchange(others * own_columns * itemsize, len(rows_by_rank) - 1)


def all_to_all_gradients(rows: int, other_columns: int, itemsize: int, world_size: int) -> Exchange:
    """The own rows' gradients, to the owners of their columns."""
    return Exchange(rows * other_columns * itemsize, world_size - 1)
