"""Under `whole()` every rank holds every table, and parts of the model may be called; training goes on after it."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import embrace_fx
from tests.eager.models import Classifier, labelled
from tests.support.ranks import run_ranks


def _train(rank: int, world_size: int, looks: bool) -> tuple[list[Tensor], list[bool], list[str]]:
    torch.manual_seed(0)
    model: Any = Classifier()
    compiled = embrace_fx.compile(model, strategy="alltoall")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    same, told = list[bool](), list[str]()
    for step in range(4):
        compiled(*labelled(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if looks and step == 1:
            ids = labelled(9, 0)[0]
            whole = compiled.full_state_dict()["rows.weight"]
            with compiled.whole() as found:
                rows: Any = found.rows
                same.append(torch.equal(rows(ids), whole[ids]))
                same.append(torch.equal(rows.weight, whole))
                copied: Any = copy.deepcopy(found)
            copied.rows(ids).sum().backward()
            same.append(torch.equal(copied.rows.weight, whole))
            with pytest.raises(RuntimeError) as of_part:
                model.rows(ids)
            with pytest.raises(RuntimeError) as between:
                _whole_between(compiled, rank)
            with pytest.raises(TypeError, match="cannot be copied") as of_copy:
                copy.deepcopy(compiled)
            told = [str(of_part.value), str(between.value), str(of_copy.value)]
            optimizer.zero_grad()
    return [embrace_fx.full_state_dict(compiled)[name] for name in model.state_dict()], same, told


def _whole_between(compiled: embrace_fx.CompiledModel, rank: int) -> None:
    loss = compiled(*labelled(7, rank))
    try:
        with compiled.whole():
            pass
    finally:
        loss.backward()


@pytest.mark.long
def test_parts_of_the_model_are_called_and_training_goes_on() -> None:
    looked, plain = run_ranks(2, _train, True), run_ranks(2, _train, False)
    for (found, same, told), (expected, _, _) in zip(looked, plain, strict=True):
        assert same == [True, True, True]
        assert "with model.whole()" in told[0]
        assert "with model.whole() as plain:" in told[2]
        assert "waits for its backward" in told[1]
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other)


def _too_large(rank: int, world_size: int) -> str:
    compiled = embrace_fx.compile(Classifier(), strategy="alltoall")
    compiled(*labelled(0, rank)).backward()
    compiled.zero_grad()
    free = mock.patch("embrace_fx.session.whole_tables.available_bytes", return_value=100)
    with free, pytest.raises(RuntimeError, match=r"on rank 0: 0 MiB are free") as raised, compiled.whole():
        pass
    return str(raised.value)


def test_tables_that_do_not_fit_are_refused_on_every_rank() -> None:
    first, second = run_ranks(2, _too_large)
    assert first == second


def _exported(rank: int, world_size: int) -> tuple[list[tuple[int, ...]], str]:
    model: Any = Classifier()
    compiled = embrace_fx.compile(model, strategy="alltoall")
    batch = labelled(0, rank)
    compiled(*batch).backward()
    compiled.zero_grad()
    with pytest.raises(RuntimeError) as raised:
        torch.export.export(model, batch)
    with compiled.whole() as plain:
        exported = torch.export.export(plain, batch)
        torch.testing.assert_close(exported.module()(*batch), plain(*batch))
    return [tuple(value.shape) for value in exported.state_dict.values()], str(raised.value)


@pytest.mark.long
def test_a_model_is_exported_whole_or_not_at_all() -> None:
    for shapes, refused in run_ranks(2, _exported):
        assert shapes == [tuple(value.shape) for value in Classifier().state_dict().values()]
        assert "rows.weight" in refused
        assert "`with model.whole():`" in refused
