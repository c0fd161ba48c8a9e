"""Updates of buckets that run into the next step, on a single process, whose launches end at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from embrace_fx.runtime.flow import bucket_updates
from embrace_fx.runtime.flow.bucket_updates import Buckets
from embrace_fx.runtime.launch.launch_queue import LaunchQueue
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.vocabulary.operation_id import chunk_id

NAMES = ("last", "middle", "first")
"""Each the parameter of a bucket, in the order of launches; a forward reads them from the end."""


class Training:
    """Three buckets that are reduced and then updated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parameters = {name: nn.Parameter(torch.ones(2)) for name in NAMES}
        self.together: list[int] = []  # number of parameters in each step
        monkeypatch.setattr(bucket_updates, "step_groups", self._step)
        communicator, order = Communicator(None), [chunk_id(k, 0) for k in range(len(NAMES))]
        self.launcher = Launcher(order, (), LaunchQueue(Recorder()), communicator)
        sends = dict.fromkeys(range(len(NAMES)), lambda flat, _: InFlight(flat, None))
        self.buckets = Buckets([(name,) for name in NAMES], self._find, communicator, self.launcher, sends)
        for k, launch in enumerate(order):
            flat = torch.full((2,), float(k + 1))
            self.buckets.submit_chunk(launch, flat, 0, 2, "")
            self.buckets.defer_bucket(flat, k)
        self.buckets.deliver(range(len(NAMES)))
        optimizer = SGD(self.parameters.values(), lr=0.25)
        hidden = self.buckets.hide_late(optimizer, set())
        self.buckets.step(optimizer, {key: bucket for key, (_, _, bucket) in hidden.items()})
        optimizer.param_groups[0]["lr"] = 100.0  # changed for the next step, before this one is applied

    def _find(self, names: Collection[str]) -> list[nn.Parameter]:
        return [self.parameters[name] for name in names]

    def _step(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
        self.together.append(sum(len(group["params"]) for group in groups))
        for group in groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad

    @property
    def values(self) -> list[float]:
        return [self.parameters[name][0].item() for name in reversed(NAMES)]


def test_the_first_read_of_a_bucket_takes_along_all_that_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    for k in reversed(range(len(NAMES))):
        training.buckets.update_bucket(None, k)
    assert training.together == [3]
    assert training.values == [0.25, 0.5, 0.75]


def test_a_bucket_in_flight_keeps_those_behind_it_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    sent = training.buckets.all[1].sent
    assert sent is not None
    sent[1][0].done = False
    training.buckets.update_bucket(None, 2)
    assert training.together == [1]
    assert training.values == [0.25, 1.0, 1.0]
    training.buckets.update_bucket(None, 1)
    assert training.together == [1, 2]
    assert training.values == [0.25, 0.5, 0.75]


def test_no_bucket_takes_over_chunks_of_a_backward_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    for k in reversed(range(len(NAMES))):
        training.buckets.update_bucket(None, k)
    training.launcher.open_window()
    training.buckets.submit_chunk(chunk_id(0, 0), torch.zeros(2), 0, 2, "")
    training.buckets.drop_submitted()
    training.buckets.defer_bucket(torch.zeros(2), 0)
    sent = training.buckets.all[0].sent
    assert sent is not None
    assert sent[1] == []
