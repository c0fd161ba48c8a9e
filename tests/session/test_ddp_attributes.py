"""What libraries read and set on a DistributedDataParallel acts on a compiled model too, or is refused in one line."""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import embrace_fx
from embrace_fx.session.ddp_attributes import SET
from tests.support.habits import Words, Wrap, adam, ends, ids_of, step_of
from tests.support.ranks import run_ranks


class Normed(Words):
    """Has buffers, which ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(4)

    def encode(self, ids: Tensor) -> Tensor:
        found: Tensor = self.batch_norm(super().encode(ids))
        return found


def _synced_by_attribute(wrap: Wrap, rank: int) -> list[Any]:
    """As Lightning's strategies and Accelerate's `accumulate` do it."""
    model, log = wrap(Words()), list[Any]()
    optimizer = adam(model)
    for k in range(6):
        model.require_backward_grad_sync = k % 3 == 2
        loss = model(ids_of(rank, k)).square().mean()
        model.require_backward_grad_sync = True  # what the forward was told counts
        loss.backward()
        log += [loss.item(), model.module.out.bias.grad.clone()]  # each rank's own, but for the last
        if k % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return log + ends(model)


def _synced_by_both(wrap: Wrap, rank: int) -> list[Any]:
    model, log = wrap(Words()), list[Any]()
    optimizer = adam(model)
    for k in range(4):
        with model.no_sync():
            log.append(model.require_backward_grad_sync)
            model(ids_of(rank, 2 * k)).square().mean().backward()
        log += [
            model.require_backward_grad_sync,
            step_of_sum(optimizer, model(ids_of(rank, 2 * k + 1)).square().mean()),
        ]
    return log + ends(model)


def step_of_sum(optimizer: Any, loss: Tensor) -> float:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _buffers_by_attribute(wrap: Wrap, rank: int) -> list[Any]:
    model, log = wrap(Normed()), list[Any]()
    optimizer = adam(model)
    for k in range(5):
        if k == 3:
            model.require_forward_param_sync = False
        log += [step_of(optimizer, model(ids_of(rank, k)).square().mean()), model.require_forward_param_sync]
        with model.no_sync():
            model(ids_of(rank, k + 20))
        log.append(model.require_forward_param_sync)
        model.require_forward_param_sync = True
    return [*log, model.will_sync_module_buffers(), len(model.modules_buffers), sorted(model.named_module_buffers)]


def _what_trainers_ask(wrap: Wrap, rank: int) -> list[Any]:
    model = wrap(Words())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # DDP's, of find_unused_parameters
        model._set_static_graph()
    for name in ("broadcast_buffers", "forward_sync_buffers", "find_unused_parameters"):
        setattr(model, name, True)  # as they are
    log: list[Any] = [step_of(adam(model), model(ids_of(rank, 0)).square().mean())]
    logged = model._get_ddp_logging_data()
    log += [logged[name] for name in ("world_size", "rank", "module_name", "num_parameter_tensors")]
    log += [model.device_ids, model.output_device, model.dim, model.device.type, model.parameters_to_ignore]
    log += [getattr(model, "no such name", "none"), hasattr(model, "no_sync"), model.mixed_precision]
    return log + ends(model)


LOOPS: tuple[Callable[[Wrap, int], list[Any]], ...] = (
    *(_synced_by_attribute, _synced_by_both, _buffers_by_attribute, _what_trainers_ask),
)
by_ddp = functools.partial(DistributedDataParallel, find_unused_parameters=True)


def _both(rank: int, world_size: int, number: int) -> tuple[Any, Any, Any]:
    found = []
    ways: list[Any] = [by_ddp, *(functools.partial(embrace_fx.compile, strategy=each) for each in ("alltoall", "auto"))]
    for wrap in ways:
        torch.manual_seed(0)
        found.append(LOOPS[number](wrap, rank))
    return found[0], found[1], found[2]


@pytest.mark.parametrize("number", range(len(LOOPS)), ids=[each.__name__.strip("_") for each in LOOPS])
def test_attributes_act_as_under_ddp(number: int) -> None:
    for theirs, *ours in run_ranks(2, _both, number):
        for each in ours:
            for own, other in itertools.zip_longest(each, theirs):
                if isinstance(other, float | Tensor):
                    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
                else:
                    assert own == other


def test_what_cannot_change_is_refused() -> None:
    model = embrace_fx.compile(Words())
    for name, value in (("broadcast_buffers", False), ("forward_sync_buffers", False), ("process_group", object())):
        with pytest.raises(AttributeError, match=rf"expected {name} to stay .*, found .* Pass \w+="):
            setattr(model, name, value)
    for name in SET[1:]:
        assert getattr(model, name) is not None or name in ("process_group", "device_mesh")
        setattr(model, name, getattr(model, name))


@pytest.mark.parametrize("name", ["reducer", "logger", "_sync_buffers", "_register_fused_optim", "scatter"])
def test_machinery_of_ddp_is_an_attribute_error_in_one_line(name: str) -> None:
    model = embrace_fx.compile(Words())

    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=f"found DistributedDataParallel's {name} asked of it"):
        getattr(model, name)


def test_every_attribute_of_ddp_is_answered_or_refused_by_name() -> None:
    model = embrace_fx.compile(Words())
    unknown = []
    for name in set(dir(DistributedDataParallel)) - set(dir(nn.Module)):
        try:
            getattr(model, name)
        except AttributeError as error:
            if "DistributedDataParallel's" not in str(error):
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

    with pytest.raises(RuntimeError, match=r"expected names of Words in a state dict.*found none: it begins with"):
        of(model).load_state_dict({name[7:]: value for name, value in state.items()}, strict=False)
    of(model).load_state_dict({}, strict=False)
    missing, _ = of(model).load_state_dict({"out.bias": torch.ones(1), "other": torch.ones(1)}, strict=False)
    assert "words.weight" in missing
    assert model.get_parameter("out.bias").item() == 1.0


def test_a_part_of_another_model_is_loaded_by_its_own_names() -> None:
    outer = nn.ModuleDict({"net": embrace_fx.compile(Words()), "head": nn.Linear(1, 1)})

    outer.load_state_dict({"head.bias": torch.full((1,), 3.0)}, strict=False)
    with pytest.raises(RuntimeError, match=r"found none: it begins with 'net\.words'"):
        outer.load_state_dict({"net.words": torch.ones(1)}, strict=False)


def test_a_group_without_parameters_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="embrace_fx")
    model = embrace_fx.compile(Words())
    named = list(model.named_parameters())
    slow = [parameter for name, parameter in named if name.startswith("module.words")]
    groups: list[dict[str, Any]] = [{"params": slow, "lr": 1e-4}, {"params": [p for _, p in named]}]
    optimizer = AdamW(groups, lr=1e-2)
    for k in range(2):
        step_of(optimizer, model(ids_of(0, k)).square().mean())
    step_of(SGD(model.parameters(), 0.1), model(ids_of(0, 2)).square().mean())

    told = [line for line in caplog.messages if "hold no parameter" in line]
    assert len(told) == 1
    assert "the param group(s) 0 of AdamW" in told[0]
    assert "do not begin with 'module.'" in told[0]
