"""Timelines of all ranks' work in both parallel forms, drawn by `embrace_fx.viz`.

A window is an iteration. Asynchronous ranks have no common iterations, so there a window is a time span of the length
of the slowest rank's iterations.
"""

from __future__ import annotations

import os
from dataclasses import replace

from embrace_fx import viz
from embrace_fx.admm.operations import COMPUTE
from embrace_fx.runtime.launch.recorder import Recording
from embrace_fx.runtime.launch.timeline import gather_timeline
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.schedule import Operation, StepGraph

STEPS = StepGraph(tuple(Operation.from_id(each, 0.0) for each in COMPUTE), (), tuple(map(str, COMPUTE)))
"""An iteration, whose parts are consecutive."""


def save_timeline(
    path: str | os.PathLike[str], communicator: Communicator, recording: Recording, *, in_step: bool
) -> None:
    """Draws what all ranks did during training to a file, on rank 0. Collective.

    The picture is divided into windows. A window is an iteration. If ranks are asynchronous, a window is a time span
    with the length of the slowest rank's mean iteration.

    Args:
        path: the file; its suffix decides the format.
        recording: this rank's recording.
        in_step: whether ranks are synchronous.
    """
    if not in_step:
        mean_s = (recording.marks[-1][2] - recording.marks[0][2]) / (recording.window + 1)
        recording = cut_by_time(recording, max(communicator.gather(mean_s, float)))
    timeline = gather_timeline(communicator, recording, STEPS)
    if communicator.rank == 0:
        viz.save(path, timeline=timeline)


def cut_by_time(recording: Recording, window_s: float) -> Recording:
    """Returns a copy of the recording divided into time spans of `window_s` seconds instead of iterations."""
    start_s, end_s = recording.marks[0][2], recording.marks[-1][2]

    def window(at_s: float) -> int:
        """Returns the index of the time span of `window_s` seconds that contains the time `at_s`."""
        return int((at_s - start_s) / window_s)

    return Recording(
        [(name, window(at_s), at_s) for name, _, at_s in recording.marks],
        [(launch, window(start), start, end) for launch, _, start, end in recording.waits],
        [replace(each, window=window(each.started_s)) for each in recording.transfers],
        window(end_s),
    )
