"""Real ranks for tests: worker processes that outlive a test, with gloo between them over loopback.

Importing torch once per rank and test is what makes distributed suites slow. Here one fork server imports it once per
session; a fork of it is a rank in some 50 ms, and the ranks of the shared pool also keep what they have warmed up.

Protocol
    The parent sends a pickled call and its test's name down a rank's pipe, the rank sends back an `Outcome`; end of
    file is the other side's death. Every `run_ranks` makes a new default group of exactly `world_size` ranks and leaves
    it at the end, so that no test sees another one's groups. A rank that raises reports, gives its peers a moment to
    finish by themselves, and exits: its closed connections are what frees peers that wait for it. The next call gets
    new ranks.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

TIMEOUT_S = 240.0
"""Time limit of one call, start of the ranks included."""
GROUP_TIMEOUT_S = 60.0
"""Timeout of the default process group: a collective that a rank never joins ends with an error on the others."""
PEER_GRACE_S = 1.0
"""How long a rank that raised stays connected, so that peers about to raise the same do not see a broken connection."""
EXIT_S = 30.0
"""How long ranks may take to exit by themselves once their work is done."""

PRELOAD = ["tests.support.preloaded"]
"""Modules the fork server imports once for all ranks."""


class RankDied(Exception):
    """A rank's process ended without reporting a result."""

    def __init__(self, rank: int, exitcode: int | None) -> None:
        super().__init__(rank, exitcode)
        self.rank = rank
        self.exitcode = exitcode

    def __str__(self) -> str:
        code = self.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        return f"the process of rank {self.rank} died with {how}"


class RankTimeout(Exception):
    """A rank was still busy when the call's time limit had passed; its process was killed."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What became of one rank.

    Attributes:
        result: what the function returned, None where it did not return.
        exception: what the rank raised, `RankDied` or `RankTimeout`; None where it returned.
        traceback: the text of the rank's own traceback, or of the stacks it hung in; empty where there is none.
        elapsed_s: seconds from the start of the call to the rank's report or death.
        exitcode: the exit status of its process (negative: the signal), of `fresh_ranks` alone.
    """

    result: T | None = None
    exception: BaseException | None = None
    traceback: str = ""
    elapsed_s: float = 0.0
    exitcode: int | None = None


class RankError(Exception):
    """At least one rank failed; the message tells of each failed rank, the earliest first.

    Attributes:
        by_rank: the exception of every rank, None where the rank returned.
    """

    def __init__(self, outcomes: Sequence[Outcome[Any]]) -> None:
        self.by_rank = [outcome.exception for outcome in outcomes]
        failed = sorted((o.elapsed_s, rank, o) for rank, o in enumerate(outcomes) if o.exception is not None)
        super().__init__("\n".join(_describe(rank, outcome) for _, rank, outcome in failed))


def _describe(rank: int, outcome: Outcome[Any]) -> str:
    error = outcome.exception
    headline = f"rank {rank}, after {outcome.elapsed_s:.1f} s: {type(error).__name__}: {error}"
    return f"{headline}\n{outcome.traceback}" if outcome.traceback else headline


def run_ranks(world_size: int, fn: Callable[..., T], *args: Any, timeout_s: float = TIMEOUT_S) -> list[T]:
    """Runs `fn(rank, world_size, *args)` on ranks 0 .. world_size - 1 of the shared pool.

    torch.distributed is initialised to exactly these ranks (gloo). `fn` is a function of a module, it and its arguments
    and results are pickled. The test's warning filters hold on the ranks too.

    Returns: the results in rank order.
    Raises: `RankError` where a rank raises, dies or takes longer than `timeout_s`.
    """
    __tracebackhide__ = True
    outcomes = _call_shared_pool(world_size, fn, args, timeout_s)
    if not _all_returned(outcomes):
        raise RankError(outcomes)
    return [outcome.result for outcome in outcomes]  # type: ignore[misc]  # a rank without exception has a result


