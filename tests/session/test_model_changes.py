"""A model that is changed after its first call: computed as it is now, or refused with the name of what changed."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.support.cases import long_but
from tests.support.inside import captures_of, session_of
from tests.support.ranks import run_ranks


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.inner = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)
        self.act: Any = torch.relu
        self.activation: nn.Module = nn.ReLU()
        self.config: Any = {"scales": [1.0, 2.0]}
        self.callbacks: list[Callable[[Tensor], Tensor]] = [torch.tanh]

    def forward(self, ids_BT: Tensor) -> Tensor:
        hidden = self.activation(self.act(self.inner(self.words(ids_BT))))
        for callback in self.callbacks:
            hidden = callback(hidden)
        for scale in self.config["scales"]:
            hidden = hidden * scale
        if os.environ.get("SQUARED", "0") == "1":
            hidden = hidden * hidden
        return self.out(hidden).square().mean()


class Negated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


def _minus(module: nn.Module, inputs: Any, result: Tensor) -> Tensor:
    return -result


def _patched(model: Any) -> None:
    forward = model.inner.forward
    model.inner.forward = lambda x: forward(x) + 1


def _patched_itself(model: Any) -> None:
    forward = model.forward
    model.forward = lambda ids: forward(ids) + 1


CHANGES: dict[str, Callable[[Any], object]] = {
    "a function": lambda m: setattr(m, "act", torch.sigmoid),
    "an object": lambda m: setattr(m, "config", {"scales": [3.0]}),
    "a list that grows": lambda m: m.config["scales"].append(4.0),
    "a list of functions": lambda m: m.callbacks.append(torch.sin),
    "an activation": lambda m: setattr(m, "activation", nn.Tanh()),
    "an activation of the user's": lambda m: setattr(m, "activation", Negated()),
    "a hook": lambda m: m.inner.register_forward_hook(_minus),
    "a hook of the model": lambda m: m.register_forward_hook(_minus),
    "a hook before": lambda m: m.inner.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,)),
    "a patched forward": _patched,
    "a patched forward of the model": _patched_itself,
    "the environment": lambda m: os.environ.update(SQUARED="1"),
}


QUICK = ("a list that grows", "a patched forward", "the environment")


def _check(model: nn.Module, change: Callable[[Any], object]) -> None:
    compiled = embrace_fx.compile(model)
    ids_BT = torch.randint(50, (2, 4))
    for _ in range(2):
        torch.testing.assert_close(compiled(ids_BT), model(ids_BT))
    before = model(ids_BT)
    change(model)
    assert not torch.equal(model(ids_BT), before)
    for _ in range(2):
        torch.testing.assert_close(compiled(ids_BT), model(ids_BT))
    assert captures_of(compiled) == 2 - bool(session_of(compiled)._eager.reason)


@pytest.fixture(autouse=True)
def _not_squared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUARED", "0")


@pytest.mark.parametrize("name", long_but(QUICK, {name: (name,) for name in CHANGES}))
def test_what_changes_is_computed_with(name: str) -> None:
    _check(Tagger(), CHANGES[name])


def test_a_class_whose_forward_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward
    _check(Tagger(), lambda m: monkeypatch.setattr(nn.Linear, "forward", lambda self, x: -forward(self, x)))


def _other_parameters(rank: int, world_size: int) -> list[str]:
    """Replaces a layer on one rank. Both ranks must raise, and must continue when the layer is restored."""
    model: Any = Tagger()
    compiled = embrace_fx.compile(model, strategy="alltoall")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids_BT = torch.randint(50, (2, 4))
    told = []
    for name, new in (("out", nn.Linear(8, 3)), ("words", nn.Embedding(60, 8))):
        compiled(ids_BT).backward()
        optimizer.step()
        old = getattr(model, name)
        if rank == 1:
            setattr(model, name, new)
        with pytest.raises(embrace_fx.PeerFailure) as raised:
            compiled(ids_BT)
        told.append(str(raised.value))
        setattr(model, name, old)
    compiled(ids_BT).backward()
    optimizer.step()
    return told


@pytest.mark.long
def test_a_layer_that_is_replaced_is_named_on_every_rank() -> None:
    for told in run_ranks(2, _other_parameters):
        assert "rank 1: the model's parameters have changed since compile()" in told[0]
        assert "out.weight was added, removed or replaced" in told[0]
        assert "words.weight was added, removed or replaced" in told[1]


def test_layers_may_change_between_compile_and_the_first_call() -> None:
    model: Any = Tagger()
    compiled = embrace_fx.compile(model)
    model.words = nn.Embedding(70, 8)
    model.out.weight = nn.Parameter(torch.ones(3, 8))
    model.inner.requires_grad_(False)
    ids_BT = torch.full((2, 4), 69)
    compiled(ids_BT).backward()
    assert model.inner.weight.grad is None
    assert model.words.weight.grad.shape == (70, 8)
    assert "inner.weight" in {d.parameter for d in compiled.plan if d.strategy == "frozen"}


def test_weights_tied_after_the_first_call_are_refused() -> None:
    model: Any = Tagger()
    model.out = nn.Linear(8, 8)
    compiled = embrace_fx.compile(model)
    ids_BT = torch.zeros((2, 4), dtype=torch.long)
    compiled(ids_BT)
    model.out.weight = model.inner.weight
    with pytest.raises(embrace_fx.PeerFailure, match=r"out\.weight was added, removed or replaced"):
        compiled(ids_BT)


def _wrapped(rank: int, world_size: int) -> None:
    model = Tagger()
    by_torch: Any = torch.compile(Tagger())
    for wrapped in (DistributedDataParallel(Tagger()), by_torch):
        with pytest.raises(ValueError, match=r"wraps a model already"):
            embrace_fx.compile(wrapped)
    compiled = embrace_fx.compile(model)
    assert embrace_fx.compile(compiled) is compiled
    with pytest.raises(RuntimeError, match=r"wraps a model already"):
        embrace_fx.compile(compiled, schedule="none")


def test_a_model_that_is_wrapped_already_is_refused() -> None:
    run_ranks(1, _wrapped)


class Local(nn.Module):
    """A model with an embedding that each rank has for itself, with a size that differs between ranks."""

    seen: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6)
        self.shared = nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(3)
        self.own = nn.Embedding(40 + rank, 3)
        self.register_buffer("seen", torch.full((2 + rank,), float(rank)))
        self.last = nn.Linear(3, 3)

    def forward(self, ids_B: Tensor, *, with_last: bool) -> Tensor:
        found = self.norm(self.shared(self.words(ids_B))) * self.own(ids_B) + self.seen[0]
        return self.last(found).sum() if with_last else found.square().sum()


IGNORED = ("own.weight", "seen", "last.weight", "last.bias", "norm.running_mean")


def _train_local(wrap: Any, rank: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    model = Local(rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, IGNORED)
    model.own.weight.register_hook(lambda gradient: 2 * gradient)
    model.own.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", (rank + 1) * p.grad))
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(5):
        ids_B = torch.arange(3) + 5 * step + rank
        with wrapped.no_sync() if step == 1 else contextlib.nullcontext():
            wrapped(ids_B, with_last=step == 2 and rank == 1).backward()
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        wrapped.eval()(torch.arange(3), with_last=True)  # shares the batch statistics of ranks
    return embrace_fx.full_state_dict(wrapped if isinstance(wrapped, embrace_fx.CompiledModel) else model)


def _ignores(rank: int, world_size: int, strategy: str) -> None:
    expected = _train_local(functools.partial(DistributedDataParallel, find_unused_parameters=True), rank)
    found = _train_local(functools.partial(embrace_fx.compile, strategy={"words.*": strategy}), rank)
    different = {n: (found[n], other) for n, other in expected.items() if not torch.allclose(found[n], other)}
    assert not different


@pytest.mark.parametrize("strategy", ["alltoall", pytest.param("auto", marks=pytest.mark.long)])
def test_what_ddp_is_told_to_ignore_is_each_rank_s_own(strategy: str) -> None:
    run_ranks(2, _ignores, strategy)


def _stand_ins(rank: int, world_size: int) -> None:
    model: Any = Tagger()
    compiled = embrace_fx.compile(model, strategy="alltoall")
    ids_BT = torch.full((2, 4), rank)
    others = {name: torch.full_like(parameter, 0.1) for name, parameter in model.named_parameters()}
    for first in (True, False):  # the first time before any call, then with sharded tables
        leaves = {name: value.clone().requires_grad_() for name, value in others.items()}
        torch.func.functional_call(compiled, leaves, (ids_BT,)).backward()
        own = {name: value.clone().requires_grad_() for name, value in others.items()}
        torch.func.functional_call(Tagger(), own, (ids_BT,)).backward()
        for name, leaf in own.items():
            torch.testing.assert_close(leaves[name].grad, leaf.grad)
        if first:
            assert all(parameter.grad is None for parameter in model.parameters())
            compiled(ids_BT).backward()
    some = {"inner.weight": torch.zeros_like(model.inner.weight)}
    with pytest.raises(embrace_fx.PeerFailure, match=r"inner\.weight was added, removed or replaced"):
        torch.func.functional_call(compiled, some, (ids_BT,))
    compiled(ids_BT).backward()


def test_tensors_in_the_place_of_all_parameters_have_gradients_of_their_own() -> None:
    run_ranks(2, _stand_ins)


def test_tensors_in_the_place_of_some_parameters_are_refused_as_the_first_call() -> None:
    compiled = embrace_fx.compile(nn.Linear(2, 1))
    with pytest.raises(ValueError, match="another tensor in place of"):
        torch.func.functional_call(compiled, {"weight": torch.ones((1, 2))}, (torch.ones(2),))
