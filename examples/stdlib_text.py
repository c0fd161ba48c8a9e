"""The text of the Python standard library as training batches: words, a vocabulary, and one shard of it per rank.

Every rank reads the same files and draws from the same seed, so the ranks agree on the vocabulary and on who trains on
which window without exchanging a byte.
"""

from __future__ import annotations

import math
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORD = re.compile(r"\w+|[^\w\s]")
UNKNOWN = "<unknown>"
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

Batch = tuple[Tensor, Tensor, Tensor]
"""inputs (B, L), targets (B, L) and negatives (K,): word ids, int64."""


@dataclass(frozen=True)
class Corpus:
    """A text as ids. Words are numbered by descending frequency: id 0 is the most frequent word."""

    words: tuple[str, ...]
    ids: Tensor


def load_corpus(vocabulary_size: int) -> Corpus:
    """Returns the source of the standard library as ids. Words beyond the `vocabulary_size` - 1 most frequent are
    unknown.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in library.rglob("*.py") if not NOT_TEXT.intersection(f.relative_to(library).parts))
    text = [word for file in files for word in WORD.findall(file.read_text(encoding="utf-8", errors="replace"))]

    counts = Counter(text)
    kept = Counter(dict(counts.most_common(vocabulary_size - 1)))
    kept[UNKNOWN] = counts.total() - kept.total()
    words = tuple(sorted(kept, key=lambda word: (-kept[word], word)))

    number = {word: i for i, word in enumerate(words)}
    unknown = number[UNKNOWN]
    return Corpus(words, torch.tensor([number.get(word, unknown) for word in text]))


class Windows(Dataset[Tensor]):
    """The text cut into pieces of `length` + 1 words, `length` inputs and, one word further on, as many targets."""

    def __init__(self, ids: Tensor, length: int) -> None:
        count = ids.numel() // (length + 1)
        self.windows = ids[: count * (length + 1)].view(count, length + 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class WithNegatives:
    """Makes a batch of windows and adds `negatives` words drawn, with replacement, from the log-uniform distribution.

    q(i) = log((i + 2) / (i + 1)) / log(V + 1), close to the frequency of the i-th most frequent word.
    """

    def __init__(self, vocabulary_size: int, negatives: int, seed: int) -> None:
        self.log_range = math.log(vocabulary_size + 1)
        self.last = vocabulary_size - 1
        self.negatives = negatives
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, windows: list[Tensor]) -> Batch:
        text = torch.stack(windows)
        uniform = torch.rand(self.negatives, generator=self.generator, dtype=torch.float64)
        negatives = (uniform * self.log_range).exp().long() - 1
        return text[:, :-1], text[:, 1:], negatives.clamp(max=self.last)


def make_loader(
    corpus: Corpus, *, batch_size: int, length: int, negatives: int, rank: int, world_size: int
) -> DataLoader[Tensor]:
    """Yields a `Batch` at a time: `batch_size` windows that no other rank reads, and negatives of the rank's own."""
    windows = Windows(corpus.ids, length)
    sampler = DistributedSampler[Tensor](windows, num_replicas=world_size, rank=rank, drop_last=True)
    add_negatives = WithNegatives(len(corpus.words), negatives, seed=rank)
    return DataLoader(windows, batch_size, sampler=sampler, collate_fn=add_negatives, drop_last=True)
