"""What traffic by itself takes of the cores that ranks compute on: a computation with and without transfers beside it.

    python -m benchmarks.micro.shared_cores --output benchmarks/results

Every rank repeats forward and backward of a Transformer layer, on a host of its own with links of limited bandwidth
(benchmarks/network.py). In every second turn a process beside it, on the same core, sends to the next rank and receives
from the one before, as much as the link carries, with the priority that the lab gives to communication. The computation
waits for none of it: what it takes longer is what copies into and out of the kernel, packets and interrupts take of the
cores. No program that communicates while it computes can do without.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lab.rank import COMMUNICATION_NICE
from benchmarks.namespaces import interface_sent_bytes
from benchmarks.network import Links, network
from benchmarks.records import write_record

PORT = 5_001
"""On each rank's own host, where every port is free."""
BUFFER_BYTES = 256 * 1024
SETTLE_S = 0.5
"""After a change, until windows are full, or what was under way has arrived."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
WIDTH, HEADS, TOKENS, SEQUENCES = 256, 4, 64, 8


@dataclass(frozen=True)
class Turn:
    """One rank's.

    Attributes:
        wall_ms, cpu_ms: of the computation; the second without the time in which its core did something else.
        sent_mbit: per second, by the interface's counter.
    """

    wall_ms: float
    cpu_ms: float
    sent_mbit: float


def transfer(following: str, rank_pid: int) -> None:
    """Sends to the next rank and receives from the one before, until it is killed, or its rank has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank_pid:
        return
    os.setpriority(os.PRIO_PROCESS, 0, COMMUNICATION_NICE)
    server = socket.create_server(("", PORT))

    def receive() -> None:
        connection, _ = server.accept()
        buffer = bytearray(BUFFER_BYTES)
        while connection.recv_into(buffer):
            pass

    threading.Thread(target=receive, daemon=True).start()
    chunk = bytes(BUFFER_BYTES)
    with _connected(following) as out:
        while True:
            out.sendall(chunk)


def _connected(address: str) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, PORT))
        except ConnectionError:  # it does not listen yet
            time.sleep(0.05)


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.connect((os.environ["MASTER_ADDR"], PORT))
        address: str = any_socket.getsockname()[0]
        return address


def run_rank(rounds: int, repeats: int) -> list[tuple[Turn, Turn]]:
    """This rank's turns: of each round, alone and beside transfers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    addresses = [""] * dist.get_world_size()
    dist.all_gather_object(addresses, _own_address())
    following = addresses[(dist.get_rank() + 1) % len(addresses)]
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    batch = torch.randn(SEQUENCES, TOKENS, WIDTH)
    interface = os.environ["GLOO_SOCKET_IFNAME"]

    def turn(traffic: subprocess.Popen[bytes], sign: signal.Signals) -> Turn:
        traffic.send_signal(sign)
        time.sleep(SETTLE_S)
        dist.barrier()
        sent, wall_s, cpu_s = interface_sent_bytes(interface), time.perf_counter(), time.thread_time()
        for _ in range(repeats):
            layer(batch).sum().backward()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
        sent = interface_sent_bytes(interface) - sent
        dist.barrier()
        return Turn(wall_s * 1e3, cpu_s * 1e3, sent * 8 / 1e6 / wall_s)

    command = [sys.executable, "-m", "benchmarks.micro.shared_cores", "--transfer-to", following, str(os.getpid())]
    with subprocess.Popen(command) as traffic:
        time.sleep(SETTLE_S)
        turn(traffic, signal.SIGCONT)
        turns = [(turn(traffic, signal.SIGSTOP), turn(traffic, signal.SIGCONT)) for _ in range(rounds)]
        traffic.kill()
    return turns


def summarise(ranks: list[list[tuple[Turn, Turn]]]) -> dict[str, float]:
    """Medians over rounds; of a round, over ranks."""
    rounds = list(zip(*ranks, strict=True))

    def each(which: int, name: str) -> list[float]:
        return [statistics.median(getattr(turns[which], name) for turns in of_ranks) for of_ranks in rounds]

    alone, beside = each(0, "wall_ms"), each(1, "wall_ms")
    ratios = [b / a for a, b in zip(alone, beside, strict=True)]
    return {
        "alone_ms": statistics.median(alone),
        "beside_ms": statistics.median(beside),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "alone_cpu_ms": statistics.median(each(0, "cpu_ms")),
        "beside_cpu_ms": statistics.median(each(1, "cpu_ms")),
        "sent_mbit": statistics.median(each(1, "sent_mbit")),
    }


def report(configuration: dict[str, Any], rows: dict[int, dict[str, float]]) -> str:
    lines = [
        f"# A computation beside transfers, {configuration['date']}",
        "",
        f"Measured: `{configuration['command']}`, {configuration['rounds']} rounds, {configuration['rate_mbit']:g} "
        f"Mb/s each way and rank, torch {configuration['torch']}, Python {configuration['python']}, "
        f"{configuration['cores']} cores. The computation waits for no transfer. Medians over ranks, then over rounds "
        "(smallest to largest).",
        "",
        "| ranks | alone ms | beside transfers ms | ratio | CPU ms alone | beside | a rank sends Mb/s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {ranks} | {row['alone_ms']:.0f} | {row['beside_ms']:.0f} | {row['ratio']:.2f} ({row['ratio_min']:.2f} to "
        f"{row['ratio_max']:.2f}) | {row['alone_cpu_ms']:.0f} | {row['beside_cpu_ms']:.0f} | {row['sent_mbit']:.0f} |"
        for ranks, row in rows.items()
    ]
    return "\n".join(lines) + "\n"


def measure(options: argparse.Namespace) -> None:
    """All numbers of ranks, one after the other; prints and writes what was found."""
    found: dict[int, list[list[tuple[Turn, Turn]]]] = {}
    own = ["--rounds", str(options.rounds), "--repeats", str(options.repeats)]
    for ranks in options.ranks:
        with network(Links(ranks, options.rate_mbit)) as hosts:
            if not hosts.reached.shaped:
                sys.exit(f"expected hosts of their own for all ranks, found none to be had: {hosts.reached.reason}")
            command = [sys.executable, "-m", "benchmarks.micro.shared_cores", "--rank", *own]
            printed = hosts.run(command, timeout_s=600, environment={"OMP_NUM_THREADS": "1"})
        found[ranks] = [
            [(Turn(**alone), Turn(**beside)) for alone, beside in json.loads(text.strip().splitlines()[-1])]
            for text in printed
        ]
    rows = {ranks: summarise(turns) for ranks, turns in found.items()}
    configuration = {
        "command": " ".join(["python -m benchmarks.micro.shared_cores", *sys.argv[1:]]),
        "rate_mbit": options.rate_mbit,
        "rounds": options.rounds,
        "repeats": options.repeats,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }
    print(report(configuration, rows))
    if options.output:
        turns = {
            ranks: [[[asdict(t) for t in both] for both in rank] for rank in each] for ranks, each in found.items()
        }
        stem = options.output / f"shared-cores-{configuration['date']}"
        write_record(stem, {"configuration": configuration, "summary": rows, "turns": turns})
        stem.with_suffix(".md").write_text(report(configuration, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=24, help="of the computation, in a turn")
    parser.add_argument("--output", type=Path, help="a folder for JSON and table")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--transfer-to", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.transfer_to:
        transfer(options.transfer_to[0], int(options.transfer_to[1]))
    elif options.rank:
        turns = run_rank(options.rounds, options.repeats)
        print(json.dumps([[asdict(each) for each in both] for both in turns]))
    else:
        measure(options)


if __name__ == "__main__":
    main()
