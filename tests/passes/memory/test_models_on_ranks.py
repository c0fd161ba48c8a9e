"""Every model that memory is measured of, on 1 and 2 ranks with sharded tables and lookahead, under every budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import embrace_fx
from benchmarks.memory.cells import BUDGETS, Sized
from benchmarks.memory.decoder import DecoderWorkload
from benchmarks.memory.residual import ResidualWorkload
from benchmarks.models import MODELS
from embrace_fx.runtime.ranks.failure import PeerFailure
from tests.support.counted_memory import CountedMemory
from tests.support.inside import memory_limit_of, pipeline_of, session_of
from tests.support.ranks import run_ranks
from tests.support.training import whole

WORKLOADS: Mapping[str, Sized] = {
    "resnet": ResidualWorkload((1, 1, 2, 1), batch_size=2, pixels=32),
    "gpt-2": DecoderWorkload(300, 16, 2, 2, batch_size=2, length=12),
    **{name: sizes["tiny"] for name, sizes in MODELS.items()},
}
TIED = "gpt-2"
"""The model whose table is its last layer, too, and stays whole."""
STEPS, SEED = 4, 3
BESIDE = {1: 1.01, 2: 1.02}
"""Ranks -> what a step may hold over its budget: numbers of 8 bytes that no graph shows, and what ranks tell each
other. In models as small as these they can be seen."""


def _trains(
    rank: int, world_size: int, name: str, budget: float | None, directory: str | None
) -> tuple[dict[str, Tensor], int, int | None]:
    """What is trained, the most that the last step holds, and what it may."""
    torch.manual_seed(SEED)
    workload = WORKLOADS[name]
    plain = workload.make()
    tables = {f"{module}.weight": "alltoall" for module, each in plain.named_modules() if _is_table(each)}
    compiled = embrace_fx.compile(plain, strategy=tables, memory_budget=budget, spill_to=directory)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.05)
    torch.manual_seed(rank)
    batches = [workload.batch(step, rank, SEED) for step in range(STEPS)]
    for step, batch in enumerate(compiled.lookahead(batches)):
        counted = CountedMemory([*plain.parameters(), *plain.buffers(), *(each for b in batches for each in b)])
        if step == STEPS - 1:
            with counted:
                compiled(*batch).backward()
        else:
            compiled(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    builder: Any = pipeline_of(compiled)
    limit: Any = memory_limit_of(compiled)
    # Of the scheduled graph: what only the data knows is as the plan expects it.
    predicted = builder.step_memory().peak_bytes
    assert limit is None or predicted <= limit * BESIDE[world_size], (predicted, counted.peak_bytes, limit)
    if world_size > 1 and name != TIED:
        assert session_of(compiled).state.tables.keys() == tables.keys()
    return whole(compiled.state_dict().items()), counted.peak_bytes, limit


def _is_table(module: Any) -> bool:
    return isinstance(module, torch.nn.Embedding) and module.num_embeddings >= 40


def under_budgets(rank: int, world_size: int, name: str, directory: str) -> list[str]:
    """What became of each budget, with and without a directory to offload to."""
    expected, _, _ = _trains(rank, world_size, name, None, None)
    told = []
    for to in (None, directory):
        for budget in BUDGETS:
            asked: float | None = budget
            try:
                found, held, limit = _trains(rank, world_size, name, asked, to)
            except PeerFailure as error:
                asked = int(str(error).split("at least ")[1].split(" ")[0].replace(",", ""))
                found, held, limit = _trains(rank, world_size, name, asked, to)
            assert limit is not None
            assert held <= limit * BESIDE[world_size], (budget, to, held, limit)
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[key]) for key, value in found.items())
            told.append(f"{budget} {'offloading' if to else ''}: {'kept' if asked == budget else 'the least'}")
    return told


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_model_trains_the_same_bits_within_every_budget(name: str, world_size: int, tmp_path: Path) -> None:
    told = run_ranks(world_size, under_budgets, name, str(tmp_path))
    assert all(each == told[0] for each in told)
    assert len(told[0]) == 2 * len(BUDGETS)
