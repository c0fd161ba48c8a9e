"""Every element-wise optimizer of torch, in its options, steps tables in shards to the reference's values.

Parameters and optimizer state, after steps in which rows rest for 1 to 49 steps. One visit to the ranks compiles a
model once for each way, and has one optimizer after another train it from the same initial values. By default a few
optimizers train one model on two ranks; all others are `long`. What rounding to float32 does to a step depends on no
number of ranks: two show it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LRScheduler, OneCycleLR

import embrace_fx
from embrace_fx.vocabulary.exactness import RowUpdatesOption
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.support.inside import session_of
from tests.support.ranks import reset_torch_state, run_ranks
from tests.support.reference import TOLERANCES, train_reference
from tests.support.resting import RESTING, STEPS, Resting
from tests.support.training import SEED, tables, whole_parameters, whole_state

TIMEOUT_S = 1200.0

pytestmark = pytest.mark.timeout(1300)

Parameters = list[nn.Parameter]
Schedulers = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True)
class Case:
    """An optimizer and how it is used.

    Attributes:
        make: of a list of parameters; the options that matter to it are in it.
        apart: options of the tables' own param group.
        scheduler: made after it.
        exact: whether rounding cannot become motion, as under a class that steps by signs; without, the case is
            compared in float64 alone, and steps no key's bias, whose gradient is rounding.
    """

    make: Callable[..., Optimizer]
    apart: tuple[tuple[str, Any], ...] = ()
    scheduler: Schedulers | None = None
    exact: bool = True


def _case(kind: Callable[..., Optimizer], lr: Any = 0.01, **options: Any) -> Case:
    if kind in (Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Adagrad):
        options = {"eps": 1e-3, **options}
    return Case(partial(kind, lr=lr, **options), exact=kind is not Rprop)


def _with(case: Case, **changes: Any) -> Case:
    return Case(**{**case.__dict__, **changes})


def _tensor_lr(parameters: Any, kind: Callable[..., Optimizer], **options: Any) -> Optimizer:
    return kind(parameters, lr=torch.tensor(0.01, dtype=torch.float64), **options)


_ONE_CYCLE = partial(OneCycleLR, max_lr=0.02, total_steps=STEPS + 1)

CASES: dict[str, Case] = {
    "sgd": _case(SGD, 0.1),
    "sgd, decay": _case(SGD, 0.1, weight_decay=0.1),
    "sgd, momentum": _case(SGD, 0.05, momentum=0.9),
    "sgd, momentum, dampening, decay": _case(SGD, 0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "sgd, nesterov, decay": _case(SGD, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd, momentum, maximize": _case(SGD, 0.01, momentum=0.5, weight_decay=0.1, maximize=True),
    "sgd, momentum, foreach": _case(SGD, 0.05, momentum=0.9, foreach=True),
    "sgd, momentum, fused": _case(SGD, 0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "sgd, tensor lr": Case(partial(_tensor_lr, kind=SGD, momentum=0.9), scheduler=partial(CosineAnnealingLR, T_max=20)),
    "sgd, cyclic momentum": _with(
        _case(SGD, 0.05, momentum=0.9), scheduler=partial(CyclicLR, base_lr=0.01, max_lr=0.05, step_size_up=6)
    ),
    "adam": _case(Adam),
    "adam, amsgrad": _case(Adam, amsgrad=True),
    "adam, decay": _case(Adam, weight_decay=0.1),
    "adam, amsgrad, decay, maximize": _case(Adam, amsgrad=True, weight_decay=0.1, maximize=True),
    "adam, decoupled": _case(Adam, weight_decay=0.1, decoupled_weight_decay=True),
    "adam, foreach": _case(Adam, foreach=True),
    "adam, fused": _case(Adam, fused=True, weight_decay=0.1),
    "adamw": _case(AdamW, weight_decay=0.1),
    "adamw, amsgrad": _case(AdamW, weight_decay=0.1, amsgrad=True),
    "adamw, fused, amsgrad": _case(AdamW, weight_decay=0.1, amsgrad=True, fused=True),
    "adamw, foreach, maximize": _case(AdamW, weight_decay=0.1, foreach=True, maximize=True),
    "adamw, tensor lr": Case(
        partial(_tensor_lr, kind=AdamW, eps=1e-3, foreach=False), scheduler=partial(CosineAnnealingLR, T_max=20)
    ),
    "adamw, one cycle": _with(_case(AdamW, weight_decay=0.1), scheduler=_ONE_CYCLE),
    "adamw, a group apart": _with(
        _case(AdamW), apart=(("lr", 0.03), ("weight_decay", 0.2), ("betas", (0.8, 0.99))), scheduler=_ONE_CYCLE
    ),
    "adamax": _case(Adamax),
    "adamax, decay, maximize": _case(Adamax, weight_decay=0.1, maximize=True),
    "adamax, foreach": _case(Adamax, foreach=True),
    "nadam": _case(NAdam),
    "nadam, decay": _case(NAdam, weight_decay=0.1, momentum_decay=0.01),
    "nadam, decoupled, foreach": _case(NAdam, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    "nadam, maximize": _case(NAdam, maximize=True),
    "radam": _case(RAdam),
    "radam, decay": _case(RAdam, weight_decay=0.1),
    "radam, decoupled, foreach": _case(RAdam, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    "rmsprop": _case(RMSprop),
    "rmsprop, momentum, centered": _case(RMSprop, 0.001, momentum=0.9, centered=True, eps=0.1),
    "rmsprop, momentum": _case(RMSprop, 0.001, momentum=0.9, eps=0.1),
    "rmsprop, decay, foreach, maximize": _case(RMSprop, weight_decay=0.1, foreach=True, maximize=True),
    "rprop": _case(Rprop, 0.001),
    "rprop, steps, foreach": _case(Rprop, 0.001, etas=(0.6, 1.1), step_sizes=(1e-5, 0.01), foreach=True),
    "adadelta": _case(Adadelta, 1.0),
    "adadelta, decay, foreach": _case(Adadelta, 1.0, weight_decay=0.1, rho=0.8, foreach=True),
    "adagrad": _case(Adagrad, 0.05),
    "adagrad, lr decay, start": _case(Adagrad, 0.05, lr_decay=0.05, initial_accumulator_value=0.1),
    # A key's bias has no true gradient but the decay's own: where lr weight_decay / eps exceeds 2, its rounding grows
    # with each step, in torch as here.
    "adagrad, decay": _case(Adagrad, 0.05, weight_decay=0.01),
    "adagrad, decay, foreach, maximize": _case(Adagrad, 0.05, weight_decay=0.01, foreach=True, maximize=True),
    "adagrad, fused": _case(Adagrad, 0.05, fused=True),
    "row-wise adagrad": Case(partial(embrace_fx.RowWiseAdagrad, lr=0.05, eps=1e-3, initial_accumulator_value=0.1)),
    "asgd": _case(ASGD, 0.05),
    "asgd, averaged": _case(ASGD, 0.05, lambd=0.01, alpha=0.6, t0=10.0, weight_decay=0.1),
    "asgd, foreach": _case(ASGD, 0.05, t0=10.0, foreach=True),
    "adam, capturable": _case(Adam, capturable=True, amsgrad=True),
    "adamw, capturable, foreach": _case(AdamW, capturable=True, foreach=True, weight_decay=0.1),
    "adamax, capturable": _case(Adamax, capturable=True),
    "nadam, capturable": _case(NAdam, capturable=True),
    "radam, capturable": _case(RAdam, capturable=True),
    "rmsprop, capturable": _case(RMSprop, capturable=True, momentum=0.9, eps=0.1),
    "rprop, capturable": _case(Rprop, 0.001, capturable=True),
    "adadelta, capturable": _case(Adadelta, 1.0, capturable=True),
    "asgd, capturable": _case(ASGD, 0.05, t0=10.0, capturable=True),
}
FAMILIES = {
    "sgd": ("sgd", "asgd"),
    "adam": ("adam", "adamw"),
    "adam's kin": ("adamax", "nadam", "radam"),
    "others": ("rmsprop", "rprop", "adadelta", "adagrad", "row-wise adagrad"),
}
"""What is trained in one visit: cases by the first of their names."""
DEFAULT = ("sgd, nesterov, decay", "adamw, one cycle", "adagrad", "row-wise adagrad")
RESTING_CASES = (
    *("sgd, decay", "sgd, momentum", "sgd, nesterov, decay", "sgd, momentum, maximize", "sgd, momentum, foreach"),
    *("sgd, momentum, fused", "sgd, tensor lr", "sgd, cyclic momentum"),
    *("adam", "adam, amsgrad", "adam, decoupled", "adam, foreach"),
    *("adamw", "adamw, amsgrad", "adamw, fused, amsgrad", "adamw, foreach, maximize", "adamw, tensor lr"),
    *("adamw, one cycle", "adamw, a group apart"),
    *("rmsprop", "rmsprop, momentum, centered", "rmsprop, momentum"),
)
"""Those whose rows can take many steps at once."""

Way = tuple[ScheduleName, RowUpdatesOption]
WAYS: tuple[Way, ...] = (("none", "sweep"), ("2d", "sweep"), ("none", "replay"), ("2d", "replay"))
"""Under "2d" batches are read through `lookahead`."""


@dataclass(frozen=True)
class Group:
    """What one visit to the ranks trains.

    Attributes:
        sweeps_again: a case whose rows cannot rest, and are swept, is trained under "replay" too.
    """

    model: str
    world_size: int
    dtype: torch.dtype
    cases: tuple[str, ...]
    ways: tuple[Way, ...] = WAYS
    sweeps_again: bool = True

    @property
    def workload(self) -> Resting:
        return RESTING[self.model]

    def cases_of(self, way: Way) -> list[str]:
        _, row_updates = way
        return [n for n in self.cases if self.sweeps_again or row_updates == "sweep" or n in RESTING_CASES]

    def __str__(self) -> str:
        return f"{self.model}-{self.world_size}-{str(self.dtype).removeprefix('torch.')}"


def _stepped(model: nn.Module, case: Case) -> tuple[Optimizer, list[LRScheduler]]:
    """The case's optimizer over what it may step, and its scheduler."""
    of_tables = tables(model)
    stepped = {n: p for n, p in model.named_parameters() if case.exact or not n.endswith("in_proj_bias")}
    groups: list[dict[str, Any]] = [{"params": [p for n, p in stepped.items() if n not in of_tables]}]
    groups.append({"params": list(of_tables.values()), **dict(case.apart)})
    optimizer = case.make(groups)
    return optimizer, [case.scheduler(optimizer)] if case.scheduler is not None else []


