"""Three planted causes of a slow step, each told by its name: in the report, in the metrics, above the timeline."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.viz.picture import Picture
from embrace_fx.viz.why import NAMES
from embrace_fx.vocabulary.step_parts import SHARES
from tests.support.ranks import run_ranks

SLOW_S = 0.3
"""More than a busy machine takes for anything else in a step."""


def slow_steps(patch: pytest.MonkeyPatch) -> None:
    update = torch.optim.sgd.sgd

    def slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(SLOW_S)
        update(*args, **kwargs)

    patch.setattr(torch.optim.sgd, "sgd", slowly)


def batches(count: int, *, slow: bool) -> Iterator[Tensor]:
    for _ in range(count):
        if slow:
            time.sleep(SLOW_S)
        yield torch.arange(24).view(6, 4)


class _Late:
    """The work handle of a collective that ends `SLOW_S` seconds late."""

    def __init__(self, work: Any) -> None:
        self._future: torch.futures.Future[None] = torch.futures.Future()

        def end() -> None:
            work.wait()
            self._future.set_result(None)

        threading.Timer(SLOW_S, end).start()

    def get_future(self) -> torch.futures.Future[None]:
        return self._future

    def wait(self) -> None:
        self._future.wait()


def slow_all_reduces(patch: pytest.MonkeyPatch) -> None:
    launch = Communicator.all_reduce_

    def slowly(self: Communicator, values: Tensor, *args: Any) -> Any:
        launched = launch(self, values, *args)
        return replace(launched, work=_Late(launched.work)) if values.numel() > 10_000 else launched

    patch.setattr(Communicator, "all_reduce_", slowly)


def trains(rank: int, ranks: int, cause: str, folder: Path) -> str:
    """Steps with a planted cause; returns the part of a step that all three ways to look at it find the largest."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(2000, 16), nn.Flatten(), nn.Linear(64, 300), nn.Linear(300, 1))
    with pytest.MonkeyPatch.context() as patch:
        if cause == "link":
            slow_all_reduces(patch)
        # With one class of launches, the report must blame the slow link, not a transfer that waits behind it.
        strategy: Any = "allreduce" if cause == "link" else {"0.weight": "alltoall"}
        model = embrace_fx.compile(plain, cluster=embrace_fx.Cluster(), strategy=strategy)
        if cause == "optimizer":
            slow_steps(patch)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = batches(8, slow=cause == "loader")
        with contextlib.ExitStack() as recorded:
            for k, batch in enumerate(loader):
                if k == 3:
                    recorded.enter_context(model.record())
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        report, metrics, timeline = model.report(), model.metrics(), model.timeline
    model.close()

    step_ms = metrics.pop("step_ms")
    times = {name: ms for name, ms in metrics.items() if name.endswith("_ms")}
    assert len(times) == len(SHARES)
    assert sum(times.values()) == pytest.approx(step_ms)
    assert step_ms > SLOW_S * 1e3
    assert (metrics["sent_bytes"] > 0) == (ranks > 1)
    assert max(times.values()) == times[METRICS[cause]], times
    assert f"is {NAMES[PARTS[cause]]}." in " ".join(report.split())
    told = Picture(None, timeline).why
    assert told is not None
    assert NAMES[PARTS[cause]] == told.parts[0][0], told
    timeline.save(folder / f"{rank}.html")
    assert " ms. " in told.headline
    assert told.change.startswith("What would change it most: ")
    assert told.headline in (folder / f"{rank}.html").read_text()
    return told.headline


PARTS: Any = {"loader": "loader", "optimizer": "optimizer", "link": "dense"}
METRICS = {"loader": "loader_ms", "optimizer": "optimizer_ms", "link": "wait_dense_ms"}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cause", ["loader", "optimizer", "link"])
def test_a_planted_cause_is_told(cause: str, ranks: int, tmp_path: Path) -> None:
    if ranks == 1 and cause == "link":
        pytest.skip("one rank sends nothing")
    headlines = run_ranks(ranks, trains, cause, tmp_path)
    assert len(set(headlines)) == 1, "a timeline is the same on all ranks"
