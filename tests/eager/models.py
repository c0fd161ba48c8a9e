"""Models whose forward no graph holds, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, KINDS = 60, 8, 3

Batch = tuple[Any, ...]


def drawn(step: int, rank: int, *shape: int, high: int = WORDS, of: int = 0) -> Tensor:
    """Returns random ids for a batch, different on each rank and at each step."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + of))


def labelled(step: int, rank: int) -> Batch:
    return drawn(step, rank, 5, 4), drawn(step, rank, 5, high=KINDS, of=1)


class Classifier(nn.Module):
    """A table, and a head that classifies the output of `encode`, which receives the rows."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.rows = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, KINDS)

    def encode(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.mid(self.rows(ids).mean(1)))

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encode(ids)), kinds)


class Asserting(Classifier):
    """Asserts on the values of its batch."""

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        assert (ids >= 0).all(), "ids below the table"
        hidden = self.encode(ids)
        if torch.isnan(hidden).any():
            raise ValueError("nan in hidden states")
        return F.cross_entropy(self.head(hidden), kinds)


class Turning(Asserting):
    """Asserts on the values of its batch in some calls."""

    def forward(self, ids: Tensor, kinds: Tensor, turns: bool = False) -> Tensor:
        if turns and (ids < 0).any():
            raise ValueError("ids below the table")
        return F.cross_entropy(self.head(self.encode(ids)), kinds)


class Repeating(Classifier):
    """Repeats a layer as often as an id says: a different number of times on each rank."""

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        hidden = self.rows(ids).mean(1)
        left = ids[0, 0] % 4
        while left >= 0:
            hidden, left = torch.tanh(self.mid(hidden)), left - 1
        return F.cross_entropy(self.head(hidden), kinds)


class Experts(Classifier):
    """Routes each row to the expert that the row chooses. An expert that no row chooses has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        hidden = self.rows(ids).flatten(0, 1)
        weights, chosen = self.gate(hidden).softmax(-1).topk(1)
        found = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            (at,) = torch.where(chosen[:, 0] == number)
            if at.numel():
                found = found.index_add(0, at, expert(hidden[at]) * weights[at])
        return F.cross_entropy(self.head(found.view(*ids.shape, WIDTH).mean(1)), kinds)


class Packing(nn.Module):
    """Packs sequences by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.rnn, self.head = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, KINDS)

    def forward(self, ids: Tensor, lengths: Tensor, kinds: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.rows(ids.t()), lengths, enforce_sorted=False)
        return F.cross_entropy(self.head(self.rnn(packed)[1][-1]), kinds)


def with_lengths(step: int, rank: int) -> Batch:
    return drawn(step, rank, 4, 6), 1 + drawn(step, rank, 4, high=6, of=2), drawn(step, rank, 4, high=KINDS, of=1)


class Recommender(nn.Module):
    """Spreads the rows of two tables over a graph of users and items, by a sparse matrix."""

    def __init__(self, users: int = 20) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, WIDTH), nn.Embedding(WORDS, WIDTH)
        generator, size = torch.Generator().manual_seed(5), users + WORDS
        user = torch.randint(users, (120,), generator=generator)
        item = torch.randint(WORDS, (120,), generator=generator) + users
        at = torch.stack([torch.cat([user, item]), torch.cat([item, user])])
        self.graph = torch.sparse_coo_tensor(at, torch.full((240,), 0.1), (size, size)).coalesce()

    def forward(self, user: Tensor, liked: Tensor, other: Tensor) -> Tensor:
        spread = torch.sparse.mm(self.graph, torch.cat([self.users.weight, self.items.weight]))
        of_users, of_items = spread.split([self.users.num_embeddings, WORDS])
        scores = (of_users[user] * (of_items[other] - of_items[liked])).sum(1)
        return F.softplus(scores).mean() + 0.1 * self.users(user).square().mean()


def clicks(step: int, rank: int) -> Batch:
    return drawn(step, rank, 6, high=20), drawn(step, rank, 6, of=1), drawn(step, rank, 6, of=2)


class Checkpointed(Asserting):
    """Recomputes a part of its forward during the backward, by reentrant checkpointing."""

    def encode(self, ids: Tensor) -> Tensor:
        return checkpoint(lambda rows: torch.tanh(self.mid(rows)).mean(1), self.rows(ids), use_reentrant=True)


class Tied(Asserting):
    """Uses its table as its output layer too."""

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        if (kinds < 0).any():
            raise ValueError("kinds below the first")
        return F.cross_entropy(self.encode(ids) @ self.rows.weight.t(), ids[:, 0])


class Normalised(Asserting):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def encode(self, ids: Tensor) -> Tensor:
        return self.norm(super().encode(ids))


class Forces(nn.Module):
    """Computes an energy and, in its forward, the gradient of the energy with respect to an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.mid, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH + 3, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, kinds: Tensor, place: Tensor) -> Tensor:
        place = place.detach().requires_grad_()
        if (kinds < 0).any():
            raise ValueError("kinds below the first")
        energy = self.out(torch.tanh(self.mid(torch.cat([self.kinds(kinds), place], 1)))).sum()
        (slope,) = torch.autograd.grad(energy, place, create_graph=True)
        return energy.square() + slope.square().sum()


def placed(step: int, rank: int) -> Batch:
    return drawn(step, rank, 5), torch.randn(5, 3, generator=torch.Generator().manual_seed(step * 7 + rank))


def spectral() -> nn.Module:
    """Returns a model whose table has spectral normalisation, which updates buffers at each read of the weight."""
    model = Classifier()
    nn.utils.parametrizations.spectral_norm(model.rows)
    return model


@dataclass(frozen=True)
class Case:
    """A model, and a function that returns its batch for a step and a rank."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch] = labelled


CASES = {
    "asserting": Case(Asserting),
    "repeating": Case(Repeating),
    "experts": Case(Experts),
    "packing": Case(Packing, with_lengths),
    "recommender": Case(Recommender, clicks),
    "checkpointed": Case(Checkpointed),
    "tied": Case(Tied),
    "normalised": Case(Normalised),
    "forces": Case(Forces, placed),
    "sparse": Case(lambda: Asserting(sparse=True)),
    "spectral": Case(spectral),
}
