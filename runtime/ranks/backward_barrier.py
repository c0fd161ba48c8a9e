"""The barrier at the start of a backward: nothing is launched before all ranks have begun this backward.

Contract
    Each rank sends an announcement. It also matches those of ranks that have called the model again without a backward,
    or whose forward has failed. The ranks in the backward then give it up.
"""

from __future__ import annotations

from typing import Any

import torch

from embrace_fx.runtime.ranks.failure import BACKWARD as NAME
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.runtime.ranks.step_handshake import BACKWARD, HandshakeMessage, MessageFormat, StepHandshake

_FORM = MessageFormat()


class BackwardBarrier:
    """The barrier at the start of one backward. Each rank announces that it begins the backward. It launches none of
    the backward's collectives before all ranks have announced the same. Requires at least two ranks.

    Args:
        announcements: exchanges announcements between ranks.
        call: the call of the model to which the backward belongs: 1 for the last call, 2 for the one before, and so on.
            A rank that computes nothing passes 0, which matches any call.

    Attributes:
        future: completes when the announcements of all ranks have been exchanged.
    """

    def __init__(self, announcements: StepHandshake, call: int) -> None:
        announcements.communicator.progress.record(NAME)
        self._announcements = announcements
        self._own, self._everyone, self._work = announcements.launch(HandshakeMessage(BACKWARD, program=call))
        self.future: torch.futures.Future[Any] = self._work.get_future()

    def all_are_here(self) -> bool:
        """Returns whether all ranks have announced the same backward. May be called from any thread, but only after the
        announcements have been exchanged.
        """
        rows = self._everyone.tolist()
        if rows.count(self._own) == len(rows):  # fast path: all ranks are in the same call's backward
            return True
        told = self._decode_announcements()
        return {each.kind for each in told} == {BACKWARD} and len({each.program for each in told} - {0}) < 2

    def wait(self) -> None:
        """Waits until every rank has made an announcement, which may be of this backward, of another one, or of the
        next call of the model.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            self._announcements.communicator.name_ranks(error, NAME)
            raise

    def check(self) -> None:
        """Checks that all ranks have announced the same backward. The announcements must have been exchanged.

        Raises:
            PeerFailure: a rank has announced something else. Raised on every rank that has announced a backward.
        """
        if not self.all_are_here():
            sent = self._decode_announcements()
            others = {
                rank: _OTHER_CALL.format(_describe_call(each.program)) for rank, each in enumerate(sent) if each.program
            }
            raise PeerFailure(self._announcements.reports(sent, None) or others)

    def _decode_announcements(self) -> list[HandshakeMessage]:
        """Returns the announcements of all ranks."""
        return [HandshakeMessage.decode(row, _FORM, 0) for row in self._everyone.tolist()]


def _describe_call(call: int) -> str:
    """Describes a call of the model in an error message, such as "the last call" or "the call 2 before the last one".

    Args:
        call: 1 for the last call of the model, 2 for the one before, and so on.
    """
    return "the last call" if call == 1 else f"the call {call - 1} before the last one"


_OTHER_CALL = (
    "ranks run the backwards of several calls in different orders: this rank is in the backward of {}. Run the "
    "backwards in the same order on all ranks, or call backward() once, on the sum of the losses"
)
