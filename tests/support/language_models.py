"""A language model on four ranks."""

from __future__ import annotations

from torch import Tensor, nn

WORDS, DIM, BATCH, LENGTH = 500, 32, 8, 16

TABLES = ("words.weight", "output.weight")


class LanguageModel(nn.Module):
    """Both lookups stand at the head of the forward; the output table is read next to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.output = nn.Embedding(WORDS, DIM)
        self.layers = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(12)))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        words, outputs = self.words(ids), self.output(targets)
        scores: Tensor = (self.layers(words) * outputs).sum(-1)
        return scores.square().mean()
