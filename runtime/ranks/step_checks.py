"""Checks that all ranks have announced the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import PeerFailure

if TYPE_CHECKING:
    from embrace_fx.runtime.ranks.step_handshake import HandshakeMessage

_ACTIVITIES = ("training", "accumulating gradients (no_sync)", "evaluating (eval or no_grad)")


def check_activities(activities: Sequence[int]) -> None:
    """Raises `PeerFailure` if ranks call the model in different modes (training, accumulating or evaluating).

    Args:
        activities: for each rank, its mode, as returned by `activity_code`.
    """
    if len(set(activities)) > 1:
        raise PeerFailure(
            {
                rank: f"ranks call the model in different modes: this rank is {_ACTIVITIES[activity]}. Make the same "
                "sequence of calls on every rank. On a rank without data, pass an empty batch"
                for rank, activity in enumerate(activities)
            }
        )


def check_programs(programs: Sequence[int]) -> None:
    """Raises `PeerFailure` if a rank is about to launch collectives that differ from those of rank 0.

    Args:
        programs: for each rank, a hash of the collectives.
    """
    others = [rank for rank, program in enumerate(programs) if program != programs[0]]
    if others:
        raise PeerFailure(dict.fromkeys(others, OTHER_PROGRAM))


OTHER_PROGRAM = (
    "the graph of this rank launches other collectives than the graph of rank 0, because the batches took different "
    "branches of the forward, or because the ranks registered different hooks. Use the same parameters and dtypes in "
    "the forward, and register the same hooks, on every rank"
)


_RUN_BY_ONE_RANK = (
    "{} operation(s) on sharded tables, their gradients or their optimizer state ran only on this rank since the last "
    "call of the model. Such an operation changes or copies only the columns of one rank. Run it on every rank, or "
    "call model.full_state_dict() on every rank and use the result"
)


def check_steps(announcements: Sequence[HandshakeMessage], communicator: Communicator) -> None:
    """Raises `PeerFailure` if ranks have run different numbers of optimizer steps, or different numbers of ops on
    sharded tables.

    Args:
        announcements: the announcement of each rank, which contains these numbers.
        communicator: the communicator whose `collective_ops` is reset if the numbers of ops differ.
    """
    if len({(each.steps, each.collective_ops) for each in announcements}) == 1:
        return
    steps, collective_ops = [each.steps for each in announcements], [each.collective_ops for each in announcements]
    if len(set(steps)) > 1:
        raise PeerFailure(
            {
                rank: (
                    f"ranks have taken different numbers of optimizer steps ({count} on this rank), so their "
                    "parameters differ. Load a checkpoint on every rank"
                )
                for rank, count in enumerate(steps)
            }
        )
    if (least := min(collective_ops)) >= 0:
        communicator.collective_ops -= collective_ops[communicator.rank]  # all ranks count from zero again
        raise PeerFailure(
            {rank: _RUN_BY_ONE_RANK.format(n - least) for rank, n in enumerate(collective_ops) if n > least}
        )
