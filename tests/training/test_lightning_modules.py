"""LightningModules whose network is not one child: compiled by their forward, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def lightning() -> Any:
    """Imports Lightning only if a test needs it, because the import takes seconds."""
    return pytest.importorskip("lightning", reason="of the extra `test`")


def strategy_of(module: nn.Module) -> object:
    from embrace_fx.integrations.lightning import EmbraceStrategy  # noqa: PLC0415

    strategy = EmbraceStrategy()
    strategy.model = module
    strategy._lightning_module = module  # type: ignore[assignment]
    return strategy


def parts() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"words": nn.Embedding(50, 4), "top": nn.Linear(4, 1)}


def test_parts_without_a_forward_are_refused(lightning: Any) -> None:
    class Apart(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.top = parts().values()

    strategy = strategy_of(Apart())
    with pytest.raises(ValueError, match=r"Apart has no forward\(\), .* they are in top, words"):
        strategy.configure_ddp()  # type: ignore[attr-defined]


def test_a_step_that_does_not_call_the_forward_is_refused(lightning: Any) -> None:
    class Apart(lightning.LightningModule):  # type: ignore[misc]
        calls_forward = True

        def __init__(self) -> None:
            super().__init__()
            self.words, self.top = parts().values()

        def forward(self, words: Tensor) -> Tensor:
            return self.top(self.words(words)).square().mean()

        def training_step(self, words: Tensor) -> Tensor:
            return self(words) if self.calls_forward else self.top(self.words(words)).mean()

    module, words = Apart(), torch.arange(6)
    expected = module(words)
    strategy = strategy_of(module)
    strategy.configure_ddp()  # type: ignore[attr-defined]
    found = strategy.training_step(words)  # type: ignore[attr-defined]
    found.backward()

    assert torch.equal(found, expected)
    assert strategy.compiled.metrics()["tables_sharded"] == 0  # type: ignore[attr-defined]
    module.calls_forward = False
    with pytest.raises(RuntimeError, match=r"Apart\.training_step\(\) did not call self\("):
        strategy.training_step(words)  # type: ignore[attr-defined]
    strategy.compiled.close()  # type: ignore[attr-defined]


def test_metrics_are_logged_every_few_steps(lightning: Any) -> None:
    from embrace_fx.integrations.lightning import EmbraceMetrics, EmbraceStrategy  # noqa: PLC0415

    strategy, told = EmbraceStrategy(), list[Any]()
    trainer, module = (
        SimpleNamespace(strategy=None, global_step=0, log_every_n_steps=3),
        SimpleNamespace(log_dict=told.append),
    )
    for used in (None, strategy):
        trainer.strategy = used
        EmbraceMetrics().on_train_batch_end(trainer, module)  # type: ignore[arg-type]
    strategy.compiled = SimpleNamespace(metrics=lambda: {"step_ms": trainer.global_step})  # type: ignore[assignment]
    for trainer.global_step in range(1, 7):
        EmbraceMetrics().on_train_batch_end(trainer, module)  # type: ignore[arg-type]
    assert told == [{"embrace_fx/step_ms": 3}, {"embrace_fx/step_ms": 6}]
