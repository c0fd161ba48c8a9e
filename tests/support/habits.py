"""Habits of DDP's users, by name: what loops do that tutorials do not.

Each is a function of what wraps a model, `DistributedDataParallel` or `embrace_fx.compile`, and of the rank; it returns
the numbers and tensors that must be the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import embrace_fx

NUM_IDS, DIM = 24, 4
Wrap = Callable[[nn.Module], Any]
Habit = Callable[[Wrap, int], list[Any]]
HABITS: dict[str, Habit] = {}


def habit(function: Habit) -> Habit:
    """Enters a habit under its name, in words."""
    HABITS[function.__name__.replace("_", " ")] = function
    return function


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_IDS, DIM)
        self.hidden = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, 1)

    def encode(self, ids: Tensor) -> Tensor:
        found: Tensor = self.norm(torch.tanh(self.hidden(self.words(ids))))
        return found

    def score(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.encode(ids)).squeeze(-1)
        return found

    def forward(self, ids: Tensor) -> Any:
        return self.score(ids)


def ids_of(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randint(NUM_IDS, shape or (5,), generator=torch.Generator().manual_seed(100 * step + rank))


def ends(*models: Any) -> list[Tensor]:
    """The parameters and buffers of models, whole."""
    return [value.detach().clone() for each in models for value in embrace_fx.full_state_dict(each).values()]


def step_of(optimizer: Any, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def adam(*models: Any) -> Adam:
    return Adam([p for model in models for p in model.parameters()], 0.02, eps=1e-3)


@habit
def a_dict_of_losses_and_none(wrap: Wrap, rank: int) -> list[Any]:
    class Losses(Words):
        def forward(self, ids: Tensor, target: Tensor | None = None) -> Any:
            x = self.score(ids)
            if target is None:
                return None, {"logits": x}
            return {"mse": F.mse_loss(x, target), "l1": F.l1_loss(x, target)}, {"logits": x}

    model = wrap(Losses())
    optimizer, log = adam(model), []
    for k in range(4):
        losses, _ = model(ids_of(rank, k), torch.ones(5))
        log.append(step_of(optimizer, losses["mse"] + losses["l1"]))
        if k == 2:
            model.eval()
            with torch.no_grad():
                nothing, found = model(ids_of(0, 90))
            assert nothing is None
            log.append(found["logits"].sum().item())
            model.train()
    return log + ends(model)


@habit
def a_module_in_two_places(wrap: Wrap, rank: int) -> list[Any]:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            words = nn.Embedding(NUM_IDS, DIM)
            self.left = nn.Sequential(words, nn.Linear(DIM, DIM))
            self.right = nn.ModuleDict({"words": words, "mix": nn.Linear(DIM, DIM)})

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            found: Tensor = (self.left(a) * self.right["mix"](self.right["words"](b))).sum(-1).mean()
            return found

    model = wrap(Twice())
    optimizer = adam(model)
    return [step_of(optimizer, model(ids_of(rank, k), ids_of(rank, 50 + k))) for k in range(4)] + ends(model)


@habit
def a_sampler_that_keeps_the_last_batch(wrap: Wrap, rank: int) -> list[Any]:
    data = TensorDataset(ids_of(7, 0, 23, 3), torch.linspace(-1, 1, 23))
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, drop_last=False)
    loader, model = DataLoader(data, batch_size=5, sampler=sampler), wrap(Words())
    optimizer, log = AdamW(model.parameters(), 0.05, eps=1e-3), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids, target in loader:
            log.append(step_of(optimizer, (model(ids).mean(-1) - target).square().mean()))
    return log + ends(model)


@habit
def a_teacher_that_follows(wrap: Wrap, rank: int) -> list[Any]:
    """The teacher is a plain copy made before, an average of the student's whole weights."""
    plain = Words()
    teacher = copy.deepcopy(plain).requires_grad_(False).eval()
    model = wrap(plain)
    optimizer, log = adam(model), []
    for k in range(4):
        ids = ids_of(rank, k)
        with torch.no_grad():
            target = teacher(ids)
        log.append(step_of(optimizer, (model(ids) - 0.5 * target - 0.1).square().mean()))
        weights = {name.removeprefix("module."): v for name, v in embrace_fx.full_state_dict(model).items()}
        for name, value in teacher.state_dict().items():
            value.lerp_(weights[name], 0.3)
    return log + ends(model, teacher)


@habit
def freezing_in_turn(wrap: Wrap, rank: int) -> list[Any]:
    plain = Words()
    model = wrap(plain)
    optimizer, log = SGD(model.parameters(), 0.3, momentum=0.9, weight_decay=0.01), []
    for k in range(6):
        plain.words.requires_grad_(k % 3 != 1)
        plain.hidden.requires_grad_(k % 3 != 2)
        log.append(step_of(optimizer, model(ids_of(rank, k)).square().mean()))
    return log + ends(model)


@habit
def gradients_in_evaluation_mode(wrap: Wrap, rank: int) -> list[Any]:
    plain = Words()
    model = wrap(plain)
    optimizer, log = SGD(model.parameters(), 0.1), []
    for k in range(6):
        model.train(k % 3 != 2)
        plain.norm.eval()
        log.append(step_of(optimizer, model(ids_of(rank, k)).square().mean()))
    return log + ends(model)