def run_ranks_expecting_errors(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
) -> list[BaseException | None]:
    """As `run_ranks`, but returns what each rank raised, None where it returned.

    Raises: `RankError` where a rank takes longer than `timeout_s`, for a hang is never the expected error.
    """
    __tracebackhide__ = True
    outcomes = _call_shared_pool(world_size, fn, args, timeout_s)
    if any(isinstance(outcome.exception, RankTimeout) for outcome in outcomes):
        raise RankError(outcomes)
    return [outcome.exception for outcome in outcomes]


def fresh_ranks(world_size: int, fn: Callable[..., T], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Outcome[T]]:
    """As `run_ranks` in processes of its own, for tests in which a rank dies; raises nothing, returns every outcome.

    A rank whose function returned exits as a script does at its end, with 0; one that raised exits with 1; one that
    cannot exit is killed (-9).
    """
    pool = Pool()
    outcomes = pool.call(world_size, fn, args, timeout_s)
    return [replace(o, exitcode=code) for o, code in zip(outcomes, pool.close(EXIT_S), strict=True)]


def store() -> Any:
    """Returns the store that all ranks of the current call share."""
    return _of_process.store


def close_pool() -> None:
    """Ends the processes of the shared pool; a later call starts new ones."""
    _pool.close(EXIT_S)


atexit.register(close_pool)  # otherwise a script that calls `run_ranks` would wait for the ranks at exit


def reset_torch_state() -> None:
    """Makes a test independent of those before it: the seed, the default type, and the compile caches, whose entries
    are limited in number per code object and would run out as more and more tests compile the same model.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _all_returned(outcomes: Sequence[Outcome[Any]]) -> bool:
    return all(outcome.exception is None for outcome in outcomes)


_of_process = SimpleNamespace(store=None)


@dataclass(frozen=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection


class Pool:
    """Processes that serve as ranks, started when a call needs them, and anew after `close` or a death."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str]

    def call(self, world_size: int, fn: Callable[..., T], args: Sequence[Any], timeout_s: float) -> list[Outcome[T]]:
        """Runs `fn(rank, world_size, *args)` on the first `world_size` processes; close the pool if one failed."""
        start_s = time.monotonic()
        if not all(worker.process.is_alive() for worker in self._workers):
            self.close()
        if not self._workers:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._workers += [_start_worker() for _ in range(world_size - len(self._workers))]
        # Not deleted, because the thread of a model that still exists may wait for it.
        directory = Path(tempfile.mkdtemp(dir=self._folder.name))
        jobs = [
            _packed(_run_as_rank, rank, world_size, directory, fn, args, warnings.filters) for rank in range(world_size)
        ]
        outcomes = self._exchange(jobs, directory, start_s, timeout_s)
        if _all_returned(outcomes):
            # Leave the group only when all ranks are done. A rank that left early would break other ranks' collectives.
            left = self._exchange([_packed(_leave_group)] * world_size, directory, start_s, timeout_s)
            outcomes = [replace(end, result=o.result) for o, end in zip(outcomes, left, strict=True)]
        return outcomes

    def _exchange(self, jobs: Sequence[bytes], directory: Path, start_s: float, timeout_s: float) -> list[Outcome[Any]]:
        """Sends job r to rank r and collects what becomes of them; kills the ranks that take longer than the limit."""
        outcomes: list[Outcome[Any]] = [Outcome() for _ in jobs]
        busy: dict[Any, int] = {}  # connection -> rank
        for rank, job in enumerate(jobs):
            connection = self._workers[rank].connection
            connection.send_bytes(job)
            busy[connection] = rank
        while busy and (ready := wait(list(busy), max(0.0, start_s + timeout_s - time.monotonic()))):
            for reporting in ready:
                rank = busy.pop(reporting)
                outcome = _receive(rank, self._workers[rank])
                outcomes[rank] = replace(outcome, elapsed_s=time.monotonic() - start_s)
        if busy:
            _dump_stacks([self._workers[rank].process for rank in busy.values()])
        for rank in busy.values():
            self._workers[rank].process.kill()
            error = RankTimeout(f"still busy after {timeout_s:g} s")
            outcomes[rank] = Outcome(None, error, _read_stacks(directory, rank), elapsed_s=timeout_s)
        return outcomes

    def close(self, grace_s: float = 0.0) -> list[int | None]:
        """Ends the processes, by force after `grace_s`; returns their exit codes in rank order."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.connection.close()
        deadline_s = time.monotonic() + grace_s
        for worker in workers:
            worker.process.join(max(0.0, deadline_s - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()
        exitcodes = [worker.process.exitcode for worker in workers]
        for worker in workers:
            worker.process.close()
        if workers:
            self._folder.cleanup()
        return exitcodes


def _packed(call: Callable[..., Any], *args: Any) -> bytes:
    """A call as it goes down a pipe, with the name of the test that makes it."""
    return pickle.dumps((call, args, os.environ.get("PYTEST_CURRENT_TEST", "")))


_pool = Pool()


def _call_shared_pool(world_size: int, fn: Callable[..., T], args: Sequence[Any], timeout_s: float) -> list[Outcome[T]]:
    try:
        outcomes = _pool.call(world_size, fn, args, timeout_s)
    # Close the pool, because late replies after an interrupt or a timeout would reach the next call.
    except BaseException:
        _pool.close()
        raise
    if not _all_returned(outcomes):
        _pool.close()
    return outcomes


def _start_worker() -> _Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _receive(rank: int, worker: _Worker) -> Outcome[Any]:
    try:
        payload = worker.connection.recv_bytes()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return Outcome(exception=RankDied(rank, worker.process.exitcode))
    return pickle.loads(payload)


def _dump_stacks(processes: Sequence[ForkServerProcess]) -> None:
    """Has each process write the Python stacks of its threads to the file it opened for them."""
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)  # the processes need time to write, and do not say when they are done


def _read_stacks(directory: Path, rank: int) -> str:
    path = directory / f"stacks-{rank}"
    return path.read_text() if path.exists() else ""


def _serve(connection: Connection) -> None:
    """A rank's main loop: runs what the parent sends until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches ranks, but only the parent should end them
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may not resolve
    torch.set_num_threads(1)
    gc.freeze()  # excludes imported modules from collections
    gc.enable()
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            break
        outcome = _attempt(job)
        sys.stdout.flush()  # so that pytest shows the output with the right test
        sys.stderr.flush()
        connection.send_bytes(_pack(outcome))
        if outcome.exception is not None:
            connection.poll(PEER_GRACE_S)  # ends early if the parent closes the pipe, once it is done with all ranks
            os._exit(1)  # sys.exit() would wait for threads that are blocked in a collective


