"""Trains one language model twice, under DistributedDataParallel and under embrace_fx, and compares the two.

    torchrun --standalone --nproc-per-node 2 examples/compare.py --output build/demo

Both start from the same weights, read the same batches and use the same optimizer. They take turns in blocks of a few
steps, and who goes first changes from block to block, so that a disturbance of the machine meets both alike. The
output folder gets the graph before and after each pass, the report, the schedule as predicted and as measured in a few
steps more (schedule.html, timeline.html, schedule.svg, trace.json for Perfetto), and every number in results.json. The
exit status is not zero where the losses differ. A single process without torchrun compares with the model as it is,
without DDP.

Both get the same plain model, so DDP reduces gradients as large as the tables. That is not the best DDP can do:
--sparse-ddp gives it tables made with `nn.Embedding(sparse=True)`. docs/measurements.md has the results of both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean, median

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from stdlib_text import Batch, load_corpus
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from train_language_model import argument_parser, load_batches, make_model, ranks, write_artifacts

import embrace_fx
from embrace_fx.runtime.probe.wire import sent_by_connection

STEPS_PER_BLOCK = 10

RECORDED_STEPS = 6
"""Steps of the timeline."""

EARLY_STEPS = 100
EARLY_TOLERANCE = 1e-4
TOLERANCE = 1e-2
"""Largest relative difference allowed between the two losses of one step. Rounding differences grow with training: DDP
and DDP with sparse gradients, which adds in another order, differ by at most 5e-6 in the first 100 steps of this model
and by at most 9e-4 in 250 (measured at the default sizes). A mistake shows in the early steps, not hidden by rounding.
"""


@dataclass
class Contender:
    """One way to train, with batches of its own, and what was measured of it.

    `losses` has an entry per step, averaged over ranks; `step_ms` and `step_bytes` have one per block, per step of it.
    Bytes are the payload that all ranks send over TCP; there are none where the system does not count them.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer
    batches: Iterator[Batch]
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    step_bytes: list[float] = field(default_factory=list)

    def train_block(self, steps: int) -> None:
        """Trains between two barriers, so that time and bytes are those of all ranks, the slowest included."""
        barrier()
        started, sent = time.perf_counter(), sent_so_far()
        losses = torch.stack([self.train_step(next(self.batches)) for _ in range(steps)])
        barrier()
        self.step_ms.append((time.perf_counter() - started) * 1e3 / steps)
        if sent is not None and (sent_now := sent_so_far()) is not None:
            own = sum(count - sent.get(connection, 0) for connection, count in sent_now.items())
            self.step_bytes.append(sum_over_ranks(torch.tensor(own / steps, dtype=torch.float64)).item())
        self.losses += average_over_ranks(losses).tolist()

    def train_step(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def measured(self) -> dict[str, list[float]]:
        return {"losses": self.losses, "step_ms": self.step_ms, "step_bytes": self.step_bytes}


def main(settings: argparse.Namespace, rank: int, world_size: int) -> bool:
    """Trains both ways; rank 0 prints and writes. Returns, on every rank alike, whether the losses agree."""
    console = Console(quiet=rank != 0)
    corpus = load_corpus(settings.vocabulary)
    console.print(f"{corpus.ids.numel():,} words of Python's standard library, {len(corpus.words):,} different ones")

    batches = load_batches(settings, corpus, rank, world_size)
    model, optimizer = make_model(settings, corpus)
    model.input.sparse = model.output.sparse = settings.sparse_ddp
    if world_size > 1:
        ddp = Contender("DDP", DistributedDataParallel(model), optimizer, iter(batches))
    else:
        ddp = Contender("plain", model, optimizer, iter(batches))

    batches = load_batches(settings, corpus, rank, world_size)
    model, optimizer = make_model(settings, corpus)
    compiled = embrace_fx.compile(model, optimizer=optimizer, strategy=settings.strategy)
    embrace = Contender("embrace_fx", compiled, compiled.optimizer, compiled.lookahead(batches))

    train_in_turns(ddp, embrace, min(settings.steps, len(batches) - RECORDED_STEPS), console)
    if world_size > 1:
        with compiled.record():  # extra steps, to record a timeline
            embrace.train_block(RECORDED_STEPS)
        del embrace.losses[-RECORDED_STEPS:], embrace.step_ms[-1], embrace.step_bytes[-1:]
    early, largest = largest_differences(ddp.losses, embrace.losses)
    agree = early <= EARLY_TOLERANCE and largest <= TOLERANCE
    if rank == 0:
        tokens_per_step = settings.batch_size * settings.length * world_size
        console.print(summary(ddp, embrace, tokens_per_step))
        write_artifacts(compiled, settings.output)
        if world_size > 1:
            for name in ("timeline.html", "timeline.svg", "trace.json"):
                compiled.timeline.save(settings.output / name)
        results = {"tokens_per_step": tokens_per_step, "largest_difference_early": early, "largest_difference": largest}
        results |= {contender.name: contender.measured() for contender in (ddp, embrace)}
        (settings.output / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        if world_size > 1 and not settings.sparse_ddp:
            console.print("DDP reduced dense gradients of the tables; --sparse-ddp compares with its sparse ones.")
        console.print(f"Graphs, report and numbers are in {settings.output}.")
        console.print(
            f"The two curves {'agree' if agree else 'DIFFER'}: expected losses within {EARLY_TOLERANCE:g} "
            f"of each other in the first {EARLY_STEPS} steps and within {TOLERANCE:g} in all, relatively, "
            f"found {early:.1e} and {largest:.1e}.",
            style="green" if agree else "bold red",
        )
    return agree


def train_in_turns(ddp: Contender, embrace: Contender, steps: int, console: Console) -> None:
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=console.quiet) as progress:
        task = progress.add_task("", total=2 * steps)
        console.print(f"{'':12}{'loss':^22}   {'ms per step':^22}", style="bold")
        console.print("step        " + f"{ddp.name:>10}  {embrace.name:>10}   " * 2, style="bold")
        for block, first in enumerate(range(0, steps, STEPS_PER_BLOCK)):
            length = min(STEPS_PER_BLOCK, steps - first)
            for contender in (ddp, embrace) if block % 2 == 0 else (embrace, ddp):
                progress.update(task, description=contender.name)
                contender.train_block(length)
                progress.advance(task, length)
            losses = f"{mean(ddp.losses[first:]):10.4f}  {mean(embrace.losses[first:]):10.4f}"
            step_ms = f"{ddp.step_ms[-1]:10.0f}  {embrace.step_ms[-1]:10.0f}"
            console.print(f"{first + length:<12}{losses}   {step_ms}")


def summary(ddp: Contender, embrace: Contender, tokens_per_step: int) -> Table:
    """Medians over blocks. The first block is left out: it captures the graph and sets up the buckets."""
    table = Table(title="All ranks together, medians over blocks")
    for heading in ("", ddp.name, embrace.name, "ratio"):
        table.add_column(heading, justify="right" if heading else "left")

    ddp_ms, embrace_ms = (median(contender.step_ms[1:]) for contender in (ddp, embrace))
    speeds = (tokens_per_step / ms * 1e3 for ms in (ddp_ms, embrace_ms))
    table.add_row("tokens/s", *(f"{speed:,.0f}" for speed in speeds), f"{ddp_ms / embrace_ms:.2f}")
    if ddp.step_bytes and embrace.step_bytes:
        ddp_bytes, embrace_bytes = (median(contender.step_bytes[1:]) for contender in (ddp, embrace))
        megabytes = (f"{sent / 1e6:,.2f}" for sent in (ddp_bytes, embrace_bytes))
        table.add_row("MB sent per step (payload over TCP)", *megabytes, f"1/{ddp_bytes / embrace_bytes:.1f}")
    return table


def largest_differences(losses: list[float], others: list[float]) -> tuple[float, float]:
    """Returns the largest relative difference of the first steps, and that of all steps. It is nan if a loss is nan."""
    reference = torch.tensor(losses)
    differences = (reference - torch.tensor(others)).abs() / reference.abs()
    return differences[:EARLY_STEPS].max().item(), differences.max().item()


def sent_so_far() -> dict[int, int] | None:
    """Returns the payload bytes sent so far by each connection of this rank, or None for a single process."""
    return sent_by_connection() if dist.is_initialized() else None


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def sum_over_ranks(values: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def average_over_ranks(values: Tensor) -> Tensor:
    return sum_over_ranks(values) / (dist.get_world_size() if dist.is_initialized() else 1)


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("--sparse-ddp", action="store_true", help="sparse gradients for the tables of DDP's model")
    parsed = parser.parse_args()
    if parsed.steps < 2 * STEPS_PER_BLOCK:
        parser.error(f"--steps is {parsed.steps}. Pass at least {2 * STEPS_PER_BLOCK}, for two blocks")
    with ranks() as (this_rank, number_of_ranks):
        agreed = main(parsed, this_rank, number_of_ranks)
    sys.exit(0 if agreed else 1)
