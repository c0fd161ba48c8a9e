"""All orders of backward, step, read, write, keep and clear: gradients of tables and layers live as under DDP.

Both ranks draw the same orders, and fail at the same one: what is found is compared over the ranks before any fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import embrace_fx
from tests.support.part_deeds import ROWS, Tagger
from tests.support.parts import differs, whole_of
from tests.support.ranks import run_ranks

NAMES = ("emb.weight", "out.weight", "out.bias")
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, 0.02, eps=1e-3, weight_decay=0.1),
    "Adagrad": lambda p: Adagrad(p, 0.1),
    "SGD with momentum": lambda p: SGD(p, 0.3, momentum=0.5),
}


class Side:
    """A model, and what a loop keeps of it.

    Attributes:
        kept: a gradient and data from before.
    """

    def __init__(self, model: Any, kind: str) -> None:
        self.model, self._make = model, KINDS[kind]
        self.parameters: dict[str, nn.Parameter] = dict(model.module.named_parameters())
        self._begin = {name: value.clone() for name, value in model.module.state_dict().items()}
        self.reset()

    def reset(self) -> None:
        """Begins anew, with an optimizer of its own."""
        state = {name: value.clone() for name, value in self._begin.items()}
        self.model.load_state_dict({f"module.{name}": value for name, value in state.items()})
        self.optimizer = self._make(self.model.parameters())
        self.optimizer.zero_grad()
        self.kept: dict[str, Tensor | None] = {}
        self.step = 0

    def find(self, what: str, name: str) -> Tensor | None:
        """A parameter, its gradient, or what has been kept of them."""
        parameter = self.parameters[name]
        if what == "parameter":
            return parameter.detach()
        return parameter.grad if what == "gradient" else self.kept.get(what)

    def forward(self) -> Any:
        draw = torch.Generator().manual_seed(10 * self.step + dist.get_rank())
        self.step += 1
        ids, tags = torch.randint(ROWS, (4, 3), generator=draw), torch.randint(3, (4,), generator=draw)
        return self.model(ids, tags)


class Lives(RuleBasedStateMachine):
    """Two sides, of which every rule asks the same."""

    sides: tuple[Side, Side]

    def __init__(self) -> None:
        super().__init__()
        for side in self.sides:
            side.reset()

    def both(self, deed: Callable[[Side], Any]) -> None:
        """Does the same on both sides, and compares what they answer."""
        found, expected = (_numbers(deed(side)) for side in self.sides)
        wrong = torch.tensor(float(differs(found, expected) != ""))
        dist.all_reduce(wrong)
        assert not wrong, f"{differs(found, expected)} on rank {dist.get_rank()}"

    def teardown(self) -> None:
        self.both(lambda side: [{n: p.detach() for n, p in side.parameters.items()}, _state(side)])

    @initialize(name=st.sampled_from(NAMES))
    def begin(self, name: str) -> None:
        self.name = name

    # -- the loop

    @rule()
    def backward(self) -> None:
        self.both(lambda side: side.forward().backward())

    @rule()
    def step(self) -> None:
        self.both(lambda side: side.optimizer.step())

    @rule(clears=st.booleans())
    def train(self, clears: bool) -> None:
        def trained(side: Side) -> None:
            side.forward().backward()
            side.optimizer.step()
            if clears:
                side.optimizer.zero_grad()

        self.both(trained)

    @rule(to_none=st.booleans())
    def clear(self, to_none: bool) -> None:
        self.both(lambda side: side.optimizer.zero_grad(set_to_none=to_none))

    @rule()
    def evaluate(self) -> None:
        with torch.no_grad():
            self.both(lambda side: side.forward())

    @rule(lr=st.sampled_from((0.01, 0.1)))
    def set_rate(self, lr: float) -> None:
        self.both(lambda side: side.optimizer.param_groups[0].__setitem__("lr", lr))

    # -- what a loop does to one parameter, its gradient, and what it has kept of them

    @rule(what=st.sampled_from(("gradient", "kept gradient", "parameter", "kept data", "state")))
    def look(self, what: str) -> None:
        self.both(lambda side: _state(side) if what == "state" else side.find(what, self.name))

    @rule(
        what=st.sampled_from(("gradient", "kept gradient", "parameter", "kept data")),
        how=st.sampled_from(("all", "a row", "a view", "data")),
    )
    def write(self, what: str, how: str) -> None:
        self.both(lambda side: _write(side.find(what, self.name), how))

    @rule()
    def keep(self) -> None:
        for side in self.sides:
            parameter = side.parameters[self.name]
            side.kept = {"kept data": parameter.data, "kept gradient": parameter.grad}

    @rule()
    def keep_gradient(self) -> None:
        for side in self.sides:
            side.kept = {"kept gradient": side.parameters[self.name].grad}

    @rule(what=st.sampled_from(("kept", "a copy", "another", "none", "twice")))
    def put(self, what: str) -> None:
        made: dict[str, Callable[[Side, nn.Parameter], Any]] = {
            "kept": lambda side, p: side.kept.get("kept gradient"),
            "a copy": lambda side, p: p.grad.clone() if p.grad is not None else None,
            "another": lambda side, p: torch.full(p.shape, 0.1, dtype=p.dtype),
            "none": lambda side, p: None,
            "twice": lambda side, p: p.grad * 2 if p.grad is not None else None,
        }
        for side in self.sides:
            parameter = side.parameters[self.name]
            parameter.grad = made[what](side, parameter)


def _numbers(answer: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), whole_of(answer))


def _state(side: Side) -> Any:
    return [dict(side.optimizer.state[p]) for p in side.parameters.values() if p in side.optimizer.state]


def _write(tensor: Tensor | None, how: str) -> None:
    if tensor is None:
        return
    with torch.no_grad():
        _change(tensor, how)


def _change(tensor: Tensor, how: str) -> None:
    if how == "all":
        tensor.mul_(0.5)
    elif how == "a row":
        tensor[1] = 0.25
    elif how == "a view":
        tensor[:2].add_(0.125)
    else:
        tensor.data.view(-1).clamp_(-0.01, 0.01)


def _lives(rank: int, world_size: int, kind: str, examples: int) -> None:
    torch.manual_seed(0)
    ours: Any = embrace_fx.compile(Tagger().double(), strategy="alltoall")
    torch.manual_seed(0)
    theirs = DistributedDataParallel(Tagger().double())
    Lives.sides = (Side(ours, kind), Side(theirs, kind))
    options = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Lives, settings=options)
    ours.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_live_as_under_ddp(kind: str) -> None:
    run_ranks(2, _lives, kind, 30)
