"""What rounded rows and buckets save of the bytes, and what they do to losses: `rows=` against "exact".

    python -m benchmarks.micro.rounding --ranks 2 --steps 500 --output benchmarks/results/rounding.md

Two models, on the same batches from the same weights: the language model of `make demo`, on the words of Python's
standard library, and the lab's recommender, both under Adagrad, their tables in shards. Bytes are those that the
recorder has of each launch, in the last steps: of rows and their gradients, and of buckets. Losses are means over
ranks and over the last 50 steps; the largest difference is of means over 50 steps, at any time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.optim import Adagrad

import embrace_fx
from benchmarks.models import MODELS
from embrace_fx.cost.wire import FORMATS

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDED, WINDOW = 6, 50
SHARDS = {"demo": {"*put.weight": "alltoall"}, "recommender": {"tables.*": "alltoall"}}


def workload(name: str, rank: int, ranks: int, steps: int) -> tuple[nn.Module, Adagrad, list[Any]]:
    """Returns a model, its optimizer and this rank's batches; the same at each call."""
    if name == "demo":
        sys.path.insert(0, str(EXAMPLES))
        import train_language_model as demo  # noqa: PLC0415  (examples are no package)
        from stdlib_text import load_corpus  # noqa: PLC0415

        settings = demo.argument_parser(None).parse_args([])
        corpus = load_corpus(settings.vocabulary)
        loader = demo.load_batches(settings, corpus, rank, ranks)
        model, optimizer = demo.make_model(settings, corpus)
        return model, optimizer, [batch for batch, _ in zip(loader, range(steps), strict=False)]
    torch.manual_seed(0)
    recommender = MODELS[name]["lab"].make()
    batches = [MODELS[name]["lab"].batch(step, rank, 0) for step in range(steps)]
    return recommender, Adagrad(recommender.parameters(), lr=0.01, initial_accumulator_value=1e-2), batches


def train(name: str, rank: int, ranks: int, steps: int, form: Any) -> dict[str, Any]:
    """Returns the losses of all steps, averaged over ranks, the bytes of this rank's step, and the errors in the
    report.
    """
    plain, optimizer, batches = workload(name, rank, ranks, steps + RECORDED)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy=SHARDS[name], rows=form)
    following = model.lookahead(batches)
    losses = torch.tensor([_step(model, optimizer, next(following)) for _ in range(len(batches) - RECORDED)])
    with model.record():
        for batch in following:
            _step(model, optimizer, batch)
    dist.all_reduce(losses)
    report = str(model.report())
    return {
        "losses": (losses / ranks).tolist(),
        "bytes": dict(_bytes_of(model, rank)),
        "predicted": sum(d.sent_bytes_per_step for d in model.plan),
        "told": [line for line in report.splitlines() if "travel as" in line],
    }


def _step(model: Any, optimizer: Adagrad, batch: Any) -> float:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _bytes_of(model: embrace_fx.CompiledModel, rank: int) -> Iterator[tuple[str, float]]:
    """Yields the bytes that this rank sends per step, for rows with their gradients, for buckets, and for ids."""
    spans = [span for span in model.timeline.spans if span.rank == rank and span.operation.is_communication]
    windows = {span.window for span in spans}
    kinds = {"buckets": ("all_reduce",), "ids": ("ids",)}
    for what in ("rows", *kinds):
        mine = kinds.get(what, tuple({s.operation.kind for s in spans} - {"all_reduce", "ids"}))
        yield what, sum(s.operation.sent_bytes for s in spans if s.operation.kind in mine) / max(len(windows), 1)


def rank_main(rank: int, ranks: int, steps: int, models: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = {name: {each: train(name, rank, ranks, steps, each) for each in FORMATS} for name in models}
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.destroy_process_group()


def table(found: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    """Yields rows of a Markdown table that compare each format with "exact"."""
    yield "| model | form | rows, KB a step | of exact | buckets, KB | of exact | loss | off | largest off |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for model, by_format in found.items():
        exact = by_format["exact"]
        for name, each in by_format.items():
            rows, buckets = each["bytes"]["rows"], each["bytes"]["buckets"]
            means, of_exact = _means(each["losses"]), _means(exact["losses"])
            off = [abs(a - b) / b for a, b in zip(means, of_exact, strict=True)]
            shares = f"{rows / exact['bytes']['rows']:.3f}", f"{buckets / exact['bytes']['buckets']:.3f}"
            sizes = f"{rows / 1e3:.1f}", f"{buckets / 1e3:.1f}"
            yield (
                f"| {model} | {name} | {sizes[0]} | {shares[0]} | {sizes[1]} | {shares[1]} | {means[-1]:.4f} | "
                f"{off[-1]:.2%} | {max(off):.2%} |"
            )


def _means(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[first : first + WINDOW]) for first in range(0, len(losses), WINDOW)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--models", nargs="+", choices=tuple(SHARDS), default=list(SHARDS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (arguments.ranks, arguments.steps, arguments.models, folder), nprocs=arguments.ranks)
        found = torch.load(f"{folder}/found", weights_only=True)
    lines = [*table(found), ""]
    lines += [
        f"{model}, {name}: {line}." for model, each in found.items() for name in each for line in each[name]["told"]
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output is not None:
        command = f"python -m benchmarks.micro.rounding --ranks {arguments.ranks} --steps {arguments.steps}"
        head = f"# Rounded rows and buckets\n\n`{command}`\n\n{__doc__.split(chr(10) * 2, 2)[2]}\n"
        arguments.output.write_text(head + text, encoding="utf-8")


if __name__ == "__main__":
    main()
