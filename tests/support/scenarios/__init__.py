"""What loops do, one function each, and how what they find under a compiled model is compared with DDP's."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import embrace_fx
from embrace_fx.cost import links as cost
from embrace_fx.vocabulary.plan import Grid
from tests.support.parts import differs
from tests.support.ranks import reset_torch_state
from tests.support.scenario import OPTIMIZERS, SCENARIOS, Scenario, Shared, Training, Wrap
from tests.support.scenarios import (
    batches,
    gradients,
    habits,
    head_loops,
    heads,
    joins,
    lookups,
    losses,
    modes,
    new_graphs,
    optimizers,
    output_layers,
    own_rules,
    papers,
    parameters,
    parts,
    processes,
    rare_optimizers,
    schemes,
    served,
    states,
    strangers,
    weights,
)
from tests.support.sides import DTYPE, Matching
from tests.support.training import SEED

ROOMS = {
    room.__name__.rpartition(".")[2]: [name for name, each in SCENARIOS.items() if each.room == room.__name__]
    for room in (
        batches,
        gradients,
        heads,
        head_loops,
        losses,
        modes,
        optimizers,
        output_layers,
        own_rules,
        rare_optimizers,
        parameters,
        parts,
        states,
        schemes,
        papers,
        joins,
        habits,
        new_graphs,
        strangers,
        weights,
        processes,
        served,
        lookups,
    )
}
"""The names of all scenarios by their files."""


@contextlib.contextmanager
def finely_cut() -> Iterator[None]:
    """Buckets and chunks of a few elements: a model this small would be one of each."""
    chunk_bytes, bucket_bytes = cost.choose_chunk_bytes, cost.choose_bucket_bytes
    cost.choose_chunk_bytes = lambda *arguments, **options: 160
    cost.choose_bucket_bytes = lambda *arguments, **options: 400
    try:
        yield
    finally:
        cost.choose_chunk_bytes, cost.choose_bucket_bytes = chunk_bytes, bucket_bytes


def compare(rank: int, world_size: int, names: Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    """By scenario what differs from the reference; of those that differ.

    Args:
        options: of `compile`; "optimizer" in the place of those that scenarios need, "module" in that of `Matching`.
    """
    kind, module = options.get("optimizer"), options.get("module", Matching)
    of_compile = {key: value for key, value in options.items() if key not in ("optimizer", "module")}
    compiled = functools.partial(embrace_fx.compile, **of_compile)
    grid = options.get("strategy") if isinstance(options.get("strategy"), Grid) else None
    torch.set_default_dtype(DTYPE)
    shared: Shared | None = None
    found = {}
    with finely_cut():
        for name in names:
            scenario = SCENARIOS[name]
            if options.get("route") == "eager":  # eager calls send no rows early and shard no table
                scenario = replace(scenario, refused="", warned=False)
            make = OPTIMIZERS[kind] if kind and scenario.optimizer in OPTIMIZERS.values() else scenario.optimizer
            if scenario.fresh:
                reset_torch_state()
                torch.set_default_dtype(DTYPE)
            elif shared is None:
                torch.manual_seed(SEED)
                shared = Shared(compiled, module)
            try:
                on = None if scenario.fresh else shared
                ours = _run(Training(compiled, make, on, is_compiled=True, kind=module), scenario)
                reference = _without_options(scenario.reference)
                theirs = _run(Training(reference, make, is_compiled=False, kind=module, grid=grid), scenario)
            except BaseException as error:
                error.add_note(f"in the scenario: {name}")
                raise
            if wrong := differs(ours, theirs, scenario.rtol):
                found[name] = wrong
    return found


def _without_options(wrap: Wrap) -> Wrap:
    return lambda module, **options: wrap(module)


def _run(training: Training, scenario: Scenario) -> Any:
    torch.manual_seed(SEED)
    if scenario.refused:
        return _refused(training, scenario) if training.is_compiled else ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scenario.run(training)
    told = [str(each.message) for each in caught if "lookahead() yielded" in str(each.message)]
    assert not training.is_compiled or len(told) == scenario.warned, told
    return training.log, training.ends()


def _refused(training: Training, scenario: Scenario) -> str:
    try:
        scenario.run(training)
    except Exception as error:
        return "" if scenario.refused in str(error) else str(error)
    return "was not refused"
