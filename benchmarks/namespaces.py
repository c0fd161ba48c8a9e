"""Hosts of a network on one machine: threads in network namespaces, which start the commands of ranks.

A namespace here has no name. It belongs to a thread of this process, and to the rank's command that the thread starts
and that dies with it: the kernel removes namespaces, cables and ranks when this process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_START = (
    "import ctypes, os, sys; "
    "ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG, SIGKILL: linux/prctl.h
    "os.getppid() == int(sys.argv[1]) or sys.exit('the process that started this rank is gone'); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Runs a command that the kernel kills when the thread that started it ends. `preexec_fn` could do it without a second
program, but is not safe in a process with threads."""


CONGESTION_CONTROL = "reno"
"""The one that every kernel has and grants to every namespace: results do not depend on the machine's own choice. Over
bare sockets, 4 or 8 hosts that all send to each other at 200 Mb/s reach 84 % of the rate with it and 74 % with bbr."""


def obstacle() -> str:
    """Returns the reason why ranks cannot have separate hosts here, as far as it is known before trying, or ""."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return f"user {os.geteuid()} is not root: only root can create network namespaces"
    return ""


class Obstacle(Exception):
    """Raised if ranks cannot have separate hosts, with the reason as its message."""


class Host:
    """A thread that starts the commands of a host. The thread may be moved to its own network namespace."""

    def __init__(self, interface: str, address: str) -> None:
        self.interface, self.address = interface, address
        self._thread = ThreadPoolExecutor(1)
        self._started: list[subprocess.Popen[bytes]] = []
        self.thread_id = self.call(threading.get_native_id)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        kill(self._started)
        self._thread.shutdown()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function in the thread of the host, so that sockets and processes belong to the host's namespace."""
        return self._thread.submit(function, *args, **kwargs).result()

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], output: Path | None, errors: Path | None
    ) -> subprocess.Popen[bytes]:
        whole = [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), *command]
        with ExitStack() as files:
            stdout, stderr = (files.enter_context(path.open("wb")) if path else None for path in (output, errors))
            process = self.call(subprocess.Popen, whole, env=variables, stdout=stdout, stderr=stderr)
        self._started.append(process)
        return process

    def configure(self, *lines: str) -> None:
        """Runs `ip` and `tc` commands on the host.

        Raises:
            Obstacle: one of them fails.
        """
        for line in lines:
            done = self.call(subprocess.run, line.split(), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise Obstacle(f"`{line}` failed: {done.stderr.strip()}")


def enter_new_namespace(window_bytes: int | None = None) -> None:
    """Moves the calling thread to a new network namespace. `os.unshare` is Python 3.12's.

    Args:
        window_bytes: the most that a connection has on its way; None: what TCP finds.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise Obstacle(f"cannot create a network namespace: {os.strerror(ctypes.get_errno())}")
    try:
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(CONGESTION_CONTROL)
        if window_bytes is not None:
            Path("/proc/sys/net/ipv4/tcp_wmem").write_text(f"4096 {window_bytes} {window_bytes}")
    except OSError as error:
        raise Obstacle(f"cannot set the congestion control of a namespace: {error}") from error


def enter_namespace_of(thread_id: int) -> None:
    """Moves the calling thread to the network namespace of another one of this process. `os.setns` is Python 3.12's."""
    with open(f"/proc/self/task/{thread_id}/ns/net", encoding="ascii") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise Obstacle(f"cannot join a network namespace: {os.strerror(ctypes.get_errno())}")


def interface_sent_bytes(interface: str) -> int:
    """Returns the bytes that a network interface of the calling thread's namespace has sent so far; see
    `Network.sent_bytes`.
    """
    # /sys/class/net would show the namespace in which it was mounted.
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() == interface:
            return int(values.split()[8])  # after the eight columns about receiving
    raise KeyError(f"/proc/thread-self/net/dev has no interface {interface}")


def kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
