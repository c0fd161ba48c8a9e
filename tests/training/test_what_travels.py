"""What travels is what the graphs say: the transfers of a steady step are the submissions that are printed.

The same launches by the same ids, and in each class in the order of the schedule, with lookahead and without.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import fx

import embrace_fx
from embrace_fx.passes.collectives import is_submission
from embrace_fx.vocabulary.operation_id import IDS, OperationId
from embrace_fx.vocabulary.ops import launch_of
from embrace_fx.vocabulary.schedule import SCHEDULES, ScheduleName
from tests.support.models import MODELS
from tests.support.ranks import reset_torch_state, run_ranks
from tests.support.training import SEED, make_optimizers

WARM_UP, RECORDED = 2, 3
"""Steps before a recording, and in it: three windows are begun, the first two are whole."""


@dataclass(frozen=True)
class Seen:
    """One rank's steady window.

    Attributes:
        transfers: what was launched, as it was.
        submissions: of the graphs that ran, in the order of the program.
        order: of the schedule.
    """

    transfers: tuple[OperationId, ...]
    submissions: tuple[OperationId, ...]
    order: tuple[OperationId, ...]


Way = tuple[ScheduleName, bool]
"""A schedule, and whether batches are looked ahead to."""


def _trains(rank: int, world_size: int, model: str, ways: list[Way]) -> dict[Way, Seen]:
    found = {}
    for schedule, lookahead in ways:
        reset_torch_state()
        workload = dict(MODELS)[model]
        module = workload.make(torch.float32, SEED)
        optimizers = make_optimizers("adagrad", module)
        compiled = embrace_fx.compile(module, optimizer=optimizers, strategy="alltoall", schedule=schedule)
        batches = [workload.batches(step, rank, SEED) for step in range(WARM_UP + RECORDED + 1)]
        coming = iter(compiled.lookahead(batches) if lookahead else batches)
        for _ in range(WARM_UP):
            _step(compiled, next(coming))
        flow = compiled._session.planned.flow
        assert flow is not None
        recording = flow.recorder.start()
        for _ in range(RECORDED):
            _step(compiled, next(coming))
        compiled.synchronize()
        flow.launcher.close()  # all that was submitted has completed, and is told
        flow.recorder.stop()
        sent = [each for each in sorted(recording.transfers, key=lambda t: t.started_s) if each.window == 1]
        found[schedule, lookahead] = Seen(
            tuple(transfer.launch for transfer in sent), _submissions(compiled.graphs), compiled.schedule.launches
        )
    return found


def _step(compiled: embrace_fx.CompiledModel, batch: tuple[torch.Tensor, ...]) -> None:
    compiled(*batch).backward()
    for each in compiled.optimizer:
        each.step()
        each.zero_grad()


def _submissions(graphs: Mapping[str, fx.GraphModule]) -> tuple[OperationId, ...]:
    nodes = [node for phase in ("backward", "forward") for node in graphs[phase].graph.nodes]
    launches = [launch_of(node) for node in nodes if is_submission(node)]
    return tuple(launch for launch in launches if launch is not None)


ALL: list[Way] = list(product(SCHEDULES, (True, False)))
FEW: list[Way] = [("2d", True), ("2d", False), ("vertical", True)]
CASES = [
    pytest.param(model, n, FEW if (model, n) == ("two_table_lm", 2) else ALL, id=f"{model}-{n}", marks=marks)
    for model, n in product(("two_table_lm", "transformer_encoder", "bag_recommender"), (2, 3, 4))
    for marks in [() if (model, n) == ("two_table_lm", 2) else (pytest.mark.long,)]
]
CASES.append(pytest.param("two_table_lm", 2, ALL, id="two_table_lm-2-all", marks=pytest.mark.long))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "world_size", "ways"), CASES)
def test_transfers_are_the_submissions_of_the_printed_graphs(model: str, world_size: int, ways: list[Way]) -> None:
    for found in run_ranks(world_size, _trains, model, ways, timeout_s=280.0):
        for (schedule, lookahead), seen in found.items():
            looks_ahead = lookahead and schedule in ("vertical", "2d")
            expected = [launch for launch in seen.submissions if looks_ahead or not launch.needs_lookahead]
            assert Counter(seen.transfers) == Counter(expected), (schedule, lookahead)
            assert (IDS in expected) == looks_ahead
            for lane in {launch.lane for launch in expected}:
                in_order = [launch for launch in seen.order if launch.lane == lane and launch in expected]
                assert [launch for launch in seen.transfers if launch.lane == lane] == in_order, (schedule, lane)


# -- names -------------------------------------------------------------------------------------------------------------

ROOT = Path(embrace_fx.__file__).parents[1]
COMPOSED = re.compile(
    r"""f["'][^"']*\{[^}]*\}[^"']*(\[\{|\bprior\b|\bdelayed\b|early\ rows|\ rows["'])   # a launch's name, put together
      | f["'](bucket|backward|forward|update|rows)\ \{                                # likewise
      | \.(startswith|endswith|removeprefix|removesuffix|partition|split)
        \(\s*[("'][^)]*(bucket|delayed|prior|early|rows|forward|backward)            # one taken apart
    """,
    re.VERBOSE,
)


def composed_names(text: str) -> list[str]:
    """Lines of a source that put a launch's name together, or take one apart."""
    return [line.strip() for line in text.splitlines() if COMPOSED.search(line)]


def test_no_name_of_a_launch_is_put_together_or_taken_apart_in_the_runtime() -> None:
    found = {
        path.name: lines
        for folder in ("runtime", "passes/scheduler", "embrace_fx/scheduling")
        for path in (ROOT / folder).rglob("*.py")
        if (lines := composed_names(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        'name = f"bucket {k} [{i}]"',
        'launcher.submit(f"{table} delayed [{k}]", launch)',
        'what = f"{self.table.name} early rows"',
        'if what.startswith("delayed"):',
        'bucket = int(what.removeprefix("bucket "))',
        'recorder.mark(f"backward {table}")',
    ],
)
def test_what_counts_as_a_composed_name(line: str) -> None:
    assert composed_names(line) == [line]
