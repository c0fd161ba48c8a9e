"""Rows and row gradients between steps: every row is read after its last update, and updated once per step.

Shape legend
    V rows of the table, D columns of it, d this rank's; R rows read by all ranks in rank order; U by this one.
"""

from __future__ import annotations

import functools
import operator
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, Optimizer

from embrace_fx.runtime.flow.routing import Routing, chunks_of, membership
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.kernels import unique_ids
from embrace_fx.runtime.launch.launch_queue import LaunchQueue
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.optimizer_state import own_state
from embrace_fx.runtime.tables.placement import shard_parameter
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.update_rule import SparseUpdate
from embrace_fx.vocabulary.operation_id import gradients_id, rows_id
from embrace_fx.vocabulary.ops import own_columns
from embrace_fx.vocabulary.plan import Grid
from tests.support.ranks import run_ranks

V = 7
EXAMPLES = 12
"""Random trainings per number of columns."""

# -- cutting -----------------------------------------------------------------------------------------------------------

ids_of_ranks = st.lists(st.lists(st.integers(0, V - 1), unique=True, max_size=V), min_size=1, max_size=4)


def routing_of(by_rank: list[list[int]], rank: int = 0) -> Routing:
    flat = torch.tensor([i for ids in by_rank for i in ids], dtype=torch.int64)
    return Routing(flat, tuple(map(len, by_rank)), Grid(1, len(by_rank)), rank)


@given(ids_of_ranks, ids_of_ranks)
def test_prior_and_delayed_rows_partition_a_batch(current: list[list[int]], following: list[list[int]]) -> None:
    routing, other = routing_of(current), routing_of(following)
    marked = membership(V, torch.device("cpu"))
    with mock.patch("embrace_fx.runtime.flow.routing.MOST_MARKED", 0):
        unmarked = membership(V, torch.device("cpu"))

    for among in (unmarked, marked, marked):  # it leaves no marks behind
        mask = among(routing.ids, other.ids)
        prior, delayed = routing.where(mask), routing.where(~mask)

    read_next = {i for ids in following for i in ids}
    assert mask.tolist() == [i in read_next for ids in current for i in ids]
    assert prior.ids.tolist() == routing.ids[mask].tolist()
    for rank, ids in enumerate(current):
        own = routing_of(current, rank).where(mask).own_positions
        assert own is not None
        assert [ids[k] for k in own.tolist()] == [i for i in ids if i in read_next]
    assert prior.counts == tuple(sum(i in read_next for i in ids) for ids in current)
    assert tuple(map(sum, zip(prior.counts, delayed.counts, strict=True))) == routing.counts
    assert routing.where(~mask, but=[prior]).counts == delayed.counts


@given(ids_of_ranks, st.data(), st.integers(1, 5))
def test_chunks_keep_equal_ids_together(by_rank: list[list[int]], data: st.DataObject, chunks: int) -> None:
    ids = routing_of(by_rank).ids
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), dtype=torch.bool)

    found = chunks_of(ids, mask, chunks)

    assert len(found) == chunks
    assert torch.equal(torch.stack(found).sum(0), mask.long())  # each masked row in one chunk, no other in any
    where: dict[int, set[int]] = {}
    for k, chunk in enumerate(found):
        for row in ids[chunk].tolist():
            where.setdefault(row, set()).add(k)
    assert all(len(of_row) == 1 for of_row in where.values())


def test_chunks_are_of_about_equal_size() -> None:
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))

    sizes = [int(chunk.sum()) for chunk in chunks_of(ids, ids % 2 == 0, 4)]

    assert max(sizes) - min(sizes) <= 2


