"""What a process's threads have done so far, and what a step of them calls.

Times and wake-ups are the kernel's (/proc), and cost nothing. Calls are counted by hooks that make a step several times
as long: a process that counts measures no times.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parents[3]
TASKS = Path("/proc/self/task")
ALLOCATING = ("aten::empty", "aten::empty_strided", "aten::resize_")
WIDTHS = {"float": 4, "double": 8, "long": 8, "long int": 8, "int": 4, "bool": 1, "c10::BFloat16": 2, "c10::Half": 2}
"""Names of dtypes, as the profiler has them -> bytes."""


@dataclass(frozen=True)
class Thread:
    """The totals of a thread since it started.

    Attributes:
        cpu_ms: the time for which it has run on a processor.
        waits: how often it has given up its processor to wait, which is how often it was woken.
    """

    cpu_ms: float
    waits: int


def threads_now() -> dict[int, tuple[str, Thread]]:
    """Returns native id of a thread -> (its name, its totals)."""
    known = {each.native_id: each.name for each in threading.enumerate()}
    found = {}
    for task in TASKS.iterdir():
        try:
            ran_ns = int((task / "schedstat").read_text().split()[0])
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended since it was listed
            continue
        number = int(task.name)
        name = known.get(number, status["Name"].strip())
        found[number] = name, Thread(ran_ns / 1e6, int(status["voluntary_ctxt_switches"]))
    return found


def per_step(
    before: dict[int, tuple[str, Thread]], after: dict[int, tuple[str, Thread]], steps: int
) -> dict[str, Thread]:
    """Returns thread name -> its share of a step. Threads with the same name are added up."""
    found: dict[str, Thread] = {}
    for number, (name, end) in after.items():
        begin = before.get(number, ("", Thread(0.0, 0)))[1]
        sum_ = found.get(name, Thread(0.0, 0))
        cpu_ms = sum_.cpu_ms + (end.cpu_ms - begin.cpu_ms) / steps
        found[name] = Thread(cpu_ms, sum_.waits + round((end.waits - begin.waits) / steps))
    return {name: thread for name, thread in found.items() if thread.cpu_ms > 0.01 or thread.waits}


@dataclass
class Calls:
    """Calls of Python functions, of every thread that starts after `install`; counted while `on`.

    Attributes:
        by_room: room of the code, as "embrace_fx/session" or "torch/optim" -> calls.
        locks: acquisitions of locks that Python code asks for.
    """

    on: bool = False
    by_room: Counter[str] = field(default_factory=Counter)
    locks: int = 0
    _rooms: dict[CodeType, str] = field(default_factory=dict)

    def install(self) -> None:
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def remove(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _hook(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.on:
            return
        if event == "call":
            code = frame.f_code
            room = self._rooms.get(code)
            if room is None:
                room = self._rooms[code] = room_of(code.co_filename)
            self.by_room[room] += 1
        elif event == "c_call" and getattr(argument, "__name__", "") in ("acquire", "__enter__"):
            self.locks += 1


def room_of(file: str) -> str:
    """Returns the folder of a source file: two names, from the root of the project or of the package."""
    path = Path(file)
    if "site-packages" in path.parts:  # check first, because an environment may be inside the project
        parts = path.parts[path.parts.index("site-packages") + 1 :]
    elif path.is_relative_to(ROOT):
        parts = path.relative_to(ROOT).parts
    else:
        return "python"
    folders = parts[:-1] if len(parts) > 1 else parts
    return "/".join(folders[:2])


@dataclass(frozen=True)
class Ops:
    """The calls of ATen ops per step.

    Attributes:
        calls: the number of op calls, including those made by other ops.
        by_name: op -> number of calls, the most frequent first.
        allocations: calls of the ops that make a tensor's memory.
        copied_bytes: bytes written by copies, and by gathers of rows.
    """

    calls: float
    by_name: dict[str, float]
    allocations: float
    copied_bytes: float


def count_ops(train: Callable[[], object], steps: int) -> Ops:
    """Runs `train`, which takes this many steps, under torch's profiler on every thread. Returns the ops per step."""
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=everywhere) as found:
        train()
    assert found.profiler is not None
    names: Counter[str] = Counter()
    copied = 0
    for event in found.profiler.kineto_results.events():
        if event.name().startswith("aten::"):
            names[event.name()] += 1
            copied += _copied_bytes(event.name(), event.shapes(), event.dtypes(), event.concrete_inputs())
    return Ops(
        calls=sum(names.values()) / steps,
        by_name={name: count / steps for name, count in names.most_common()},
        allocations=sum(count for name, count in names.items() if name in ALLOCATING) / steps,
        copied_bytes=copied / steps,
    )


def _copied_bytes(name: str, shapes: list[list[int]], types: list[str], given: list[Any]) -> int:
    """Returns the bytes that an op writes: for a copy, its whole first argument; for a gather, the selected slices.

    Args:
        given: the arguments that are numbers, at their positions.
    """
    if name == "aten::copy_":
        return math.prod(shapes[0]) * WIDTHS.get(types[0], 0)
    if name == "aten::index_select":
        along = given[1]
        others = [size for k, size in enumerate(shapes[0]) if k != along % len(shapes[0])]
        return math.prod(shapes[2]) * math.prod(others) * WIDTHS.get(types[0], 0)
    return 0
