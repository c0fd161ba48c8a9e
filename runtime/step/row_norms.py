"""Row-wise Adagrad over shards: a row's step needs the squares of all its columns, of which each rank has some.

They are added up in one exchange a step, of all tables, by the thread that steps the optimizer: once their gradients
have arrived, and before any of them is updated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from embrace_fx import cost
from embrace_fx.runtime.launch.recorder import Recorder, Transfer
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.update_rule import RowWise
from embrace_fx.vocabulary.operation_id import ROW_NORMS


def update_row_wise(tables: Sequence[RowTable], communicator: Communicator, recorder: Recorder) -> None:
    """Steps tables of one optimizer by their gradients, which are here. Collective, with the same tables."""
    if not tables:
        return
    gradients = [table.open_gradient().rows() for table in tables]
    squares = torch.cat([rows.square().sum(1) for _, rows in gradients])
    if communicator.world_size > 1 and squares.numel():
        began, recording = recorder.clock.now(), recorder.recording
        with recorder.waiting(ROW_NORMS):
            squares = communicator.reduce_scalar(squares, dist.ReduceOp.SUM)
        if recording is not None:
            sent_bytes = cost.all_reduce(squares.nbytes, communicator.world_size).sent_bytes
            recorder.transferred(Transfer(ROW_NORMS, recording.window, sent_bytes, began, recorder.clock.now()))
    parts = squares.split([len(ids) for ids, _ in gradients])
    for table, (ids, rows), of_table in zip(tables, gradients, parts, strict=True):
        rule = table.begin_step()
        assert isinstance(rule, RowWise)
        rule.update(ids, rows, of_table.to(rows.dtype))
