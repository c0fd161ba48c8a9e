"""The tasks: data that needs no download, small enough for hundreds of trainings on one core.

digits      scikit-learn's 8 x 8 digits, a row per step: 10 classes
text        characters of the Python standard library, the next one at every step of 25
sentiment   made up: words of a value each, of which some flip the next one's; is the sum positive?
"""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
"""Inputs (B, N, I) and classes, (B,) or (B, N)."""


@dataclass(frozen=True)
class Task:
    """The training data, the test data, and the size of the model."""

    name: str
    train: Pair
    test: Pair
    hidden: int
    classes: int

    def modules(self, seed: int, scale: float) -> tuple[nn.RNN, nn.Linear]:
        """Returns a model as torch initializes it, with all parameters multiplied by `scale`."""
        torch.manual_seed(seed)
        rnn = nn.RNN(self.train[0].shape[2], self.hidden, batch_first=True)
        head = nn.Linear(self.hidden, self.classes)
        with torch.no_grad():
            for parameter in (*rnn.parameters(), *head.parameters()):
                parameter.mul_(scale)
        return rnn, head


def digits(train: int = 200, test: int = 400) -> Task:
    from sklearn.datasets import load_digits  # noqa: PLC0415  # of an extra that the other tasks do without

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images, dtype=torch.float32)[order] / 16
    classes = torch.tensor(bunch.target, dtype=torch.int64)[order]
    judged = slice(train, train + test)
    return Task("digits", (images[:train], classes[:train]), (images[judged], classes[judged]), 24, 10)


def text(windows: int = 32, steps: int = 25, characters: int = 40) -> Task:
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8").lower()
    kept = [character for character, _ in Counter(source).most_common(characters - 1)]
    number = {character: k for k, character in enumerate(kept)}
    ids = torch.tensor([number.get(character, characters - 1) for character in source])
    cut = ids[: len(ids) // (steps + 1) * (steps + 1)].view(-1, steps + 1)
    cut = cut[torch.randperm(len(cut), generator=torch.Generator().manual_seed(0))][: 2 * windows]
    pairs = nn.functional.one_hot(cut[:, :-1], characters).float(), cut[:, 1:]
    train, test = ((pairs[0][part], pairs[1][part]) for part in (slice(windows), slice(windows, None)))
    return Task("text", train, test, 24, characters)


def sentiment(train: int = 200, test: int = 400, steps: int = 12, words: int = 24, width: int = 12) -> Task:
    generator = torch.Generator().manual_seed(0)
    values = torch.zeros(words)
    values[: words // 4], values[-(words // 4) :] = -1, 1
    vectors = torch.randn(words, width, generator=generator)
    ids = torch.randint(words, (2 * (train + test), steps), generator=generator)
    total = values[ids].sum(1)
    clear = total != 0
    inputs, classes = vectors[ids[clear]], (total[clear] > 0).long()
    judged = slice(train, train + test)
    return Task("sentiment", (inputs[:train], classes[:train]), (inputs[judged], classes[judged]), 24, 2)


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "text": text, "sentiment": sentiment}
