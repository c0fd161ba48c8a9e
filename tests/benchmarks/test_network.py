"""Hosts of their own for ranks: limited links, counters, commands, and nothing left behind however a run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    "links", [{"ranks": 1}, {"rate_mbit": 0}, {"slow": 0.5}, {"ranks_per_host": 2}, {"inside_mbit": 500}], ids=str
)
def test_links_that_make_no_sense_are_refused(links: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^expected .*, in Links, found "):
        Links(**{"ranks": 4, "rate_mbit": 100, **links})


def test_without_its_tools_ranks_run_on_loopback_and_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with network(LINKS) as hosts:
        assert not hosts.reached.shaped
        assert "found no ip and no tc: install iproute2" in hosts.reached.reason
        printed = hosts.run(python("import os; print(os.environ['GLOO_SOCKET_IFNAME'])"), timeout_s=PATIENCE_S)
    assert printed == ("lo\n", "lo\n")


@needs_hosts
def test_links_carry_their_rate_until_it_is_lifted_and_their_bytes_are_counted() -> None:
    with network(LINKS) as hosts:
        assert hosts.reached.shaped, hosts.reached.reason
        for rate_mbit in hosts.reached.transfer_mbit:
            assert 0.5 * LINKS.rate_mbit < rate_mbit < LINKS.rate_mbit  # the cores may be busy with other things
        with hosts.unlimited():
            assert transfer_mbit(*hosts._hosts) > 2 * LINKS.rate_mbit
        before = hosts.sent_bytes()
        assert transfer_mbit(*hosts._hosts) < LINKS.rate_mbit
        of_sender, of_receiver = (now - then for now, then in zip(hosts.sent_bytes(), before, strict=True))
        names = "import os, socket; print(sorted(name for _, name in socket.if_nameindex()), os.environ['WORLD_SIZE'])"
        printed = hosts.run(python(names), timeout_s=PATIENCE_S)

    assert of_sender > 1_000_000  # 0.35 s
    assert of_receiver < 0.05 * of_sender  # acknowledgements
    assert printed == ("['eth0', 'lo'] 2\n",) * 2


@pytest.mark.parametrize(
    ("does", "timeout_s", "message"),
    [
        ("sys.exit('no such data')", 600, "found 1 of rank 1, which printed:\nno such data"),
        ("time.sleep(600)", 1, "busy"),
    ],
)
def test_a_rank_that_fails_or_takes_too_long_ends_the_others_and_is_named(
    does: str, timeout_s: float, message: str
) -> None:
    program = f"import os, sys, time; ({does}) if os.environ['RANK'] == '1' else time.sleep(600 * ({timeout_s} > 1))"
    with network(LINKS) as hosts, pytest.raises(RankFailed, match=message):
        hosts.run(python(program), timeout_s=timeout_s)


_PARENT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from pathlib import Path
from benchmarks.network import Links, network
with network(Links(2, 100)) as hosts:
    pids = [hosts.start(rank, ["sleep", "600"]).pid for rank in range(2)]
    inside = {os.readlink(entry) for entry in Path("/proc/self/task").glob("*/ns/net")}
    print(*pids, *inside - {os.readlink("/proc/self/ns/net")}, flush=True)
    sys.stdin.read()
    raise ZeroDivisionError
"""


@pytest.mark.parametrize("ending", [None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=str)
def test_a_parent_that_is_ended_leaves_nothing_behind(ending: signal.Signals | None) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _PARENT], cwd=ROOT, text=True, **pipes) as parent:  # type: ignore[call-overload]
        words = parent.stdout.readline().split()
        pids, inside = [int(word) for word in words[:2]], set(words[2:])
        assert len(inside) == (0 if obstacle() else 3)
        if ending:
            parent.send_signal(ending)
        else:
            parent.stdin.close()
        parent.wait(PATIENCE_S)

    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_running, pids)) or inside & namespaces():
        assert time.monotonic() < deadline, (pids, inside & namespaces())
        time.sleep(0.05)


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
