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
    """A thread that runs functions in the order in which they are submitted. It ends when this object is freed, or with
    the process.
    """

    def __init__(self, name: str) -> None:
        self._jobs = SimpleQueue[Any]()
        # Use a daemon thread, because a job may still wait for a dead rank when the interpreter exits.
        threading.Thread(target=_run_jobs, args=(self._jobs,), name=f"embrace_fx {name}", daemon=True).start()
        # Do not run the finalizer at interpreter exit: jobs may still run, and the daemon thread ends with the process.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Callable[[], Any]) -> Any:
        """Adds the function `job` to the queue. Returns a future, which completes with the function's result or
        error.
        """
        end: Any = torch._C.Future([])  # each method of `torch.futures.Future` would add a Python call
        self._jobs.put((job, end))
        return end


def _run_jobs(jobs: SimpleQueue[Any]) -> None:
    """Runs the functions in a queue, in order, until it gets None from the queue.

    Args:
        jobs: a queue of pairs (function, future of its result).
    """
    while (next_ := jobs.get()) is not None:
        job, end = next_
        try:
            result = job()
        except Exception as error:  # the caller's wait() raises it
            end._set_unwrap_func(partial(_raise_error, error))
            end.set_result(error)
        else:
            end.set_result(result)
        del job, end, next_  # drop references before waiting for the next job


def _raise_error(error: Exception, _: object) -> None:
    """Raises `error`. A future of a failed job calls this function when its result is read. The second argument, the
    result, is ignored.
    """
    raise error


class FutureWork:
    """Wraps a future in an object with the methods of torch's `Work`, the handle of a collective."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def get_future(self) -> Future[Any]:
        """Returns the wrapped future."""
        return self._future

    def wait(self) -> Any:
        """Waits for the future, and returns its result."""
        return self._future.wait()