# -- trainings ---------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """What all ranks read: `ids` (R,), `counts` rows of each, and what loss they have of them, (R, D) factors."""

    ids: Tensor
    counts: Tensor
    factors: Tensor

    def own(self, rank: int) -> slice:
        counts: list[int] = self.counts.tolist()
        return slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    @staticmethod
    def draw(random: random.Random, world_size: int, columns: int, padding_idx: int) -> Batch:
        most = random.choice([0, 2, 2 * V])
        drawn = [[random.randrange(V) for _ in range(random.randint(0, most))] for _ in range(world_size)]
        unique = [unique_ids([torch.tensor(ids, dtype=torch.int64)], V, padding_idx)[0] for ids in drawn]
        generator = torch.Generator().manual_seed(random.randrange(2**31))
        rows = sum(map(len, unique))
        factors = torch.randn((rows, columns), dtype=torch.float64, generator=generator)
        return Batch(torch.cat(unique), torch.tensor(list(map(len, unique))), factors)


class Watched(RowTable):
    """Tells what is updated under the options of which step."""

    updates: list[tuple[int, list[int]]]

    def begin_step(self) -> SparseUpdate:
        step = super().begin_step()
        if "number" in step.options:
            number, apply = step.options["number"], step.apply

            def noted(ids: Tensor, rows: Tensor) -> None:
                self.updates.append((number, ids.tolist()))
                apply(ids, rows)

            step.apply = noted  # type: ignore[method-assign]
        return step


@dataclass
class Reference:
    """The whole table in one process, updated at once."""

    weight: nn.Parameter
    optimizer: Optimizer
    padding_idx: int
    read: dict[int, set[int]] = field(default_factory=dict)  # by number of the step
    gradient: Tensor | None = None
    touched: set[int] = field(default_factory=set)

    def backward(self, gradients: Tensor, batch: Batch, scale: float) -> None:
        whole = torch.zeros_like(self.weight).index_add_(0, batch.ids, gradients, alpha=scale)
        if self.padding_idx >= 0:
            whole[self.padding_idx] = 0
        self.gradient = whole if self.gradient is None else self.gradient + whole
        self.touched |= set(batch.ids.tolist()) - {self.padding_idx}

    def step(self, number: int) -> None:
        if self.gradient is not None:
            self.weight.grad = self.gradient
            self.optimizer.step()
            self.read[number] = self.touched
        self.zero_grad()

    def zero_grad(self) -> None:
        self.gradient, self.touched = None, set()


EARLY, LATE, PRIOR = rows_id("t", "early"), rows_id("t", "late"), gradients_id("t", "prior")


