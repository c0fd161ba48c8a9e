"""Parameters after training, bit for bit those of a record: what a change of the schedule must leave as it was.

The record holds for one version of torch and one kind of CPU, whose kernels round alike; elsewhere the test is skipped.
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
    """What decides how kernels round."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


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