@habit
def pseudo_labels(wrap: Wrap, rank: int) -> list[Any]:
    """Forwards without gradients between one with gradients and its backward."""
    model = wrap(Words())
    optimizer, log = adam(model), []
    for k in range(4):
        ids = ids_of(rank, k)
        first = model(ids)
        with torch.no_grad() if k % 2 else torch.set_grad_enabled(False):
            label = model(ids.flip(0))
        with torch.inference_mode():
            log.append(model(ids_of(0, 77)).sum().item())
        log.append(step_of(optimizer, (first - label.flip(0) + 0.3).square().mean()))
    return log + ends(model)


@habit
def warm_up_and_one_cycle(wrap: Wrap, rank: int) -> list[Any]:
    model = wrap(Words())
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    parts = [LinearLR(optimizer, 0.1, total_iters=2), LambdaLR(optimizer, lambda k: 0.9**k)]
    warm, log = SequentialLR(optimizer, parts, [2]), []
    for k in range(5):
        log.append(step_of(optimizer, model(ids_of(rank, k)).square().mean()))
        warm.step()
    cycle = OneCycleLR(optimizer, 0.2, total_steps=5)  # momentum as well
    for k in range(4):
        log.append(step_of(optimizer, model(ids_of(rank, k + 5)).square().mean()))
        cycle.step()
    return log + ends(model)


@habit
def an_optimizer_replaced_by_its_state(wrap: Wrap, rank: int) -> list[Any]:
    model = wrap(Words())
    optimizer = adam(model)
    log = [step_of(optimizer, model(ids_of(rank, k)).square().mean()) for k in range(3)]
    state = copy.deepcopy(optimizer.state_dict())
    log.append(step_of(optimizer, model(ids_of(rank, 3)).square().mean()))
    optimizer = Adam(model.parameters(), 0.5, eps=1e-3)
    optimizer.load_state_dict(state)
    return log + [step_of(optimizer, model(ids_of(rank, k)).square().mean()) for k in (4, 5)] + ends(model)


@habit
def accumulation_of_unequal_batches(wrap: Wrap, rank: int) -> list[Any]:
    """Weighted by examples over all ranks, clipped."""
    model = wrap(Words())
    optimizer, log = AdamW(model.parameters(), 0.05, eps=1e-3), []
    for k in range(3):
        optimizer.zero_grad()
        parts = [ids_of(rank, 10 * k + j, 2 + j + rank) for j in range(3)]
        count = torch.tensor(float(sum(map(len, parts))))
        dist.all_reduce(count)
        for j, part in enumerate(parts):
            with model.no_sync() if j < 2 else contextlib.nullcontext():
                loss = model(part).square().sum() * 2 / count
                loss.backward()
            log.append(loss.item())
        log.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return log + ends(model)


@habit
def losses_reduced_for_the_log(wrap: Wrap, rank: int) -> list[Any]:
    """The user's own collectives, one of them under the backward, and a loop that all leave on rank 0's word."""
    model = wrap(Words())
    optimizer, log = adam(model), []
    for k in range(5):
        optimizer.zero_grad()
        loss = model(ids_of(rank, k)).square().mean()
        total = loss.detach().clone()
        sent: Any = dist.all_reduce(total, async_op=True)
        loss.backward()
        sent.wait()
        optimizer.step()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, loss.item())
        dist.barrier()
        stop = torch.tensor(float(k == 3))
        dist.broadcast(stop, 0)
        log += [total.item(), sum(found)]
        if stop:
            break
    return log + ends(model)


@habit
def hooks_that_log(wrap: Wrap, rank: int) -> list[Any]:
    plain = Words()
    log: list[Any] = []
    plain.hidden.register_forward_hook(lambda module, inputs, output: log.append(output.detach().mean()))
    plain.out.register_forward_pre_hook(lambda module, inputs: log.append(inputs[0].detach().abs().max()))
    model = wrap(plain)
    model.register_forward_hook(lambda module, inputs, output: log.append(output.detach().sum()))
    optimizer = SGD(model.parameters(), 0.1)
    for k in range(3):
        step_of(optimizer, model(ids_of(rank, k)).square().mean())
    return [float(x) for x in log] + ends(model)


@habit
def hooks_on_results(wrap: Wrap, rank: int) -> list[Any]:
    model = wrap(Words())
    optimizer, log = SGD(model.parameters(), 0.1), []
    for k in range(3):
        out = model(ids_of(rank, k))
        out.retain_grad()
        out.register_hook(lambda g: g * 2)
        log.append(step_of(optimizer, out.square().mean()))
        log.append(out.grad.norm().item())
    return log + ends(model)


@habit
def steps_left_out_where_norms_are_large(wrap: Wrap, rank: int) -> list[Any]:
    model = wrap(Words())
    optimizer, log = AdamW(model.parameters(), 0.05, eps=1e-3), []
    for k in range(5):
        optimizer.zero_grad()
        loss = model(ids_of(rank, k)).square().mean() * (10.0 if k == 2 else 1.0)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        log += [loss.item(), norm.item()]
        if norm < 5:
            optimizer.step()
    return log + ends(model)


@habit
def a_whole_model_in_bfloat16(wrap: Wrap, rank: int) -> list[Any]:
    model = wrap(Words().bfloat16())
    optimizer = SGD(model.parameters(), 0.1)
    return [step_of(optimizer, model(ids_of(rank, k)).float().square().mean()) for k in range(3)] + ends(model)
