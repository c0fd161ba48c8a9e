"""What compiled models do before their process forks, and in the child.

    loader = DataLoader(data, num_workers=4)    multiprocessing.get_context("fork").Process(target=evaluate)

Contract
    A child finds parameters, gradients and optimizer state as they are after the last step: it has no thread that would
    apply an update. It holds copies of the connections to other ranks: what would use one is refused.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Protocol
from weakref import WeakSet


class Forking(Protocol):
    """A compiled model, as this sees it."""

    def before_fork(self) -> None: ...

    def in_fork(self) -> None: ...


_MODELS: WeakSet[Forking] = WeakSet()


def watch_forks(model: Forking) -> None:
    """Has forks wait for what a model has pending."""
    _listen()
    _MODELS.add(model)


@cache
def _listen() -> None:
    os.register_at_fork(before=_before, after_in_child=_in_child)


def _before() -> None:
    for model in list(_MODELS):
        model.before_fork()


def _in_child() -> None:
    for model in list(_MODELS):
        model.in_fork()
