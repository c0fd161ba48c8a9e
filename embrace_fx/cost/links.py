"""The cost model: predicts bytes and time of each exchange on an alpha-beta link.

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
                            count here too: where ranks' sizes differ, they are sent as pairwise messages.

The work of a rank's processor before, between and after the messages (`Work`) is added at the rates of `Handling`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Literal

Collective = Literal["all_reduce", "all_to_all", "all_gather", "messages"]
"""A collective, or "messages" of any sizes from each rank to all others, as in the sparse exchanges."""
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_to_all", "all_gather", "messages")

START_UP_SHARE = 0.1
"""Share of latency in a chunk's time. Smaller chunks would delay urgent transfers less, but waste more time."""
MIN_CHUNK_BYTES = 64 * 1024
"""The largest packet that TCP passes to an interface, which other transfers cannot interrupt."""
BUCKET_ROUNDS = 6.0
"""Units of handling (`Handling.round_ms`) that a bucket takes under "none", by `benchmarks.micro.table_rounds`."""
LARGE_BLOCK_BYTES = 32 * 2**20 + 2**16
"""Memory blocks of at least this size come from the kernel at each use, which makes each page at its first write;
glibc's malloc keeps smaller blocks (M_MMAP_THRESHOLD grows up to 32 MiB)."""


@dataclass(frozen=True)
class Link:
    """A rank's connection as one collective sees it: the bandwidth that it reaches, and its latency.

    Latency is mostly the time to wake threads. That time overlaps bytes that are being sent, so consecutive large
    messages hide it. If `least_ms` is 0, the latency is the alpha of the alpha-beta model, for messages of any size.

    Attributes:
        bandwidth_bytes_per_ms: the bytes that one rank can send per millisecond.
        latency_ms: the latency that each message adds to the time of its bytes.
        least_ms: the minimum time of a message of any size.
    """

    bandwidth_bytes_per_ms: float
    latency_ms: float
    least_ms: float = 0.0

    @property
    def start_up_ms(self) -> float:
        """The time of an empty message, in milliseconds."""
        return max(self.latency_ms, self.least_ms)

    def transfer_ms(self, sent_bytes: float, messages: int) -> float:
        """Predicts the time in ms to send `sent_bytes` in `messages` messages, one after another."""
        return max(messages * self.least_ms, sent_bytes / self.bandwidth_bytes_per_ms + messages * self.latency_ms)


@dataclass(frozen=True)
class Handling:
    """The rates at which a rank's processor handles gradients while all ranks do the same, possibly on shared cores.

    Defaults are for a rank with its own core of a server CPU (`python -m benchmarks.exchanges.handling`). The
    processor's work to send and receive messages is not included, because it is part of the bandwidth of a `Link`.

    Attributes:
        scan_bytes_per_ms: rate of searching a dense tensor for non-zero values.
        pass_bytes_per_ms: rate of gathering, copying, adding or writing rows once.
        claim_bytes_per_ms: rate of first writes to newly allocated memory, in blocks of at least `LARGE_BLOCK_BYTES`.
        unit_ms: time to encode and decode a row, block or element of any size, and to find its place in the union.
        round_ms: time to prepare and receive a round of communication of any size.
    """

    scan_bytes_per_ms: float = 1e7
    pass_bytes_per_ms: float = 1e7
    claim_bytes_per_ms: float = 1.7e6
    unit_ms: float = 1e-4
    round_ms: float = 0.1

    def __post_init__(self) -> None:
        rates = (self.scan_bytes_per_ms, self.pass_bytes_per_ms, self.claim_bytes_per_ms)
        if not (min(rates) > 0 <= min(self.unit_ms, self.round_ms)):
            raise ValueError(f"Handling: rates must be positive, and times must not be negative. Got {self}.")


