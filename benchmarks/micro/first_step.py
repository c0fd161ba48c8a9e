"""Seconds to the end of the first training step, by stage, on local ranks.

    python -m benchmarks.micro.first_step --ranks 2 --output benchmarks/results
    python -m benchmarks.micro.first_step --models tables --profile build/first_step.prof
    python -m benchmarks.micro.first_step --probe --models tables

Seven models: a Transformer encoder of 12 layers, 1,000 parameters, 120, 240 and 1,000 tables, which show what grows
faster than the tables, a masked language model of Hugging Face's, ten steps of ten lengths, and its GPT-2. Every
measurement is a process per rank that has never compiled; importing torch and embrace_fx, making the model and starting
the process group come before the clock starts. The figure is that of rank 0, whose `compile` and first call end when
all ranks have agreed. Beside it stand the first steps of DDP and of torch's own capture (`torch.compile` with the
backend "aot_eager", which traces forward and backward and compiles nothing), on the same model. Beside the seconds
stand rank 0's seconds of a processor, which depend less on what else the machine does. `--probe` leaves the links to be
probed, and runs each process a second time, with what the first has left in the cache.
`--profile` writes rank 0's cProfile of the embrace_fx step: `python -m pstats FILE` reads it.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from benchmarks.micro.language_models import LANGUAGE_MODELS
from benchmarks.records import write_record
from embrace_fx.runtime.probe.disk_cache import VARIABLE
from embrace_fx.session.session import Session  # noqa: F401  (imports what the first compile would)


class Encoder(nn.Module):
    """A Transformer encoder over one table."""

    def __init__(self, layers: int = 12, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(20_000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.top = nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.top(self.layers(self.table(ids))).square().mean()
        return loss


class Tables(nn.Module):
    """Many tables, each of which reads its own column of the batch."""

    def __init__(self, tables: int, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2_000, width) for _ in range(tables))
        self.top = nn.Linear(width * tables, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, k % ids.shape[1]]) for k, table in enumerate(self.tables)]
        loss: Tensor = self.top(torch.cat(rows, -1)).square().mean()
        return loss


class Chain(nn.Module):
    """Many small parameters behind one table."""

    def __init__(self, linears: int = 500, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(2_000, width)
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(linears))

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.table(ids)
        for linear in self.linears:
            hidden = hidden + linear(hidden).tanh()
        return hidden.square().mean()


class MaskedLanguageModel(nn.Module):
    """A BERT of 4 layers whose loss is over all words."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415  (takes seconds to import)

        layers = BertConfig(
            vocab_size=8000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
        )
        self.bert = BertForMaskedLM(layers)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.bert(input_ids=ids, labels=ids).loss
        return loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer of 12 layers": Encoder,
    "120 tables": lambda: Tables(120),
    "240 tables": lambda: Tables(240),
    "1,000 tables": lambda: Tables(1_000),
    "1,000 parameters": Chain,
    "BERT-MLM": MaskedLanguageModel,
    "GPT-2": LANGUAGE_MODELS["GPT-2"],
}
LENGTHS = {"BERT-MLM": range(16, 56, 4)}
"""Of the batches of its steps; others take one step of 16."""


Taken = tuple[float, float]
"""Seconds, and seconds of a processor."""

SECOND_RUN = "embrace_fx again"
CAPTURE = "torch's capture"


