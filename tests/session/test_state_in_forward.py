"""State that a forward assigns, tensors that it leaves behind: at each call, as under DDP."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
from embrace_fx.capture.errors import CaptureError
from tests.support.beside import check, ids
from tests.support.inside import captures_of
from tests.support.ranks import run_ranks, run_ranks_expecting_errors


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6)
        self.inner = nn.Linear(6, 6)

    def encode(self, ids_BT: Tensor) -> Tensor:
        return self.inner(self.words(ids_BT)).mean((0, 1))


class Carried(Words):
    """Passes a state without gradient from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(6)

    def forward(self, ids_BT: Tensor) -> Tensor:
        h = torch.tanh(self.encode(ids_BT) + self.h)
        self.h = h.detach()
        return h.square().sum()

    def state(self) -> Any:
        return self.h


class Averaged(Words):
    """Assigns a new tensor to a buffer instead of writing the buffer in place."""

    buf: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buf", torch.zeros(6))

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.encode(ids_BT)
        self.buf = 0.9 * self.buf + x.detach()
        return (x * self.buf).sum()

    def state(self) -> Any:
        return self.buf


class Queued(Words):
    def __init__(self) -> None:
        super().__init__()
        self.queue = [torch.zeros(6), torch.zeros(6), torch.zeros(6)]

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.encode(ids_BT)
        self.queue.append(x.detach())
        first = self.queue.pop(0)
        return (x - first).square().sum() + torch.stack(self.queue).sum()

    def state(self) -> Any:
        return torch.stack(self.queue)


class Router(nn.Module):
    aux: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        self.aux = weights.square().sum()
        return x * weights[..., :1]


class Experts(Words):
    """Stores an auxiliary loss on a submodule, which the training loop adds to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.router(self.encode(ids_BT)).square().sum()

    def state(self) -> Any:
        return self.router.aux.detach()


class Collected(Words):
    """Activations that a hook collects."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        self.inner.register_forward_hook(lambda module, inputs, output: self.collected.append(output.detach()))

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.encode(ids_BT).square().sum()

    def state(self) -> Any:
        return self.collected.pop()


class Switching(Words):
    """Takes a different branch in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 6)
        self.odd = False

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.odd = not self.odd
        x = self.words(ids_BT)
        return (self.inner(x) if self.odd else self.other(x)).square().sum()

    def state(self) -> Any:
        return torch.tensor([self.odd])


def _train(model: Any, rank: int) -> list[Any]:
    optimizer, inner, found = torch.optim.SGD(model.parameters(), 0.2), model.module, []
    for step in range(5):
        loss = model(torch.arange(6).view(2, 3) + rank if step == 3 else ids(step, rank, 2, 4, high=40))
        if isinstance(inner, Experts):
            loss = loss + 0.1 * inner.router.aux
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), inner.state().clone()]
    model.eval()
    with torch.no_grad():
        return [*found, model(torch.arange(4).view(2, 2)), inner.state().clone()]


CASES = {make.__name__: (make, _train) for make in (Carried, Averaged, Queued, Experts, Collected, Switching)}


@pytest.mark.long
def test_state_goes_from_call_to_call_as_under_ddp() -> None:
    check(__name__, ddp={"find_unused_parameters": True}, strategy="alltoall", rtol=1e-5)


class Counting(Words):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.longest = 0

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.longest = ids_BT.shape[1]
        self.count += 1
        return self.encode(ids_BT).sum()


def _counts_on(rank: int, world_size: int) -> tuple[int, int]:
    compiled = embrace_fx.compile(Counting(), route="graph")
    for _ in range(8):
        compiled(torch.zeros((2, 2), dtype=torch.long)).backward()
    return compiled.module.count, captures_of(compiled)  # type: ignore[return-value]


def test_a_count_in_python_is_an_input_of_the_graph() -> None:
    assert run_ranks(2, _counts_on) == [(8, 2), (8, 2)]


class Hooked(Words):
    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.encode(ids_BT)
        x.register_hook(lambda gradient: gradient * 2)
        return x.sum()


def test_a_hook_on_a_tensor_of_the_forward_changes_its_gradient() -> None:
    torch.manual_seed(0)
    model, plain = Hooked(), Hooked()
    plain.load_state_dict(model.state_dict())
    compiled, ids_BT = embrace_fx.compile(model), torch.zeros((2, 2), dtype=torch.long)
    for _ in range(2):
        compiled(ids_BT).backward()
        plain(ids_BT).backward()
    torch.testing.assert_close(model.inner.weight.grad, plain.inner.weight.grad)


class Unread(Words):
    """Cannot be captured. Each subclass leaves a tensor behind."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        sys.stdout.flush()
        x = self.encode(ids_BT)
        self.leave(x)
        return x.square().sum()

    def leave(self, x: Tensor) -> None: ...


class LeavesInList(Unread):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def leave(self, x: Tensor) -> None:
        self.seen.append(x)


class LeavesBuffer(Unread):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def leave(self, x: Tensor) -> None:
        self.seen = self.seen + x.detach()


@pytest.mark.parametrize("make", [LeavesInList, LeavesBuffer])
def test_what_a_forward_leaves_behind_is_there_after_each_call(make: type[Unread]) -> None:
    torch.manual_seed(0)
    model: Any = make()
    plain, ids_BT = copy.deepcopy(model), torch.zeros((2, 2), dtype=torch.long)
    compiled = embrace_fx.compile(model)
    for _ in range(3):
        compiled(ids_BT).backward()
        plain(ids_BT).backward()
    assert repr(model.seen) == repr(plain.seen)


@pytest.mark.parametrize("of", ["", "inner", "all modules"])
def test_backward_hooks_of_modules_are_refused_by_the_graph_route_and_training_goes_on(of: str) -> None:
    model = Queued()
    compiled, ids_BT = embrace_fx.compile(model, route="graph"), torch.zeros((2, 2), dtype=torch.long)
    compiled(ids_BT).backward()
    register: Any = nn.modules.module.register_module_full_backward_hook
    if of != "all modules":
        register = model.get_submodule(of).register_full_backward_hook
    hook = register(lambda module, before, after: None)
    with pytest.raises(CaptureError, match="has a backward hook"):
        compiled(ids_BT)
    hook.remove()
    compiled(ids_BT).backward()


def test_forward_hooks_of_all_modules_run_while_they_are_registered() -> None:
    model = Words()
    compiled, ids_BT = embrace_fx.compile(model, route="graph"), torch.zeros((2, 2), dtype=torch.long)
    model.forward = model.encode
    before = compiled(ids_BT)
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, given, found: found * 2 if module is model.inner else found
    )
    assert torch.equal(compiled(ids_BT), 2 * before)
    hook.remove()
    assert torch.equal(compiled(ids_BT), before)


def test_backward_hooks_of_modules_run_in_each_backward() -> None:
    model, seen = Queued(), list[str]()
    model.inner.register_full_backward_hook(lambda module, before, after: seen.append("here"))
    compiled, ids_BT = embrace_fx.compile(model), torch.zeros((2, 2), dtype=torch.long)
    for _ in range(2):
        compiled(ids_BT).backward()
    assert seen == ["here", "here"]


def _hooked(rank: int, world_size: int) -> None:
    plain = Words()
    node = torch.autograd.graph.get_gradient_edge(plain.inner.bias).node
    node.register_hook(lambda *_: None)
    embrace_fx.compile(plain)


def test_hooks_of_autograds_nodes_are_refused() -> None:
    for error in run_ranks_expecting_errors(2, _hooked):
        assert "has a hook on the autograd node" in str(error)
        assert "inner.bias" in str(error)
