"""Forks of a process that trains: a child reads what is, and what needs other ranks is refused at once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from functools import partial
from typing import Any

import pytest
import torch

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.scenario import OPTIMIZERS, Training
from tests.support.scenarios.modes import in_a_child


def _ask(rank: int, world_size: int) -> list[Any]:
    training = Training(partial(embrace_fx.compile, strategy="alltoall"), OPTIMIZERS["adamw"], is_compiled=True)
    for batch in training.batches(3):
        training.update(batch)
    table, model = training.tables[0], training.model
    asked = [
        in_a_child(lambda: table.sum().item()),
        in_a_child(lambda: model(*training.batch(0)).item()),
        in_a_child(lambda: training.module.words(torch.ones(2, dtype=torch.int64)).sum().item()),
        in_a_child(lambda: pickle.dumps(table)),
    ]
    with model.whole() as whole:
        asked.append(in_a_child(lambda: whole.words.weight.sum().item()))
        expected = whole.words.weight.sum().item()
    training.update(training.batch(0))  # the ranks can still train
    return [*asked, expected]


@pytest.mark.long
def test_what_needs_other_ranks_is_refused_in_a_child() -> None:
    for *refused, whole, expected in run_ranks(2, _ask):
        for told in refused:
            assert "a forked child process" in told
            assert "model.whole()" in told
        assert whole == expected


def _await(rank: int, world_size: int) -> tuple[str, float]:
    training = Training(partial(embrace_fx.compile, strategy="alltoall"), OPTIMIZERS["adamw"], is_compiled=True)
    training.update(training.batch(0))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    words, ids = training.module.words, torch.ones(2, dtype=torch.int64)
    context.Process(target=os._exit, args=(1,)).start()  # the failure of another child must not matter
    context.Process(target=lambda: answers.put(words(ids).sum().item())).start()
    began = time.monotonic()
    try:
        answers.get(timeout=40)
    except Exception as error:
        return str(error), time.monotonic() - began
    return "an answer", 0.0


def test_a_parent_does_not_wait_for_a_child_that_was_refused() -> None:
    for told, waited_s in run_ranks(2, _await):
        assert "A child process has failed" in told
        assert "model.whole()" in told
        assert waited_s < 20
