"""Checks which features of embrace_fx work on this machine and in this launch, and how to fix the others.

Each check returns one finding. Ranks that run `embrace-fx doctor` under torchrun also probe the links between them.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from typing import Literal

import torch
import torch.distributed as dist

Environment = Mapping[str, str]

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)


@dataclass(frozen=True)
class Finding:
    """The result of one check of `embrace-fx doctor`.

    Attributes:
        subject: what was checked.
        state: "works"; "limits" if training is slower or an option is unavailable; "fails" if training is impossible.
        found: the result, in a few words.
        to_do: how to fix it, or "" if nothing needs to be done.
    """

    subject: str
    state: Literal["works", "limits", "fails"]
    found: str
    to_do: str = ""


def software_versions(_: Environment) -> Finding:
    """Checks that Python and torch are recent enough. Ignores the environment."""
    found = (
        f"Python {platform.python_version()}, torch {torch.__version__}, embrace-fx {metadata.version('embrace-fx')}"
    )
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if sys.version_info < OLDEST_PYTHON or release < OLDEST_TORCH:
        needed = f"Python {'.'.join(map(str, OLDEST_PYTHON))} and torch {'.'.join(map(str, OLDEST_TORCH))}, or later"
        return Finding("versions", "fails", found, f"install {needed}")
    return Finding("versions", "works", found)


def backends(_: Environment) -> Finding:
    """Checks that gloo or NCCL supports the devices of this machine. Ignores the environment."""
    if not dist.is_available():
        return Finding("backends", "fails", "torch without torch.distributed", "install a build of torch that has it")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    carries = [
        name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there
    ]
    found = f"{', '.join(carries) or 'none'}; {gpus} CUDA device(s)"
    if gpus and "nccl" not in carries:
        return Finding("backends", "limits", found, "install a build of torch with NCCL; GPUs would send through gloo")
    if not carries:
        return Finding("backends", "fails", found, "install a build of torch with gloo or NCCL")
    return Finding("backends", "works", found)


def compiler(environment: Environment) -> Finding:
    """Checks for a C++ compiler, which `backend="inductor"` calls on a CPU. Looks for the compiler in the environment
    variable `CXX`, or for a common one on `PATH`.
    """
    asked = environment.get("CXX")
    for name in (asked,) if asked else ("g++", "c++", "clang++"):
        if path := shutil.which(name, path=environment.get("PATH")):
            return Finding("C++ compiler", "works", path)
    missing = f"CXX={asked}, which does not exist" if asked else "none of g++, c++, clang++"
    return Finding("C++ compiler", "limits", missing, 'install g++ or set CXX; until then backend="inductor" raises')


def triton(_: Environment) -> Finding:
    """Checks for Triton, the language of the GPU kernels. Ignores the environment."""
    there = util.find_spec("triton") is not None
    if not torch.cuda.is_available():
        return Finding("Triton", "works", "not needed without a CUDA device")
    if not there:
        return Finding("Triton", "limits", "not installed", "pip install 'embrace-fx[triton]'; GPU kernels need it")
    return Finding("Triton", "works", metadata.version("triton"))


def launcher_variables(environment: Environment) -> Finding:
    """Checks that the environment contains either all variables that a launcher such as torchrun sets, or none."""
    there = [name for name in LAUNCH_VARIABLES if name in environment]
    if not there:
        return Finding("launch", "works", "a single process; `torchrun --nproc-per-node 2 -m ...` starts several")
    if missing := [name for name in LAUNCH_VARIABLES if name not in environment]:
        found = f"{', '.join(there)} without {', '.join(missing)}"
        return Finding(
            "launch", "fails", found, "start every rank with torchrun, or unset the variables of an old launch"
        )
    rank, size = environment["RANK"], environment["WORLD_SIZE"]
    if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
        return Finding(
            "launch", "fails", f"RANK={rank} of WORLD_SIZE={size}", "ranks are numbered from 0 to WORLD_SIZE - 1"
        )
    return Finding("launch", "works", f"rank {rank} of {size}")


def master_address(environment: Environment) -> Finding:
    """Checks that the host in the environment variable `MASTER_ADDR`, at which ranks meet, can be resolved."""
    host = environment.get("MASTER_ADDR")
    if host is None:
        return Finding("meeting place", "works", "none is needed for a single process")
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError as error:
        return Finding(
            "meeting place",
            "fails",
            f"MASTER_ADDR={host}: {error}",
            "set it to rank 0's address, or pass torchrun --rdzv-endpoint; 127.0.0.1 on one machine",
        )
    return Finding("meeting place", "works", f"{host} is {address}")


def network_interface(environment: Environment) -> Finding:
    """Checks that the network interfaces in the environment variable `GLOO_SOCKET_IFNAME` exist."""
    asked, there = environment.get("GLOO_SOCKET_IFNAME"), [name for _, name in socket.if_nameindex()]
    if asked and not set(asked.split(",")) <= set(there):
        return Finding(
            "network interface",
            "fails",
            f"GLOO_SOCKET_IFNAME={asked}, and this machine has {', '.join(there)}",
            "set it to the interface that connects the ranks, or unset it",
        )
    return Finding("network interface", "works", asked or f"gloo chooses among {', '.join(there)}")


def thread_count(environment: Environment) -> Finding:
    """Checks that the ranks of a machine do not start more threads in total than it has cores. Reads the numbers of
    ranks and threads from the environment.
    """
    ranks, cores = int(environment.get("LOCAL_WORLD_SIZE", "1")), os.cpu_count() or 1
    each = int(environment.get("OMP_NUM_THREADS") or cores)
    found = f"{ranks} rank(s) of {each} thread(s) on {cores} core(s)"
    if ranks > 1 and ranks * each > cores and not torch.cuda.is_available():
        return Finding("threads", "limits", found, f"set OMP_NUM_THREADS={max(1, cores // ranks)}")
    return Finding("threads", "works", found)


CHECKS: tuple[Callable[[Environment], Finding], ...] = (
    software_versions,
    backends,
    compiler,
    triton,
    launcher_variables,
    master_address,
    network_interface,
    thread_count,
)


def run_checks(environment: Environment) -> list[Finding]:
    """Runs all checks in order. Returns one finding for each.

    Args:
        environment: the environment variables of this process.
    """
    return [check(environment) for check in CHECKS]


def probe_links() -> Finding:
    """Measures bandwidth and latency of the links between the ranks of the default process group. Collective."""
    from embrace_fx.runtime.probe.probe import probe_cluster  # noqa: PLC0415  (DTensor takes a while to import)
    from embrace_fx.runtime.ranks.communicator import Communicator  # noqa: PLC0415

    link = probe_cluster(Communicator(dist.group.WORLD)).link("all_reduce")
    gigabits = link.bandwidth_bytes_per_ms * 8e3 / 1e9
    return Finding("links", "works", f"{gigabits:.2f} Gb/s, {link.start_up_ms:.3f} ms to start a message")
