"""The head of a forward: what each rank tells the others of its batch, and of the one that it looks ahead to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from embrace_fx.runtime.flow.ahead import IdsProgram
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.ranks.announcement import Announcements, bad_id_report, unreadable
from embrace_fx.vocabulary.graph import Values
from embrace_fx.vocabulary.operation_id import OperationId

ANNOUNCEMENT = OperationId("ids", "announcement", "early", lane="ids")
"""What a recording shows of the wait for the slowest rank."""

_FOUND, _OVERTOOK = 1, 2
"""What a rank announces of its state: the batch is the one looked ahead to; launches of the last window have left out
of turn, so that no rank's next ones may wait for them."""


@dataclass(frozen=True)
class Announced:
    """The announcements of all ranks at the head of a forward.

    Attributes:
        found: whether the batch is the one looked ahead to, on all of them.
        overtook: whether launches have left out of turn on any.
        rows: unique rows by rank, by table.
        coming: likewise, of the next batch; -1 where it is not known.
    """

    found: bool
    overtook: bool
    rows: list[tuple[int, ...]]
    coming: list[tuple[int, ...]]


def announce(
    announcements: Announcements,
    launcher: Launcher,
    rows: Sequence[Tensor],
    coming: Sequence[int] | None,
    failure: str | None,
    *,
    found: bool,
) -> Announced:
    """Tells all ranks of this one's batch, and is told of theirs.

    Args:
        rows: unique rows by table.
        coming: how many the next batch has; None: it is not known.
        failure: what is wrong with the batch.
        found: whether it is the one looked ahead to.

    Raises:
        PeerFailure: a rank could not go on, on every rank.
    """
    now = [each.numel() for each in rows]
    state = found * _FOUND + (not launcher.queue.took_turns()) * _OVERTOOK
    with launcher.recorder.waiting(ANNOUNCEMENT):
        everyone = announcements.announce_step([state, *now, *(coming or [-1] * len(now))], failure)
    return Announced(
        all(row[0] & _FOUND for row in everyone),
        any(row[0] & _OVERTOOK for row in everyone),
        [row[1 : 1 + len(now)] for row in everyone],
        [row[1 + len(now) :] for row in everyone],
    )


def read(announcements: Announcements, program: IdsProgram, leaves: Sequence[Any]) -> tuple[Values, str | None]:
    """Returns the values of a batch's unique phase, and what is wrong with its ids.

    Raises:
        PeerFailure: they cannot be computed; on every rank.
    """
    try:
        values = program.unique(leaves)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        announcements.announce_step((), unreadable(error))
        raise
    return values, bad_id_report(program.rows_of_batch(values), program.tables, program.num_rows)
