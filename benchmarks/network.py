"""A cluster's network on one machine: every rank a host of its own, on links of limited bandwidth.

    with network(Links(ranks=4, rate_mbit=200)) as hosts:
        before = hosts.sent_bytes()
        outputs = hosts.run([sys.executable, "train.py"], timeout_s=300)
        sent = [now - then for now, then in zip(hosts.sent_bytes(), before, strict=True)]
    results["network"] = asdict(hosts.reached)

Each rank has a network namespace with one interface, a virtual cable to a bridge in a namespace of its own, and a token
bucket (`tc ... tbf`) at either end of the cable, so that what a rank sends and what it receives are limited alike.
Ranks may share a host: what they send each other passes its loopback interface, behind a bucket of its own. The
machine's own interfaces, addresses and routes are not touched. Ranks are dealt out to the cores, each stays on its own:
ranks that share a core share it evenly.

The kernel removes namespaces, cables and ranks when this process ends, however it ends (`benchmarks/namespaces.py`).

Needs Linux, root, and `ip` and `tc` of iproute2. Where these are missing the ranks run on the loopback interface,
without a limit, and `Reached` says so.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.namespaces import (
    Host,
    Obstacle,
    enter_namespace_of,
    enter_new_namespace,
    interface_sent_bytes,
    kill,
    obstacle,
)
from benchmarks.transfer import transfer_mbit

MAX_RANKS = 64
PACKET_BYTES = 60_000
"""The largest packet that TCP hands to an interface, which on a real link would cut it into frames. A bucket does so
with every packet larger than itself, and wakes up for each: the smaller packets are, the more they take of the cores
that the ranks compute on."""
MIN_PACKET_BYTES = 3_000
"""Of slow motion: two Ethernet frames."""
FRAME_BYTES = 1_500
"""Of a host's loopback, as of Ethernet. Its own 64 KiB are more than a connection may have on its way, so that TCP
sends less than a frame and waits to be acknowledged, and more than a small bucket lets pass at all."""
BURST_MS = 1.0
"""A bucket holds what passes in 1 ms, which is not delayed, and is small against a step's messages; or one packet."""
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""For glibc: memory that is freed stays with the process. Otherwise a training step gives its activations back to the
kernel and asks for them again, page by page, in one step more of them than in another."""
QUEUE_MS = 100.0
"""How long a packet may wait for the bucket before it is dropped: so long that an AlltoAll of 8 ranks loses next to
none, for the last packet of a message, once lost, is sent again after TCP's 200 ms only."""
WINDOW_MS = 1.0
"""What the connections of a host may have sent and not had acknowledged, together, in time of its link; two packets
each at least. TCP's small queues and a switch's some 100 kB for a port bound on real hosts what a small message waits
behind; a bucket here holds `QUEUE_MS`, and TCP fills it. A bound of the window drops nothing."""
OPEN_MBIT = 10_000.0
"""What each link carries while its limit is lifted: more than the cores can send."""
MOST_OF_RATE = 1.1
"""A bare transfer that is faster than this multiple of its limit is not limited."""


