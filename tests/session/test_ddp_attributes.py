"""What libraries read and set on a DistributedDataParallel acts on a compiled model too, or is refused in one line."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from embrace_fx.session.ddp_attributes import SET
from tests.support.scenarios.schemes import Words


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
