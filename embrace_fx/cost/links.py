"""The cost model: bytes and time of each exchange on an alpha-beta link. Units are in the names.

Source: the cost table of EmbRace (ICPP 2022, section 3), start-up `alpha` per message and bandwidth `beta` per link:
    AlltoAll, both ways     2 (N-1) (a M / (N B) + alpha)
    dense AllReduce         2 (N-1) (M / (N B) + alpha)
    sparse AllGather        (N-1) (a M / B + alpha)
with N ranks, M bytes of table, density a of the gradient on each rank.

Machines of k ranks each share one link to the others, as the testbeds of Zen do (OSDI 2025: 25 Gb/s for 8 GPUs). With
bandwidth B and start-up alpha between machines, b and beta inside one:
    a ring, AllReduce       one rank of a machine sends to the next machine: every round takes as long as the slowest
                            of its messages, whose link has min(B, b) and max(alpha, beta)
    pairwise messages,      of N-1 peers k-1 are inside: a byte takes (k-1)/(N-1) / b + (N-k)/(N-1) k / B, for k ranks
    AlltoAll, AllGather     send to other machines at once; a start-up (k-1)/(N-1) beta + (N-k)/(N-1) alpha. AllGathers
                            count here too: where ranks' sizes differ, pairwise messages take their place.

What a rank's processor does before, between and after (`Work`) is added at the rates of `Handling`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

Collective = Literal["all_reduce", "all_to_all", "all_gather", "messages"]
"""How ranks send: a collective, or "messages" of any size from each to all others, as the sparse exchanges do."""
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_to_all", "all_gather", "messages")

START_UP_SHARE = 0.1
"""Of the time of a chunk: smaller chunks would let an urgent transfer pass sooner, but cost more of the link."""
MIN_CHUNK_BYTES = 64 * 1024
"""The largest packet that TCP hands to an interface: nothing passes between parts smaller than that."""
LARGE_BLOCK_BYTES = 32 * 2**20 + 2**16
"""Blocks of memory from here on come from the kernel for each use, which makes each page when it is first written:
glibc's malloc keeps smaller ones (M_MMAP_THRESHOLD grows up to 32 MiB)."""


@dataclass(frozen=True)
class Link:
    """The rate that a collective reaches on a rank's connection, and its start-up.

    Start-up is mostly threads being woken, which goes on while bytes are on their way: of messages in a row, those that
    are large enough hide it. Without `least_ms` it is the alpha of the formulas above, whatever the size.

    Attributes:
        bandwidth_bytes_per_ms: what one rank can send per millisecond.
        latency_ms: start-up of one message that its bytes do not hide.
        least_ms: of a message, however few its bytes.
    """

    bandwidth_bytes_per_ms: float
    latency_ms: float
    least_ms: float = 0.0

    @property
    def start_up_ms(self) -> float:
        """Milliseconds of a message of no bytes."""
        return max(self.latency_ms, self.least_ms)

    def transfer_ms(self, sent_bytes: float, messages: int) -> float:
        """Time in which a rank sends `sent_bytes` in `messages` messages one after the other."""
        return max(messages * self.least_ms, sent_bytes / self.bandwidth_bytes_per_ms + messages * self.latency_ms)


@dataclass(frozen=True)
class Handling:
    """The speed at which a rank's processor handles gradients while all ranks do: sharing cores slows each.

    Defaults are one core of a server CPU of its own (`python -m benchmarks.exchanges.handling`). What a processor does
    for the network is not here, but in what a collective reaches.

    Attributes:
        scan_bytes_per_ms: of a dense tensor, searched for what is not zero.
        pass_bytes_per_ms: of rows that are gathered, copied, added or written once.
        claim_bytes_per_ms: of new memory in blocks of `LARGE_BLOCK_BYTES` or more, when it is first written.
        unit_ms: of a row, block or element, whatever its size: to encode it, decode it and find its place in the union.
        round_ms: of a round of communication, whatever is in it: to prepare it and to take what came.
    """

    scan_bytes_per_ms: float = 1e7
    pass_bytes_per_ms: float = 1e7
    claim_bytes_per_ms: float = 1.7e6
    unit_ms: float = 1e-4
    round_ms: float = 0.1

    def __post_init__(self) -> None:
        rates = (self.scan_bytes_per_ms, self.pass_bytes_per_ms, self.claim_bytes_per_ms)
        if not (min(rates) > 0 <= min(self.unit_ms, self.round_ms)):
            raise ValueError(f"expected positive rates and no negative times, in Handling, found {self}.")


@dataclass(frozen=True)
class Compute:
    """The speed at which a rank computes its model, until it has been measured.

    Attributes:
        flops_per_ms: floating-point operations of matrix products.
        moved_bytes_per_ms: bytes that all other operations read and write.
        launch_ms: of an operation, whatever its size.
    """

    flops_per_ms: float
    moved_bytes_per_ms: float
    launch_ms: float = 0.0

    def time_ms(self, flops: float, moved_bytes: float) -> float:
        """Milliseconds of one operation that multiplies and moves."""
        return self.launch_ms + flops / self.flops_per_ms + moved_bytes / self.moved_bytes_per_ms


