"""Hosts of their own for ranks: limited links, counters, commands, and nothing left behind however a run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.namespaces import obstacle
from benchmarks.network import Links, RankFailed, network
from benchmarks.transfer import transfer_mbit

needs_hosts = pytest.mark.skipif(bool(obstacle()), reason=obstacle())

ROOT = Path(__file__).parents[2]
LINKS = Links(ranks=2, rate_mbit=100)
PATIENCE_S = 20.0


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def namespaces() -> set[str]:
    """The network namespaces that any thread of this machine is in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/task/*/ns/net"):
        try:
            found.add(os.readlink(entry))
        except OSError:  # the thread is gone
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], inside: set[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_running, pids)) or inside & namespaces():
        assert time.monotonic() < deadline, (
            f"left behind: {[p for p in pids if is_running(p)]}, {inside & namespaces()}"
        )
        time.sleep(0.05)


@pytest.mark.parametrize(("ranks", "rate_mbit", "found"), [(1, 100, "found 1"), (2, 0, "found 0"), (2, -5, "found -5")])
def test_links_that_make_no_sense_are_refused(ranks: int, rate_mbit: float, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        Links(ranks, rate_mbit)


@pytest.mark.parametrize(("ranks", "per_host", "inside_mbit"), [(3, 2, 500), (4, 4, 500), (4, 2, 0), (4, 1, 500)])
def test_hosts_that_cannot_be_shared_so_are_refused(ranks: int, per_host: int, inside_mbit: float) -> None:
    with pytest.raises(ValueError, match=r"expected (two hosts|a positive inside_mbit)"):
        Links(ranks, 100, ranks_per_host=per_host, inside_mbit=inside_mbit)


def test_without_its_tools_ranks_run_on_loopback_and_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with network(LINKS) as hosts:
        assert not hosts.reached.shaped
        assert "found no ip and no tc: install iproute2" in hosts.reached.reason
        assert len(hosts.sent_bytes()) == 1
        printed = hosts.run(python("import os; print(os.environ['GLOO_SOCKET_IFNAME'])"), timeout_s=PATIENCE_S)

    assert printed == ("lo\n", "lo\n")
    assert hosts.reached.links == LINKS


@needs_hosts
def test_links_carry_their_rate_and_no_more() -> None:
    with network(LINKS) as hosts:
        assert hosts.reached.shaped, hosts.reached.reason
        for rate_mbit in hosts.reached.transfer_mbit:
            assert 0.5 * LINKS.rate_mbit < rate_mbit < LINKS.rate_mbit  # the cores may be busy with other things


@needs_hosts
def test_limits_are_lifted_for_a_while_and_kept_again() -> None:
    with network(LINKS) as hosts:
        with hosts.unlimited():
            lifted_mbit = transfer_mbit(*hosts._hosts)
        assert lifted_mbit > 2 * LINKS.rate_mbit
        assert transfer_mbit(*hosts._hosts) < LINKS.rate_mbit


_EXCHANGE = """
import os, socket, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server, server.accept()[0] as peer:
        while peer.recv(1 << 20):
            pass
else:
    while True:
        try:
            with socket.create_connection(address) as peer:
                peer.sendall(bytes(1_000_000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
print(sorted(name for _, name in socket.if_nameindex()), os.environ["GLOO_SOCKET_IFNAME"], os.environ["WORLD_SIZE"])
"""


@needs_hosts
def test_commands_meet_on_hosts_of_their_own_and_their_bytes_are_counted() -> None:
    with network(LINKS) as hosts:
        before = hosts.sent_bytes()
        printed = hosts.run(python(_EXCHANGE), timeout_s=PATIENCE_S)
        of_receiver, of_sender = (now - then for now, then in zip(hosts.sent_bytes(), before, strict=True))

    assert printed == ("['eth0', 'lo'] eth0 2\n",) * 2
    assert 1_000_000 < of_sender < 1_050_000
    assert of_receiver < 50_000  # acknowledgements


_SEND_TO_NEXT = """
import os, socket, sys, time
rank, count = int(os.environ["RANK"]), int(sys.argv[1])
if rank == 0:
    with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as server:
        for _ in range(2):
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"x")
                while peer.recv(1 << 20):
                    pass
elif rank in (1, 2):
    while True:
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    with peer:
        peer.recv(1)  # its turn
        began = time.monotonic()
        peer.sendall(bytes(count))
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)  # the other end has all of it
    print(time.monotonic() - began, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
"""


@needs_hosts
@pytest.mark.parametrize("links", [Links(4, 40, 1, 2, 400), Links(4, 1128, 64, 2, 5640)], ids=["as it is", "slowly"])
def test_ranks_of_one_host_have_a_link_of_their_own(links: Links) -> None:
    """Rank 1 shares rank 0's host, rank 2 does not: 4 MB of each to rank 0, one after the other."""
    with network(links) as hosts:
        assert len(hosts.sent_bytes()) == 2
        before = hosts.sent_bytes()
        _, inside, outside, _ = hosts.run([*python(_SEND_TO_NEXT), "4000000"], timeout_s=60)
        first, second = (now - then for now, then in zip(hosts.sent_bytes(), before, strict=True))

    (inside_s, *inside_place), (outside_s, *outside_place) = inside.split(), outside.split()
    assert (inside_place, outside_place) == (["1", "2"], ["0", "2"])
    assert float(outside_s) > 0.7  # 0.8 s at 40 Mb/s
    assert float(inside_s) < 0.5 * float(outside_s)
    assert first < 100_000
    assert second > 4_000_000


_BESIDE_BULK = """
import os, socket, statistics, threading, time
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(where) as server:
        bulk, small = server.accept()[0], server.accept()[0]
        threading.Thread(target=lambda: [None for _ in iter(lambda: bulk.recv(1 << 16), b"")], daemon=True).start()
        while word := small.recv(1):
            small.sendall(word)
else:
    def connect():
        while True:
            try:
                return socket.create_connection(where)
            except ConnectionRefusedError:
                time.sleep(0.05)
    bulk, small = connect(), connect()
    threading.Thread(target=lambda: bulk.sendall(bytes(50_000_000)), daemon=True).start()
    time.sleep(1.0)
    took = []
    for _ in range(10):
        began = time.monotonic()
        small.sendall(b"x")
        small.recv(1)
        took.append(time.monotonic() - began)
    print(statistics.median(took), flush=True)
    os._exit(0)
"""


@needs_hosts
def test_small_messages_do_not_wait_behind_a_deep_queue() -> None:
    """In slow motion of 20: 1 ms of the link is 20 here, where TCP alone would have filled 2 seconds."""
    with network(Links(2, 200, slow=20.0)) as hosts:
        _, waited = hosts.run(python(_BESIDE_BULK), timeout_s=60)

    assert float(waited) < 0.4


def test_a_rank_that_fails_ends_the_others_and_shows_its_errors() -> None:
    program = "import os, sys, time; sys.exit('no such data') if os.environ['RANK'] == '1' else time.sleep(600)"
    started_s = time.monotonic()
    with network(LINKS) as hosts, pytest.raises(RankFailed, match=r"found 1 of rank 1, which printed:\nno such data"):
        hosts.run(python(program), timeout_s=600)

    assert time.monotonic() - started_s < PATIENCE_S


def test_a_rank_that_takes_too_long_is_named() -> None:
    program = "import os, time; time.sleep(600 * (os.environ['RANK'] == '1'))"
    with (
        network(LINKS) as hosts,
        pytest.raises(RankFailed, match=r"within 1 s, in run\(\), found rank\(s\) \[1\] busy"),
    ):
        hosts.run(python(program), timeout_s=1)


def test_an_exception_leaves_nothing_behind() -> None:
    own = namespaces()
    pids: list[int] = []
    inside: set[str] = set()

    def start_and_fail() -> None:
        with network(LINKS) as hosts:
            pids.extend(hosts.start(rank, ["sleep", "600"]).pid for rank in range(2))
            inside.update(namespaces() - own)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start_and_fail()
    wait_until_gone(pids, inside)


_PARENT = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from pathlib import Path
from benchmarks.network import Links, network
with network(Links(2, 100)) as hosts:
    pids = [hosts.start(rank, ["sleep", "600"]).pid for rank in range(2)]
    inside = {os.readlink(entry) for entry in Path("/proc/self/task").glob("*/ns/net")}
    print(*pids, *inside - {os.readlink("/proc/self/ns/net")}, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_parent_that_is_ended_leaves_nothing_behind(ending: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        words = parent.stdout.readline().split()
        pids, inside = [int(word) for word in words[:2]], set(words[2:])
        assert len(inside) == (0 if obstacle() else 3)
        parent.send_signal(ending)
        parent.wait(PATIENCE_S)

    wait_until_gone(pids, inside)
