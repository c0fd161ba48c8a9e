"""torch's own DDP tests with embrace_fx.compile in DDP's place: what `conformance.md` says of each still holds."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.conformance.__main__ import VERDICTS, judged
from tests.conformance.bodies import names
from tests.conformance.outcomes import Bench

RECORDED: dict[str, str] = json.loads(VERDICTS.read_text())

QUICK = ("test_verify_model_across_rank_without_logger", "test_output_unused_in_loss_tuple_module")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in names()]
)
def test_a_body_does_what_the_table_says(name: str, bench: Bench) -> None:
    verdict, line = judged(name, bench)
    assert verdict == RECORDED.get(name), f"{line}\nRun `python -m tests.conformance` and look at what it changes."