@dataclass(frozen=True)
class Compute:
    """The speed at which a rank computes the model, assumed until it is measured.

    Attributes:
        flops_per_ms: floating-point operations per ms of matrix products.
        moved_bytes_per_ms: bytes per ms that all other operations read and write.
        launch_ms: fixed time of one operation.
    """

    flops_per_ms: float
    moved_bytes_per_ms: float
    launch_ms: float = 0.0

    def time_ms(self, flops: float, moved_bytes: float) -> float:
        """Predicts the time in ms of one operation from its FLOPs and the bytes that it reads and writes
        (`moved_bytes`).
        """
        return self.launch_ms + flops / self.flops_per_ms + moved_bytes / self.moved_bytes_per_ms


CORE = Compute(2e10 / 1e3, 1e10 / 1e3)
"""A server core: 20 GFLOP/s of matrix products, 10 GB/s of other operations. Measured times replace them after a few
steps. Until then only their ratio matters."""


@dataclass(frozen=True)
class Work:
    """Processor work of a rank in an exchange, without the transfers. Each count is multiplied by a rate or time of
    `Handling`.

    Attributes:
        scanned_bytes: bytes searched for non-zero values.
        passed_bytes: bytes gathered, copied, added or written; n passes over the same bytes count n times.
        claimed_bytes: bytes of newly allocated memory that are written for the first time.
        units: rows, blocks or elements that are encoded and decoded.
        rounds: rounds of communication that are prepared or received.
    """

    scanned_bytes: float = 0.0
    passed_bytes: float = 0.0
    claimed_bytes: float = 0.0
    units: float = 0.0
    rounds: float = 0.0

    def time_ms(self, cluster: Cluster) -> float:
        """Returns the time in ms that a rank of this cluster takes for the work."""
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


def passes_work(nbytes: float, times: float = 1.0) -> Work:
    """Returns the work of reading or writing `nbytes` bytes, repeated `times` times."""
    return Work(passed_bytes=times * nbytes)


def new_memory_work(nbytes: float) -> Work:
    """Returns the work of writing `nbytes` bytes of newly allocated memory for the first time. The work is zero below
    `LARGE_BLOCK_BYTES`, where the allocator reuses memory.
    """
    return Work(claimed_bytes=nbytes if nbytes >= LARGE_BLOCK_BYTES else 0.0)


