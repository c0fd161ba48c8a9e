"""Whole loops as others write them: several models, sparse tables, logs and batches that fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop, SparseAdam
from torch.utils.dlpack import from_dlpack

from tests.support.scenario import Training
from tests.support.scenarios.schemes import (
    DIM,
    NUM_IDS,
    Words,
    adam,
    ids_of,
    loss_of,
    scheme,
    step_of,
    stepped,
    wrapped,
)


class _Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.labels, self.out = nn.Embedding(NUM_IDS, DIM), nn.Linear(2 * DIM, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        found: Tensor = self.out(torch.cat([x, self.labels(ids)], 1)).squeeze(1)
        return found


class _Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.labels, self.out = nn.Embedding(NUM_IDS, DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, z: Tensor, ids: Tensor) -> Tensor:
        return torch.tanh(self.out(torch.cat([z, self.labels(ids)], 1)))


def _adversaries(training: Training, freezes: bool) -> None:
    generator, critic = _Generator(), _Critic()
    makes, judges = training.wrap(generator), training.wrap(critic)
    of_makes = training.optimize(Adam, makes.parameters(), lr=0.02, betas=(0.5, 0.999), eps=1e-3)
    of_judges = training.optimize(RMSprop, judges.parameters(), lr=0.01, eps=1e-3)
    for k in range(4):
        draw = torch.Generator().manual_seed(10 * k + training.rank)
        ids, (z, real) = ids_of(training.rank, k), torch.randn(2, 5, DIM, generator=draw)
        if freezes:
            critic.requires_grad_(False)
            step_of(training, of_makes, -judges(makes(z, ids), ids).mean())
            critic.requires_grad_(True)
        fake = makes(z, ids)
        step_of(training, of_judges, (judges(fake.detach(), ids) - judges(real, ids)).mean())
        for each in critic.parameters():
            each.data.clamp_(-0.5, 0.5)
        if not freezes:
            step_of(training, of_makes, -judges(fake, ids).mean())


@scheme
def adversaries_that_share_a_forward(training: Training) -> None:
    _adversaries(training, freezes=False)


@scheme
def a_critic_frozen_at_its_first_call(training: Training) -> None:
    _adversaries(training, freezes=True)


@scheme
def values_of_a_target_network(training: Training) -> None:
    """As a double DQN: a replay buffer, clipped values of gradients, a hard update every third step, one soft."""
    plain, model = wrapped(training)
    target = copy.deepcopy(plain)
    optimizer = training.optimize(RMSprop, model.parameters(), lr=0.01, eps=1e-3)
    replay: list[tuple[Tensor, Tensor]] = []
    for k in range(7):
        ids = ids_of(training.rank, k)
        with torch.no_grad():
            training.note(model(ids).argmax())
            replay.append((ids, 0.9 * target(ids_of(training.rank, k + 1))))
        ids, wanted = replay[5 * k % len(replay)]
        loss = F.smooth_l1_loss(model(ids), wanted + 0.1)
        optimizer.zero_grad()
        loss.backward()
        for each in plain.parameters():
            each.grad.data.clamp_(-0.02, 0.02)
        optimizer.step()
        if k % 3 == 2:
            target.load_state_dict(plain.state_dict())
        for own, new in zip(target.parameters(), plain.parameters(), strict=True):
            own.data.copy_(0.99 * own.data + 0.01 * new.data)
    training.note(list(target.state_dict().values()))


@scheme
def a_student_and_its_teacher_of_one_class(training: Training) -> None:
    """Both wrapped; the teacher is frozen, and takes over the student's state at the end of an epoch."""
    teacher, student = Words(), Words()
    teacher.requires_grad_(False)
    model = training.wrap(student)
    optimizer = adam(training, model)
    for k in range(6):
        ids = ids_of(training.rank, k)
        with torch.no_grad():
            soft = teacher(ids).softmax(0)
        out = model(ids)
        step_of(training, optimizer, F.kl_div(out.log_softmax(0), soft, reduction="sum") + out.square().mean())
        if k % 2:
            teacher.load_state_dict(student.state_dict())


@scheme
def two_towers_of_one_loss(training: Training) -> None:
    queries, items = training.wrap(Words()), training.wrap(Words())
    optimizer = adam(training, queries, items)
    for k in range(5):
        one, other = queries(ids_of(training.rank, k, 4, 3)), items(ids_of(training.rank, 30 + k, 4, 2 + k % 2))
        logits = one.sum(1)[:, None] * other.sum(1)[None] / 0.5
        step_of(training, optimizer, F.cross_entropy(logits, torch.arange(4)))


