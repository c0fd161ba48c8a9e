"""What is drawn: a schedule, and a timeline beside it."""

from __future__ import annotations

import pytest

from embrace_fx.vocabulary.schedule import Schedule, Timeline
from tests.support import timelines


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return timelines.schedule()


@pytest.fixture(scope="module")
def timeline(schedule: Schedule) -> Timeline:
    return timelines.timeline(schedule)
