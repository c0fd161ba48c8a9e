"""What compiling costs on one process: the step against eager, and the capture against `torch.compile`.

    python benchmarks/overhead.py --output benchmarks/results

Two models, one CPU thread, the same batch: an LSTM language model over 100 steps and BERT-base for question answering.
Steps alternate (eager, compiled, eager, compiled, ...); the figure is the median of the paired ratios. SGD updates are
left out of the step time: a compiled table updates fewer rows, which is another subject. Capture is compared with the
first forward and backward of `torch.compile(backend="aot_eager")` less one eager step, each in a fresh process.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import embrace_fx

Batch = dict[str, Tensor]


class LanguageModel(nn.Module):
    """Two tables around a two-layer LSTM; the loss is a sampled softmax over the negatives of the batch."""

    def __init__(self, rows: int = 20_000, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.softmax = nn.Embedding(rows, width)

    def forward(self, ids: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(ids))
        right = (hidden * self.softmax(targets)).sum(-1, keepdim=True)
        wrong = hidden @ self.softmax(negatives).t()
        scores = torch.cat([right, wrong], dim=-1).flatten(0, 1)
        return nn.functional.cross_entropy(scores, scores.new_zeros(scores.shape[0], dtype=torch.int64))


def language_model() -> tuple[nn.Module, Batch]:
    ids = torch.randint(20_000, (8, 100))
    return LanguageModel(), {"ids": ids, "targets": ids.roll(-1, 1), "negatives": torch.randint(20_000, (256,))}


def bert() -> tuple[nn.Module, Batch]:
    import transformers

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertForQuestionAnswering(transformers.BertConfig())

        def forward(self, **batch: Tensor) -> Tensor:
            loss: Tensor = self.bert(**batch).loss
            return loss

    ids = torch.randint(1000, 30_000, (2, 128))
    spans = {"start_positions": torch.randint(128, (2,)), "end_positions": torch.randint(128, (2,))}
    return Loss(), {"input_ids": ids, "attention_mask": torch.ones_like(ids), **spans}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {"lstm_100_steps": language_model, "bert_base": bert}


@dataclass(frozen=True)
class StepResult:
    """Medians over the paired rounds; `ratio` is the median of the rounds' ratios."""

    model: str
    joint_nodes: int
    eager_ms: float
    compiled_ms: float
    ratio: float
    ratio_min: float
    ratio_max: float


def measure_step(name: str, rounds: int) -> StepResult:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = embrace_fx.compile(model, optimizer=optimizer, strategy="allreduce")
    for _ in range(2):
        _step_ms(eager, batch)
        _step_ms(compiled, batch)
    pairs = [(_step_ms(eager, batch), _step_ms(compiled, batch)) for _ in range(rounds)]
    ratios = [b / a for a, b in pairs]
    nodes = len(compiled.graphs["captured"].graph.nodes)
    eager_ms, compiled_ms = (statistics.median(pair[k] for pair in pairs) for k in (0, 1))
    return StepResult(name, nodes, eager_ms, compiled_ms, statistics.median(ratios), min(ratios), max(ratios))


def _step_ms(model: nn.Module, batch: Batch) -> float:
    model.zero_grad()
    start = time.perf_counter()
    model(**batch).backward()
    return (time.perf_counter() - start) * 1e3


def capture_seconds(system: str) -> float:
    """First forward and backward of BERT-base under one system, in this process."""
    torch.manual_seed(0)
    model, batch = bert()
    _step_ms(model, batch)
    step_s = _step_ms(model, batch) / 1e3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = time.perf_counter()
    compiled: Any = (
        embrace_fx.compile(model, optimizer=optimizer, strategy="alltoall")
        if system == "embrace_fx"
        else torch.compile(model, backend=system)
    )
    compiled(**batch).backward()
    return time.perf_counter() - start - step_s


def measure_captures(rounds: int) -> dict[str, Any]:
    """Alternating fresh processes; seconds per round, and the median of the rounds' ratios."""
    seconds: dict[str, list[float]] = {"embrace_fx": [], "aot_eager": []}
    for _ in range(rounds):
        for system, found in seconds.items():
            command = [sys.executable, __file__, "--capture-only", system]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found.append(float(out.strip().splitlines()[-1]))
    ratios = [a / b for a, b in zip(seconds["embrace_fx"], seconds["aot_eager"], strict=True)]
    return {"seconds": seconds, "ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--capture-rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--capture-only", choices=("embrace_fx", "aot_eager"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.capture_only:
        print(capture_seconds(options.capture_only))
        return
    steps = [measure_step(name, options.rounds) for name in MODELS]
    captures = measure_captures(options.capture_rounds)
    print(report(steps, captures))
    if options.output:
        write(options.output, steps, captures, options)


def report(steps: list[StepResult], captures: dict[str, Any]) -> str:
    lines = ["| model | nodes | eager ms | compiled ms | compiled / eager (min, max) |", "|---|---|---|---|---|"]
    lines += [
        f"| {s.model} | {s.joint_nodes} | {s.eager_ms:.1f} | {s.compiled_ms:.1f} "
        f"| {s.ratio:.3f} ({s.ratio_min:.3f}, {s.ratio_max:.3f}) |"
        for s in steps
    ]
    medians = {name: statistics.median(values) for name, values in captures["seconds"].items()}
    lines += [
        "",
        f"Capture and passes of BERT-base: {medians['embrace_fx']:.1f} s, torch.compile(aot_eager): "
        f"{medians['aot_eager']:.1f} s, ratio {captures['ratio']:.2f}",
    ]
    return "\n".join(lines)


def write(output: Path, steps: list[StepResult], captures: dict[str, Any], options: argparse.Namespace) -> None:
    output.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    configuration = {
        "command": "python benchmarks/overhead.py",
        "rounds": options.rounds,
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": today,
    }
    results = {"configuration": configuration, "steps": [asdict(s) for s in steps], "captures": captures}
    (output / f"overhead-{today}.json").write_text(json.dumps(results, indent=2) + "\n")
    (output / f"overhead-{today}.md").write_text(
        f"# Overhead on one process, {today}\n\nMeasured: `{configuration['command']}`, torch {torch.__version__}, "
        f"Python {platform.python_version()}, one thread.\n\n{report(steps, captures)}\n"
    )


if __name__ == "__main__":
    main()
