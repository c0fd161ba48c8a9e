"""What a side does with a batch, each deed written once for both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from embrace_fx.runtime.ranks.failure import PeerFailure
from tests.soak.plan import FAULTS, Deed, Epoch
from tests.soak.sides import Batch, PlainSide
from tests.support.failing import NUM_WORDS, Armed, draw_batch

OTHERS = 10_000
"""From this number on, batches that come from no loader."""


class LoaderError(Exception):
    """A loader's own."""


Deeds = Callable[[PlainSide, Deed, Batch, int], None]


def run_epoch(side: PlainSide, epoch: Epoch, rank: int) -> None:
    """Runs a loop on one side."""

    def read(first: int, *, may_fail: bool) -> Iterator[Batch]:
        def batches() -> Iterator[Batch]:
            for deed in epoch.deeds[first:]:
                if may_fail and deed.kind == "loader" and deed.rank == rank:
                    raise LoaderError
                yield draw_batch(deed.step, rank, deed.length)

        return side.lookahead(batches()) if epoch.ahead else batches()

    batches = read(0, may_fail=side.is_compiled)
    for k, deed in enumerate(epoch.deeds[: epoch.left_after]):
        try:
            batch = next(batches)
        except LoaderError:  # this rank alone begins to read anew
            batches = read(k, may_fail=False)
            batch = next(batches)
        do(side, deed, batch, rank)


def do(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    """Does one deed."""
    if deed.kind in FAULTS and deed.kind not in ("evaluation", "loader"):
        if side.is_compiled:
            _survive(side, deed, batch, fails=deed.rank == rank)
        return
    if deed.kind == "evaluation":
        if side.is_compiled:
            _evaluation_that_fails(side, deed, batch, fails=deed.rank == rank)
        _update(side, deed, batch, rank)
        return
    _DEEDS.get(deed.kind, _update)(side, deed, batch, rank)


def _survive(side: PlainSide, deed: Deed, batch: Batch, *, fails: bool) -> None:
    """A step that fails on one rank; all ranks raise, or hear of it at the next call."""
    kind = deed.kind if fails else ""
    if kind == "bad id":
        batch[0][0, 0] = NUM_WORDS
    elif kind == "label":
        batch[2][0] = 7
    Armed.where = kind
    raised = False
    try:
        loss = side.model(*batch)
        if kind == "in the loss":
            raise ValueError("a user's own error")
        if kind == "no backward":
            return
        loss.backward()
    except (PeerFailure, FloatingPointError, MemoryError, IndexError, ValueError):
        raised = True
    assert raised, f"{deed} was not told"
    side.optimizer.zero_grad()


def _evaluation_that_fails(side: PlainSide, deed: Deed, batch: Batch, *, fails: bool) -> None:
    with torch.no_grad():
        side.model(*batch)
        Armed.where = "forward" if fails else ""
        try:
            side.model(*batch)
        except MemoryError:
            assert fails


def _update(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    side.model(*batch).backward()
    side.step()


def _update_with_clipping(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    side.model(*batch).backward()
    side.reduce()
    side.log.append(float(nn.utils.clip_grad_norm_(side.plain.parameters(), 0.05)))
    side.step()


def _accumulate(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    with side.no_sync():
        side.model(*batch).backward()
    side.model(*draw_batch(OTHERS + deed.step, rank)).backward()
    side.step()


def _two_backwards(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    side.model(*batch).backward()
    side.model(*draw_batch(OTHERS + deed.step, rank)).backward()
    side.step()


def _no_backward(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    side.model(*batch)


def _evaluate(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    _update(side, deed, batch, rank)
    with torch.no_grad():
        side.log.append(float(side.model(*draw_batch(OTHERS, 0))))


def _read(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    _update(side, deed, batch, rank)
    side.log += [float(value.norm()) for value in side.parameters().values()]


def _clamp(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    _update(side, deed, batch, rank)
    with torch.no_grad():
        for parameter in side.model.parameters():
            parameter.clamp_(-0.8, 0.8)


def _change_rate(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    _update(side, deed, batch, rank)
    for group in side.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + deed.step % 7)


def _keep(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    _update(side, deed, batch, rank)
    side.keep()


def _go_back(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    side.go_back()
    _update(side, deed, batch, rank)


def _ask_for_plan(side: PlainSide, deed: Deed, batch: Batch, rank: int) -> None:
    side.ask_for_another_plan()
    _update(side, deed, batch, rank)


_DEEDS: dict[str, Deeds] = {
    "update with clipping": _update_with_clipping,
    "accumulate": _accumulate,
    "two backwards": _two_backwards,
    "no backward on any rank": _no_backward,
    "evaluate": _evaluate,
    "read the parameters": _read,
    "clamp the parameters": _clamp,
    "change the learning rate": _change_rate,
    "keep a state": _keep,
    "go back to it": _go_back,
    "ask for another plan": _ask_for_plan,
}
