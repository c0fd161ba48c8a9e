"""A thread that runs functions in order, and signals the end of each."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.futures import Future


class Worker:
    """A thread that runs functions in order. It ends with this object, or with the process."""

    def __init__(self, name: str) -> None:
        self._jobs = SimpleQueue[Any]()
        # Use a daemon thread, because a job may still wait for a dead rank when the interpreter exits.
        threading.Thread(target=_run_jobs, args=(self._jobs,), name=f"embrace_fx {name}", daemon=True).start()
        # Do not run the finalizer at interpreter exit: jobs may still run, and the daemon thread ends with the process.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Callable[[], Any]) -> Any:
        """Adds a function (`job`) to the queue. Returns a future of its result or error."""
        end: Any = torch._C.Future([])  # each method of `torch.futures.Future` would add a Python call
        self._jobs.put((job, end))
        return end


def _run_jobs(jobs: SimpleQueue[Any]) -> None:
    """Runs the jobs of a queue, (function, its future), in order, until the queue yields None."""
    while (next_ := jobs.get()) is not None:
        job, end = next_
        try:
            result = job()
        except Exception as error:  # raised by the caller's wait()
            end._set_unwrap_func(partial(_raise_error, error))
            end.set_result(error)
        else:
            end.set_result(result)
        del job, end, next_  # drop references before waiting for the next job


def _raise_error(error: Exception, _: object) -> None:
    """Raises an error. A future calls it instead of returning the result, its second argument, which is ignored."""
    raise error


class FutureWork:
    """A future with the methods of a collective's `Work`."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def get_future(self) -> Future[Any]:
        """Returns the wrapped future."""
        return self._future

    def wait(self) -> Any:
        """Waits for the future, and returns its result."""
        return self._future.wait()
