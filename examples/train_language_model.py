"""Trains the language model of language_model.py with embrace_fx, on any number of ranks.

    python examples/train_language_model.py
    torchrun --standalone --nproc-per-node 2 examples/train_language_model.py

`train` is the part to copy: `embrace_fx.compile` stands where DistributedDataParallel would.
compare.py trains the same model both ways and measures the difference.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from language_model import LanguageModel
from rich.progress import Progress
from stdlib_text import Corpus, load_corpus, make_loader
from torch import Tensor
from torch import distributed as dist
from torch.optim import Adagrad
from torch.utils.data import DataLoader

import embrace_fx


def train(settings: argparse.Namespace, rank: int, world_size: int) -> None:
    corpus = load_corpus(settings.vocabulary)
    loader = load_batches(settings, corpus, rank, world_size)
    plain, optimizer = make_model(settings, corpus)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy=settings.strategy)

    with Progress(disable=rank != 0) as progress:
        batches = model.lookahead(islice(loader, settings.steps))  # reads one batch ahead, to send its rows early
        for step, batch in enumerate(progress.track(batches, total=settings.steps)):
            loss = model(*batch)
            loss.backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
            if rank == 0 and step % 10 == 0:
                progress.console.print(f"step {step:4}   loss {loss.item():.4f}")

    if rank == 0:
        write_artifacts(model, settings.output)


def load_batches(settings: argparse.Namespace, corpus: Corpus, rank: int, world_size: int) -> DataLoader[Tensor]:
    return make_loader(
        corpus,
        batch_size=settings.batch_size,
        length=settings.length,
        negatives=settings.negatives,
        rank=rank,
        world_size=world_size,
    )


def make_model(settings: argparse.Namespace, corpus: Corpus) -> tuple[LanguageModel, Adagrad]:
    """Returns the model and its optimizer, with the same weights at every call and on every rank."""
    torch.manual_seed(0)
    model = LanguageModel(len(corpus.words), settings.width)
    # Adagrad divides by the root of its accumulator. From zero, a gradient that is only a rounding error would move
    # its weight by a whole learning rate, so that two correct training runs would differ.
    return model, Adagrad(model.parameters(), lr=0.2, initial_accumulator_value=1e-2)


def write_artifacts(model: embrace_fx.CompiledModel, folder: Path) -> None:
    """Writes the graph after each pass, the decision for each parameter, and the timeline to a folder."""
    graphs = folder / "graphs"
    graphs.mkdir(parents=True, exist_ok=True)
    for number, (name, graph) in enumerate(model.graphs.items()):
        text = graph.print_readable(print_output=False)
        (graphs / f"{number:02}_{name}.py").write_text(text, encoding="utf-8")
    (folder / "report.txt").write_text(f"{model.report()}\n", encoding="utf-8")
    if model.plan.world_size > 1:
        for name in ("schedule.html", "schedule.svg", "schedule.dot"):
            model.schedule.save(folder / name)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser for the sizes of the model and of a rank's batches."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="folder for the graphs and the report")
    parser.add_argument("--steps", type=int, default=250, help="steps to train, at most one pass over the text")
    parser.add_argument("--vocabulary", type=int, default=50_000, help="rows of either table, at most")
    parser.add_argument("--width", type=int, default=128, help="columns of either table")
    parser.add_argument("--batch-size", type=int, default=32, help="pieces of text in a batch")
    parser.add_argument("--length", type=int, default=32, help="words in a piece of text")
    parser.add_argument("--negatives", type=int, default=512, help="words sampled for the softmax, per batch")
    parser.add_argument("--strategy", default="auto", help="of both tables; auto: what the links make worth it")
    return parser


@contextmanager
def ranks() -> Iterator[tuple[int, int]]:
    """Yields this process's rank and the number of ranks: those of torchrun, or (0, 1) without a launcher."""
    if not dist.is_torchelastic_launched():
        yield 0, 1
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    settings = argument_parser(__doc__).parse_args()
    with ranks() as (rank, world_size):
        train(settings, rank, world_size)
