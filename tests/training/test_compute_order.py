"""A backward that is put in another order while it trains: on all ranks, as the graphs then say, to the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from embrace_fx.passes.overlap.order import BackwardUnits
from embrace_fx.passes.scheduler.compute_order import reordered
from embrace_fx.passes.scheduler.launch_order import schedule as launch_schedule
from embrace_fx.planning import scheduling
from embrace_fx.session.step_pipeline import PROFILED, PROFILED_AFTER
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.support.models import MODELS
from tests.support.ranks import reset_torch_state, run_ranks
from tests.support.training import SEED, make_optimizers, whole_parameters

STEPS = PROFILED_AFTER + PROFILED + 8
"""The order changes when the profile is there; some steps follow."""


@dataclass(frozen=True)
class Trained:
    """What a run came to."""

    parameters: dict[str, Tensor]
    units: tuple[str, ...]
    computed: tuple[str, ...]
    graphs: tuple[str, ...]


def _trains(rank: int, world_size: int, model: str, name: ScheduleName, lookahead: bool, reverse: bool) -> Trained:
    import embrace_fx  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patched:
        if reverse:
            patched.setattr(scheduling, "search", _turned_round)
        reset_torch_state()
        torch.set_num_threads(1)
        workload = dict(MODELS)[model]
        module = workload.make(torch.float32, SEED)
        optimizers = make_optimizers("adagrad", module)
        compiled = embrace_fx.compile(module, optimizer=optimizers, strategy="alltoall", schedule=name)
        batches = [workload.batches(step, rank, SEED) for step in range(STEPS)]
        for batch in compiled.lookahead(batches) if lookahead else batches:
            compiled(*batch).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        compiled.synchronize()
        found = whole_parameters(module)
        computed = tuple(n.removeprefix("backward ") for n in compiled.schedule.steps.compute_order if "backward " in n)
        units = BackwardUnits.of(compiled.graphs["backward"]).units
        return Trained(found, units, tuple(n for n in computed if n in units), tuple(compiled.graphs))


def _turned_round(steps, name, source, atoms, held, held_limit):  # type: ignore[no-untyped-def]
    """In place of the search: the units from the last to the first."""
    order = tuple(reversed(atoms.units))
    return launch_schedule(reordered(steps, atoms, order), name, source), order


CASES = [
    pytest.param(model, name, lookahead, id=f"{model}-{name}-{lookahead}")
    for model, (name, lookahead) in product(
        ("two_table_lm", "transformer_encoder", "bag_recommender"),
        (("2d", True), ("2d", False), ("horizontal", False), ("vertical", True)),
    )
]


@pytest.mark.long
@pytest.mark.parametrize(("model", "name", "lookahead"), CASES)
def test_another_order_of_compute_trains_to_the_same_bits(model: str, name: ScheduleName, lookahead: bool) -> None:
    stands = run_ranks(2, _trains, model, name, lookahead, False)
    turned = run_ranks(2, _trains, model, name, lookahead, True)
    for before, after in zip(stands, turned, strict=True):
        assert "order_compute" in after.graphs
        assert after.units == after.computed  # the graphs that are shown, and the schedule, are of what runs
        if "order_compute" not in before.graphs:
            assert after.units == tuple(reversed(before.units))
        for key, value in before.parameters.items():
            assert torch.equal(value, after.parameters[key]), key
    assert replace(turned[0], parameters={}) == replace(turned[1], parameters={})