class Training:
    """One table's training on a rank, in the order in which a flow calls its exchange."""

    def __init__(self, communicator: Communicator, seed: int, columns: int, kind: type[Optimizer]) -> None:
        self.draw = random.Random(seed)
        self.communicator = communicator
        self.padding_idx = self.draw.choice([-1, 0, 3])
        self.paddings = [self.padding_idx] if self.padding_idx >= 0 else []
        generator = torch.Generator().manual_seed(seed)
        initial = torch.randn((V, columns), dtype=torch.float64, generator=generator)
        options: dict[str, Any] = {"lr": 0.3, "eps": 0.1} | (
            {"lr_decay": 0.1} if kind is Adagrad else {"amsgrad": True}
        )
        whole = nn.Parameter(initial.clone())
        self.reference = Reference(whole, kind([whole], **options), self.padding_idx)
        parameter = nn.Parameter(initial.clone())
        self.optimizer = kind([parameter], **options)
        layout = shard_parameter("t", parameter, whole.shape, communicator)
        self.group = self.optimizer.param_groups[0]
        self.table = Watched(parameter, layout, "exact", self.optimizer)
        self.table.updates = []
        state = self.optimizer.state[parameter]  # Adagrad makes its own before anything is sharded
        state.update(own_state(parameter, layout, state))
        self.moves = kind is Adam  # rows without gradient too
        self.early = 0  # forwards that found rows early, and right
        chunks = self.draw.randint(1, 3)
        self.pieces = [gradients_id("t", "delayed", k) for k in range(chunks)]
        order = [PRIOR, *self.pieces]
        order.insert(self.draw.randrange(1, 1 + len(order)), LATE)  # which wait for the prior ones
        order.insert(self.draw.randrange(1 + len(order)), EARLY)
        self.launcher = Launcher(order, [LATE], LaunchQueue(Recorder()), communicator)
        self.exchange = RowExchange(self.table, communicator, self.launcher, chunks)
        self.number = 0
        self.split = 0  # steps whose gradients were cut in two

    def forward(self, batch: Batch) -> Tensor:
        """Checks the rows of this rank's batch, and returns the gradient with respect to those of all ranks."""
        exchange = self.exchange
        if not exchange.usable:
            exchange.drop()
        self.early += bool(exchange.sent)
        self.launcher.enter_forward()
        with self.launcher.hurrying():  # an order that launches rows before delayed gradients is not always followed
            shard = self.table.local
            assert exchange.gradient.update_rows(PRIOR, shard) is shard
            exchange.submit_rows(LATE, shard, batch.ids, batch.counts, "t", torch.float64, "")
        for launch in (EARLY, LATE):
            exchange.await_rows(launch, batch.ids, batch.counts, "t", torch.float64, "")
        rows = exchange.join_rows((), batch.ids, batch.counts, "t").view(-1, self.reference.weight.shape[1])
        expected = self.reference.weight.detach()[batch.ids]
        torch.testing.assert_close(rows, expected[batch.own(self.communicator.rank)], rtol=1e-12, atol=1e-12)
        return batch.factors * (1 + expected)

    def backward(self, batch: Batch, gradients: Tensor, following: Batch | None) -> None:
        self.launcher.open_window()
        self.exchange.gradient.begin_backward()  # of a forward that was not this program's
        for launch in self.pieces:
            self.exchange.gradient.apply(launch)
        cut = following is not None and self.exchange.can_split(batch.ids)
        if following is not None and cut:
            self.exchange.cut(following.ids, following.counts)
        else:
            self.launcher.skip([EARLY, *self.pieces])
        if cut:
            self.exchange.submit_rows(EARLY, self.table.local, batch.ids, batch.counts, "t", torch.float64, "")
        scale = 1 / self.communicator.world_size
        own = gradients[batch.own(self.communicator.rank)].contiguous()
        for launch in (PRIOR, *self.pieces) if cut else (PRIOR,):
            of_batch = (own, batch.ids, batch.counts, "t")
            found = self.exchange.gradient.submit_gradients(launch, *of_batch, self.paddings, scale, "")
        self.launcher.leave_backward()
        found.deliver()
        parts = [part.ids.tolist() for _, part in found.parts.values()]
        assert sorted(functools.reduce(operator.iadd, parts, [])) == sorted(batch.ids.tolist())
        if cut:
            assert following is not None
            self.split += 1
            assert set(parts[0]) == set(batch.ids.tolist()) & set(following.ids.tolist())
            assert max(Counter(row for part in parts for row in set(part)).values(), default=1) == 1
        self.reference.backward(gradients, batch, scale)

    def step(self) -> None:
        self.number += 1
        if not self.moves:
            self.group["number"] = self.number
        if not self.moves or self.draw.random() < 0.3:  # the options are those of this moment
            self.group["lr"] *= 0.9
            self.reference.optimizer.param_groups[0]["lr"] *= 0.9
        self.exchange.gradient.apply()
        if self.exchange.gradient.may_wait():
            self.exchange.note_step(moved_all=self.exchange.gradient.begin_step().moves_all)
        elif self.table.parameter.grad is not None:
            if self.moves:
                self.table.step_dense()
            else:
                self.table.begin_step().finish([self.table.open_gradient().rows()])
            self.exchange.note_step(moved_all=self.moves)
        if not self.moves:
            self.group["number"] = -1
        self.reference.step(self.number)

    def zero_grad(self) -> None:
        self.table.parameter.grad = None
        self.reference.zero_grad()

    def finish(self) -> None:
        self.launcher.open_window()
        self.exchange.gradient.apply()
        while self.launcher.queue.under_way():  # discarded ones too: the next training uses the same groups
            time.sleep(0.001)
        mine = self.table.local
        first, last = own_columns(self.table.shape[1], self.communicator.world_size, self.communicator.rank)
        expected = self.reference.weight.detach()[:, first:last]
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
        if self.moves:
            return
        by_step: dict[int, list[int]] = {}
        updated: dict[int, int] = {}  # row -> the step that updated it last
        for number, ids in self.table.updates:
            assert all(number > updated.get(row, 0) for row in ids)
            updated |= dict.fromkeys(ids, number)
            by_step.setdefault(number, []).extend(ids)
        found = {number: sorted(ids) for number, ids in by_step.items() if ids}
        assert found == {number: sorted(rows) for number, rows in self.reference.read.items() if rows}


