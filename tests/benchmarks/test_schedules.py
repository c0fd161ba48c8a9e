"""Which schedule "auto" chooses for the lab's models on emulated devices, beside the steps measured there."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from torch.optim import Adagrad

import embrace_fx
from benchmarks.device.emulated import EmulatedModel
from benchmarks.device.profile import profile_of
from benchmarks.models import MODELS
from embrace_fx.cost.links import Cluster, Handling, Link

RANKS = 8


class Measured(NamedTuple):
    """The rates of links (bytes per ms), the start-up time of a message (ms), and each schedule's step time (ms)."""

    slow: float
    bytes_per_ms: float
    latency_ms: float
    steps_ms: dict[str, int]


def steps(*steps_ms: int) -> dict[str, int]:
    return dict(zip(("none", "vertical", "horizontal", "2d"), steps_ms, strict=True))


MEASURED = {
    "lm": Measured(16, 4100, 0.24, steps(1603, 1281, 1326, 1209)),
    "recommender": Measured(32, 3295, 0.8, steps(2453, 1943, 2007, 1841)),
    "transformer": Measured(16, 6125, 0.25, steps(2826, 2807, 2244, 2183)),
    "bert": Measured(32, 4577, 0.95, steps(2844, 2712, 2345, 2282)),
    "gnmt": Measured(32, 5195, 0.95, steps(2584, 2262, 1877, 1882)),
}
"""`python -m benchmarks.lab device --groups schedules`, 8 ranks, of one day."""


@pytest.mark.long
@pytest.mark.parametrize("name", MEASURED)
def test_the_chosen_schedule_is_as_fast_as_the_fastest(name: str) -> None:
    slow, rate, latency_ms, steps_ms = MEASURED[name]
    workload = MODELS[name]["lab"]
    model = EmulatedModel(workload.make(), profile_of(name, "lab").blocks, slow)
    links: Any = (("all_to_all", Link(rate, 1.4, 1.8)), ("all_gather", Link(rate, 1.2, 1.0)))
    cluster = Cluster(rate, latency_ms, links, handling=Handling(round_ms=0.2), busy=0.12)
    batches = [workload.batch(0, rank, 0) for rank in range(2)]
    optimizer = Adagrad(model.parameters())
    plan = embrace_fx.plan(model, batches, world_size=RANKS, cluster=cluster, optimizer=optimizer)
    assert steps_ms[plan.schedule_name] <= 1.05 * min(steps_ms.values())