@dataclass(frozen=True)
class Cluster:
    """The links between ranks, and the speed of the ranks' processors.

    Defaults are the slower testbed of Zen (OSDI 2025, section 4): 25 Gb/s between machines, with a TCP latency of 50
    us. They determine only which strategy is *relatively* cheaper.

    Attributes:
        bandwidth_bytes_per_ms: bytes per ms that one machine, with all of its ranks, can send to others.
        latency_ms: the latency of one message.
        links: pairs (collective, link) for collectives whose speed differs: pairwise messages, for example, may be
            slower than a ring.
        ranks_per_machine: number of consecutive ranks that share a machine.
        inside: the link between two ranks of one machine, or None if each rank has its own machine.
        handling: the speed at which a rank's processor gathers, sums and writes.
        compute: the speed at which a rank computes the model, used for schedules until it is measured.
        pace: the speed of a rank while all ranks compute, relative to `compute`. With 2, operations take half the time
            that `compute` predicts.
        busy: how long a transfer delays compute on the same processors, as a share of the transfer's time.
    """

    bandwidth_bytes_per_ms: float = 25e9 / 8 / 1e3
    latency_ms: float = 0.05
    links: tuple[tuple[Collective, Link], ...] = ()
    ranks_per_machine: int = 1
    inside: Link | None = None
    handling: Handling = Handling()
    compute: Compute = CORE
    pace: float = 1.0
    busy: float = 0.0

    def __post_init__(self) -> None:
        if not (self.pace > 0 and 0 <= self.busy <= 1):
            raise ValueError(
                "Cluster: pace must be positive, and busy must be between 0 and 1. Got "
                f"pace={self.pace} and busy={self.busy}."
            )
        names = [name for name, _ in self.links]
        if not set(names) <= set(COLLECTIVES) or len(set(names)) != len(names):
            raise ValueError(
                f"Cluster: links= must have at most one entry for each of {', '.join(COLLECTIVES)}, and no others. Got "
                f"entries for {', '.join(names)}."
            )
        if self.ranks_per_machine < 1 or (self.ranks_per_machine > 1) != (self.inside is not None):
            raise ValueError(
                "Cluster: inside= is required if ranks_per_machine is above 1, and must be None otherwise. Got "
                f"ranks_per_machine={self.ranks_per_machine} and inside={self.inside}."
            )
        own = Link(self.bandwidth_bytes_per_ms, self.latency_ms)
        for link in (own, *(link for _, link in self.links), *((self.inside,) if self.inside else ())):
            if not (link.bandwidth_bytes_per_ms > 0 and min(link.latency_ms, link.least_ms) >= 0):
                raise ValueError(f"Cluster: bandwidth must be positive, and latency must not be negative. Got {link}.")

    def link(self, collective: Collective | None = None) -> Link:
        """Returns the link that a collective uses. This is its entry in `links` or, without one, a link with the
        cluster's bandwidth and latency. Without an entry, "messages" use the link of "all_to_all".

        Args:
            collective: the collective, or None for a link with the cluster's bandwidth and latency.
        """
        listed = dict(self.links)
        if collective == "messages" and "messages" not in listed:
            collective = "all_to_all"
        own = Link(self.bandwidth_bytes_per_ms, self.latency_ms)
        return listed.get(collective, own) if collective is not None else own

    def flattened(self, world_size: int) -> Cluster:
        """Returns a cluster with one rank per machine on which collectives of `world_size` ranks take the same time as
        on this one. The formulas are in the module's docstring.
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
        """Predicts the time in ms to send `sent_bytes` in `messages` messages, one after another, over a collective's
        link.
        """
        return self.link(collective).transfer_ms(sent_bytes, messages)


@dataclass(frozen=True)
class Exchange:
    """The bytes and messages that one rank sends per step to make one tensor or gradient equal on all ranks.

    Attributes:
        sent_bytes: bytes that the rank sends.
        messages: messages that the rank sends, one after another.
    """

    sent_bytes: int
    messages: int

    def time_ms(self, cluster: Cluster, collective: Collective | None = None) -> float:
        """Returns the time in ms of the exchange on an idle cluster, over a collective's link."""
        return cluster.transfer_ms(self.sent_bytes, self.messages, collective)

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.sent_bytes + other.sent_bytes, self.messages + other.messages)


def all_reduce(tensor_bytes: int, world_size: int) -> Exchange:
    """Returns the bytes and messages that a rank sends in a ring AllReduce over N = `world_size` ranks. The bytes are 2
    (N-1)/N of the tensor's bytes.
    """
    steps = 2 * (world_size - 1)
    return Exchange(round(steps * tensor_bytes / world_size), steps)


def all_gather(own_bytes: int, world_size: int) -> Exchange:
    """Returns the bytes and messages that a rank sends in a ring AllGather over N = `world_size` ranks. A rank sends
    its own bytes, and forwards those of N-2 other ranks.
    """
    return Exchange((world_size - 1) * own_bytes, world_size - 1)


def predict_id_exchange(rows_by_rank: tuple[int, ...], num_rows: int) -> Exchange:
    """Returns the bytes and messages that a rank sends for one table in the exchange of ids at the start of a step.
    That exchange consists of two AllGathers for all tables.

    The first AllGather announces each table's number of ids as an int64 (`StepHandshake.announce`, whose other fields
    are not counted here). The second sends that number again, and the ids (`Communicator.all_gather_ids`). Every rank
    sends as many ids as the rank with the most has, in int32 if they fit. The prediction pads each table on its own. In
    fact all tables are padded together, which takes slightly less if different ranks have the most ids of different
    tables.

    Args:
        rows_by_rank: for each rank, the number of unique rows of the table that it reads.
        num_rows: the number of rows of the table.
    """
    id_bytes = 4 if num_rows < 2**31 else 8
    return all_gather(8 + id_bytes * (1 + max(rows_by_rank)), len(rows_by_rank))