def first_step(model_name: str, system: str, profile: Path | None, *, probes: bool) -> Taken:
    """Returns the seconds from before `compile` to the end of one step. Collective."""
    torch.manual_seed(0)
    model = MODELS[model_name]()
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(2_000, (8, length), generator=generator) for length in LENGTHS.get(model_name, [16])]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    profiler = cProfile.Profile()
    dist.barrier()
    if profile is not None:
        profiler.enable()
    began_s, of_processor_s = time.perf_counter(), time.process_time()
    trained: Callable[[Tensor], Tensor]
    if system == "embrace_fx":
        links = None if probes else embrace_fx.Cluster(1e4, 0.1)
        trained = embrace_fx.compile(model, optimizer=optimizer, cluster=links)
    elif system == CAPTURE:
        trained = torch.compile(model, backend="aot_eager")
    else:
        trained = DistributedDataParallel(model)
    for ids in batches:
        trained(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(trained, embrace_fx.CompiledModel):
        trained.synchronize()
    took_s = time.perf_counter() - began_s, time.process_time() - of_processor_s
    if profile is not None:
        profiler.disable()
        profile.parent.mkdir(parents=True, exist_ok=True)
        profiler.dump_stats(profile)
    return took_s


def measure_all(model_name: str, ranks: int, profile: Path | None, *, probes: bool) -> dict[str, Taken]:
    """Returns rank 0's measurements, by system."""
    with tempfile.TemporaryDirectory() as cache:
        beside = () if profile else ("ddp", CAPTURE)
        found = {system: measure(model_name, system, ranks, None, cache) for system in beside}
        found["embrace_fx"] = measure(model_name, "embrace_fx", ranks, profile, cache, probes=probes)
        if probes:
            found[SECOND_RUN] = measure(model_name, "embrace_fx", ranks, None, cache, probes=True)
    return found


def measure(
    model_name: str, system: str, ranks: int, profile: Path | None, cache: str = "", *, probes: bool = False
) -> Taken:
    """Returns rank 0's measurements of one system, made in new processes that store their caches in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.micro.first_step", "--rank-of", model_name, "--system", system]
        command += ["--ranks", str(ranks), *(("--probe",) if probes else ())]
        started = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "STORE": str(Path(folder) / "store"),
                VARIABLE: cache,
            }
            own = [*command, "--profile", str(profile)] if profile is not None and rank == 0 else command
            started.append(subprocess.Popen(own, env=environment, stdout=subprocess.PIPE, text=True))
        printed = [process.communicate()[0] for process in started]
        if failed := [rank for rank, process in enumerate(started) if process.returncode]:
            raise RuntimeError(f"rank(s) {failed} failed to train {model_name}")
    took_s, of_processor_s = json.loads(printed[0].splitlines()[-1])
    return took_s, of_processor_s


def page(figures: dict[str, Any]) -> str:
    """Returns the figures as a page."""
    lines = [
        f"# The first step, {figures['date']}",
        "",
        f"Measured by `{figures['command']}`: seconds (in brackets seconds of rank 0's processor), medians of "
        f"{figures['rounds']} new processes, on {figures['ranks']} local ranks.",
        "",
        f"| model | {' | '.join(figures['systems'])} |",
        "|---|" + "---|" * len(figures["systems"]),
    ]
    for name, rounds in figures["seconds"].items():
        cells = []
        for system in figures["systems"]:
            took_s, of_processor_s = (statistics.median(each[system][k] for each in rounds) for k in (0, 1))
            cells.append(f"{took_s:.2f} ({of_processor_s:.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="parts of names: " + ", ".join(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for the page and the numbers")
    parser.add_argument("--probe", action="store_true", help="probe the links, and run a second time with the cache")
    parser.add_argument("--profile", type=Path, help="file for rank 0's profile of embrace_fx")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--system", default="embrace_fx", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of is not None:
        rank, meet = int(os.environ["RANK"]), f"file://{os.environ['STORE']}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=asked.ranks)
        print(json.dumps(first_step(asked.rank_of, asked.system, asked.profile, probes=asked.probe)))
        dist.destroy_process_group()
        return
    names = [name for name in MODELS if any(part in name for part in asked.models)]
    seconds: dict[str, list[dict[str, Taken]]] = {}
    for name in names:
        rounds = [measure_all(name, asked.ranks, asked.profile, probes=asked.probe) for _ in range(asked.rounds)]
        seconds[name] = rounds
        medians = {s: [round(statistics.median(r[s][k] for r in rounds), 2) for k in (0, 1)] for s in rounds[0]}
        print(name, medians, flush=True)
    if asked.output is not None:
        date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        figures = {
            "date": date,
            "command": f"python -m benchmarks.micro.first_step --ranks {asked.ranks} --rounds {asked.rounds}"
            + (" --probe" if asked.probe else ""),
            "systems": list(next(iter(seconds.values()))[0]),
            "ranks": asked.ranks,
            "rounds": asked.rounds,
            "seconds": seconds,
        }
        stem = asked.output / f"first-step-{date}"
        write_record(stem, figures)
        stem.with_suffix(".md").write_text(page(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
