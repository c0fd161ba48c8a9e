"""Tells the recorder what a forward computes between its waits."""

from __future__ import annotations

from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.vocabulary.operation_id import OperationId


class ForwardSegments:
    """The forward's compute, segment by segment: each is told of when the forward stands still, or ends."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._segment: OperationId | None = None  # None: no forward runs
        self._stands = False

    @property
    def runs(self) -> bool:
        """Tells whether a forward runs."""
        return self._segment is not None

    def begin(self, operation: OperationId) -> None:
        """Notes that the forward computes this from here on."""
        self._segment, self._stands = operation, False

    def stand(self) -> None:
        """Notes that the forward's compute stands still, until what is awaited is put to use."""
        if self._segment is not None and not self._stands:
            self._recorder.mark(self._segment)
        self._stands = True

    def end(self) -> None:
        """Notes that the forward ends."""
        self.stand()
        self.forget()

    def forget(self) -> None:
        """Notes that no forward runs any more."""
        self._segment = None
