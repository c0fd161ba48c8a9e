"""Training schemes of published papers, each as its authors' code has it."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from tests.support.scenario import Training
from tests.support.scenarios.schemes import DIM, NUM_IDS, Words, adam, ids_of, scheme, step_of


class Encoder(Words):
    def forward(self, ids: Tensor) -> Tensor:
        return F.normalize(self.encode(ids), dim=-1)


class Centers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Embedding(3, DIM)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        return (x - self.centers(kinds)).square().mean()


@scheme
def a_loss_with_a_table_of_its_own(training: Training) -> None:
    """Wen et al. 2016: the criterion is compiled too, and called with what the model returns."""
    model, criterion = training.wrap(Encoder()), training.wrap(Centers())
    optimizer = training.optimize(SGD, [*model.parameters(), *criterion.parameters()], lr=0.3, momentum=0.9)
    for k in range(4):
        ids = ids_of(training.rank, k)
        step_of(training, optimizer, criterion(model(ids), ids % 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_IDS, DIM)
        self.cell = nn.GRUCell(DIM, DIM)

    def forward(self, ids: Tensor, h: Tensor | None = None) -> Tensor:
        return self.cell(self.words(ids), h)


@scheme
def truncated_through_time(training: Training) -> None:
    """Williams and Peng 1990: the state goes from call to call, and is cut each second time."""
    model = training.wrap(Recurrent())
    optimizer, h = adam(training, model), None
    for k in range(4):
        h = model(ids_of(training.rank, 10 * k + 1), model(ids_of(training.rank, 10 * k), h))
        step_of(training, optimizer, h.square().mean())
        h = h.detach()


@scheme
def sharpness_aware(training: Training) -> None:
    """Foret et al. 2021: parameters are moved along their gradients and back between two backwards."""
    model = training.wrap(Words())
    optimizer = training.optimize(SGD, model.parameters(), lr=0.1)
    for k in range(4):
        ids = ids_of(training.rank, k)
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moved = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            for p, by in zip(model.parameters(), moved, strict=True):
                p.add_(by)
        optimizer.zero_grad()
        loss = model(ids).square().mean()
        loss.backward()
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.sub_(by)
        optimizer.step()
        training.note(loss, norm)


class Own(nn.Module):
    """Grill et al. 2020: a target network that the forward writes in place, and a queue of what it has said."""

    queue: Tensor
    at: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Embedding(NUM_IDS, DIM), nn.Linear(DIM, DIM))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(20, DIM))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            for own, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
                target.mul_(0.9).add_(own, alpha=0.1)
            said = self.target(b)
            self.queue.index_copy_(0, (self.at + torch.arange(5)) % 20, said)
            self.at.add_(5)
        apart: Tensor = (self.online(a) - said).square().mean()
        matched: Tensor = (self.online(a) @ self.queue.clone().t()).square().mean()
        return apart + matched


@scheme
def a_target_network_within(training: Training) -> None:
    model = training.wrap(Own())
    optimizer = training.optimize(SGD, model.parameters(), lr=0.1)
    for k in range(4):
        step_of(training, optimizer, model(ids_of(training.rank, 10 * k), ids_of(training.rank, 10 * k + 1)))
    if training.rank:  # buffers differ between ranks until the next call
        embrace_fx.full_state_dict(training.models.pop())
