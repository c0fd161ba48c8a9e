"""Explains a step's time in words: what it is spent on, and which change would help most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from embrace_fx.vocabulary.schedule import Schedule
from embrace_fx.vocabulary.step_parts import Share

NAMES: Mapping[Share, str] = {
    "loader": "the data loader",
    "forward": "the forward",
    "backward": "the backward",
    "optimizer": "the optimizer",
    "your code": "the training loop's own code",
    "ids": "waiting for ids or for a slower rank",
    "embedding": "waiting for the link: rows of tables",
    "dense": "waiting for the link: dense gradients",
    "delayed": "waiting for the link: delayed gradients of tables",
    "offload": "waiting for saved values to be offloaded",
    "reload": "waiting for saved values to be reloaded",
    "storage": "waiting for rows of tables larger than memory",
    "between": "Python and autograd between operations",
}
"""Part of a step -> its name in a sentence."""

_FASTER_LINKS = (
    "faster links, fewer steps for the same data (larger batches, or model.no_sync() over some of them), or fewer bits "
    "on the way (compile(..., rows='bf16'))"
)
_LESS_COMPUTE = (
    "less compute, or faster processors: backend='inductor', more threads per rank, a smaller model or batch. "
    "Strategies and schedules do not help"
)
CHANGES: Mapping[Share, str] = {
    "loader": "a loader that prefetches: DataLoader(num_workers=..., prefetch_factor=...), or less work per sample. "
    "Strategies and schedules do not help",
    "forward": _LESS_COMPUTE,
    "backward": _LESS_COMPUTE,
    "optimizer": "a faster optimizer: fused=True or foreach=True if it has them; for large tables, row_updates='lazy', "
    "which leaves rows without a gradient unchanged",
    "your code": "less code between the calls: logging, metrics and .item() only every few steps, and "
    "model.clip_grad_norm_() for clipping",
    "ids": "an even load: the same amount of data and of work on each rank, because all ranks wait for the slowest",
    "embedding": "fetching rows earlier: schedule='2d' and for batch in model.lookahead(loader), if not in use yet; "
    "else " + _FASTER_LINKS,
    "dense": _FASTER_LINKS,
    "delayed": _FASTER_LINKS,
    "offload": "a larger memory_budget, or a faster store in spill_to",
    "reload": "a larger memory_budget, or a faster store in spill_to",
    "storage": "reading rows earlier: for batch in model.lookahead(loader, batches=3); else a larger table_memory, or "
    "a faster disk in spill_to",
    "between": "larger batches, because Python's time per step does not grow with them",
}
"""Largest part of a step -> the changes that reduce it."""

WAITS: tuple[Literal["ids", "embedding", "dense", "delayed"], ...] = ("ids", "embedding", "dense", "delayed")
PREDICTED: tuple[Share, ...] = ("forward", "backward", "between", *WAITS)
"""Parts of a step that a schedule predicts: compute, with the time to issue it, and waits for links."""

LEFT = 0.25
"""A measured step that differs from the predicted one by more than this share is reported."""

LEAST = 0.02
"""Parts below this share of a step are printed together."""


@dataclass(frozen=True)
class Why:
    """The explanation of what a step's time is spent on.

    Attributes:
        headline: a sentence with the time of the step and the category that takes most of it.
        change: a sentence with the change that would help most.
        parts: triples (category, share of the step from 0 to 1, milliseconds), longest first. Categories with a share
            below `LEAST` are added up in a last triple, "all else".
    """

    headline: str
    change: str
    parts: tuple[tuple[str, float, float], ...]

    def __str__(self) -> str:
        rest = "; ".join(f"{name} {share:.0%}" for name, share, _ in self.parts[1:])
        return f"{self.headline}{f' Then: {rest}.' if rest else ''} {self.change}"


def explain_step(shares_ms: Mapping[Share, float], step: str = "A step takes") -> Why | None:
    """Explains in words what a step's time is spent on. Returns None if all times are zero.

    Args:
        shares_ms: category -> milliseconds of the step.
        step: the beginning of the sentence: "A step is predicted to take" for a prediction.
    """
    whole_ms = sum(shares_ms.values())
    if whole_ms <= 0:
        return None
    ordered = sorted(shares_ms.items(), key=lambda item: -item[1])
    (first, first_ms), *_ = ordered
    parts = [(NAMES[part], ms / whole_ms, ms) for part, ms in ordered if ms >= LEAST * whole_ms]
    rest_ms = whole_ms - sum(ms for *_, ms in parts)
    if rest_ms >= LEAST * whole_ms:
        parts.append(("all else", rest_ms / whole_ms, rest_ms))
    most = "Most of it" if first_ms > whole_ms / 2 else "The largest part"
    return Why(
        f"{step} {whole_ms:.1f} ms. {most}, {first_ms / whole_ms:.0%} or {first_ms:.1f} ms, is {NAMES[first]}.",
        f"What would change it most: {CHANGES[first]}.",
        tuple(parts),
    )


def compare_to_prediction(shares_ms: Mapping[Share, float], schedule: Schedule) -> str:
    """Returns sentences that say how much slower or faster a measured step is than predicted, and what to try. Returns
    "" if the difference is at most a share `LEFT` of the predicted time.

    Args:
        shares_ms: category -> milliseconds of the measured step.
        schedule: the schedule in use, with the predicted times.
    """
    figures = schedule.diagnostics()
    measured_ms = sum(shares_ms[part] for part in PREDICTED)
    if figures.step_ms <= 0 or abs(measured_ms - figures.step_ms) <= LEFT * figures.step_ms:
        return ""
    # Compare how much each wait exceeds its prediction, not the wait itself.
    waits_ms = sum(shares_ms[lane] - figures.exposed_ms.get(lane, 0.0) for lane in WAITS)
    compute_ms = measured_ms - figures.step_ms - waits_ms
    is_waiting = abs(waits_ms) > abs(compute_ms)
    more_ms = waits_ms if is_waiting else compute_ms
    if more_ms < 0:
        option = f"cluster=embrace_fx.Cluster(...), which plans for faster {'links' if is_waiting else 'processors'}"
    elif schedule.name != "none":
        option = "schedule='none', which asks less of the host"
    elif is_waiting:
        option = "schedule='2d', which hides more of the links"
    else:
        option = "backend='inductor', or fewer ranks on one host: its processors are slower than planned"
    return (
        f"Forward, backward and links take {measured_ms:.1f} ms of it, but {figures.step_ms:.1f} ms were predicted: "
        f"{abs(more_ms):.1f} ms {'more' if more_ms > 0 else 'less'} in {'waits' if is_waiting else 'compute'}. To try: "
        f"{option}."
    )
