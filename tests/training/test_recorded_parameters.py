"""Parameters after training, bit for bit those of a record: what a change of the schedule must leave as it was.

The record, made by the code before communication was launched by nodes of the graph, holds for one version of torch and
one processor, whose kernels round alike; elsewhere the test is skipped.
`pytest --update-golden` writes it: do so from the code whose numbers are to be kept.
"""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import golden
from tests.support.models import MODELS
from tests.support.ranks import reset_torch_state, run_ranks
from tests.support.training import Way, train_compiled

RECORD = Path(__file__).parent / "recorded_parameters.json"
STEPS, WORLD_SIZE = 8, 2
TRAININGS = tuple(product(("two_table_lm", "transformer_encoder", "bag_recommender"), ("sgd", "adagrad")))


def _made_by() -> dict[str, str]:
    """What decides how kernels round: of two makers' processors with the same instructions, libraries choose others."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "cpu": capability, "processor": _processor()}


def _processor() -> str:
    """Maker, family and model, as Linux numbers them; "" where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return ", ".join(told.get(key, "") for key in ("vendor_id", "cpu family", "model"))


def _hashes(rank: int, world_size: int) -> dict[str, dict[str, str]]:
    """By training, SHA-256 of each parameter's bytes after it."""
    torch.set_num_threads(1)
    found = {}
    for model, optimizer in TRAININGS:
        reset_torch_state()
        way = Way(schedule="none", lookahead=False, steps=STEPS)
        result = train_compiled(rank, world_size, dict(MODELS)[model], torch.float32, optimizer, "exact", way)
        found[f"{model}, {optimizer}"] = {
            name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
            for name, value in sorted(result.parameters.items())
        }
    return found


@pytest.mark.long
def test_the_naive_schedule_trains_to_the_recorded_bits() -> None:
    if not golden.options.update:
        record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
        if record["made_by"] != _made_by():
            pytest.skip(f"the record is of {record['made_by']}, whose kernels may round otherwise than {_made_by()}")

    first, second = run_ranks(WORLD_SIZE, _hashes)

    assert first == second
    if golden.options.update:
        record = {"made_by": _made_by(), "steps": STEPS, "ranks": WORLD_SIZE, "parameters": first}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    assert first == record["parameters"]
