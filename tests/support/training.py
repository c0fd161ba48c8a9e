"""What the tests of whole trainings share: the optimizers they run, the training loop on a rank, what they compare.

Every Adagrad and Adam here has an `eps` of 1e-3: a parameter whose true gradient is zero (the key bias of an attention)
has rounding for a gradient, which a smaller eps would turn into motion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

import embrace_fx
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.exactness import RowUpdates
from embrace_fx.vocabulary.plan import Decision
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.support.models import Workload
from tests.support.reference import train_reference

STEPS = 20
SEED = 0

_ONE: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
    "adagrad": partial(Adagrad, lr=0.05, eps=1e-3),
    "adam": partial(Adam, lr=0.01, eps=1e-3),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.05, eps=1e-3),
}

OPTIMIZERS = (*_ONE, "sparse_adam")


def tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a model's embedding layers, by the names of its parameters."""
    weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in weights}


def make_optimizers(name: str, model: nn.Module) -> tuple[Optimizer, ...]:
    """An optimizer of `OPTIMIZERS` over all parameters; SparseAdam over the tables, with Adam over the rest."""
    if name != "sparse_adam":
        return (_ONE[name](model.parameters()),)
    of_tables = tables(model)
    rest = [parameter for name, parameter in model.named_parameters() if name not in of_tables]
    return SparseAdam(list(of_tables.values()), 0.01, eps=1e-3), Adam(rest, 0.01, eps=1e-3)


@dataclass(frozen=True)
class Way:
    """How a model is trained, apart from what it computes.

    Attributes:
        strategy, schedule, backend, memory_budget: as in `compile`.
        lookahead: batches are read through the model's `lookahead`.
        steps: how many batches are trained on.
    """

    strategy: Strategy = "alltoall"
    schedule: ScheduleName = "2d"
    lookahead: bool = True
    steps: int = STEPS
    backend: Literal["eager", "inductor"] = "eager"
    memory_budget: float | None = None


@dataclass(frozen=True)
class Trained:
    """What a rank has after training.

    Attributes:
        parameters: name -> whole value, shards put together.
        plan: name -> the decision about it.
    """

    parameters: dict[str, Tensor]
    plan: dict[str, Decision]

    @property
    def strategies(self) -> dict[str, str]:
        """The strategy of every table."""
        return {name: decision.strategy for name, decision in self.plan.items() if decision.is_table}


def train_compiled(
    rank: int,
    world_size: int,
    workload: Workload,
    dtype: torch.dtype,
    optimizer: str,
    row_updates: RowUpdates = "exact",
    way: Way = Way(),
) -> Trained:
    """Trains a compiled model as a user would, from initial values that only rank 0 has right."""
    model = workload.make(dtype, seed=SEED + rank)
    optimizers = make_optimizers(optimizer, model)
    compiled = embrace_fx.compile(
        model,
        optimizer=optimizers,
        row_updates=row_updates,
        strategy=way.strategy,
        schedule=way.schedule,
        memory_budget=way.memory_budget,
        backend=way.backend,
    )
    batches = [workload.batches(step, rank, SEED) for step in range(way.steps)]
    for batch in compiled.lookahead(batches) if way.lookahead else batches:
        compiled(*batch).backward()
        for each in compiled.optimizer:
            each.step()
            each.zero_grad()
    return trained(compiled)


def trained(compiled: embrace_fx.CompiledModel) -> Trained:
    """Collective: the whole parameters of a compiled model, and its plan."""
    return Trained(whole_parameters(compiled), {each.parameter: each for each in compiled.plan})


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Collective: copies of a model's parameters, those of sharded tables put together."""
    shown = model.state_dict()
    return whole((name, shown[name]) for name, _ in model.named_parameters())


def whole(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Collective: copies of tensors, sharded ones put together."""
    return {name: (t.full_tensor() if isinstance(t, TableShard) else t).detach().clone() for name, t in named}


def whole_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Collective: copies of an optimizer's state as its state dict shows it, by names of parameters, put together."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    return {
        f"{held[number]} {key}": (
            value.full_tensor() if isinstance(value, TableShard) else torch.as_tensor(value)
        ).clone()
        for number, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
        if value is not None
    }


def expected_parameters(
    world_size: int,
    workload: Workload,
    dtype: torch.dtype,
    optimizer: str,
    row_updates: RowUpdates = "exact",
    steps: int = STEPS,
    **options: Any,
) -> dict[str, Tensor]:
    """The single-process reference of `train_compiled`; `options` go to `train_reference`."""
    make = partial(workload.make, dtype, SEED)
    batches = [[workload.batches(step, rank, SEED) for step in range(steps)] for rank in range(world_size)]
    return train_reference(
        make, partial(make_optimizers, optimizer), batches, steps, row_updates, list(tables(make())), **options
    )
