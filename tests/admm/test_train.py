"""Training in a single process: it learns, keeps the best, stops, resumes to the bit, and refuses what it cannot do."""

from __future__ import annotations

import re
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embrace_fx import admm
from embrace_fx.admm.progress import Best, Progress
from embrace_fx.admm.state import State
from tests.admm.problems import modules, random_problem, weighed_words
from tests.support.golden import brief, check_golden


def loss_and_accuracy(rnn: nn.RNN, head: nn.Linear, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Returns the loss and the accuracy that the modules themselves compute."""
    with torch.no_grad():
        states, _ = rnn(inputs)
        scores = head(states if targets.dim() == 2 else states[:, -1]).flatten(0, -2)
    loss = nn.functional.cross_entropy(scores, targets.flatten())
    return float(loss), float((scores.argmax(-1) == targets.flatten()).float().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 6])
def test_classification_of_sequences(dtype: torch.dtype, steps: int) -> None:
    inputs, targets = weighed_words(150, steps, seed=0)
    rnn, head = modules(6, 16, 2, dtype=dtype)
    state = admm.train(rnn, head, (inputs.to(dtype), targets), iterations=25)
    loss, accuracy = loss_and_accuracy(rnn, head, inputs.to(dtype), targets)
    assert accuracy > 0.85
    assert loss == pytest.approx(state.best.loss, rel=1e-4)
    assert all(parameter.dtype == dtype and parameter.grad is None for parameter in rnn.parameters())


TRAININGS: dict[str, dict[str, Any]] = {
    "of sequences": {"batch_size": 7},
    "of steps, other penalties": {"every": True, "penalties": admm.Penalties(3.0, 0.5, 2.0)},
    "until other data fit no better": {
        "rescale": False,
        "validation": weighed_words(9, 5, seed=3),
        "stopping": admm.Stopping(patience=1),
    },
    "until it is accurate": {"stopping": admm.Stopping(accuracy=0.9), "iterations": 40, "batch_size": 1},
}


def test_metrics_of_all_iterations() -> None:
    lines = []
    for name, options in TRAININGS.items():
        inputs, targets = weighed_words(40, 5, seed=0)
        every = options.get("every")
        ask: dict[str, Any] = {"iterations": 6, **{key: of for key, of in options.items() if key != "every"}}
        if "validation" in ask:
            ask["validation"] = ask["validation"][0].double(), ask["validation"][1]
        rnn, head = modules(6, 8, 2, dtype=torch.float64)
        state = admm.train(rnn, head, (inputs.double(), inputs.argmax(-1) % 2 if every else targets), **ask)
        norms = [float(each.detach().norm()) for each in (*rnn.parameters(), *head.parameters())]
        lines += [f"\n{name}: best {state.best.iteration}, stopped {state.stopped}, norms {brief(norms)}"]
        lines += [brief(progress, "elapsed_s") for progress in state.history]
    check_golden("admm", "\n".join(lines))


def flat(state: State) -> dict[str, Tensor]:
    holders = {
        "weights": state.weights,
        "agreed": state.agreed,
        "best": state.best.weights,
        "multipliers": state.multipliers,
        "grams": state.grams,
    }
    found = {f"{n}.{f.name}": getattr(h, f.name) for n, h in holders.items() if h is not None for f in fields(h)}
    rows = [astuple(progress)[:-1] for progress in state.history]  # without the time, which differs between runs
    return found | {"history": torch.tensor(rows, dtype=torch.float64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resumed_training_is_the_same_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    inputs, targets = weighed_words(40, 4, seed=0)
    data = inputs.to(dtype), targets
    rnn, head = modules(6, 8, 2, dtype=dtype)
    whole = admm.train(rnn, head, data, iterations=20)

    again, again_head = modules(6, 8, 2, dtype=dtype)
    admm.train(again, again_head, data, iterations=8).save(tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)
    fresh, fresh_head = modules(6, 8, 2, dtype=dtype, seed=5)
    resumed = admm.train(fresh, fresh_head, data, iterations=20, state=State.load(tmp_path / "state.pt"))

    assert resumed.iteration == whole.iteration == 20
    wanted = flat(whole)
    for name, value in flat(resumed).items():
        assert torch.equal(value, wanted[name]), name
    for found, expected in zip(
        [*fresh.parameters(), *fresh_head.parameters()], [*rnn.parameters(), *head.parameters()], strict=True
    ):
        assert torch.equal(found, expected)


def test_what_is_kept_is_the_best_and_not_the_last() -> None:
    """A model with many units and few sequences overfits: its loss on other data increases again."""
    rnn, head = modules(6, 48, 2, seed=1)
    held_out = weighed_words(200, 6, seed=1)
    state = admm.train(
        rnn,
        head,
        weighed_words(24, 6, seed=0),
        iterations=300,
        validation=held_out,
        stopping=admm.Stopping(patience=10),
    )
    losses = [progress.loss for progress in state.history]
    assert state.best.loss == min(losses) < losses[-1]
    assert losses.index(min(losses)) + 1 == state.best.iteration == state.iteration - 10
    assert loss_and_accuracy(rnn, head, *held_out)[0] == pytest.approx(min(losses), rel=1e-4)
    assert state.stopped == f"10 iterations brought no lower loss than iteration {state.best.iteration}"


def test_each_iteration_is_told() -> None:
    seen: list[Progress] = []
    state = admm.train(*modules(6, 16, 2), weighed_words(50, 4, seed=0), iterations=2, on_iteration=seen.append)
    assert seen == state.history


@pytest.mark.parametrize(("loss", "lagrangian"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_a_loss_that_is_no_number_ends_training_and_is_never_best(loss: float, lagrangian: float) -> None:
    weights = random_problem(0, 1, 1).weights
    progress = Progress(3, loss, 0.5, lagrangian, 0, 0, 0, 0, 0, 1.0)
    best = Best(1, 0.9, weights)
    assert best.better_of(progress, weights) is best
    assert admm.Stopping().reason(progress, best) == "the loss was not finite at iteration 3"


def _data(**changes: Any) -> tuple[Tensor, Tensor]:
    data = {"inputs": torch.zeros(4, 3, 6), "targets": torch.zeros(4, dtype=torch.int64)} | changes
    return data["inputs"], data["targets"]


@pytest.mark.parametrize(
    ("rnn", "head", "data", "message"),
    [
        (nn.LSTM(6, 8), None, _data(), "supports a torch.nn.RNN and a torch.nn.Linear, not LSTM and Linear"),
        (nn.RNN(6, 8, nonlinearity="relu"), None, _data(), "does not support nonlinearity='relu'"),
        (nn.RNN(6, 8, num_layers=2), None, _data(), "does not support num_layers=2"),
        (nn.RNN(6, 8, bidirectional=True), None, _data(), "does not support bidirectional=True"),
        (nn.RNN(6, 8, bias=False), None, _data(), "does not support bias=False"),
        (None, nn.Linear(8, 2, bias=False), _data(), "does not support bias=False"),
        (None, nn.Linear(9, 2), _data(), "head has in_features=9, but the RNN has hidden_size=8"),
        (nn.RNN(6, 8, dtype=torch.float64), None, _data(), "are torch.float32 on cpu, torch.float64 on cpu"),
        (
            None,
            None,
            _data(inputs=torch.zeros(4, 3, 5)),
            r"shape \(4, 3, 5\) and must have shape \(B, N, I\), with I = 6",
        ),
        (None, None, _data(inputs=torch.zeros(4, 0, 6)), "no size 0"),
        (None, None, _data(inputs=torch.zeros(4, 3, 6).double()), "inputs are torch.float64 on cpu"),
        (None, None, _data(inputs=torch.full((4, 3, 6), float("nan"))), "inputs contain inf or nan"),
        (None, None, _data(targets=torch.zeros(5, dtype=torch.int64)), r"Pass int64 targets of shape \(4,\)"),
        (None, None, _data(targets=torch.zeros(4)), "targets are torch.float32"),
        (None, None, _data(targets=torch.full((4,), 2)), "targets go from 2 to 2, but the head has 2 outputs"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(
    rnn: nn.Module | None, head: nn.Linear | None, data: tuple[Tensor, Tensor], message: str
) -> None:
    rnn = rnn if rnn is not None else nn.RNN(6, 8, batch_first=True)
    head = head if head is not None else nn.Linear(8, 2)
    with pytest.raises(ValueError, match=message) as refused:
        admm.train(rnn, head, data)  # type: ignore[arg-type]  # a user's mistake
    assert "\n" not in str(refused.value)


def test_options_that_make_no_sense_are_refused() -> None:
    rnn, head = modules(6, 8, 2)
    for make, message in (
        (lambda: admm.Penalties(p2=0.0), re.escape("p2=0.0")),
        (lambda: admm.Stopping(patience=0), "patience is 0. Pass at least 1"),
        (lambda: admm.Stopping(accuracy=90.0), "accuracy is 90.0"),
        (
            lambda: admm.train(rnn, head, weighed_words(4, 3, seed=0), iterations=-1),
            "iterations is -1 and batch_size 16",
        ),
        (lambda: admm.train(rnn, head, weighed_words(4, 3, seed=0), batch_size=0), "iterations is 60 and batch_size 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_a_state_of_another_training_is_refused(tmp_path: Path) -> None:
    rnn, head = modules(6, 8, 2)
    data = weighed_words(12, 3, seed=0)
    state = admm.train(rnn, head, data, iterations=1)
    with pytest.raises(ValueError, match=r"now \(\(3, 9, 8\)"):
        admm.train(rnn, head, weighed_words(9, 3, seed=0), state=state)
    with pytest.raises(ValueError, match=r"now Penalties\(p1=7.0"):
        admm.train(rnn, head, data, state=state, penalties=admm.Penalties(p1=7.0))
    with pytest.raises(ValueError, match=r"was saved with weights torch\.float32"):
        admm.train(*modules(6, 9, 2), data, state=state)
    torch.save({"else": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="not written by admm"):
        State.load(tmp_path / "other.pt")
