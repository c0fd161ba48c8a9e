"""A rank of the lab: opens systems, each in a process of its own that is forked from this one, and gives them turns.

    python -m benchmarks.lab.rank SOCKET ENVIRONMENT RANK      (started by the lab, in the host of its rank)

The parent process imports torch and the environment's system once; a fork of it has no state of another system and
starts in milliseconds. A system that is not at work is stopped (SIGSTOP): its threads take nothing from the cores.
What the lab asks and is answered is in benchmarks/lab/cell.py. Ends with the connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import itertools
import multiprocessing
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lab.cell import (
    STOPPED,
    Answer,
    Cell,
    Close,
    Closed,
    Command,
    Failed,
    Hello,
    Measured,
    Open,
    Ready,
    Turn,
)
from benchmarks.models import text
from benchmarks.namespaces import interface_sent_bytes
from benchmarks.peers import ENVIRONMENTS, SYSTEMS
from benchmarks.peers.base import Recorded

KIB = 1024
BATCHES = 48
"""Batches are made before training and then read again and again, so that making them takes no time of a step."""
LOOK_S, COMMUNICATION_NICE = 0.2, -10
"""While a system is at work, how often its new threads are looked for, and the priority they get."""
PAUSED_S = 7200.0
"""How long a system may be stopped; its collectives must not take a pause for a failure."""
QUIET_BYTES, QUIET_S, QUIET_LOOKS, MOST_LOOKS = 20_000, 0.02, 4, 100
QUIET_SHARE = 0.25
"""A turn is over when its interface has sent next to nothing, at most a quarter of what it can, in four looks in a row.
Horovod never falls silent: its ranks ask each other every millisecond what there is to reduce."""
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9  # constants of linux/prctl.h and of signals


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "torchrec", "fbgemm-gpu-cpu", "horovod"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


# -- in the forked process ---------------------------------------------------------------------------------------------


class Session:
    """A system that trains on this rank, with torch.distributed initialized."""

    def __init__(self, cell: Cell, rank: int) -> None:
        task = cell.task()
        batches = [task.workload.batch(step, rank, cell.seed) for step in range(BATCHES)]
        self._interface = os.environ["GLOO_SOCKET_IFNAME"]
        self._quiet_bytes = min(QUIET_BYTES, cell.rate_mbit * 1e6 / 8 * QUIET_S * QUIET_SHARE)
        self._start_bytes = resident_bytes("VmRSS")
        dist.barrier()
        started = time.perf_counter()
        self._training = SYSTEMS[cell.system].peer().prepare(task)
        # All turns share one endless loop, so that systems that look ahead always find a next batch.
        self._losses: Iterator[Tensor] = self._training.steps(itertools.cycle(batches))
        losses = [next(self._losses)]
        first_step_s = time.perf_counter() - started
        notes = self._training.notes()
        last_s = 0.0
        for _ in range(cell.warm_up_steps - 1):
            began = time.perf_counter()
            losses.append(next(self._losses))
            last_s = time.perf_counter() - began
        compiled = self._training.compiled
        predicted_ms = compiled.schedule.diagnostics().step_ms if compiled is not None else None
        plan = {each.parameter: each.name for each in compiled.plan.decisions} if compiled is not None else {}
        self.ready = Ready(first_step_s, last_s * 1e3, tuple(loss.item() for loss in losses), notes, predicted_ms, plan)
        await_quiet(self._interface, self._quiet_bytes)
        give_memory_back()

    def turn(self, steps: int) -> Measured:
        dist.barrier()
        next(self._losses)
        ends, sent = [time.perf_counter()], [interface_sent_bytes(self._interface)]
        main_cpu_s, all_cpu_s, cores = time.thread_time(), time.process_time(), core_times()
        for _ in range(steps):
            next(self._losses)
            ends.append(time.perf_counter())
            sent.append(interface_sent_bytes(self._interface))
        main_cpu_s, all_cpu_s = time.thread_time() - main_cpu_s, time.process_time() - all_cpu_s
        busy, idle = (end - begin for begin, end in zip(cores, core_times(), strict=True))
        await_quiet(self._interface, self._quiet_bytes)
        give_memory_back()
        each = tuple((end - begin) * 1e3 for begin, end in itertools.pairwise(ends))
        return Measured(
            step_ms=sum(each) / steps,
            each_step_ms=each,
            sent_bytes=(sent[-1] - sent[0]) / steps / int(os.environ["LOCAL_WORLD_SIZE"]),
            main_cpu_ms=main_cpu_s * 1e3 / steps,
            other_cpu_ms=(all_cpu_s - main_cpu_s) * 1e3 / steps,
            cores_busy=busy / max(busy + idle, 1),
            peak_bytes=resident_bytes("VmHWM"),
            start_bytes=self._start_bytes,
        )

    def record(self, steps: int) -> Recorded:
        def train() -> None:
            for _ in range(steps):
                next(self._losses)

        dist.barrier()
        recorded = self._training.record(train)
        await_quiet(self._interface, self._quiet_bytes)
        return recorded


def await_quiet(interface: str, quiet_bytes: float) -> None:
    """Waits until the network interface sends fewer than `quiet_bytes` bytes between two checks."""
    before, looks = interface_sent_bytes(interface), 0
    for _ in range(MOST_LOOKS):
        time.sleep(QUIET_S)
        now = interface_sent_bytes(interface)
        looks = looks + 1 if now - before < quiet_bytes else 0
        before = now
        if looks == QUIET_LOOKS:
            return


def give_memory_back() -> None:
    """Returns freed memory to the system (with glibc), so that other systems can use it while this one is stopped."""
    ctypes.CDLL(None).malloc_trim(0)


def core_times() -> tuple[int, int]:
    """Returns the times for which all cores together were busy and idle since the machine started, in ticks of
    /proc/stat.
    """
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, idle, waiting, interrupts, soft, *_ = map(int, file.readline().split()[1:])
    return user + nice + system + interrupts + soft, idle + waiting


def resident_bytes(which: str) -> int:
    """Returns this process's memory in RAM, from /proc/self/status: "VmRSS" for now, "VmHWM" for the maximum since the
    fork.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * KIB
    raise KeyError(f"/proc/self/status has no line {which}")