def all_to_all(own_bytes: int, world_size: int) -> Exchange:
    """Returns the bytes and messages that a rank sends in an AlltoAll over N = `world_size` ranks. A rank keeps 1/N of
    its `own_bytes` bytes and sends the rest.
    """
    return Exchange(round((world_size - 1) * own_bytes / world_size), world_size - 1)


def exchange(collective: Collective, own_bytes: int, world_size: int) -> Exchange:
    """Returns the bytes and messages that a rank sends if a collective is launched once on a tensor of `own_bytes`
    bytes on each rank.
    """
    counted = {"all_reduce": all_reduce, "all_to_all": all_to_all, "all_gather": all_gather, "messages": all_to_all}
    return counted[collective](own_bytes, world_size)


def launch_ms(cluster: Cluster, collective: Collective, own_bytes: int, world_size: int) -> float:
    """Predicts the time in ms of launching a collective once on an idle cluster, on a tensor of `own_bytes` bytes on
    each rank.
    """
    return exchange(collective, own_bytes, world_size).time_ms(cluster.flattened(world_size), collective)


def choose_chunk_bytes(cluster: Cluster, world_size: int, collective: Collective = "all_reduce") -> int:
    """Chooses the size of a chunk for a collective on a cluster. Large transfers are cut into chunks that are launched
    separately, so that an urgent transfer waits only for the current chunk.

    The result is the smallest size for which the fixed time is at most `START_UP_SHARE` of a launch's time, and at
    least `MIN_CHUNK_BYTES`. For a single rank, it is the size for two ranks.

    Returns:
        Bytes of the chunk's tensor on each rank, including the part that the rank does not send.
    """
    alone = replace(cluster, links=())
    start_up_ms, ms_per_byte = _cost_per_launch_and_byte(alone, max(world_size, 2), collective)
    return max(MIN_CHUNK_BYTES, ceil((1 / START_UP_SHARE - 1) * start_up_ms / ms_per_byte))


def choose_bucket_bytes(cluster: Cluster, world_size: int, total_bytes: int, *, read_later: bool = True) -> int:
    """Chooses the size of a bucket in bytes.

    If the next forward waits for each bucket separately, the result is the size of a chunk. Smaller buckets would add
    latency. Larger buckets would be launched later, and the first parameter that the forward reads would wait for its
    whole bucket.

    If the backward waits for all buckets at its end, the exposed time is that of the last bucket, plus a fixed cost for
    each bucket: its latency and `BUCKET_ROUNDS` rounds of processor work. With k buckets, T ms of transfers and s ms of
    fixed cost, the sum T / k + k s is minimal for k = sqrt(T / s).

    Args:
        cluster: the links between the ranks, and the speed of the processors.
        total_bytes: the bytes of all dense gradients.
        read_later: whether the next forward waits for each bucket separately. If False, the backward waits for all
            buckets at its end.
    """
    if read_later:
        return max(1, min(total_bytes, choose_chunk_bytes(cluster, world_size)))
    start_up_ms, ms_per_byte = _cost_per_launch_and_byte(replace(cluster, links=()), max(world_size, 2), "all_reduce")
    own_ms = start_up_ms + BUCKET_ROUNDS * cluster.handling.round_ms
    least_bytes = max(sqrt(total_bytes * own_ms / ms_per_byte), MIN_CHUNK_BYTES)
    return max(1, ceil(total_bytes / max(1, round(total_bytes / least_bytes))))


def _cost_per_launch_and_byte(cluster: Cluster, world_size: int, collective: Collective) -> tuple[float, float]:
    """Returns the cost of a collective on a cluster: (fixed milliseconds per launch, milliseconds per byte of the
    exchanged tensor).
    """
    large = 2**30
    start_up_ms = launch_ms(cluster, collective, 0, world_size)
    return start_up_ms, (launch_ms(cluster, collective, large, world_size) - start_up_ms) / large