class _SkipGram(nn.Module):
    """Words near each other, and drawn ones that are not; the context may be bags."""

    def __init__(self, bags: bool = False) -> None:
        super().__init__()
        make: Any = nn.EmbeddingBag if bags else nn.Embedding
        self.inside, self.outside = nn.Embedding(NUM_IDS, DIM, sparse=True), make(NUM_IDS, DIM, sparse=True)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, center: Tensor, near: Tensor, far: Tensor) -> Tensor:
        x_BD = self.inside(center) * self.scale
        far_BKD = self.outside(far).view(len(center), -1, DIM)
        good_B, bad_BK = (x_BD * self.outside(near)).sum(-1), torch.einsum("bd,bkd->bk", x_BD, far_BKD)
        return -(F.logsigmoid(good_B).mean() + F.logsigmoid(-bad_BK).sum(1).mean())


def _words(training: Training, step: int, *, bags: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    near, far = ids_of(training.rank, 20 + step), ids_of(training.rank, 40 + step, 5, 3)
    return ids_of(training.rank, step), near[:, None] if bags else near, far.view(-1, 1) if bags else far


def _by_flags(plain: Any) -> list[Any]:
    tables = [each.weight for each in plain.modules() if getattr(each, "sparse", False)]
    return [SparseAdam(tables, eps=1e-3), RMSprop([p for n, p in plain.named_parameters() if "side" not in n], 0.01)]


def _by_groups(plain: Any) -> list[Any]:
    groups: list[dict[str, Any]] = [{"params": [plain.inside.weight], "lr": 0.05}, {"params": [plain.outside.weight]}]
    return [SparseAdam(groups, 0.01, eps=1e-3), AdamW([plain.scale])]


def _by_shape(plain: Any) -> list[Any]:
    return [SparseAdam([p for p in plain.parameters() if p.dim() == 2], 0.02, eps=1e-3), SGD([plain.scale], 0.1)]


SPARSE: dict[str, Callable[[Any], list[Any]]] = {
    "skip_grams_by_shape": _by_shape,
    "skip_grams_by_groups_of_rates": _by_groups,
    "skip_grams_by_plain_descent": lambda plain: [SGD(plain.parameters(), 0.2)],
    "skip_grams_by_adagrad_over_all": lambda plain: [Adagrad(plain.parameters(), 0.1, eps=1e-3)],
    "skip_grams_by_flags": _by_flags,
    "skip_grams_of_bags": _by_shape,
}


def _skip_grams(name: str, make: Callable[[Any], list[Any]]) -> None:
    def run(training: Training) -> None:
        plain: Any = _SkipGram(bags="bags" in name)
        model = training.wrap(plain)
        optimizers = make(plain)
        schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 - step / 10) for each in optimizers]
        for k in range(5):
            loss = model(*_words(training, k, bags="bags" in name))
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            training.note(loss, plain.inside.weight.grad.is_sparse, plain.outside.weight.grad.is_sparse)
            for each, scheduler in zip(optimizers, schedulers, strict=True):
                each.step()
                scheduler.step()

    run.__name__ = name
    scheme(run)


for _name, _make in SPARSE.items():
    _skip_grams(_name, _make)


@scheme
def a_bad_batch_on_one_rank(training: Training) -> None:
    """Catches the error of a batch on one rank, and trains on a batch of the same shape instead."""
    _, model = wrapped(training)
    optimizer = adam(training, model)
    for k in range(5):
        ids = ids_of(training.rank, k)
        try:
            if k == 2 and training.rank == 1:
                raise ValueError("a file that cannot be read")
        except ValueError:
            ids = torch.zeros(5, dtype=torch.int64)
        step_of(training, optimizer, model(ids).square().mean())


def _whole_tables(training: Training) -> dict[str, Any]:
    return {"strategy": "allreduce"} if training.is_compiled else {}


@scheme
def evaluations_of_unequal_length(training: Training) -> None:
    """With whole tables each rank evaluates as many batches as it has."""
    for _, plain, model in stepped(training, 4, **_whole_tables(training)):
        model.eval()
        with torch.no_grad():
            found = [model(ids_of(training.rank, 50 + n)).sum() for n in range(1 + training.rank)]
            if training.rank == 0:
                found.append(plain(ids_of(0, 60)).sum())
        model.train()
        dist.barrier()
        training.note(found)