CORE = Compute(2e10 / 1e3, 1e10 / 1e3)
"""A core of a server: 20 GFLOP/s of matrix products, 10 GB/s of everything else. A profile replaces them after a few
steps; until then only their proportions matter."""


@dataclass(frozen=True)
class Work:
    """The work of a rank's processor in an exchange, one thing after the other, while nothing of it is sent.

    Attributes:
        scanned_bytes, passed_bytes, claimed_bytes, units, rounds: as `Handling` has their rates; of n passes over the
            same bytes, n times as many.
    """

    scanned_bytes: float = 0.0
    passed_bytes: float = 0.0
    claimed_bytes: float = 0.0
    units: float = 0.0
    rounds: float = 0.0

    def time_ms(self, cluster: Cluster) -> float:
        rates = cluster.handling
        return (
            self.scanned_bytes / rates.scan_bytes_per_ms
            + self.passed_bytes / rates.pass_bytes_per_ms
            + self.claimed_bytes / rates.claim_bytes_per_ms
            + self.units * rates.unit_ms
            + self.rounds * rates.round_ms
        )

    def __add__(self, other: Work) -> Work:
        return Work(
            self.scanned_bytes + other.scanned_bytes,
            self.passed_bytes + other.passed_bytes,
            self.claimed_bytes + other.claimed_bytes,
            self.units + other.units,
            self.rounds + other.rounds,
        )


def passes_over(nbytes: float, times: float = 1.0) -> Work:
    """So many passes over the same bytes."""
    return Work(passed_bytes=times * nbytes)


def claim(nbytes: float) -> Work:
    """Returns a new block of memory."""
    return Work(claimed_bytes=nbytes if nbytes >= LARGE_BLOCK_BYTES else 0.0)


@dataclass(frozen=True)
class Cluster:
    """The links between ranks, and what their processors do at either end.

    Defaults are the slower testbed of Zen (OSDI 2025, section 4): 25 Gb/s between machines; a start-up of 50 us is what
    a TCP message costs there. They only decide which strategy is *relatively* cheaper.

    Attributes:
        bandwidth_bytes_per_ms: what one machine can send to others per millisecond: one rank, or those that share it.
        latency_ms: start-up of one message.
        links: (collective, what it reaches) where that differs: pairwise messages may reach less than a ring's.
        ranks_per_machine: consecutive ranks that share a machine.
        inside: the link between two ranks of one machine; None where each rank has a machine of its own.
        handling: what a rank's processor takes for what it gathers, adds up and writes.
        compute: how fast a rank computes its model, for schedules that nothing has been measured of.
    """

    bandwidth_bytes_per_ms: float = 25e9 / 8 / 1e3
    latency_ms: float = 0.05
    links: tuple[tuple[Collective, Link], ...] = ()
    ranks_per_machine: int = 1
    inside: Link | None = None
    handling: Handling = Handling()
    compute: Compute = CORE

    def __post_init__(self) -> None:
        names = [name for name, _ in self.links]
        if not set(names) <= set(COLLECTIVES) or len(set(names)) != len(names):
            raise ValueError(
                f"expected links of {', '.join(COLLECTIVES)}, each at most once, in Cluster, found {names}."
            )
        if self.ranks_per_machine < 1 or (self.ranks_per_machine > 1) != (self.inside is not None):
            raise ValueError(
                "expected a link inside a machine where ranks_per_machine is above 1, and only there, in Cluster, "
                f"found {self.ranks_per_machine} rank(s) per machine and {self.inside}."
            )
        own = Link(self.bandwidth_bytes_per_ms, self.latency_ms)
        for link in (own, *(link for _, link in self.links), *((self.inside,) if self.inside else ())):
            if not (link.bandwidth_bytes_per_ms > 0 and min(link.latency_ms, link.least_ms) >= 0):
                raise ValueError(f"expected a positive bandwidth and no negative latency, in Cluster, found {link}.")

    def link(self, collective: Collective | None = None) -> Link:
        """Returns the link as a collective reaches it. None, and collectives that are not listed, get the cluster's own
        figures.

        Messages that are not listed reach what an AlltoAll does.
        """
        listed = dict(self.links)
        if collective == "messages" and "messages" not in listed:
            collective = "all_to_all"
        own = Link(self.bandwidth_bytes_per_ms, self.latency_ms)
        return listed.get(collective, own) if collective is not None else own

    def among(self, world_size: int) -> Cluster:
        """The cluster of one rank per machine on which collectives of `world_size` ranks take as long as on this one.

        See the head of this module for the formulas.
        """
        if self.inside is None:
            return self
        near = min(self.ranks_per_machine, world_size) - 1
        far = world_size - 1 - near
        if not far:
            inside = self.inside
            of_all = tuple((collective, inside) for collective in COLLECTIVES)
            return replace(
                self,
                bandwidth_bytes_per_ms=inside.bandwidth_bytes_per_ms,
                latency_ms=inside.latency_ms,
                links=of_all,
                ranks_per_machine=1,
                inside=None,
            )
        links: list[tuple[Collective, Link]] = []
        for collective in COLLECTIVES:
            outside = self.link(collective)
            if collective == "all_reduce":
                link = Link(
                    min(outside.bandwidth_bytes_per_ms, self.inside.bandwidth_bytes_per_ms),
                    max(outside.latency_ms, self.inside.latency_ms),
                    max(outside.least_ms, self.inside.least_ms),
                )
            else:
                sharing = self.ranks_per_machine / outside.bandwidth_bytes_per_ms
                ms_per_byte = (near / self.inside.bandwidth_bytes_per_ms + far * sharing) / (near + far)
                latency_ms = (near * self.inside.latency_ms + far * outside.latency_ms) / (near + far)
                least_ms = (near * self.inside.least_ms + far * outside.least_ms) / (near + far)
                link = Link(1 / ms_per_byte, latency_ms, least_ms)
            links.append((collective, link))
        return replace(self, links=tuple(links), ranks_per_machine=1, inside=None)

    def transfer_ms(self, sent_bytes: float, messages: int, collective: Collective | None = None) -> float:
        """Time in which a rank sends `sent_bytes` in `messages` messages one after the other."""
        return self.link(collective).transfer_ms(sent_bytes, messages)


