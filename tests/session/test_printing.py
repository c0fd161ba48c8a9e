"""What a forward prints and logs: at each call what it does under DDP, or once, which is said once."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import embrace_fx
from tests.support.beside import check

spoken = logging.getLogger("tests.spoken")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6)
        self.seen: list[float] = []

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.words(ids_BT).square()
        self.tell(x)
        return x.sum() / x.detach().max().item()

    def tell(self, x: Tensor) -> None: ...


class Telling(Words):
    def tell(self, x: Tensor) -> None:
        print("mean", x.mean().item(), x.shape, x.dtype, flush=True)
        print(f"largest {x.max().item():.4f}", x.detach().sum(), (x.min().item(), 1))
        found = [x.std().item(), 2]
        print(found)
        found.append(3)
        spoken.info("mean %.3f of %s", x.mean().item(), x.shape[0], stacklevel=2)
        spoken.debug("not shown")
        logging.warning("sum %s", x.detach().sum())
        warnings.warn("careful", stacklevel=2)
        self.seen.append(x.sum().item())


def _told(model: Any, rank: int) -> list[Any]:
    """Returns the printed and logged text, and the losses."""
    text, losses = io.StringIO(), []
    handler = logging.StreamHandler(text)
    spoken.setLevel(logging.INFO)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stdout(text), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                loss = model(torch.arange(4).view(2, 2) + step + rank)
                loss.backward()
                losses.append(loss.detach())
    finally:
        logging.getLogger().removeHandler(handler)
        spoken.setLevel(logging.NOTSET)
    lines = [line for line in text.getvalue().splitlines() if not line.startswith("embrace_fx: ")]
    assert len(lines) == 15
    assert [str(each.message) for each in caught if "careful" in str(each.message)] == ["careful"] * 3
    return [lines, losses, torch.tensor(model.module.seen)]


CASES = {"telling": (Telling, _told)}


def test_each_call_tells_what_it_tells_under_ddp() -> None:
    check(__name__, strategy="alltoall")


class Region(Words):
    """Prints a value inside a checkpointed region, which is unknown outside that region."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            found = x.square()
            print("mean", found.mean())
            return found

        found: Tensor = checkpoint(run, self.words(ids_BT), use_reentrant=False)
        return found.sum()


class Separated(Words):
    def tell(self, x: Tensor) -> None:
        print("mean", x.mean().item(), sep=": ")


@pytest.mark.parametrize("kind", [Separated, Region])
def test_what_cannot_be_put_off_is_told_at_each_call_as_the_model_runs_as_it_is_written(
    kind: type[Words], capsys: pytest.CaptureFixture[str]
) -> None:
    def told(make: Callable[[nn.Module], nn.Module]) -> list[str]:
        torch.manual_seed(0)
        model = make(kind())
        for _ in range(2):
            model(torch.zeros((2, 2), dtype=torch.long)).backward()
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("mean")]

    assert told(embrace_fx.compile) == told(lambda model: model)
    refused = embrace_fx.compile(kind(), route="graph")
    with pytest.raises(embrace_fx.CaptureError, match=r"test_printing\.py"):
        refused(torch.zeros((2, 2), dtype=torch.long))