def _attempt(job: bytes) -> Outcome[Any]:
    try:
        call, args, os.environ["PYTEST_CURRENT_TEST"] = pickle.loads(job)
        return Outcome(result=call(*args))
    except BaseException as error:  # includes SystemExit, because tests check how a rank ends
        text = traceback.format_exc()
        error.add_note(text)  # shown when one exception of `RankError.by_rank` is printed
        return Outcome(exception=_portable(error), traceback=text)


def _pack(outcome: Outcome[Any]) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        message = f"the result, a {type(outcome.result).__qualname__}, cannot be pickled: {error}"
        return pickle.dumps(Outcome(exception=TypeError(message)))


def _portable(error: BaseException) -> BaseException:
    """The exception itself, or a RuntimeError in its place where it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__qualname__} (which cannot be pickled): {error}")
    return error


def _run_as_rank(
    rank: int, world_size: int, directory: Path, fn: Callable[..., T], args: Sequence[Any], filters: Sequence[Any]
) -> T:
    with (directory / f"stacks-{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            reset_torch_state()
            _of_process.store = dist.FileStore(str(directory / "store"), world_size)  # type: ignore[attr-defined]
            timeout = timedelta(seconds=GROUP_TIMEOUT_S)
            dist.init_process_group("gloo", store=_of_process.store, rank=rank, world_size=world_size, timeout=timeout)
            with warnings.catch_warnings():
                warnings.filters[:] = filters  # type: ignore[index]  # typed as a Sequence, is a list
                return fn(rank, world_size, *args)
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def _leave_group() -> None:
    """Ends what the call has left behind, but for what only a later collection finds."""
    reset_torch_state()
    gc.collect()
    gc.freeze()  # excludes remaining objects from later collections
    dist.destroy_process_group()