@dataclass(frozen=True)
class Exchange:
    """The bytes that one rank sends per step to keep one tensor consistent."""

    sent_bytes: int
    messages: int

    def time_ms(self, cluster: Cluster, collective: Collective | None = None) -> float:
        return cluster.transfer_ms(self.sent_bytes, self.messages, collective)

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
    """Prices one table's share of the exchange of ids, two AllGathers at the head of the step.

    The first announces each table's number of ids as an int64 (`Announcements.announce`; the state before it is the
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
    """Prices the exchange of a rank's row gradients with the owners of their columns."""
    return Exchange(rows * other_columns * itemsize, world_size - 1)


def all_to_all(own_bytes: int, world_size: int) -> Exchange:
    """AlltoAll of `own_bytes` per rank in equal parts, one of which stays."""
    return Exchange(round((world_size - 1) * own_bytes / world_size), world_size - 1)


def exchange(collective: Collective, own_bytes: int, world_size: int) -> Exchange:
    """One launch of a collective on a tensor of `own_bytes` on each rank."""
    counted = {"all_reduce": all_reduce, "all_to_all": all_to_all, "all_gather": all_gather, "messages": all_to_all}
    return counted[collective](own_bytes, world_size)


def launch_ms(cluster: Cluster, collective: Collective, own_bytes: int, world_size: int) -> float:
    """Time of one launch, on an idle link, of a tensor of `own_bytes` on each rank: a chunk, or a bucket."""
    return exchange(collective, own_bytes, world_size).time_ms(cluster.among(world_size), collective)


def chunk_bytes(
    cluster: Cluster, world_size: int, collective: Collective = "all_reduce", share: float = START_UP_SHARE
) -> int:
    """Size of the chunks into which a tensor is cut, so that an urgent transfer can pass between two of them.

    The smallest of which start-up, of one launch alone, takes at most `share`, so that the urgent one waits for
    1 / `share` start-ups, 10 by default, or for `MIN_CHUNK_BYTES` to pass. A single rank, which sends nothing, cuts as
    two would.

    Returns: bytes of the tensor on each rank, whatever part of them is sent.
    """
    alone = replace(cluster, links=())
    start_up_ms, ms_per_byte = _affine(alone, max(world_size, 2), collective)
    return max(MIN_CHUNK_BYTES, ceil((1 / share - 1) * start_up_ms / ms_per_byte))


def bucket_bytes(cluster: Cluster, world_size: int, total_bytes: int, *, read_later: bool = True) -> int:
    """Size of the buckets of dense gradients, of `total_bytes` together: that of a chunk.

    Smaller ones would pay more start-ups. Larger ones would be cut into chunks again, but would leave later, and be
    waited for as a whole by the first parameter that is read.

    Args:
        read_later: whether a forward waits for each by itself; else all are waited for at the end of the backward, and
            nothing passes between two of them.
    """
    share = START_UP_SHARE if read_later else START_UP_SHARE / 5
    return max(1, min(total_bytes, chunk_bytes(cluster, world_size, share=share)))


def _affine(cluster: Cluster, world_size: int, collective: Collective) -> tuple[float, float]:
    """Milliseconds of a launch's start-up, and of each byte of its tensor."""
    large = 2**30
    start_up_ms = launch_ms(cluster, collective, 0, world_size)
    return start_up_ms, (launch_ms(cluster, collective, large, world_size) - start_up_ms) / large
