"""The lab's ranks: a crew of processes per environment, each on the host of its rank, one system at work at a time."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from benchmarks.lab.cell import STOPPED, Answer, Close, Command, Failed, Hello, Open
from benchmarks.network import Network

ROOT = Path(__file__).parents[2]
START_S = 300.0
"""How long the ranks of an environment may take to import it, on cores that are busy with each other."""
GRACE_S = 30.0
"""How much longer than its system a rank may take to answer."""


class CrewFailed(RuntimeError):
    """The ranks of an environment did not start, or one of them has died."""


def python_of(environment: str) -> Path:
    """Returns the Python interpreter that runs the systems of an environment.

    Raises:
        CrewFailed: the environment has not been created.
    """
    if environment == "project":
        return Path(sys.executable)
    python = ROOT / "build" / "peers" / environment / "bin" / "python"
    if not python.exists():
        raise CrewFailed(f"the environment build/peers/{environment} does not exist: run `make bench-peers`")
    return python


@dataclass(frozen=True)
class Crew:
    """The ranks of one environment.

    Attributes:
        versions: the versions of Python and of the relevant packages on rank 0.
    """

    versions: dict[str, str]
    _connections: tuple[Connection, ...]
    _errors: tuple[Path, ...]

    def ask(self, command: Command, timeout_s: float) -> tuple[Answer, ...]:
        """Returns the answers of all ranks, in rank order. If a rank fails, returns only the reason of the first
        failure.

        Raises:
            CrewFailed: a rank has died, or does not answer.
        """
        for rank, connection in enumerate(self._connections):
            try:
                connection.send(command)
            except OSError as error:
                raise CrewFailed(f"rank {rank} ended before it listened:\n{self._errors_of(rank)}") from error
        answers: dict[int, Answer] = {}
        while len(answers) < len(self._connections):
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in answers}
            ready = wait(waiting, timeout_s + GRACE_S)
            if not ready:
                raise CrewFailed(f"ask(): no answer within {timeout_s + GRACE_S:g} s")
            failed_before = any(isinstance(answer, Failed) for answer in answers.values())
            for rank in [rank for connection, rank in waiting.items() if connection in ready]:
                answers[rank] = self._receive(rank)
            if not failed_before and any(isinstance(answer, Failed) for answer in answers.values()):
                for rank, connection in enumerate(self._connections):
                    if rank not in answers:
                        connection.send(None)
        failures = [(rank, a) for rank, a in sorted(answers.items()) if isinstance(a, Failed)]
        if not failures:
            return tuple(answer for _, answer in sorted(answers.items()))
        rank, first = next(((r, f) for r, f in failures if f.reason != STOPPED), failures[0])
        self._close_where_open(command, answers)
        return (Failed(f"rank {rank}: {first.reason}", first.details),)

    def _close_where_open(self, command: Command, answers: Mapping[int, Answer]) -> None:
        """Closes a system that has failed on one rank on all ranks on which it has not failed."""
        name = command.cell.system if isinstance(command, Open) else command.system
        for rank, answer in answers.items():
            if not isinstance(answer, Failed):
                self._connections[rank].send(Close(name))
                self._receive(rank)

    def _receive(self, rank: int) -> Answer:
        try:
            answer: Answer = self._connections[rank].recv()
        except (EOFError, ConnectionError) as error:
            raise CrewFailed(f"rank {rank} ended before it answered:\n{self._errors_of(rank)}") from error
        return answer

    def _errors_of(self, rank: int) -> str:
        return _tail(self._errors[rank])


@contextlib.contextmanager
def crew(hosts: Network, ranks: int, environment: str, logs: Path) -> Iterator[Crew]:
    """Starts the ranks of an environment; they end with the block, or with this process.

    Args:
        logs: folder for what they write to standard error.

    Raises:
        CrewFailed: the environment has not been made, or a rank does not start.
    """
    python = python_of(environment)
    logs.mkdir(parents=True, exist_ok=True)
    errors = tuple(logs / f"{environment}-{rank}.txt" for rank in range(ranks))
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build" / "lab" / "inductor"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-"))
        # Use a new cache for each network, so that its systems share one probe and do not reuse the links of other
        # networks.
        variables["EMBRACE_FX_CACHE"] = os.path.join(folder, "cache")
        # A socket with a path is reachable from every network namespace.
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(address := os.path.join(folder, environment))
        server.listen(ranks)
        server.settimeout(1.0)
        processes = []
        for rank, error in enumerate(errors):
            command = [str(python), "-m", "benchmarks.lab.rank", address, environment, str(rank)]
            processes.append(hosts.start(rank, command, environment=variables, output=error, errors=error))
            stack.callback(_end, processes[-1])
        greeted: dict[int, tuple[Connection, Hello]] = {}
        while len(greeted) < ranks:
            connection = stack.enter_context(_accept(server, processes, errors))
            hello: Hello = connection.recv()
            greeted[hello.rank] = connection, hello
        connections = tuple(greeted[rank][0] for rank in range(ranks))
        yield Crew(greeted[0][1].versions, connections, errors)


def _accept(server: socket.socket, processes: Sequence[subprocess.Popen[bytes]], errors: Sequence[Path]) -> Connection:
    for _ in range(int(START_S)):
        with contextlib.suppress(TimeoutError):
            return Connection(server.accept()[0].detach())
        for process, error in zip(processes, errors, strict=True):
            if process.poll() is not None:
                raise CrewFailed(f"the rank exited with status {process.returncode}:\n{_tail(error)}")
    raise CrewFailed(f"not all ranks started within {START_S:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-8:])
