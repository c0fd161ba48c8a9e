"""Handles forks of a process with compiled models.

    loader = DataLoader(data, num_workers=4)    multiprocessing.get_context("fork").Process(target=evaluate)

Contract
    A child sees parameters, gradients and optimizer state after the last step. Pending updates are applied before the
    fork, because the child has no thread to apply them. Ops that need a connection to other ranks raise in the child,
    because it has only copies of its parent's connections.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Protocol
from weakref import WeakSet


class Forking(Protocol):
    """The methods that a compiled model provides for forks."""

    def before_fork(self) -> None:
        """Prepares this model for a fork."""

    def in_fork(self) -> None:
        """Makes this model usable in a forked process."""


_MODELS: WeakSet[Forking] = WeakSet()


def watch_forks(model: Forking) -> None:
    """Registers a model whose pending updates forks must apply first."""
    _listen()
    _MODELS.add(model)


@cache
def _listen() -> None:
    """Registers the two callbacks for forks."""
    os.register_at_fork(before=_before, after_in_child=_in_child)


def _before() -> None:
    """Prepares all models for a fork."""
    for model in list(_MODELS):
        model.before_fork()


def _in_child() -> None:
    """Makes all models usable in the forked process."""
    for model in list(_MODELS):
        model.in_fork()