def _by_model(model: Any, plain: Any, steps: range) -> Any:
    return [model(ids_of(0, k)).sum() for k in steps]


def _by_module(model: Any, plain: Any, steps: range) -> Any:
    return [plain(ids_of(0, k)).sum() for k in steps]


def _by_a_part(model: Any, plain: Any, steps: range) -> Any:
    return [plain.encode(ids_of(0, k)).norm() for k in steps]


def _by_a_copy(model: Any, plain: Any, steps: range) -> Any:
    alone = copy.deepcopy(plain)
    return [alone(ids_of(0, k)).sum() for k in steps]


def _by_a_state(model: Any, plain: Any, steps: range) -> Any:
    alone = Words()
    alone.load_state_dict({name.removeprefix("module."): value for name, value in model.state_dict().items()})
    return [alone(ids_of(0, k)).sum() for k in steps]


def _by_norms(model: Any, plain: Any, steps: range) -> Any:
    return [(name, each.norm().item(), each.grad.abs().max().item()) for name, each in plain.named_parameters()]


def _and_all_are_told(model: Any, plain: Any, steps: range) -> Any:
    return [float(model(ids_of(0, k)).sum()) for k in steps]


EVALUATED: dict[str, Callable[[Any, Any, range], Any]] = {
    "rank_0_evaluates_the_model": _by_model,
    "rank_0_evaluates_the_module": _by_module,
    "rank_0_evaluates_a_part": _by_a_part,
    "rank_0_evaluates_a_copy": _by_a_copy,
    "rank_0_evaluates_a_state": _by_a_state,
    "rank_0_logs_norms": _by_norms,
    "rank_0_evaluates_and_tells": _and_all_are_told,
}


def _by_rank_0(name: str, evaluate: Callable[[Any, Any, range], Any]) -> None:
    """With whole tables, rank 0 evaluates alone while the others wait in a collective."""

    def run(training: Training) -> None:
        for k, plain, model in stepped(training, 4, **_whole_tables(training)):
            told: list[Any] = [None]
            if training.rank == 0:
                model.eval()
                with torch.inference_mode() if k % 2 else torch.no_grad():
                    told = [evaluate(model, plain, range(50, 52 + k))]
                    training.note(told)
                model.train()
            if "tells" in name:
                dist.broadcast_object_list(told)
                training.note(told)
            else:
                dist.barrier()

    run.__name__ = name
    scheme(run)


for _name, _evaluate in EVALUATED.items():
    _by_rank_0(_name, _evaluate)


@scheme
def weights_logged_as_a_histogram(training: Training) -> None:
    for _, plain, _ in stepped(training, 3):
        for name, each in plain.named_parameters():
            values = each.detach().cpu().flatten()
            training.note(name, torch.histogram(values, 6, range=(-3.0, 3.0)).hist, values.sort().values[::7])
            training.note(
                values.kthvalue(1).values, each[-1].sum().item(), f"{each.norm():.6f}", each.std(correction=0).item()
            )


@scheme
def an_early_end_by_a_norm_that_all_ranks_ask_for(training: Training) -> None:
    for k, plain, _ in stepped(training, 6):
        norms = {name: each.detach().norm().item() for name, each in plain.named_parameters()}
        if norms["words.weight"] > 9.7 and k > 2:
            break
    training.note(k, list(norms.values()))


@scheme
def scripted_and_traced_functions_of_weights(training: Training) -> None:
    traced = torch.jit.trace(lambda weight: weight.sum() * 2, torch.zeros(DIM, DIM))
    for _, plain, _ in stepped(training, 4):
        weight = plain.hidden.weight
        training.note(traced(weight), from_dlpack(weight.detach()).sum(), float(plain.out.bias.detach().numpy()[0]))
        training.note(sum(plain.out.bias.detach().untyped_storage()))


@scheme
def other_data_of_dense_gradients(training: Training) -> None:
    plain, model = wrapped(training)
    optimizer = adam(training, model)
    for k in range(4):
        optimizer.zero_grad()
        loss_of(model, training, k).backward()
        plain.hidden.weight.grad.data = torch.full((DIM, DIM), 0.1)
        plain.out.weight.grad.data = plain.out.weight.grad.data * 0.5
        plain.words.weight.grad.data = plain.words.weight.grad.data * 2
        optimizer.step()
