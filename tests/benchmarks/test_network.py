"""Hosts of their own for ranks: limited links, counters, commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.namespaces import obstacle
from benchmarks.network import Links, network
from benchmarks.transfer import transfer_mbit

needs_hosts = pytest.mark.skipif(bool(obstacle()), reason=obstacle())

LINKS = Links(ranks=2, rate_mbit=100)
PATIENCE_S = 20.0


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def test_without_its_tools_ranks_run_on_loopback_and_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with network(LINKS) as hosts:
        assert not hosts.reached.shaped
        assert "ip and tc not found: install iproute2" in hosts.reached.reason
        printed = hosts.run(python("import os; print(os.environ['GLOO_SOCKET_IFNAME'])"), timeout_s=PATIENCE_S)
    assert printed == ("lo\n", "lo\n")


@needs_hosts
def test_links_carry_their_rate_until_it_is_lifted_and_their_bytes_are_counted() -> None:
    with network(LINKS) as hosts:
        assert hosts.reached.shaped, hosts.reached.reason
        for rate_mbit in hosts.reached.transfer_mbit:
            assert 0.5 * LINKS.rate_mbit < rate_mbit < LINKS.rate_mbit  # half the rate suffices if the cores are busy
        with hosts.unlimited():
            assert transfer_mbit(*hosts._hosts) > 2 * LINKS.rate_mbit
        before = hosts.sent_bytes()
        assert transfer_mbit(*hosts._hosts) < LINKS.rate_mbit
        of_sender, of_receiver = (now - then for now, then in zip(hosts.sent_bytes(), before, strict=True))
        names = "import os, socket; print(sorted(name for _, name in socket.if_nameindex()), os.environ['WORLD_SIZE'])"
        printed = hosts.run(python(names), timeout_s=PATIENCE_S)

    assert of_sender > 1_000_000  # bytes that a transfer of 0.35 s exceeds
    assert of_receiver < 0.05 * of_sender  # the receiver sends only acknowledgements
    assert printed == ("['eth0', 'lo'] 2\n",) * 2


def namespaces() -> set[str]:
    """Returns the network namespaces that any thread of this machine is in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/task/*/ns/net"):
        try:
            found.add(os.readlink(entry))
        except OSError:  # the thread has ended since it was listed
            continue
    return found
