"""A rank of the lab: waits for cells of the matrix and measures each in a process of its own, forked from this one.

    python -m benchmarks.lab_rank SOCKET ENVIRONMENT RANK      (started by benchmarks/lab.py, in the host of its rank)

The parent process imports torch and the environment's system once; a fork of it has no state of an earlier cell and
starts in milliseconds. It receives a `Cell`, answers with a `Measured` or a `Failed`, and ends with the connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import multiprocessing
import os
import platform
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.lab_cell import STOPPED, Cell, Failed, Hello, Measured
from benchmarks.models import text
from benchmarks.network import interface_sent_bytes
from benchmarks.peers import ENVIRONMENTS, SYSTEMS

KIB = 1024
EXIT_S = 5.0
"""How long a process may take to end once it has answered: all ranks wait for the last one's answer."""
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9  # linux/prctl.h


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "torchrec", "fbgemm-gpu-cpu", "horovod"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def measure(cell: Cell, rank: int) -> Measured:
    """Trains on this rank, and stops in the middle of it; torch.distributed is initialised."""
    steps = cell.warm_up_steps + cell.steps
    task = cell.task()
    # One batch more than steps: a system that looks ahead must find the last measured step followed by another, as all
    # before it, and what it still has under way then makes up for what was under way at the beginning.
    batches = [task.workload.batch(step, rank, cell.seed) for step in range(steps + 1)]
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    start_bytes = resident_bytes("VmRSS")
    dist.barrier()
    started = time.perf_counter()
    training = SYSTEMS[cell.system].peer().prepare(task)
    notes, losses, ends, sent = "", [], [], []
    for step, loss in zip(range(steps), training.steps(batches), strict=False):
        ends.append(time.perf_counter())
        sent.append(interface_sent_bytes(interface))
        losses.append(loss)
        if step == 0:
            notes = training.notes()
    measured = slice(cell.warm_up_steps - 1, None)
    each = [(end - begin) * 1e3 for begin, end in zip(ends[measured], ends[cell.warm_up_steps :], strict=False)]
    return Measured(
        first_step_s=ends[0] - started,
        step_ms=sum(each) / len(each),
        each_step_ms=tuple(each),
        sent_bytes=(sent[-1] - sent[cell.warm_up_steps - 1]) / cell.steps,
        peak_bytes=resident_bytes("VmHWM"),
        start_bytes=start_bytes,
        losses=tuple(loss.item() for loss in losses),
        notes=notes,
    )


def resident_bytes(which: str) -> int:
    """Memory of this process in RAM, from /proc/self/status: "VmRSS" now, "VmHWM" at most since it was forked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * KIB
    raise KeyError(f"expected a line {which} in /proc/self/status, found none")


def run_forked(cell: Cell, rank: int, answer: Connection, parent: int) -> None:
    """The forked process: one cell, its answer down the pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        return
    os.environ["MASTER_PORT"] = str(cell.port)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=cell.timeout_s))
        answer.send(measure(cell, rank))
        dist.barrier()  # no rank may leave while another still needs it
    except Exception as error:  # whatever a system raises is a result
        answer.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
    answer.close()
    # Systems leave threads behind that would keep a process from ending.
    os._exit(0)


def serve(lab: Connection, rank: int) -> None:
    """Answers cells until the connection ends; None in place of a cell ends the one that is running."""
    forking = multiprocessing.get_context("fork")
    while True:
        try:
            cell: Cell | None = lab.recv()
        except EOFError:
            return
        if cell is None:
            continue  # told to stop what it had just finished
        answer, end = forking.Pipe(duplex=False)
        process = forking.Process(target=run_forked, args=(cell, rank, end, os.getpid()))
        process.start()
        end.close()
        result = _answer(answer, lab, cell.timeout_s)
        process.join(timeout=EXIT_S)
        process.kill()
        process.join()
        lab.send(result or Failed(f"the rank's process died with exit status {process.exitcode}", ""))


def _answer(answer: Connection, lab: Connection, timeout_s: float) -> Measured | Failed | None:
    """What the forked process says; None where it died."""
    ready = wait([answer, lab], timeout_s)
    if lab in ready:
        with contextlib.suppress(EOFError):
            lab.recv()
        return Failed(STOPPED, "")
    if not ready:
        return Failed(f"still busy after {timeout_s:g} s", "")
    try:
        result: Measured | Failed = answer.recv()
    except EOFError:
        return None
    return result


def main() -> None:
    torch.set_num_threads(1)
    text.words()
    address, environment, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    importlib.import_module(ENVIRONMENTS[environment])
    with Client(address, family="AF_UNIX") as lab:
        lab.send(Hello(rank, versions()))
        serve(lab, rank)


if __name__ == "__main__":
    main()
