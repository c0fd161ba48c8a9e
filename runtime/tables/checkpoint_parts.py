"""Parts of tables as `torch.distributed.checkpoint` wants them, by columns; and who asks for a state dict.

Contract
    What it saves and loads itself stays a part. Where it is to put tables together, or to cut whole ones, it gets
    DTensors, which nobody else sees.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from embrace_fx.runtime.tables.held import Held
from embrace_fx.runtime.tables.part import Part, own_part_of

_ROOM = "torch.distributed.checkpoint"
_OF_STATE_DICTS = f"{_ROOM}.state_dict"


def as_asked(part: Part) -> Tensor:
    """Returns a part as whoever asks for a state dict wants it: itself, unless that is `torch.distributed.checkpoint`.

    Collective where that asks and the table lies on a grid.
    """
    found, gathers = _asks()
    if not found or part.held.is_elsewhere or part.spread.is_alone:
        return part
    if part.spread.grid is not None:
        layout = part.spread.by_columns()
        part = part.like(Held(own_part_of(part, layout)), layout)
    return as_dtensor(part) if gathers else part


def as_dtensor(part: Part) -> DTensor:
    """Returns a part by columns as a DTensor, in the same memory."""
    layout = part.spread
    assert layout.mesh is not None
    local, shape = part.held.memory().detach(), layout.shape
    return DTensor.from_local(local, layout.mesh, [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1))


def _asks() -> tuple[bool, bool]:
    """Tells whether `torch.distributed.checkpoint` asks for a state dict; and whether to gather it, or to cut one."""
    frame: Any = sys._getframe(1)
    found = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == _OF_STATE_DICTS and (info := frame.f_locals.get("info")) is not None:
            return True, bool(info.full_state_dict or info.broadcast_from_rank0)
        found |= name.startswith(_ROOM)
        frame = frame.f_back
    return found, False
