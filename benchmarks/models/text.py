"""Real text as ids: the sources of Python's standard library, whose words are Zipf-distributed as any text's are.

A word's number is its rank by falling frequency, 0 the most frequent; a vocabulary of V words keeps the V - 1 most
frequent and makes the others V - 1. Batches draw windows of the text: which ones is a pure function of
(step, rank, seed), so that every system reads the same batches, whatever order they run in.
"""

from __future__ import annotations

import hashlib
import math
import platform
import re
import sysconfig
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

WORD = re.compile(r"\w+|[^\w\s]")
CACHE = Path(__file__).parents[2] / "build" / "lab"
NOT_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


def tokenize(library: Path) -> Tensor:
    """Returns the words of all `*.py` files in a folder, in the order of file names, as numbers (words,), int32."""
    files = sorted(f for f in library.rglob("*.py") if not NOT_TEXT.intersection(f.relative_to(library).parts))
    if not files:
        raise ValueError(f"tokenize(): {library} contains no Python sources. Pass another folder.")
    text = [word for file in files for word in WORD.findall(file.read_text(encoding="utf-8", errors="replace"))]
    counts = Counter(text)
    number = {word: i for i, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)))}
    # Create the tensor on the CPU, even if another device is the default, because it is stored in a file.
    return torch.tensor([number[word] for word in text], dtype=torch.int32, device="cpu")


@lru_cache(maxsize=1)
def words() -> Tensor:
    """Returns the text's words as numbers (words,). They are computed once for each version of Python, and stored in
    build/.
    """
    kept = CACHE / f"words-{platform.python_version()}.pt"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=CACHE, delete=False) as file:
            torch.save(tokenize(Path(sysconfig.get_path("stdlib"))), file)
        Path(file.name).rename(kept)  # an atomic rename, because other ranks may read the file
    found: Tensor = torch.load(kept, mmap=True)
    return found


def generator(step: int, rank: int, seed: int) -> torch.Generator:
    """Returns the random generator for one rank's batch of one step."""
    # torch's CPU generator uses only the low 32 bits of its seed, so hash the three numbers into 32 bits.
    digest = hashlib.blake2b(f"{step} {rank} {seed}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest))


def windows(count: int, length: int, vocabulary: int, random: torch.Generator) -> Tensor:
    """Returns pieces of the text (count, length), int64 ids below `vocabulary`, from uniformly drawn positions."""
    text = words()
    starts = torch.randint(text.numel() - length, (count, 1), generator=random)
    return text[starts + torch.arange(length)].long().clamp_(max=vocabulary - 1)


def log_uniform(count: int, vocabulary: int, random: torch.Generator) -> Tensor:
    """Words (count,) drawn with q(i) = log((i + 2) / (i + 1)) / log(V + 1), close to the i-th word's frequency."""
    uniform = torch.rand(count, generator=random, dtype=torch.float64)
    return ((uniform * math.log(vocabulary + 1)).exp().long() - 1).clamp_(max=vocabulary - 1)


def sentence_pairs(count: int, length: int, vocabulary: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns, for translation, pieces (count, length) and the text that follows each (count, length + 1). The first
    word of a target is an input.
    """
    piece = windows(count, 2 * length + 1, vocabulary, random)
    return piece[:, :length].contiguous(), piece[:, length:].contiguous()
