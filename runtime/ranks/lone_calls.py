"""A call of the model that other ranks do not make, because they wait for the caller elsewhere: told in seconds.

    rank 0   evaluates: its announcement waits for rank 1
    rank 1   torch.distributed.barrier(), until rank 0 comes

Neither would ever go on. A rank that has waited for a while says so in the store. Another one, whose main thread stands
in a collective that the first must come to, has a thread of its own make the announcement in its place, as one of a
failure: the caller raises, and once it comes to the barrier both go on, with nothing applied. That collective may be
one of the user's, or part of what all ranks must ask for together: whole tables, norms of their gradients.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from embrace_fx.runtime.ranks.failure import place_of_main_thread

PATIENCE_S = 3.0
"""How long an announcement waits before others are asked."""

_C10D = "torch/distributed/distributed_c10d.py"
_TOGETHER = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""How the names of those collectives begin that no rank leaves before all have come."""
_LAYOUTS, _WHOLE = "runtime/tables/layouts.py", "whole_table"
"""Where a sharded table is gathered, by torch's functional collectives."""

_ELSEWHERE = (
    "expected every rank to call the model, found this one in {} at {}, waiting for a rank that calls the model alone. "
    "Call both on all ranks: the model, under join() where loaders are of unequal length, and what stands at that line "
    "(full_state_dict(), clipping and norms of gradients need all ranks, too); or evaluate on one rank with a plain "
    "model that has loaded full_state_dict()"
)


class LoneCalls:
    """The thread behind a rank that looks, a few times a second, for calls that other ranks do not come to.

    Args:
        store: of that thread alone.
        key: where a rank says that it waits.
        group: of the ranks that train together.
        answer: makes the announcement that others wait for, as one of a failure.
    """

    def __init__(
        self, store: Any, key: str, rank: int, group: dist.ProcessGroup, answer: Callable[[str], None]
    ) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._group = group
        self._answer = answer
        self._told = 0
        self._stood: tuple[int, int] | None = None  # the announcement asked for, and where the main thread stood

    def look(self, made: int, waiting_since_s: float | None) -> None:
        """Notes in the store a long wait of this rank; where this rank does not wait, answers that of another.

        Args:
            made: announcements that this rank has begun.
            waiting_since_s: by `time.monotonic`, of the one that it waits in; None: it waits in none.
        """
        if waiting_since_s is not None:
            if time.monotonic() - waiting_since_s > PATIENCE_S and self._told != made:
                self._store.set(self._key, f"{self._rank} {made}")
                self._told = made
            return
        stood, self._stood = self._stood, None
        if not self._store.check([self._key]):
            return
        rank, number = map(int, self._store.get(self._key).decode().split())
        if number != made + 1 or rank == self._rank:
            return
        frame = _stands_in(dist.get_global_rank(self._group, rank))
        if frame is None:
            return
        self._stood = number, id(frame)
        if stood == self._stood:  # at two looks: it is not just leaving
            name = frame.f_code.co_name
            what = "the gathering of a whole table" if name == _WHOLE else f"torch.distributed.{name}()"
            self._answer(_ELSEWHERE.format(what, place_of_main_thread()))


def _stands_in(rank: int) -> FrameType | None:
    """Finds the collective in which the main thread waits for a rank of the job, or None."""
    top = sys._current_frames().get(threading.main_thread().ident or 0)
    for frame, _ in traceback.walk_stack(top):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if (file.endswith(_C10D) and name.startswith(_TOGETHER)) or (file.endswith(_LAYOUTS) and name == _WHOLE):
            group = frame.f_locals.get("group")
            return frame if rank in dist.get_process_group_ranks(group or dist.group.WORLD) else None
    return None
