"""Names of a compiled model: the plain model's; what is written for DDP's prefix "module." is answered or refused."""

from __future__ import annotations

import copy
import fnmatch
import io
import logging
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import SGD, AdamW

import embrace_fx
from tests.support.scenarios.schemes import Words, ids_of


@pytest.fixture
def model() -> Any:
    return embrace_fx.compile(Words())


def _handed_out(model: Any) -> list[str]:
    """Returns the name of one parameter as each method gives it."""
    states = model.state_dict(), model.full_state_dict(), embrace_fx.full_state_dict(model)
    found = [dict(model.named_parameters()), *states, dict(states[0].items()), {**states[1]}, dict.fromkeys(states[2])]
    return [next(name for name in each if name == "words.weight") for each in found]


NO_DECAY = {"module.words.weight", "module.out.bias"}


RATES = {"module.words.weight": 0.1}
LOADED = {"module.words.weight": torch.ones(1)}


class Groups:
    slow = frozenset(NO_DECAY)


HABITS: tuple[Callable[[str], Any], ...] = (
    lambda name: name.startswith("module.words"),
    lambda name: name.startswith(("module.out", "module.words")),
    lambda name: "module.words" in name,
    lambda name: name == "module.words.weight",
    lambda name: name in ["module.out.bias", "module.words.weight"],
    lambda name: name in {"module.out.bias", "module.words.weight"},
    lambda name: [each for each in (name,) if each in NO_DECAY],
    lambda name: name not in Groups.slow,
    lambda name: RATES.get(name, 1.0),
    lambda name: name[7:],
    lambda name: name[len("module.") :],
)
ANSWERED: tuple[Callable[[str], Any], ...] = (
    lambda name: name.startswith("module."),
    lambda name: name.startswith("module.out"),
    lambda name: name.startswith(("module.words", "words")),
    lambda name: name[7:] if name.startswith("module.") else name,
    lambda name: "module." in name,
    lambda name: name == "module.words",
    lambda name: name in {"words.weight"},
    lambda name: name in {"words.weight", "module.words.weight"},
    lambda name: name in {"module.out.bias"},
    lambda name: name in LOADED or LOADED.get(name, 3),
    lambda name: (RATES.get("out.bias", 1.0), hash(name)),
    lambda name: name.removeprefix("module."),
    lambda name: name.replace("module.", ""),
    lambda name: name.split("module.")[-1],
    lambda name: name[:7] + name[-1] + name[5:],
    lambda name: (hash(name), name is None, name != "words.weight", f"{name:>20}", sorted([name, "a"])),
)


def test_habits_that_expect_the_prefix_are_refused(model: Any) -> None:
    for name in _handed_out(model):
        for habit in HABITS:
            with pytest.raises(ValueError, match=r"in a compiled model do not begin with 'module\.'"):
                habit(name)


def test_names_are_strings_for_all_else(model: Any) -> None:
    for name in _handed_out(model):
        for habit in ANSWERED:
            assert habit(name) == habit("words.weight")
        for same in (copy.deepcopy(name), copy.copy(name), pickle.loads(pickle.dumps(name)), str(name)):
            assert type(same) is str
            assert same == "words.weight"


def test_a_name_is_cut_where_a_module_ends() -> None:
    """PyTorch does the same when it loads a state dict into modules whose name has six letters."""
    plain = nn.Sequential(OrderedDict(linear=nn.Linear(2, 3), decoder=nn.Linear(3, 1), linear_2=nn.Linear(1, 1)))
    plain.register_parameter("w", nn.Parameter(torch.ones(1)))
    model = embrace_fx.compile(copy.deepcopy(plain))

    *found, short = sorted(dict(model.named_parameters()), key=len, reverse=True)
    assert {name[7:] for name in found} == {"weight", "bias", ".weight", ".bias", "2.weight", "2.bias"}
    with pytest.raises(ValueError, match="cuts into the name"):
        short[7:]
    plain.load_state_dict(dict(model.state_dict().items()))