@dataclass(frozen=True)
class Links:
    """The requested hosts and links.

    Attributes:
        ranks: the number of ranks.
        rate_mbit: what each host can send, and what it can receive, in megabits (1e6) per second, headers included.
        slow: the factor of slow motion by which links are slower than `rate_mbit`. Packets are smaller, too.
        ranks_per_host: consecutive ranks that share a host and its link.
        inside_mbit: the rate at which each rank can send to the other ranks of its host, on a separate link.
    """

    ranks: int
    rate_mbit: float
    slow: float = 1.0
    ranks_per_host: int = 1
    inside_mbit: float = 0.0

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"Links: ranks is {self.ranks}. Pass 2 to {MAX_RANKS}.")
        if not self.slow >= 1:
            raise ValueError(f"Links: slow is {self.slow}. Pass 1 or more.")
        if not self.rate_mbit > 0:
            raise ValueError(f"Links: rate_mbit is {self.rate_mbit}. Pass a positive number.")
        if self.ranks_per_host < 1 or self.ranks % self.ranks_per_host or self.ranks_per_host == self.ranks:
            raise ValueError(
                f"Links: there must be at least two hosts with equally many ranks. Got {self.ranks} ranks, "
                f"{self.ranks_per_host} per host."
            )
        if (self.ranks_per_host > 1) != (self.inside_mbit > 0):
            raise ValueError(
                "Links: pass a positive inside_mbit if ranks share a host, and only then. Got "
                f"{self.inside_mbit} with {self.ranks_per_host} per host."
            )

    def burst_bytes(self, carried_mbit: float) -> int:
        """Returns the bytes that a link of this rate passes at once: more than the largest packet with its headers."""
        return max(self.packet_bytes * 7 // 6, round(carried_mbit * 1e6 / 8 * BURST_MS / 1e3))

    @property
    def window_bytes(self) -> int:
        """Returns the bytes that a connection may have in flight: an equal share for each rank on other hosts, at least
        two packets.
        """
        return max(2 * self.packet_bytes, round(self._share_bytes))

    @property
    def _share_bytes(self) -> float:
        """Of a connection, of what a host may have on its way."""
        connections = self.ranks_per_host * (self.ranks - self.ranks_per_host)
        return self.rate_mbit * 1e6 / 8 / 1e3 * WINDOW_MS / connections

    @property
    def carried_mbit(self) -> float:
        """Returns the rate of a link."""
        return self.rate_mbit / self.slow

    @property
    def packet_bytes(self) -> int:
        """Of slow motion, half of what a connection may have on its way: smaller ones only take of the cores."""
        most = PACKET_BYTES if self.slow == 1 else min(PACKET_BYTES, round(self._share_bytes / 2))
        return max(MIN_PACKET_BYTES, round(PACKET_BYTES / self.slow), most)


@dataclass(frozen=True)
class Reached:
    """The measured properties of the network, which are stored with the results.

    Attributes:
        links: the requested links.
        shaped: whether ranks have separate hosts with limited links.
        reason: the reason why they have not, or "".
        transfer_mbit: payload rate of a bare TCP transfer from each rank to one of the next host, one at a time. TCP,
            IP and Ethernet headers take 4.6 % of a link's rate.
    """

    links: Links
    shaped: bool
    reason: str
    transfer_mbit: tuple[float, ...]


class RankFailed(RuntimeError):
    """A rank's command did not end with exit status 0."""


@contextlib.contextmanager
def network(links: Links) -> Iterator[Network]:
    """Opens a context with hosts for `links.ranks` ranks. At its end, commands that still run are killed, and the hosts
    are removed.

    Raises:
        RuntimeError: the limits are set, but a transfer exceeds them.
    """
    with ExitStack() as stack:
        try:
            (hosts, bridge), reason = _cabled_hosts(links, stack), ""
        except Obstacle as found:
            bridge, reason = None, str(found)
            hosts = [stack.enter_context(Host("lo", "127.0.0.1")) for _ in range(links.ranks)]
        cores = sorted(os.sched_getaffinity(0))
        for rank, host in enumerate(hosts):  # processes that the host's thread starts inherit its core
            host.call(os.sched_setaffinity, 0, {cores[rank % len(cores)]})
        far = links.ranks_per_host
        rates = tuple(transfer_mbit(host, hosts[(r + far) % links.ranks]) for r, host in enumerate(hosts))
        reached = Reached(links, not reason, reason, rates)
        if reached.shaped and max(rates) > MOST_OF_RATE * links.carried_mbit:
            raise RuntimeError(
                f"expected at most {links.carried_mbit} Mb/s from each rank to the next host, in network(), "
                f"found {', '.join(f'{rate:.0f}' for rate in rates)}: the limit of `tc ... tbf` is not kept."
            )
        yield Network(reached, tuple(hosts), bridge, _free_port())


@dataclass(frozen=True)
class Network:
    """Running hosts.

    Attributes:
        reached: the measured properties of the hosts.
    """

    reached: Reached
    _hosts: tuple[Host, ...]
    _bridge: Host | None
    _port: int

    def start(
        self,
        rank: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
        errors: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a rank's command on its host; its process is killed when the network ends, or this process.

        Its environment has what `torch.distributed.init_process_group("gloo")` reads (RANK, WORLD_SIZE, MASTER_ADDR,
        MASTER_PORT, GLOO_SOCKET_IFNAME, LOCAL_RANK, LOCAL_WORLD_SIZE); and `KEEP_FREED_MEMORY`.

        Args:
            environment: further variables.
            output, errors: files for its standard output and error; None: this process's own.
        """
        host, per_host = self._hosts[rank], self.reached.links.ranks_per_host if self.reached.shaped else 1
        variables = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._hosts)),
            "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": self._hosts[0].address,
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": host.interface,
            **KEEP_FREED_MEMORY,
            **(environment or {}),
        }
        return host.start(command, variables, output, errors)

    def run(
        self, command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        """Runs one command on every rank and returns what each has printed.

        Raises:
            RankFailed: a rank fails, or is not done after `timeout_s`; the others are killed.
        """
        with tempfile.TemporaryDirectory(prefix="network-") as name:
            outputs = [Path(name) / f"output-{rank}" for rank in range(len(self._hosts))]
            errors = [Path(name) / f"errors-{rank}" for rank in range(len(self._hosts))]
            processes = []
            try:
                for rank, (output, error) in enumerate(zip(outputs, errors, strict=True)):
                    processes.append(self.start(rank, command, environment=environment, output=output, errors=error))
                _await_all(processes, errors, timeout_s)
            finally:
                kill(processes)
            return tuple(output.read_text() for output in outputs)

    @contextlib.contextmanager
    def unlimited(self) -> Iterator[None]:
        """Opens a context without limits on links, if links are limited."""
        self._limit(OPEN_MBIT / self.reached.links.carried_mbit)
        try:
            yield
        finally:
            self._limit(1.0)

    def _limit(self, times: float) -> None:
        """Sets the rate of every link to `times` the requested rate."""
        if self._bridge is None:
            return
        links = self.reached.links
        shape = _shape(links, links.carried_mbit * times)
        for number, host in enumerate(self._hosts[:: links.ranks_per_host]):
            host.configure(f"tc qdisc change dev eth0 {shape}")
            self._bridge.configure(f"tc qdisc change dev port{number * links.ranks_per_host} {shape}")
            if links.ranks_per_host > 1:
                inside = _shape(links, links.inside_mbit * links.ranks_per_host / links.slow * times)
                host.configure(f"tc qdisc change dev lo {inside}")

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that each interface has sent so far, read from its counter: one per host, or the loopback's alone.

        Headers are counted once per packet of up to `PACKET_BYTES`, so that the counter is 1 % above the payload where
        frames of a real wire would be 5 % above. The loopback counts all ranks together, and other programs.
        """
        counted = self._hosts[:: self.reached.links.ranks_per_host] if self.reached.shaped else self._hosts[:1]
        return tuple(host.call(interface_sent_bytes, host.interface) for host in counted)


def _shape(links: Links, carried_mbit: float) -> str:
    """Returns the limit of a link as arguments of `tc`."""
    latency_ms, burst_bytes = QUEUE_MS * links.slow, links.burst_bytes(carried_mbit)
    return f"root tbf rate {round(carried_mbit * 1e6)}bit burst {burst_bytes} latency {latency_ms:g}ms"


def _cabled_hosts(links: Links, stack: ExitStack) -> tuple[list[Host], Host]:
    """Returns one host for each rank, and the bridge to which they are connected. Closing `stack` removes them."""
    if reason := obstacle():
        raise Obstacle(reason)
    shape = _shape(links, links.carried_mbit)
    bridge = stack.enter_context(Host("bridge", ""))
    bridge.call(enter_new_namespace)
    bridge.configure("ip link add bridge type bridge", "ip link set bridge up")
    hosts: list[Host] = []
    for rank in range(links.ranks):
        host = stack.enter_context(Host("eth0", f"10.0.0.{rank // links.ranks_per_host + 1}"))
        hosts.append(host)
        if rank % links.ranks_per_host:
            host.call(enter_namespace_of, hosts[rank - rank % links.ranks_per_host].thread_id)
            continue
        host.call(enter_new_namespace, links.window_bytes)
        host.configure(
            "ip link set lo up",
            f"ip link add eth0 type veth peer name port{rank} netns {bridge.thread_id}",
            f"ip link set eth0 gso_max_size {links.packet_bytes}",
            f"ip address add {host.address}/24 dev eth0",
            f"tc qdisc add dev eth0 {shape}",
            "ip link set eth0 up",
        )
        bridge.configure(f"tc qdisc add dev port{rank} {shape}", f"ip link set port{rank} master bridge up")
        if links.ranks_per_host > 1:  # the loopback is shared by all ranks of the host
            inside = _shape(links, links.inside_mbit * links.ranks_per_host / links.slow)
            host.configure(
                f"ip link set lo mtu {FRAME_BYTES} gso_max_size {links.packet_bytes}",
                f"tc qdisc add dev lo {inside}",
            )
    return hosts, bridge


def _await_all(processes: Sequence[subprocess.Popen[bytes]], errors: Sequence[Path], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while None in (statuses := [process.poll() for process in processes]):
        if any(statuses):
            break  # other ranks may wait for the failed one forever
        if time.monotonic() > deadline:
            late = [rank for rank, status in enumerate(statuses) if status is None]
            raise RankFailed(f"run(): rank(s) {late} did not end within {timeout_s:g} s.")
        time.sleep(0.02)
    for rank, status in enumerate(statuses):
        if status:
            raise RankFailed(
                f"run(): rank {rank} exited with status {status}, which printed:\n{errors[rank].read_text()}"
            )


def _free_port() -> int:
    """Returns a port at which the ranks can meet. It is free on this machine's loopback; in a new namespace, every port
    is free.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
