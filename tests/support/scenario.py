"""What a scenario is given and needs, and the registry of all of them.

A scenario is one function: what a user's script does between its wrapping line and its end. What it notes, where its
models end and what its optimizers hold must be the same under every wrap, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils import _pytree as pytree

import embrace_fx
from embrace_fx.vocabulary.plan import Grid
from tests.support.sides import Matching, Words, draw_batch

Wrap = Callable[..., Any]
"""(module, options of `compile`) -> what a script calls."""
Make = Callable[[Any], Optimizer]
Use = Callable[[Any, int], Any]
"""(training, step) -> what is noted."""

OPTIMIZERS: Mapping[str, Make] = {
    "adamw": lambda parameters: AdamW(parameters, 0.02, eps=1e-3, weight_decay=0.05),
    "adam": lambda parameters: Adam(parameters, 0.02, eps=1e-3),
    "adagrad": lambda parameters: Adagrad(parameters, 0.1, eps=1e-3),
    "sgd": lambda parameters: SGD(parameters, 0.3),
    "momentum": lambda parameters: SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
}


class Training:
    """A script's models, optimizers and batches, on one rank.

    Attributes:
        is_compiled: whether models are compiled, not wrapped by a reference.
        grid: the ranks' grid, on which a compiled model's tables are sharded.
        log: what the scenario has noted.
        optimizers: all of its optimizers, whose state is compared at the end.
    """

    def __init__(
        self,
        wrap: Wrap,
        make: Make | None,
        shared: Shared | None = None,
        *,
        is_compiled: bool,
        kind: type[Matching] = Matching,
        grid: Grid | None = None,
    ) -> None:
        self.grid = grid or Grid(1, dist.get_world_size())
        self._kind = kind
        self.rank, self.is_compiled, self._wrap = dist.get_rank(), is_compiled, wrap
        self.log: list[Any] = []
        self.models: list[Any] = []
        self.optimizers: list[Optimizer] = []
        self._make = make
        if shared is not None:
            self.models.append(shared.begin())
            self._standard = shared.module, shared.model

    @cached_property
    def _standard(self) -> tuple[Any, Any]:
        module = self._kind()
        return module, self.wrap(module)

    @property
    def module(self) -> Any:
        """Two tables and two layers, as they were before they were wrapped; `model.module` applies what is pending."""
        return self._standard[0]

    @property
    def model(self) -> Any:
        """The wrapped model."""
        return self._standard[1]

    def drop(self) -> None:
        """Forgets models and optimizers. Their states are then not compared."""
        self.models.clear()
        self.optimizers.clear()
        del self._standard

    @property
    def tables(self) -> list[nn.Parameter]:
        return [self.module.words.weight, self.module.items.weight]

    @property
    def dense(self) -> list[nn.Parameter]:
        return [*self.module.first.parameters(), *self.module.second.parameters()]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.tables, *self.dense]

    @cached_property
    def optimizer(self) -> Any:
        """The scenario's own where it has made one, else one of all parameters."""
        assert self._make is not None, "a scenario of optimizer=None makes its own"
        return self.optimize(self._make)

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """What a script calls in the place of a module.

        Args:
            options: of `compile`, where it is compiled.
        """
        self.models.append(self._wrap(module, **options))
        return self.models[-1]

    def optimize(self, make: Callable[..., Optimizer], parameters: Any = None, **options: Any) -> Any:
        """An optimizer of some parameters, or of all those of the model."""
        self.optimizers.append(make(self.model.parameters() if parameters is None else parameters, **options))
        return self.optimizers[-1]

    def lookahead(self, batches: Iterable[Any], model: Any = None) -> Iterator[Any]:
        """Batches, which a compiled model looks ahead to."""
        return iter((model or self.model).lookahead(batches) if self.is_compiled else batches)

    def batches(self, count: int = 6, first: int = 0) -> Iterator[Words]:
        return self.lookahead([draw_batch(step, self.rank) for step in range(first, first + count)])

    def batch(self, step: int) -> Words:
        """Returns a batch that does not come from a loader."""
        return draw_batch(step, self.rank)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def update(self, batch: Words) -> None:
        """Takes a step: forward, backward, optimizer step, and zeroed gradients."""
        self.model(*batch).backward()
        self.step()

    def note(self, *values: Any) -> None:
        """Logs values as they are now, of which ranks may have parts. Collective where they have."""
        self.log += [pytree.tree_map_only(Tensor, _copy, value) for value in values]

    def columns(self, value: Any) -> Any:
        """Returns this rank's part of a table, of its gradient or of its state, as a plain tensor."""
        if self.is_compiled:
            return own(value)
        row, column = self.grid.place(self.rank)
        return value[row :: self.grid.rows].chunk(self.grid.columns, dim=-1)[column]

    def ends(self) -> list[Any]:
        """Returns the states of models and optimizers. Collective."""
        states: list[Any] = [embrace_fx.full_state_dict(each) for each in (*self.models, *self.optimizers)]
        return [pytree.tree_map_only(Tensor, _copy, _in_order(state)) for state in states]