def test_names_of_another_module_are_plain(model: Any) -> None:
    outer = nn.ModuleDict({"module": model})

    assert all(type(name) is str for name, _ in (*outer.named_parameters(), *outer.named_modules()))
    assert all(type(name) is str for name in outer.state_dict())
    assert all(name.startswith("module.") for name, _ in model.named_parameters(prefix="module"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("made", [lambda state: state, dict, lambda state: {k: v.clone() for k, v in state.items()}])
def test_saved_names_are_plain_strings(model: Any, made: Callable[[Any], Any], tmp_path: Path) -> None:
    state = made(model.full_state_dict())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    save(state, checkpoint_id=tmp_path)
    stored = {name: torch.zeros_like(value) for name, value in state.items()}
    load(stored, checkpoint_id=tmp_path)
    safetensors.save_file(state, tmp_path / "file")

    assert list(loaded) == list(Words().state_dict())
    assert safetensors.load_file(tmp_path / "file").keys() == loaded.keys()
    assert all(type(name) is str for name in loaded)
    assert type(loaded) is type(state) or type(loaded) is OrderedDict
    for name, value in state.items():
        assert torch.equal(loaded[name], value)
        assert torch.equal(stored[name], value)


def test_a_state_dict_is_an_ordered_dict(model: Any) -> None:
    state, expected = model.state_dict(), model.module.state_dict()

    assert state["module.words.weight"] is state["words.weight"]
    assert "module.words.weight" not in state
    with pytest.raises(KeyError, match=r"module\.other"):
        state["module.other"]
    assert list(state) == list(state.keys()) == list(expected)
    assert [value.shape for _, value in state.items()] == [each.shape for each in expected.values()]
    assert state.keys() == expected.keys()
    for other in (copy.copy(state), copy.deepcopy(state), state):
        assert other._metadata == expected._metadata
        assert list(reversed(other)) == list(reversed(expected))
    state.move_to_end("words.weight")
    assert state.popitem()[0] == "words.weight"
    assert model.state_dict(prefix="a.").keys() == {f"a.{name}" for name in expected}


def test_names_with_the_prefix_are_found() -> None:
    model = embrace_fx.compile(Words())

    assert model.get_parameter("module.words.weight") is model.get_parameter("words.weight")
    assert model.get_submodule("module.words") is model.module.get_submodule("words")
    model.load_state_dict({f"module.{name}": value for name, value in Words().state_dict().items()})


@pytest.mark.parametrize("of", [lambda model: model, lambda model: model.module], ids=["compiled", "module"])
def test_a_state_dict_without_a_name_of_the_model_is_an_error(of: Callable[[Any], nn.Module]) -> None:
    model = embrace_fx.compile(Words())
    state = model.full_state_dict()

    with pytest.raises(RuntimeError, match=r"no key of the state dict is a parameter or buffer of Words"):
        of(model).load_state_dict({f"x.{name}": value for name, value in state.items()}, strict=False)
    of(model).load_state_dict({}, strict=False)
    missing, _ = of(model).load_state_dict({"out.bias": torch.ones(1), "other": torch.ones(1)}, strict=False)
    assert "words.weight" in missing
    assert model.get_parameter("out.bias").item() == 1.0


def test_a_part_of_another_model_is_loaded_by_its_own_names() -> None:
    outer = nn.ModuleDict({"net": embrace_fx.compile(Words()), "head": nn.Linear(1, 1)})

    outer.load_state_dict({"head.bias": torch.full((1,), 3.0)}, strict=False)
    with pytest.raises(RuntimeError, match=r"The first key is 'net\.words'"):
        outer.load_state_dict({"net.words": torch.ones(1)}, strict=False)


def test_a_group_without_parameters_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="embrace_fx")
    model = embrace_fx.compile(Words())
    named = list(model.named_parameters())
    slow = [parameter for name, parameter in named if fnmatch.fnmatch(name, "module.words*")]
    groups: list[dict[str, Any]] = [{"params": slow, "lr": 1e-4}, {"params": [p for _, p in named]}]
    optimizer = AdamW(groups, lr=1e-2)
    for k, each in enumerate((optimizer, optimizer, SGD(model.parameters(), 0.1))):
        model(ids_of(0, k)).square().mean().backward()
        each.step()
        each.zero_grad()

    told = [line for line in caplog.messages if "have no parameters" in line]
    assert len(told) == 1
    assert "param group(s) 0 of AdamW" in told[0]
    assert "do not begin with 'module.'" in told[0]
