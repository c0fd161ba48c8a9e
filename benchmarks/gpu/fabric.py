"""*Emulated* ranks: one real rank of N, real compute, collectives that take the cost model's time on their streams.

What is reported, for each fabric and system
    step        milliseconds, in turn with the others
    link        what the model's collectives occupy of the link in a step, by kind
    exposed     the step less that of the same system with a link that takes no time
    hidden      1 - exposed / link; of the sparse part alone, from the timeline's waits
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.gpu.emulated import LATENCY_MS, emulated
from benchmarks.gpu.section import Context
from benchmarks.gpu.training import Running
from benchmarks.models import MODELS

MODEL = "lm"
DDP = ("ddp", "ddp sparse")
EMBRACE = ("embrace 2d", "embrace none", "embrace horizontal", "embrace vertical")
SETTLED = 14
"""Steps after which the order is the one that follows the profile."""
SLOW_MS = 200.0
"""A step so long is a window by itself."""
TARGET = {"ranks": 16, "gigabits": 100, "embedding hidden": 0.9, "over_better_of_ddp": 2.41}
"""Of 2d: the share of embedding communication that is hidden, and its speed over the better of DDP's two."""


def run(context: Context) -> None:
    context.add(kind="method", what="emulated", model=MODEL, latency_ms=LATENCY_MS, target=TARGET)
    for gigabits in context.sizes.gigabits:
        for ranks in context.sizes.ranks:
            steps: dict[str, float] = {}
            for system in (*DDP, *EMBRACE):
                if not context.affords(12.0, f"emulated {ranks} ranks at {gigabits} Gb/s, {system}"):
                    continue
                row = _measure(context, system, ranks, gigabits)
                steps[system] = row["ms"]
                context.add(kind="step", emulated=True, ranks=ranks, gigabits=gigabits, system=system, **row)
            if "embrace 2d" in steps and set(DDP) <= set(steps):
                best = min(steps[name] for name in DDP)
                row = {"ranks": ranks, "gigabits": gigabits, "over_better_of_ddp": best / steps["embrace 2d"]}
                context.add(kind="speedup", emulated=True, **row)


def _measure(context: Context, system: str, ranks: int, gigabits: int) -> dict[str, Any]:
    device, sizes = context.device, context.sizes
    device.reset_peak()
    with emulated(device, ranks, gigabits) as fabric:
        running = Running(device, system, MODELS[MODEL][sizes.model])
        for _ in range(SETTLED if device.is_real and system in EMBRACE else 2):
            running.step()
        steps = sizes.steps if running.window_ms(1) < SLOW_MS else 1
        fabric.busy_ms = dict.fromkeys(fabric.busy_ms, 0.0)
        windows = [running.window_ms(steps) for _ in range(sizes.rounds)]
        link_ms = {kind: ms / (steps * sizes.rounds) for kind, ms in fabric.busy_ms.items()}
        overlap = running.overlap(3) if system in EMBRACE else {}
        fabric.takes_time = False  # measures the same compute, copies and launches again, without links
        free = [running.window_ms(sizes.steps) for _ in range(sizes.rounds)]
        running.close()
    exposed, whole = median(windows) - median(free), sum(link_ms.values())
    return {
        "ms": median(windows),
        "windows_ms": windows,
        "free_ms": median(free),
        "link_ms": link_ms,
        "exposed_ms": exposed,
        "hidden": 1 - exposed / whole if whole else None,
        "timeline": overlap,
        "peak_bytes": device.peak_bytes(),
    }
