"""What compiling costs on one process: the step against eager, and the capture against `torch.compile`.

    python -m benchmarks.micro.overhead --output benchmarks/results

Two models, one CPU thread, the same batch: an LSTM language model over 100 steps and BERT-base for question answering.
Each system has a process of its own (in one process they share an allocator, whose state weighs more than the
difference), and they take turns step by step, so that a disturbance of the machine meets all alike. A round's figure
is the median of the ratios of neighbouring steps after a warm-up; the result is the median of the rounds, which start
new processes. "allreduce" is forward and backward with every gradient dense, as
eager's; "auto" is the whole training step, SGD included, with the strategy left to the compiler. Capture is compared
with the first forward and backward of `torch.compile(backend="aot_eager")`, less one eager step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
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
import transformers
from torch import Tensor, nn

import embrace_fx
from benchmarks.records import write_record

Batch = dict[str, Tensor]


class LanguageModel(nn.Module):
    """Two tables and a two-layer LSTM. The loss is a sampled softmax over the negatives of the batch."""

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


WARM_UP_STEPS = 3
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_MMAP_THRESHOLD_": str(2**36)}
"""Has glibc keep freed memory, on both sides. Whether it gives memory back, to be faulted in again at the next step,
depends on what happens to lie at the end of the heap: without this, two processes of one system differ by 20 %."""
PARTS = {"allreduce": "pass", "auto": "step"}
"""Strategy -> the part of a step in which it is compared with eager."""

SYSTEMS = ("eager", *PARTS)


@dataclass(frozen=True)
class StepResult:
    """The time of a compiled step divided by that of an eager one: the median over rounds, with the smallest and
    largest round.
    """

    model: str
    strategy: str
    eager_ms: float
    compiled_ms: float
    ratio: float
    ratio_min: float
    ratio_max: float


def serve_steps(name: str, system: str) -> None:
    """Runs a step for each line of standard input; prints its milliseconds: forward and backward, and all of it."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if system != "eager":
        model = embrace_fx.compile(model, optimizer=optimizer, strategy=system)
    for _ in sys.stdin:
        start = time.perf_counter()
        optimizer.zero_grad()
        model(**batch).backward()
        between = time.perf_counter()
        optimizer.step()
        print(json.dumps({"pass": (between - start) * 1e3, "step": (time.perf_counter() - start) * 1e3}), flush=True)


class Server:
    """A process that runs steps of one system, one at a time."""

    def __init__(self, name: str, system: str) -> None:
        command = [sys.executable, "-m", "benchmarks.micro.overhead", "--serve", name, system]
        environment = {**os.environ, **KEEP_MEMORY}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(WARM_UP_STEPS):
            self.step()

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


def measure_steps(name: str, rounds: int, steps: int) -> list[StepResult]:
    """Rounds of fresh processes; in a round the systems take turns step by step, there and back."""
    ratios: dict[str, list[float]] = {system: [] for system in PARTS}
    figures: dict[str, list[tuple[float, float]]] = {system: [] for system in PARTS}
    for _ in range(rounds):
        servers = {system: Server(name, system) for system in SYSTEMS}
        found: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
        for turn in range(steps):
            for system in SYSTEMS if turn % 2 == 0 else reversed(SYSTEMS):
                found[system].append(servers[system].step())
        for server in servers.values():
            server.close()
        for system, part in PARTS.items():
            pairs = [(e[part], c[part]) for e, c in zip(found["eager"], found[system], strict=True)]
            ratios[system].append(statistics.median(compiled / eager for eager, compiled in pairs))
            figures[system] += pairs
    results = []
    for system, values in ratios.items():
        eager_ms, compiled_ms = (statistics.median(pair[k] for pair in figures[system]) for k in (0, 1))
        ratio = statistics.median(values)
        results.append(StepResult(name, system, eager_ms, compiled_ms, ratio, min(values), max(values)))
    return results


def joint_nodes(name: str) -> int:
    """Returns the number of nodes in the captured forward and backward."""
    model, batch = MODELS[name]()
    compiled = embrace_fx.compile(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    compiled(**batch)
    return len(compiled.graphs["captured"].graph.nodes)


def _in_fresh_process(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.micro.overhead", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]


def capture_seconds(system: str) -> float:
    """Returns the seconds of the first forward and backward of BERT-base under one system, in this process."""
    torch.manual_seed(0)
    model, batch = bert()
    model(**batch).backward()
    before = time.perf_counter()
    model(**batch).backward()
    step_s = time.perf_counter() - before
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
    """Measures captures in new, alternating processes. Returns the seconds of each round, and the median of the rounds'
    ratios.
    """
    seconds: dict[str, list[float]] = {"embrace_fx": [], "aot_eager": []}
    for _ in range(rounds):
        for system, found in seconds.items():
            found.append(float(_in_fresh_process("--capture-only", system)))
    ratios = [a / b for a, b in zip(seconds["embrace_fx"], seconds["aot_eager"], strict=True)]
    return {"seconds": seconds, "ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--capture-only", choices=("embrace_fx", "aot_eager"), help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.capture_only:
        print(capture_seconds(options.capture_only))
        return
    if options.serve:
        serve_steps(*options.serve)
        return
    results = {
        "nodes": {name: joint_nodes(name) for name in MODELS},
        "steps": [asdict(r) for name in MODELS for r in measure_steps(name, options.rounds, options.steps)],
        "captures": measure_captures(options.rounds),
    }
    print(report(results))
    if options.output:
        write(options.output, results, options)


def report(results: dict[str, Any]) -> str:
    lines = [
        "| model | nodes | strategy | eager ms | compiled ms | compiled / eager (min, max) |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s['model']} | {results['nodes'][s['model']]} | {s['strategy']} | {s['eager_ms']:.1f} | "
        f"{s['compiled_ms']:.1f} "
        f"| {s['ratio']:.3f} ({s['ratio_min']:.3f}, {s['ratio_max']:.3f}) |"
        for s in results["steps"]
    ]
    medians = {name: statistics.median(values) for name, values in results["captures"]["seconds"].items()}
    lines += [
        "",
        "allreduce: forward and backward, every gradient dense. auto: the whole step with its SGD update.",
        "",
        f"Capture and passes of BERT-base: {medians['embrace_fx']:.1f} s, torch.compile(aot_eager): "
        f"{medians['aot_eager']:.1f} s, ratio {results['captures']['ratio']:.2f}",
    ]
    return "\n".join(lines)


def write(output: Path, results: dict[str, Any], options: argparse.Namespace) -> None:
    output.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    configuration = {
        "command": f"python -m benchmarks.micro.overhead --rounds {options.rounds} --steps {options.steps}",
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": today,
    }
    write_record(output / f"overhead-{today}", {"configuration": configuration, **results})
    (output / f"overhead-{today}.md").write_text(
        f"# Overhead on one process, {today}\n\nMeasured: `{configuration['command']}`, torch {torch.__version__}, "
        f"Python {platform.python_version()}, one thread.\n\n{report(results)}\n"
    )


if __name__ == "__main__":
    main()
