"""Refuses, within seconds, a call of the model that other ranks do not make because they wait for the caller elsewhere.

    rank 0   evaluates: its announcement waits for rank 1
    rank 1   torch.distributed.barrier(), until rank 0 comes

Neither would ever go on. A rank that has waited for a while writes so into the store. A rank whose main thread stands
in a collective that needs the first one then announces a failure from another thread. The caller raises, comes to the
barrier, and both go on, with nothing applied. That collective may be the user's, or part of another model's call.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

import torch.distributed as dist

from embrace_fx.runtime.ranks.failure import place_of_main_thread

PATIENCE_S = 1.0
"""Seconds that an announcement waits before the rank writes that it does."""

_TOGETHER = {
    "torch/distributed/distributed_c10d.py": ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    "torch/distributed/utils.py": ("_verify_param_shape", "_sync_module_states"),  # of DDP's constructor
}
"""Files, and beginnings of the names of collectives there that no rank leaves before all have come."""
_ANNOUNCEMENTS, _READ = "runtime/ranks/announcement.py", "_read"
"""Where another model's ranks wait for each other."""

_ELSEWHERE = (
    "expected every rank to call the model, found this one in {} at {}, waiting for a rank that calls the model, or "
    "asks of a sharded table, alone. Do both on all ranks: the call, under join() where loaders are of unequal length, "
    "or the question (full_state_dict(), clipping and norms, too), and what stands at that line; or evaluate on one "
    "rank with a plain model that has loaded full_state_dict()"
)


class LoneCalls:
    """Looks, from a thread behind a rank, for calls of the model that other ranks do not come to.

    Args:
        rank: this rank.
        group: the ranks that train together.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self._rank = rank
        self._group = group
        self._told = 0
        self._stood: tuple[int, int] | None = None  # the announcement asked for, and where the main thread stood

    def look(self, store: Any, name: str, made: int, waiting_since_s: float | None) -> str | None:
        """Writes a long wait of this rank into the store; where this rank does not wait, reads that of another.

        Args:
            store: a store that only this thread uses.
            name: a name that nothing else has in the store, the same on all ranks.
            made: announcements that this rank has begun.
            waiting_since_s: by `time.monotonic`, of the one that it waits in; None: it waits in none.

        Returns:
            The failure to announce to a rank that waits for this one in vain; None: there is none.
        """
        if waiting_since_s is not None:
            if time.monotonic() - waiting_since_s > PATIENCE_S and self._told != made:
                store.set(name, f"{self._rank} {made}")
                self._told = made
            return None
        stood, self._stood = self._stood, None
        if not store.check([name]):
            return None
        rank, number = map(int, store.get(name).decode().split())
        if number != made + 1 or rank == self._rank:
            return None
        frame = _stands_in(dist.get_global_rank(self._group, rank))
        if frame is None:
            return None
        self._stood = number, id(frame)
        if stood != self._stood:  # at one look only: it may be just leaving
            return None
        called = frame.f_code.co_name
        what = "another model's call" if called == _READ else f"torch.distributed.{called}()"
        return _ELSEWHERE.format(what, place_of_main_thread())


def _stands_in(rank: int) -> FrameType | None:
    """Finds the collective in which the main thread waits for a rank of the job, or None."""
    top = sys._current_frames().get(threading.main_thread().ident or 0)
    for frame, _ in traceback.walk_stack(top):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if any(file.endswith(there) and name.startswith(names) for there, names in _TOGETHER.items()):
            return frame if _has(frame.f_locals.get("group", frame.f_locals.get("process_group")), rank) else None
        if file.endswith(_ANNOUNCEMENTS) and name == _READ:
            return frame if _has(frame.f_locals["self"].communicator.group, rank) else None
    return None


def _has(group: dist.ProcessGroup | None, rank: int) -> bool:
    """Whether a rank of the job is one of a group's; None: the default group."""
    return rank in dist.get_process_group_ranks(group or dist.group.WORLD)