def train(training: Training, steps: int = 7) -> None:
    """A loop that does, at random, what users do."""
    draw, world_size = training.draw, training.communicator.world_size
    columns = training.reference.weight.shape[1]

    def another() -> Batch:
        return Batch.draw(draw, world_size, columns, training.padding_idx)

    batch = another()
    for _ in range(steps):
        following = another()
        gradients = training.forward(batch)
        event = draw.choice(["look ahead"] * 5 + ["do not", "other batch", "two forwards", "drop", "sum up", "clip"])
        if event == "two forwards":  # the first of them is a batch whose loss is not used, or used later
            training.forward(another())
            if draw.random() < 0.5:
                gradients = training.forward(batch)
        training.backward(batch, gradients, None if event == "do not" else following)
        if event == "clip":
            with training.launcher.hurrying():
                training.exchange.gradient.wait()
        if event not in ("drop", "sum up"):
            training.step()
        if event != "sum up":
            training.zero_grad()
        if event == "other batch":  # than the one looked ahead to
            following = another()
            training.exchange.drop()
        batch = following
    training.finish()


def trains_at_random(rank: int, world_size: int, columns: int, kind: type[Optimizer]) -> tuple[int, int]:
    """How often a gradient was cut, and how often rows were there early."""
    communicator = Communicator(dist.group.WORLD)
    communicator.open_lanes()
    split = early = 0
    for seed in range(EXAMPLES):
        training = Training(communicator, seed, columns, kind)
        try:
            train(training)
        except Exception as error:
            error.add_note(f"in training {seed} with {columns} columns on {world_size} ranks")
            raise
        split += training.split
        early += training.early
    return split, early


@pytest.mark.long
@pytest.mark.parametrize(
    "columns",
    [pytest.param(6, id="even"), pytest.param(5, id="uneven"), pytest.param(2, id="a rank without columns")],
)
@pytest.mark.parametrize("kind", [Adagrad, Adam])
def test_rows_are_read_after_their_last_update_and_updated_once_per_step(columns: int, kind: type[Optimizer]) -> None:
    for split, early in run_ranks(3, trains_at_random, columns, kind):
        assert split > EXAMPLES
        assert early > EXAMPLES / 2


def test_early_rows_are_stale_once_the_gradient_of_another_batch_leaves() -> None:
    training = Training(Communicator(None), 0, 6, Adagrad)
    exchange, found = training.exchange, []
    first, second, other = (
        Batch(torch.tensor(ids), torch.tensor([2]), torch.ones((2, 6), dtype=torch.float64))
        for ids in ([2, 5], [5, 6], [1, 3])
    )
    training.backward(first, training.forward(first), second)
    found.append((bool(exchange.sent), exchange.usable))

    training.launcher.open_window()
    exchange.gradient.submit_gradients(PRIOR, other.factors, other.ids, other.counts, "t", (), 1.0, "")

    found.append((bool(exchange.sent), exchange.usable))
    exchange.drop()
    found.append((bool(exchange.sent), exchange.usable))
    assert found == [(True, True), (True, False), (False, True)]
    training.launcher.close()
