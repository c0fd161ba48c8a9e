"""How models read their tables: pairs, one lookup twice, bags beside lookups, tables of one joined table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.scenario import Training
from tests.support.scenarios.schemes import DIM, NUM_IDS, adam, ids_of, scheme, step_of


class Tables(nn.Module):
    """Three tables of one width, biases, and layers; a score of its ids, by one of the ways below."""

    def __init__(self, score: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(NUM_IDS, DIM), nn.Embedding(NUM_IDS, DIM)
        self.padded, self.bias = nn.Embedding(NUM_IDS, DIM, padding_idx=0), nn.Embedding(NUM_IDS, 1)
        self.norm, self.out = nn.BatchNorm1d(DIM, track_running_stats=False), nn.Linear(DIM, DIM)
        self.score = score

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return self.score(self, x, y, z)


def _without_gradient(m: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    with torch.no_grad():
        weights = m.a(x).softmax(1)
    return (weights * m.a(x) * m.b(x)).sum(1)


def _checkpointed(m: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    found: Tensor = checkpoint(lambda ids: m.a(ids) * m.b(y) - m.a(ids) * m.b(z), x, use_reentrant=False)
    return found.sum(1)


def _encoded_twice(m: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    def encode(ids: Tensor) -> Tensor:
        return torch.tanh(m.out(m.a(ids) + m.b(torch.arange(len(ids)))))

    return F.cosine_similarity(encode(x), encode(y)) - F.cosine_similarity(encode(x), encode(z))


SCORES: dict[str, Callable[..., Tensor]] = {
    "pairs": lambda m, x, y, z: (m.a(x) * m.b(y)).sum(1) - (m.a(x) * m.b(z)).sum(1),
    "pairs_and_their_norms": lambda m, x, y, z: (m.a(x) * (m.b(y) - m.b(z)) + m.a(x) ** 2 + m.b(y) ** 2).sum(1),
    "translations": lambda m, x, y, z: (m.a(x) + m.b(y) - m.a(z)).norm(dim=1) - (m.a(x) + m.b(y) - m.a(y)).norm(dim=1),
    "products_of_three": lambda m, x, y, z: (m.a(x) * m.b(y) * m.a(z) + m.a(x) * m.padded(y) * m.b(z)).sum(1),
    "biases": lambda m, x, y, z: (m.a(x) * m.b(y)).sum(1) + m.bias(x)[:, 0] + m.bias(y)[:, 0] - m.bias(x)[:, 0] * 0.1,
    "padded_pairs": lambda m, x, y, z: (m.padded(x) * m.a(y)).sum(1) - (m.padded(x) * m.a(z)).sum(1),
    "padded_and_not": lambda m, x, y, z: (F.embedding(x, m.a.weight, padding_idx=0) * m.a(x) * m.b(x)).sum(1),
    "a_bag_and_a_lookup": lambda m, x, y, z: (F.embedding_bag(x[:, None], m.a.weight) * m.b(x) + m.a(x)).sum(1),
    "two_bags": lambda m, x, y, z: (
        F.embedding_bag(x[:, None], m.a.weight, mode="sum") * F.embedding_bag(x[:, None], m.a.weight) + m.b(x)
    ).sum(1),
    "counted_ids": lambda m, x, y, z: (
        F.embedding(torch.stack([x, x, z]), m.a.weight, scale_grad_by_freq=True).sum(0) * m.b(y)
    ).sum(1),
    "detached_lookups": lambda m, x, y, z: (m.a(x) * m.a(x).detach() + m.b(x) * m.a(y)).sum(1),
    "lookups_without_gradient": _without_gradient,
    "checkpointed_pairs": _checkpointed,
    "siamese_towers": _encoded_twice,
    "one_id_of_many": lambda m, x, y, z: (m.a(x) * m.a(x)[:1] * m.b(x[:1])).sum(1),
    "pairs_within_the_batch": lambda m, x, y, z: (F.normalize(m.a(x)) @ F.normalize(m.norm(m.b(y))).t()).log_softmax(1)[
        :, 0
    ],
}


def _enter(name: str, score: Callable[..., Tensor]) -> None:
    def run(training: Training) -> None:
        model = training.wrap(Tables(score))
        optimizer = adam(training, model)
        for k in range(4):
            x, y, z = (ids_of(training.rank, 40 * n + k, 6) for n in range(3))
            step_of(training, optimizer, -F.logsigmoid(model(x, y, z)).mean())

    run.__name__ = f"tables_read_by_{name}"
    scheme(run)


for _name, _score in SCORES.items():
    _enter(_name, _score)
