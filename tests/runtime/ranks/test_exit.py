"""How a job ends: with its own exit status, whatever is under way and whatever is still referenced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ends import EXIT_STATUS, WORLD_SIZE

ROOT = Path(__file__).parents[3]


def run_to_the_end(directory: Path, way: str, waits_for: tuple[int, ...] = (0, 1)) -> dict[int, tuple[int, str]]:
    """Returns the exit status and standard error of the ranks in `waits_for`, and then kills the others."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.support.ends", str(directory / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank), way], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = {rank: ranks[rank].communicate(timeout=50)[1] for rank in waits_for}
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return {rank: (ranks[rank].returncode, text) for rank, text in errors.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("half read", 0),
        ("raises", 1),
        ("exits", EXIT_STATUS),
        ("loader raises", 1),
        ("between forward and backward", 0),
    ],
)
def test_a_job_ends_with_its_own_status_whatever_is_still_referenced(tmp_path: Path, way: str, status: int) -> None:
    """One of the referenced objects is a `lookahead` that has not been exhausted."""
    for found, errors in run_to_the_end(tmp_path, way).values():
        assert found == status, errors
        assert status == 0 or way == "exits" or errors.rstrip().endswith("ValueError: a user's own error")


@pytest.mark.long
def test_the_others_end_with_their_error_where_one_rank_raises(tmp_path: Path) -> None:
    (other, others_error), (raised, own_error) = run_to_the_end(tmp_path, "one rank raises").values()
    assert raised == 1
    assert "ValueError: a user's own error" in own_error
    assert other == 1
    assert "DeadRank" in others_error


@pytest.mark.long
def test_a_rank_ends_with_its_error_after_the_groups_timeout(tmp_path: Path) -> None:
    """The other rank is alive, and its launches are pending."""
    ((status, errors),) = run_to_the_end(tmp_path, "another rank is stuck", waits_for=(0,)).values()
    assert status == 1
    assert "embrace_fx.runtime.ranks.failure." in errors, errors
