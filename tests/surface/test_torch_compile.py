"""`torch.compile` around a compiled model: it runs as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import embrace_fx
from tests.support.beside import take_steps
from tests.support.tagger import Scorer


def losses(wrap: Callable[[nn.Module, SGD], Any]) -> list[float]:
    torch.manual_seed(0)
    model = Scorer()
    optimizer = SGD(model.parameters(), 0.1)
    return [loss.item() for loss in take_steps(wrap(model, optimizer), optimizer, [(torch.arange(6),)] * 3)]


def test_a_compiled_model_inside_of_torch_compile_trains_as_it_does_outside() -> None:
    plain = losses(lambda model, _: model)
    twice = losses(lambda model, opt: torch.compile(embrace_fx.compile(model, optimizer=opt), backend="aot_eager"))
    assert twice == plain
