"""Prepares compiled models for forks of the process, and raises if a forked child uses one.

    loader = DataLoader(data, num_workers=4)    multiprocessing.get_context("fork").Process(target=evaluate)

Contract
    A child sees parameters, gradients and optimizer state after the last step. Pending updates are applied before the
    fork, because the child has no thread to apply them. Ops that need a connection to other ranks raise in the child,
    because it has only copies of its parent's connections. If the child ends by that error, its parent raises it too:
    the parent may wait for an answer.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

FORKED = (
    "The model was called, or a sharded table was read, in a forked child process, which cannot communicate with other "
    "ranks. Before the fork, call full_tensor() of the table or model.full_state_dict() on every rank. Or fork inside "
    "`with model.whole():`."
)
"""The error of a model in a forked child."""


class ForkAware(Protocol):
    """The methods of a compiled model that are called when the process forks."""

    def before_fork(self) -> None:
        """Called before the process forks."""

    def in_fork(self) -> None:
        """Called in the forked child."""


_MODELS: WeakSet[ForkAware] = WeakSet()


def watch_forks(model: ForkAware) -> None:
    """Registers a model, so that its `before_fork` and `in_fork` are called when the process forks."""
    _register_callbacks()
    _MODELS.add(model)


@cache
def _register_callbacks() -> None:
    """Registers the functions that Python calls at a fork. Only the first call does this."""
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


@cache
def _refused_child_memory() -> mmap.mmap:
    """Returns memory that is shared with child processes. It contains the process id of the last child that used a
    model, which raises an error in the child.
    """
    return mmap.mmap(-1, _BYTES)


_BYTES = 8


def fork_error() -> RuntimeError:
    """Returns the error to raise if a forked child uses a model. Records the child for its parent."""
    _refused_child_memory()[:] = os.getpid().to_bytes(_BYTES, "little")
    return RuntimeError(FORKED)


@cache
def _watch_children() -> None:
    """Installs a signal handler for the end of child processes, unless the script ignores the signal."""
    _refused_child_memory()
    before = signal.getsignal(signal.SIGCHLD)
    if before is signal.SIG_DFL or callable(before):
        signal.signal(signal.SIGCHLD, lambda number, frame: _on_child_exit(before, number, frame))


def _on_child_exit(before: Callable[..., Any] | int, number: int, frame: Any) -> None:
    """Handles the end of a child process. If the child failed because it used a model, raises the child's error in the
    parent.

    Args:
        before: the signal handler that this one replaces. Called first if it is a function.
        number, frame: the signal's number and the interrupted frame, as for any signal handler.
    """
    if callable(before):
        before(number, frame)
    child = int.from_bytes(_refused_child_memory()[:], "little")
    if child and _has_failed(child):
        _refused_child_memory()[:] = bytes(_BYTES)
        raise RuntimeError(f"A child process has failed. {FORKED}")


def _has_failed(child: int) -> bool:
    """Returns whether a child process has exited with an error. Its exit status stays available to other code."""
    try:
        found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the status has already been read, or the process is not a direct child
        return False
    return found is not None and found.si_code == os.CLD_EXITED and found.si_status != 0


def _before_fork() -> None:
    """Calls `before_fork` of all registered models."""
    if _MODELS and threading.current_thread() is threading.main_thread():
        _watch_children()
    for model in list(_MODELS):
        model.before_fork()


def _after_fork_in_child() -> None:
    """Calls `in_fork` of all registered models."""
    for model in list(_MODELS):
        model.in_fork()
