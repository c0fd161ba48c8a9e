"""What libraries read and set on a DistributedDataParallel acts on a compiled model too, or is refused in one line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import embrace_fx
from embrace_fx.session.ddp_attributes import SET
from tests.support.scenarios.schemes import Words, ids_of


def test_what_cannot_change_is_refused() -> None:
    model = embrace_fx.compile(Words())
    for name, value in (("broadcast_buffers", False), ("forward_sync_buffers", False), ("process_group", object())):
        with pytest.raises(AttributeError, match=rf"{name} cannot be set to .* Pass \w+="):
            setattr(model, name, value)
    for name in SET[1:]:
        assert getattr(model, name) is not None or name in ("process_group", "device_mesh")
        setattr(model, name, getattr(model, name))


@pytest.mark.parametrize("name", ["reducer", "logger", "_sync_buffers", "_register_fused_optim", "scatter"])
def test_machinery_of_ddp_is_an_attribute_error_in_one_line(name: str) -> None:
    model = embrace_fx.compile(Words())

    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=f"has no {name!r}, which is internal to DistributedDataParallel"):
        getattr(model, name)


def test_every_attribute_of_ddp_is_answered_or_refused_by_name() -> None:
    model = embrace_fx.compile(Words())
    unknown = []
    for name in set(dir(DistributedDataParallel)) - set(dir(nn.Module)):
        try:
            getattr(model, name)
        except AttributeError as error:
            if "internal to DistributedDataParallel" not in str(error):
                unknown.append(name)
    assert unknown == []


def test_the_models_own_attributes_go_first() -> None:
    class Own(Words):
        dim, device, reducer = 5, "here", "mine"

    model = embrace_fx.compile(Own())

    assert (model.dim, model.device, model.reducer) == (5, "here", "mine")
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'nothing'"):
        _ = model.nothing


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_with_the_prefix_are_found() -> None:
    model = embrace_fx.compile(Words())

    assert model.get_parameter("module.words.weight") is model.get_parameter("words.weight")
    assert model.get_submodule("module.words") is model.module.get_submodule("words")
    model.load_state_dict({f"module.{name}": value for name, value in Words().state_dict().items()})


@pytest.mark.parametrize("of", [lambda model: model, lambda model: model.module], ids=["compiled", "module"])
def test_a_state_dict_without_a_name_of_the_model_is_an_error(of: Callable[[Any], nn.Module]) -> None:
    model = embrace_fx.compile(Words())
    state = model.full_state_dict()

    with pytest.raises(RuntimeError, match=r"the state dict has no name of Words"):
        of(model).load_state_dict({name[7:]: value for name, value in state.items()}, strict=False)
    of(model).load_state_dict({}, strict=False)
    missing, _ = of(model).load_state_dict({"out.bias": torch.ones(1), "other": torch.ones(1)}, strict=False)
    assert "words.weight" in missing
    assert model.get_parameter("out.bias").item() == 1.0


def test_a_part_of_another_model_is_loaded_by_its_own_names() -> None:
    outer = nn.ModuleDict({"net": embrace_fx.compile(Words()), "head": nn.Linear(1, 1)})

    outer.load_state_dict({"head.bias": torch.full((1,), 3.0)}, strict=False)
    with pytest.raises(RuntimeError, match=r"It begins with 'net\.words'"):
        outer.load_state_dict({"net.words": torch.ones(1)}, strict=False)


def test_a_group_without_parameters_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="embrace_fx")
    model = embrace_fx.compile(Words())
    named = list(model.named_parameters())
    slow = [parameter for name, parameter in named if name.startswith("module.words")]
    groups: list[dict[str, Any]] = [{"params": slow, "lr": 1e-4}, {"params": [p for _, p in named]}]
    optimizer = AdamW(groups, lr=1e-2)
    for k, each in enumerate((optimizer, optimizer, SGD(model.parameters(), 0.1))):
        model(ids_of(0, k)).square().mean().backward()
        each.step()
        each.zero_grad()

    told = [line for line in caplog.messages if "hold no parameter" in line]
    assert len(told) == 1
    assert "param group(s) 0 of AdamW" in told[0]
    assert "do not begin with 'module.'" in told[0]
