"""Ways to use a table, legal and illegal: whether its columns can be spread over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embrace_fx.vocabulary.graph import TrainingGraph
from tests.support.graphs import BAG, IDS, OFFSETS, Tables, analysed, tables_model


@dataclass(frozen=True)
class Case:
    """A forward over `Tables`, and whether its first table can be sharded.

    Attributes:
        forward: takes the model and `args`.
        blocker: a part of the reason why the table cannot be sharded; None: it can.
    """

    forward: Callable[..., Any]
    blocker: str | None = None
    args: tuple[Tensor, ...] = (IDS,)


def bag(model: Tables, ids: Tensor, offsets: Tensor | None = None, **options: Any) -> Tensor:
    return F.embedding_bag(ids, model.weight, offsets, **{"mode": "sum", **options})


def shared_arithmetic(model: Tables, ids: Tensor) -> Tensor:
    """The ids of two lookups share a step on the way, and the third one's are computed from the first one's."""
    shared = ids + 1
    first = shared % 10
    return model.table(first) * model.table(shared * 2 % 10) * model.table((first + ids) % 10)


def plain(model: Tables, ids: Tensor) -> Tensor:
    return model.linear(model.table(ids))


OFFSET_BAG = (BAG, OFFSETS)
LAST_OFFSET_BAG = (BAG, torch.tensor([0, 2, 2, 5, 6]))

LEGAL: dict[str, Case] = {
    "one lookup": Case(plain),
    "the lookup is the result": Case(lambda m, x: m.table(x)),
    "two lookups of the same ids": Case(lambda m, x: m.table(x) * m.linear(m.table(x))),
    "two lookups of other ids": Case(lambda m, x: m.table(x) + m.table(x + 1)),
    "three lookups, weighed": Case(lambda m, x: m.table(x) + 2 * m.table(x + 1) + 3 * m.table(x * 0)),
    "one of two lookups without gradient": Case(lambda m, x: m.table(x).detach() + m.table(x + 1)),
    "a lookup without gradient": Case(lambda m, x: m.linear(m.table(x).detach())),
    "only its shape besides": Case(lambda m, x: m.table(x) * m.weight.shape[0]),
    "a sparse gradient asked for": Case(lambda m, x: F.embedding(x, m.weight, sparse=True)),
    "padding": Case(lambda m, x: m.linear(F.embedding(x, m.weight, padding_idx=2))),
    "ids used elsewhere": Case(lambda m, x: m.table(x % 7) * m.vector[x % 3].unsqueeze(-1) * (x % 7).unsqueeze(-1)),
    "ids computed from ids": Case(shared_arithmetic),
    "ids are a result": Case(lambda m, x: (m.table(x + 1), x + 1)),
    "the batch is a result": Case(lambda m, x: (m.table(x), x)),
    "int32 ids": Case(plain, args=(IDS.int(),)),
    "uint8 ids": Case(lambda m, x: m.linear(m.table(x.int())), args=(IDS.to(torch.uint8),)),
    "a single id": Case(plain, args=(torch.tensor(3),)),
    "no ids": Case(plain, args=(IDS[:0],)),
    "ids from a parameter's shape": Case(lambda m, x: m.table(x % m.vector.shape[0])),
    "random ids": Case(lambda m, x: m.table(torch.randint(10, (3,))) + x.unsqueeze(-1)),
    "random ids after a draw": Case(lambda m, x: F.dropout(x.double()).sum() * m.table(torch.randint(10, (3,)))),
    "dropout": Case(lambda m, x: m.linear(F.dropout(m.table(x)))),
    "a sum bag": Case(bag, args=OFFSET_BAG),
    "a sum bag of rows": Case(bag),
    "a sum bag with its last offset": Case(
        lambda m, x, o: bag(m, x, o, include_last_offset=True), args=LAST_OFFSET_BAG
    ),
    "a mean bag": Case(lambda m, x, o: bag(m, x, o, mode="mean"), args=OFFSET_BAG),
    "a mean bag of rows": Case(lambda m, x: bag(m, x, mode="mean")),
    "a mean bag with its last offset": Case(
        lambda m, x, o: bag(m, x, o, mode="mean", include_last_offset=True), args=LAST_OFFSET_BAG
    ),
    "a mean bag with padding": Case(lambda m, x, o: bag(m, x, o, mode="mean", padding_idx=2), args=OFFSET_BAG),
    "a mean bag of int32 ids": Case(lambda m, x, o: bag(m, x, o, mode="mean"), args=(BAG.int(), OFFSETS.int())),
    "only empty bags": Case(lambda m, x, o: bag(m, x, o, mode="mean"), args=(BAG[:0], torch.zeros_like(OFFSETS))),
    "two bags of the same ids": Case(lambda m, x, o: bag(m, x, o) * bag(m, x, o, mode="mean"), args=OFFSET_BAG),
    "a bag and a lookup": Case(lambda m, x, o: bag(m, x, o).sum() * m.table(x).sum(), args=OFFSET_BAG),
    "a weighted bag": Case(lambda m, x, o: bag(m, x, o, per_sample_weights=m.vector), args=OFFSET_BAG),
    "a weighted bag with padding": Case(
        lambda m, x, o: bag(m, x, o, per_sample_weights=m.vector, padding_idx=2), args=OFFSET_BAG
    ),
    "a weighted bag of int32 ids": Case(
        lambda m, x, o: bag(m, x, o, per_sample_weights=m.vector), args=(BAG.int(), OFFSETS.int())
    ),
    "two weighted bags": Case(
        lambda m, x, o: bag(m, x, o, per_sample_weights=m.vector) * bag(m, x, o, per_sample_weights=2 * m.vector),
        args=OFFSET_BAG,
    ),
}

ILLEGAL: dict[str, Case] = {
    "a tied projection": Case(lambda m, x: m.table(x) @ m.weight.t(), "also read densely (t"),
    "a penalty on all rows": Case(lambda m, x: m.table(x).sum() + m.weight.pow(2).sum(), "also read densely (pow"),
    "a row read without gradient": Case(lambda m, x: m.table(x) + m.weight[0].detach(), "also read densely (select"),
    "a weighted bag and a projection": Case(
        lambda m, x, o: bag(m, x, o, per_sample_weights=m.vector) @ m.weight.t(), "also read densely (t", OFFSET_BAG
    ),
    "the table is a result": Case(lambda m, x: (m.table(x), m.weight), "also read densely ("),
    "disagreeing padding": Case(
        lambda m, x: F.embedding(x, m.weight, padding_idx=0) + F.embedding(x, m.weight, padding_idx=1),
        "disagree on padding_idx (0, 1)",
    ),
    "padding in one of two": Case(
        lambda m, x: F.embedding(x, m.weight, padding_idx=0) + m.table(x + 1), "disagree on padding_idx (-1, 0)"
    ),
    "scaled by frequency": Case(lambda m, x: F.embedding(x, m.weight, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "ids from a parameter": Case(
        lambda m, x: m.table((m.vector[:3] * 2).long()) + x.unsqueeze(-1), "its ids depend on parameters"
    ),
    "ids from another table": Case(lambda m, x: m.table(m.other(x).argmax(-1)), "its ids depend on parameters"),
    "random ids after a dropout of rows": Case(
        lambda m, x: F.dropout(m.table(x)) + m.table(torch.randint(10, (3,))), "after other random numbers"
    ),
    "a max bag": Case(lambda m, x, o: bag(m, x, o, mode="max"), "max mode compares whole rows", args=OFFSET_BAG),
}
"""The twins that must not be sharded."""


@functools.cache
def example(name: str) -> tuple[Tables, TrainingGraph]:
    """The model of a case and its captured graph; both are read by many tests, and written by none."""
    case = (LEGAL | ILLEGAL)[name]
    model = tables_model(case.forward)
    return model, analysed(model, *case.args)