def run_session(cell: Cell, rank: int, parent: Connection, parent_pid: int) -> None:
    """Runs the forked process of a system, from its opening to its end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent_pid:
        return
    os.environ["MASTER_PORT"] = str(cell.port)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=PAUSED_S))
        session = Session(cell, rank)
        parent.send(session.ready)
        while True:
            command = parent.recv()
            parent.send(session.turn(command.steps) if isinstance(command, Turn) else session.record(command.steps))
    except EOFError:
        pass
    except Exception as error:  # an error of a system is a result
        parent.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
    # Exit at once, because threads of systems would keep the process alive.
    os._exit(0)


# -- in the rank's own process -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Child:
    """The process of an open system."""

    process: ForkProcess
    connection: Connection
    timeout_s: float

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()  # SIGKILL also ends a stopped process
        self.process.join()
        self.connection.close()


def serve(lab: Connection, rank: int) -> None:
    """Answers commands until the connection ends. A command of None ends the running system."""
    children: dict[str, Child] = {}
    while True:
        try:
            command: Command | None = lab.recv()
        except EOFError:
            return
        if command is not None:  # None: the interrupt came after the command had ended
            lab.send(_answer(command, children, lab, rank))


def _answer(command: Command, children: dict[str, Child], lab: Connection, rank: int) -> Answer:
    if isinstance(command, Open):
        name = command.cell.system
        children[name] = child = _open(command.cell, rank)
    else:
        name = command.system
        child = children[name]
        if isinstance(command, Close):
            children.pop(name).end()
            return Closed()
        child.signal(signal.SIGCONT)
        child.connection.send(command)
    answer = _await_answer(child, lab)
    if isinstance(answer, Failed):
        children.pop(name).end()
    else:
        child.signal(signal.SIGSTOP)
    return answer


def put_communication_first(pid: int | None) -> None:
    """Raises the priority of all threads of a process above that of the main thread, which computes.

    On a host of its own, a rank's communication would have a free core. On this machine, it would wait behind the
    computation of all ranks, for milliseconds at each of the two dozen messages of a collective. Needs root, as limited
    links do.
    """
    with contextlib.suppress(OSError):  # the process has ended, or this user is not root
        for thread in os.listdir(f"/proc/{pid}/task"):
            if int(thread) != pid:
                os.setpriority(os.PRIO_PROCESS, int(thread), COMMUNICATION_NICE)


def _open(cell: Cell, rank: int) -> Child:
    forking = multiprocessing.get_context("fork")
    own, theirs = forking.Pipe()
    process = forking.Process(target=run_session, args=(cell, rank, theirs, os.getpid()))
    process.start()
    theirs.close()
    return Child(process, own, cell.timeout_s)


def _await_answer(child: Child, lab: Connection) -> Answer:
    """Returns the answer of the forked process."""
    deadline = time.monotonic() + child.timeout_s
    while not (ready := wait([child.connection, lab], LOOK_S)) and time.monotonic() < deadline:
        put_communication_first(child.process.pid)
    put_communication_first(child.process.pid)
    if lab in ready:
        with contextlib.suppress(EOFError):
            lab.recv()
        return Failed(STOPPED, "")
    if not ready:
        return Failed(f"still busy after {child.timeout_s:g} s", "")
    try:
        answer: Answer = child.connection.recv()
    except EOFError:
        child.process.join()
        return Failed(f"the rank's process died with exit status {child.process.exitcode}", "")
    return answer


def main() -> None:
    torch.set_num_threads(1)
    text.words()
    address, environment, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    importlib.import_module(ENVIRONMENTS[environment])
    # Excludes the objects that all systems share, because a collection after the fork would copy their pages.
    gc.freeze()
    with Client(address, family="AF_UNIX") as lab:
        lab.send(Hello(rank, versions()))
        serve(lab, rank)


if __name__ == "__main__":
    main()
