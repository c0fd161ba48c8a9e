"""Notices a training loop that reads all of a model's parameters in every step.

Contract
    Where all rows are wanted after each step, letting rows rest costs more than it saves. `in_every_step` changes only
    when parameters are read: nothing that a step has taken is pending then, so that one step is never taken two ways.
"""

from __future__ import annotations

from torch.optim import Optimizer

OFTEN = 2
"""Steps in a row after each of which all parameters were read."""


class ParameterReads:
    """Counts the steps in a row after each of which parameters were read, of whichever optimizers."""

    _in_a_row: int
    _stepped: set[int]  # ids of optimizers, since parameters were last read
    _missed: bool  # one of them has stepped twice

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets all reads: a change of the plan, while nothing is pending, reads what the loop does not."""
        self._in_a_row, self._stepped, self._missed = 0, set(), False

    @property
    def in_every_step(self) -> bool:
        """Whether the loop does so in every step."""
        return self._in_a_row >= OFTEN

    def stepped(self, optimizer: Optimizer) -> None:
        """Counts a step that an optimizer has taken."""
        self._missed |= id(optimizer) in self._stepped
        self._stepped.add(id(optimizer))

    def note(self) -> None:
        """Counts a read of all parameters; once between two steps."""
        if self._stepped:
            self._in_a_row = 1 if self._missed else self._in_a_row + 1
            self._stepped.clear()
            self._missed = False
