"""Gates a backward: ranks learn whether all of them are in it before anything that it launches leaves.

Contract
    A rank sends an announcement here, which meets those of ranks that have gone on to another call without a backward,
    or could not finish their forward. The ranks at the gate then give the backward up.
"""

from __future__ import annotations

from typing import Any

import torch

from embrace_fx.runtime.ranks.announcement import BACKWARD, Announcement, Announcements, Form
from embrace_fx.runtime.ranks.failure import BACKWARD as NAME
from embrace_fx.runtime.ranks.failure import PeerFailure

_FORM = Form()


class BackwardBarrier:
    """The gate of one backward. Made by every rank that begins it, of at least two ranks.

    Args:
        call: which call's backward it is: 1 of the last call, 2 of the one before, and so on. 0: whichever the others
            are in, of a rank that computes nothing.

    Attributes:
        future: ends when it has come out whether all ranks are here.
    """

    def __init__(self, announcements: Announcements, call: int) -> None:
        announcements.communicator.progress.note(NAME)
        self._announcements = announcements
        self._here: bool | None = None
        self._own, self._everyone, self._work = announcements.launch(Announcement(BACKWARD, program=call))
        self.future: torch.futures.Future[Any] = self._work.get_future()

    def all_are_here(self) -> bool:
        """Tells whether all ranks are in this backward, once the gate's exchange has ended. Any thread may ask."""
        if self._here is None:
            rows = self._everyone.tolist()
            if not (found := rows.count(self._own) == len(rows)):  # the same call's, as most often
                told = self._announced()
                found = {each.kind for each in told} == {BACKWARD} and len({each.program for each in told} - {0}) < 2
            self._here = found
        return self._here

    def wait(self) -> None:
        """Waits until the gate's exchange has ended."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self._announcements.communicator.name_ranks(error, NAME)
            raise

    def check(self) -> None:
        """Checks that all ranks are in this backward, once the gate's exchange has ended.

        Raises:
            PeerFailure: a rank is not in this backward; on every rank that is. The others go on.
        """
        if not self.all_are_here():
            sent = self._announced()
            others = {rank: _OTHER_CALL.format(_spoken(each.program)) for rank, each in enumerate(sent) if each.program}
            raise PeerFailure(self._announcements.reports(sent, None) or others)

    def _announced(self) -> list[Announcement]:
        return [Announcement.decode(row, _FORM, 0) for row in self._everyone.tolist()]


def _spoken(call: int) -> str:
    return "the last call" if call == 1 else f"the call {call - 1} before the last one"


_OTHER_CALL = (
    "backwards of several calls run in another order on some rank: this one is in that of {}. Run them in one order "
    "on all ranks, or one backward of the sum of the losses"
)
