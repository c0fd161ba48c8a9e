"""The head of a backward: whether every rank is in it, before any of what it launches leaves.

Contract
    What a rank tells here is an announcement in form, so that it meets those of ranks that have gone on to another call
    without a backward, or that could not finish their forward. Who stands here then gives the backward up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.ranks.announcement import Announcement, Announcements, Mark
from embrace_fx.runtime.ranks.failure import BACKWARD, PeerFailure


class Gate:
    """The head of one backward. Made on every rank that begins it, of at least two.

    Attributes:
        future: ends when it has come out whether all ranks are here.
    """

    def __init__(self, announcements: Announcements) -> None:
        announcements.communicator.progress.note(BACKWARD)
        self._announcements = announcements
        self._everyone: Tensor
        self._everyone, self._work = announcements.launch(announcements.elsewhere(Mark.IN_BACKWARD))
        self.future: torch.futures.Future[Any] = self._work.get_future()

    def all_are_here(self) -> bool:
        """Once it has come out. From any thread."""
        return all(each.marks == Mark.IN_BACKWARD for each in self._told())

    def wait(self) -> None:
        """Until it has come out."""
        with self._announcements.communicator.watching(BACKWARD):
            self._work.wait()

    def check(self) -> None:
        """Once it has come out.

        Raises:
            PeerFailure: a rank is not in this backward; on every rank that is. The others go on.
        """
        if not self.all_are_here():
            raise PeerFailure(self._announcements.reports(self._told(), None))

    def _told(self) -> list[Announcement]:
        return [Announcement.decode(row, 0, 0) for row in self._everyone.tolist()]
