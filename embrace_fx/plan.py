"""The plan: the strategy of every parameter, with its reason and its predicted cost. Plain data, equal on all ranks."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table as TextTable

STRATEGIES = ("allreduce", "alltoall")
"""What keeps a parameter consistent: dense AllReduce of the gradient, or column shards and AlltoAll of rows."""


@dataclass(frozen=True)
class Decision:
    """How one parameter is kept consistent.

    Attributes:
        parameter: its name in the user's model.
        shape: its whole shape.
        is_table: whether a lookup reads it.
        strategy: one of `STRATEGIES`, "frozen" (no gradient) or "unused" (no rank's forward reads it).
        reason: why, in one line.
        sent_bytes_per_step: predicted payload that one rank sends per step, the mean over ranks: without the frames of
            the transport (gloo adds 144 bytes per message, TCP and Ethernet 66 per packet).
        ddp_bytes_per_step: what DDP's dense AllReduce sends for it.
        predicted_ms: time of the exchange alone on an idle link.
    """

    parameter: str
    shape: tuple[int, ...]
    is_table: bool
    strategy: str
    reason: str
    sent_bytes_per_step: int
    ddp_bytes_per_step: int
    predicted_ms: float


@dataclass(frozen=True)
class Plan:
    """Decisions and buckets.

    Attributes:
        world_size: number of ranks.
        decisions: one per parameter, in the model's order.
        buckets: parameters whose gradients are reduced together, in launch order.
        renormed: data-parallel tables with `max_norm`, whose replicas must rescale the same rows.
    """

    world_size: int
    decisions: tuple[Decision, ...]
    buckets: tuple[tuple[str, ...], ...]
    renormed: tuple[str, ...] = ()

    @property
    def sharded(self) -> tuple[str, ...]:
        """Tables whose columns are spread over the ranks."""
        return tuple(d.parameter for d in self.decisions if d.strategy == "alltoall")

    @property
    def sent_bytes_per_step(self) -> int:
        """Predicted payload that one rank sends per step, the mean over ranks."""
        return sum(d.sent_bytes_per_step for d in self.decisions)

    def __getitem__(self, parameter: str) -> Decision:
        for decision in self.decisions:
            if decision.parameter == parameter:
                return decision
        raise KeyError(
            f"expected a parameter of the model, found {parameter!r}; it has {[d.parameter for d in self.decisions]}"
        )

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def digest(self) -> str:
        """A hash of everything the ranks must agree on."""
        agreed = [(d.parameter, d.shape, d.strategy) for d in self.decisions]
        return hashlib.sha256(repr((self.world_size, agreed, self.buckets, self.renormed)).encode()).hexdigest()

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        return render(self)


def render(plan: Plan) -> str:
    """The plan as a table: tables first, then everything else, and the totals against DDP."""
    text = TextTable(title=f"embrace_fx plan, {plan.world_size} rank(s); bytes sent by one rank per step")
    for column in ("parameter", "shape", "strategy", "predicted", "DDP", "ms", "reason"):
        text.add_column(column, justify="right" if column in ("predicted", "DDP", "ms") else "left", overflow="fold")
    for decision in sorted(plan.decisions, key=lambda d: not d.is_table):
        text.add_row(
            decision.parameter,
            " x ".join(map(str, decision.shape)) or "scalar",
            decision.strategy,
            readable_bytes(decision.sent_bytes_per_step),
            readable_bytes(decision.ddp_bytes_per_step),
            f"{decision.predicted_ms:.3f}",
            decision.reason,
        )
    ddp = sum(d.ddp_bytes_per_step for d in plan.decisions)
    text.add_section()
    text.add_row(
        "total",
        "",
        "",
        readable_bytes(plan.sent_bytes_per_step),
        readable_bytes(ddp),
        "",
        f"{len(plan.buckets)} bucket(s)",
    )
    if not any(d.is_table for d in plan.decisions):
        text.caption = "no tables: every gradient is reduced densely"
    out = io.StringIO()
    Console(file=out, width=160, no_color=True).print(text)
    return out.getvalue()


def readable_bytes(count: float) -> str:
    """Bytes with a binary unit.

    >>> readable_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
