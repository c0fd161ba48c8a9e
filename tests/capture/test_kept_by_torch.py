"""What torch keeps of captures is given back."""

from __future__ import annotations

import gc
import traceback

import pytest
import torch
from torch import Tensor, fx, nn

import embrace_fx


def texts() -> dict[str, str]:
    return fx.graph_module._loader.eval_cache


def capture_one(width: int) -> None:
    """Makes a model, trains it for two steps, and closes it."""
    model = embrace_fx.compile(nn.Sequential(nn.Embedding(10, width), nn.Linear(width, 2)))
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
    model.close()


@pytest.mark.long
def test_the_code_of_graphs_that_have_gone_is_forgotten() -> None:
    held = []
    for width in (3, 4, 5, 6):
        capture_one(width)
        gc.collect()
        held.append(sum(map(len, texts().values())))
    assert held[-1] <= held[0] + 200  # numbers in the code may get more digits


def test_code_that_is_in_use_stays() -> None:
    def fail(value: Tensor) -> Tensor:
        return value.reshape(7)

    own = fx.symbolic_trace(fail)
    run = own.forward
    del own
    capture_one(3)
    try:
        run(torch.zeros(3))
    except RuntimeError as error:
        lines = "".join(traceback.format_exception(error))
    assert "value.reshape(7)" in lines