@contextmanager
def _capturable_on_cpus() -> Iterator[None]:
    """Lifts torch's check of the device: what it computes under `capturable`, a CPU can compute too."""
    with ExitStack() as stack:
        for kind in (Adadelta, Adam, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop):
            module = sys.modules[kind.__module__]
            stack.enter_context(patch.object(module, "_get_capturable_supported_devices", lambda **_: ["cpu"]))
        yield


Ends = dict[str, Tensor]


@_capturable_on_cpus()
def _train_all(rank: int, world_size: int, group: Group) -> dict[tuple[str, Way], Ends]:
    found = {}
    batches = [group.workload.batches(step, rank, SEED) for step in range(STEPS)]
    for way in filter(group.cases_of, group.ways):
        schedule, row_updates = way
        reset_torch_state()
        plain = group.workload.make(group.dtype, SEED)
        initial = {name: value.clone() for name, value in plain.state_dict().items()}
        model = embrace_fx.compile(plain, strategy="alltoall", schedule=schedule, row_updates=row_updates)
        for name in group.cases_of(way):
            model.load_state_dict(initial)
            model.zero_grad()
            optimizer, schedulers = _stepped(model.module, CASES[name])
            try:
                rested = False
                for batch in model.lookahead(batches) if schedule == "2d" else batches:
                    model(*batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    for scheduler in schedulers:
                        scheduler.step()
                    rested |= any(table.has_resting_rows for table in session_of(model).state.tables.values())
                assert rested == (row_updates == "replay" and name in RESTING_CASES), "RESTING_CASES is not true of it"
                found[name, way] = whole_parameters(model) | whole_state(plain, optimizer)
            except Exception as error:
                error.add_note(f"while training {group} with {name}, {way}")
                raise
        assert set(model.plan.sharded) == set(tables(plain)), model.plan
    return found


@_capturable_on_cpus()
def _reference(group: Group, name: str) -> Ends:
    made: list[Any] = []

    def make_optimizers(model: nn.Module) -> Sequence[Optimizer]:
        optimizer, schedulers = _stepped(model, CASES[name])
        made[:] = model, optimizer, schedulers
        return (optimizer,)

    batches = [[group.workload.batches(step, rank, SEED) for step in range(STEPS)] for rank in range(group.world_size)]
    parameters = train_reference(
        partial(group.workload.make, group.dtype, SEED),
        make_optimizers,
        batches,
        STEPS,
        make_schedulers=lambda _: made[2],
    )
    return parameters | whole_state(made[0], made[1])


def _differences(found: Ends, expected: Ends, dtype: torch.dtype, rounded: Callable[[], Ends]) -> list[str]:
    """What differs by more than the tolerance, and by more than twice what rounding does to the reference itself.

    A momentum whose gradients nearly cancel has fewer digits than they had.

    Args:
        rounded: the reference in float64, made where it is asked for.
    """
    wrong = [f"expected {sorted(expected)}, found {sorted(found)}"] if found.keys() != expected.keys() else []
    for key, value in expected.items():
        other = found[key]
        if other.shape != value.shape or other.dtype != value.dtype:
            wrong.append(f"{key}: expected {value.shape}, {value.dtype}, found {other.shape}, {other.dtype}")
            continue
        far, allowed = float((other - value).abs().max()), TOLERANCES[dtype] * max(float(value.abs().max()), 1e-30)
        if allowed < far < 100 * allowed and dtype == torch.float32:
            allowed = max(allowed, 2 * float((value - rounded()[key]).abs().max()))
        if not far <= allowed:
            wrong.append(f"{key}: differs by {far:.3g}, allowed {allowed:.3g}")
    return wrong


def _check(group: Group) -> None:
    by_rank = run_ranks(group.world_size, _train_all, group, timeout_s=TIMEOUT_S)
    wrong = []
    for name in group.cases:
        expected = _reference(group, name)
        rounded = functools.cache(partial(_reference, replace(group, dtype=torch.float64), name))
        for way in (way for way in group.ways if name in group.cases_of(way)):
            for rank, found in enumerate(by_rank):
                told = _differences(found[name, way], expected, group.dtype, rounded)
                wrong += [f"{name}, {way}, rank {rank}: {each}" for each in told]
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_some_optimizers_on_shards_end_as_the_reference() -> None:
    _check(Group("two_table_lm", 2, torch.float64, DEFAULT, (("2d", "sweep"), ("2d", "replay"))))


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "dtype"), [*product((1, 2, 3, 4), [torch.float64]), (2, torch.float32)], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model", RESTING)
def test_all_optimizers_on_shards_end_as_the_reference(
    model: str, world_size: int, family: str, dtype: torch.dtype
) -> None:
    cases = {name: case for name, case in CASES.items() if name.split(",")[0] in FAMILIES[family]}
    exact = tuple(name for name, case in cases.items() if case.exact or dtype == torch.float64)
    _check(Group(model, world_size, dtype, exact, sweeps_again=world_size == 2))


def test_every_case_is_of_a_family() -> None:
    assert {name.split(",")[0] for name in CASES} == {kind for family in FAMILIES.values() for kind in family}
