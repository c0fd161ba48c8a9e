"""RowWiseAdagrad on sharded tables: updating a row needs the sum of squares over all of its columns, which lie on
several ranks.

They are added up in one exchange a step, of all tables, which the thread that steps the optimizer launches: once their
gradients have arrived. Rows are updated in the next forward, before any of them is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from embrace_fx.cost import links as cost
from embrace_fx.runtime.launch.recorder import Recorder, Transfer
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.local_storage import Rows
from embrace_fx.runtime.tables.update_rule import SparseUpdate
from embrace_fx.vocabulary.operation_id import ROW_NORMS

Step = tuple[SparseUpdate, Rows]
"""Of a table or a joined table, and the gradient that it takes."""


def sum_squares_over_ranks(steps: Sequence[Step], communicator: Communicator, recorder: Recorder) -> None:
    """Starts summing the squared norms of gradient rows over ranks, because each rank has only some columns of a row.
    Collective. Each update of `steps` waits for the sums of its rows.
    """
    if not steps:
        return
    norms = _RowNorms(torch.cat([rows.square().sum(1) for _, (_, rows) in steps]), communicator, recorder)
    first = 0
    for rule, (ids, rows) in steps:
        rule.add_for_finish((ids, rows), partial(norms.of, slice(first, first + len(ids)), rows.dtype))
        first += len(ids)


class _RowNorms:
    """The squared norms (K,) of gradient rows over all ranks' columns. `squares` (K,) are of this rank's columns."""

    def __init__(self, squares: Tensor, communicator: Communicator, recorder: Recorder) -> None:
        self._squares, self._communicator, self._recorder = squares, communicator, recorder
        recording = recorder.recording
        self._began = None if recording is None else (recording.window, recorder.clock.now())
        travels = communicator.world_size > 1 and squares.numel()
        self._launched = communicator.all_reduce_(squares, "sum", "dense") if travels else None

    def of(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Waits for the sums, and returns the squared norms of the gradient rows in a slice, converted to `dtype`."""
        if (launched := self._launched) is not None:
            self._launched = None
            with self._recorder.waiting(ROW_NORMS):
                self._squares = self._communicator.wait(launched, str(ROW_NORMS))
            if self._began is not None:
                window, began_s = self._began
                sent_bytes = cost.all_reduce(self._squares.nbytes, self._communicator.world_size).sent_bytes
                now = self._recorder.clock.now()
                self._recorder.record_transfer(Transfer(ROW_NORMS, window, sent_bytes, began_s, now))
        return self._squares[rows].to(dtype)