class Shared:
    """A compiled model that one scenario after another trains from the beginning: a capture is dearer than its loop."""

    def __init__(self, wrap: Wrap, kind: type[Matching] = Matching) -> None:
        self.module = kind()
        self.model = wrap(self.module)
        self._begin = copy.deepcopy(embrace_fx.full_state_dict(self.model))

    def begin(self) -> Any:
        self.model.load_state_dict(copy.deepcopy(self._begin))
        self.model.zero_grad()
        return self.model


def compiled_once(**options: Any) -> Wrap:
    """A wrap that compiles the first module; each later one of its kind is that model with its own values."""
    models: list[Any] = []

    def wrap(module: nn.Module) -> Any:
        if not models:
            models.append(embrace_fx.compile(module, **options))
        else:
            models[0].load_state_dict(module.state_dict())
            models[0].zero_grad()
        return models[0]

    return wrap


def own(value: Any) -> Any:
    """Returns a tensor, or this rank's shard of it."""
    return value.to_local() if hasattr(value, "to_local") else value


def _in_order(state: dict[str, Any]) -> Any:
    """The values of a model's state, whose names a wrap may change; an optimizer's by the numbers of parameters."""
    if "param_groups" not in state:
        return list(state.values())
    of_each = {number: dict(sorted(each.items())) for number, each in sorted(state["state"].items())}
    return of_each, [dict(sorted(group.items())) for group in state["param_groups"]]


def _copy(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach().clone()


@dataclass(frozen=True)
class Scenario:
    """What a script does, and what it needs.

    Attributes:
        room: the module that it is of.
        optimizer: the kind of `Training.optimizer`; None: it makes its own.
        reference: what it is compared with.
        fresh: it leaves hooks or foreign memory, or needs a first call: its model is shared with no other scenario.
        refused: a part of the error that a compiled model raises; "": none.
        warned: whether a compiled model warns, of batches that are not those looked ahead to.
        rtol: how far from the reference it may end.
    """

    run: Callable[[Training], None]
    room: str
    optimizer: Make | None = OPTIMIZERS["adagrad"]
    reference: Wrap = DistributedDataParallel
    fresh: bool = False
    refused: str = ""
    warned: bool = False
    rtol: float = 1e-9


SCENARIOS: dict[str, Scenario] = {}
F = TypeVar("F", bound=Callable[..., Any])


def scenario(**needs: Any) -> Callable[[F], F]:
    """Enters a function under its name, in words, with its needs: fields of `Scenario`."""

    def enter(function: F) -> F:
        name = function.__name__.replace("_", " ")
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(function, function.__module__, **needs)
        return function

    return enter


def before_each_step(**needs: Any) -> Callable[[F], F]:
    """Enters what a loop does between each backward and its step; what it returns is noted."""

    def enter(function: F) -> F:
        def run(training: Training) -> None:
            for batch in training.batches(4):
                training.model(*batch).backward()
                training.note(function(training))
                training.step()

        scenario(**{"optimizer": OPTIMIZERS["adamw"]} | needs)(functools.update_wrapper(run, function))
        return function

    return enter


def after_each_step(**needs: Any) -> Callable[[F], F]:
    """Enters what a loop does after each step but the first, as (training, step); what it returns is noted."""

    def enter(function: F) -> F:
        def run(training: Training) -> None:
            for step, batch in enumerate(training.batches(4)):
                training.model(*batch).backward()
                training.optimizer.step()
                if step:
                    training.note(function(training, step))
                training.optimizer.zero_grad()

        scenario(**{"optimizer": OPTIMIZERS["adamw"]} | needs)(functools.update_wrapper(run, function))
        return function

    return enter


def enter_all(decorator: Callable[..., Any], uses: Mapping[str, Callable[..., Any]], **needs: Any) -> None:
    """Enters short uses, by one of the decorators above, under the names of a table."""
    for name, use in uses.items():
        use.__name__ = name
        decorator(**needs)(use)


class Mean(nn.Module):
    """The reference of what DDP does not do: every backward's gradients become their mean, whatever they are of."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_hook(functional_mean)

    def forward(self, *batch: Any) -> Any:
        return self.module(*batch)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def functional_mean(gradient: Tensor) -> Tensor:
    mean = gradient.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()
