"""What loops keep, average and write beside a model's weights, and how they change these amid training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim import SGD

from tests.support.scenario import Training
from tests.support.scenarios.schemes import DIM, NUM_IDS, Words, adam, ids_of, loss_of, scheme, stepped, train, wrapped


@scheme
def master_weights_by_hand(training: Training) -> None:
    """In more digits, as before GradScaler: the optimizer steps copies, which are put back."""
    plain, model = wrapped(training)
    masters = [nn.Parameter(each.detach().clone().float()) for each in plain.parameters()]
    optimizer = SGD(masters, 0.2, momentum=0.9)
    for k in range(5):
        model.zero_grad()
        loss_of(model, training, k).backward()
        for master, own in zip(masters, plain.parameters(), strict=True):
            master.grad = own.grad.detach().float()
        optimizer.step()
        with torch.no_grad():
            for master, own in zip(masters, plain.parameters(), strict=True):
                own.copy_(master)


@scheme
def the_way_back_to_where_a_task_began(training: Training) -> None:
    """As Reptile: the weights move a part of the way that an inner loop has gone."""
    plain, model = wrapped(training)
    for task in range(3):
        before = {name: each.data.clone() for name, each in plain.named_parameters()}
        inner = SGD(model.parameters(), 0.3)
        train(training, model, inner, range(3 * task, 3 * task + 3))
        plain.load_state_dict({n: before[n] + 0.4 * (each.data - before[n]) for n, each in plain.named_parameters()})


@scheme
def weights_that_are_sharpened(training: Training) -> None:
    """As SAM: up the gradient, a second backward, back by what was kept."""
    plain, model = wrapped(training)
    optimizer = training.optimize(SGD, model.parameters(), lr=0.2, momentum=0.9)
    for k in range(4):
        optimizer.zero_grad()
        loss_of(model, training, k).backward()
        norm = torch.stack([each.grad.norm(2) for each in plain.parameters()]).norm(2)
        kept = [each.data.clone() for each in plain.parameters()]
        with torch.no_grad():
            for each in plain.parameters():
                each.add_(each.grad * (0.05 / (norm + 1e-12)))
        optimizer.zero_grad()
        loss_of(model, training, k).backward()
        for each, old in zip(plain.parameters(), kept, strict=True):
            each.data = old
        optimizer.step()
        training.note(norm)


@scheme
def the_distance_from_where_training_began(training: Training) -> None:
    """The state from before the model was wrapped has whole tables."""
    plain = Words()
    start = copy.deepcopy(plain.state_dict())
    for _ in stepped(training, 3, plain):
        for name, value in plain.state_dict().items():
            moved, turned = value - start[name], F.cosine_similarity(value.flatten(), start[name].flatten(), dim=0)
            training.note(moved.pow(2).sum().sqrt().item(), turned.item())


@scheme
def a_soup_of_states(training: Training) -> None:
    """Averages the state dicts of several steps, and loads the mean."""
    plain, model = wrapped(training)
    optimizer, kept = adam(training, model), list[dict[str, Any]]()
    for k in range(4):
        train(training, model, optimizer, range(k, k + 1))
        kept.append({name: value.clone() for name, value in plain.state_dict().items()})
    plain.load_state_dict({name: torch.stack([each[name] for each in kept]).mean(0) for name in kept[0]})
    train(training, model, optimizer, range(4, 6))


@scheme
def slow_weights(training: Training) -> None:
    """As Lookahead: every third step, slow weights move towards the fast ones, which begin from there."""
    plain, model = wrapped(training)
    optimizer = adam(training, model)
    slow = [each.detach().clone() for each in plain.parameters()]
    for k in range(7):
        train(training, model, optimizer, range(k, k + 1))
        if k % 3 == 2:
            for one, each in zip(slow, plain.parameters(), strict=True):
                one += 0.5 * (each.data - one)
                each.data.copy_(one)


@scheme
def a_distribution_of_weights(training: Training) -> None:
    """As SWAG: means and squares of a vector of all weights, and a draw that is evaluated."""
    plain, model = wrapped(training)
    optimizer = adam(training, model)
    mean = square = torch.zeros(())
    for k in range(4):
        train(training, model, optimizer, range(k, k + 1))
        vector = parameters_to_vector(plain.parameters()).detach()
        mean, square = (k * mean + vector) / (k + 1), (k * square + vector**2) / (k + 1)
    kept = copy.deepcopy(plain.state_dict())
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(3))
    vector_to_parameters(mean + 0.1 * (square - mean**2).clamp(min=0).sqrt() * noise, plain.parameters())
    with torch.no_grad():
        training.note(loss_of(model, training, 50))
    plain.load_state_dict(kept)
    train(training, model, optimizer, range(4, 6))


@scheme
def a_layer_given_the_tables_weight(training: Training) -> None:
    """Plain layers that take over rows, as classifiers of prototypes do."""
    scores, other = nn.Linear(DIM, NUM_IDS, bias=False), nn.Embedding(NUM_IDS, DIM)
    for k, plain, _ in stepped(training, 3):
        scores.weight = nn.Parameter(plain.words.weight.detach().clone() / 2)
        other.weight.data = plain.words.weight.data * 0.5 + other.weight.data
        training.note(scores(torch.ones(2, DIM)), other(ids_of(0, k)), scores.weight.norm(dim=1).max())


@scheme
def importance_of_weights(training: Training) -> None:
    """As elastic weight consolidation: squares of gradients hold weights where they were, by their gradients."""
    plain, model = wrapped(training)
    optimizer = adam(training, model)
    importance = {name: torch.zeros_like(each) for name, each in plain.named_parameters()}
    for k in range(3):
        model.zero_grad()
        loss_of(model, training, k).backward()
        for name, each in plain.named_parameters():
            importance[name] += each.grad.detach() ** 2 / 3
    anchor = {name: each.detach().clone() for name, each in plain.named_parameters()}
    for k in range(3, 6):
        optimizer.zero_grad()
        loss_of(model, training, k).backward()
        for name, each in plain.named_parameters():
            each.grad.add_(importance[name] * (each.detach() - anchor[name]), alpha=10.0)
        optimizer.step()
        held = [(importance[n] * (each.detach() - anchor[n]) ** 2).sum() for n, each in plain.named_parameters()]
        training.note(sum(held))


def _pruned(plain: Any, step: int) -> None:
    if step == 2:
        prune.l1_unstructured(plain.hidden, "weight", 0.4)
    if step == 4:
        prune.remove(plain.hidden, "weight")


def _reset(plain: Any, step: int) -> None:
    if step == 3:
        torch.manual_seed(7)
        plain.out.reset_parameters()
        nn.init.normal_(plain.words.weight, 0, 0.02)


def _perturbed(plain: Any, step: int) -> None:
    """As shrink-and-perturb does it, by modules."""
    if step % 2:
        fresh = Words()
        for own, new in zip(plain.modules(), fresh.modules(), strict=True):
            for name, each in own.named_parameters(recurse=False):
                each.data.mul_(0.8).add_(getattr(new, name).data, alpha=0.05)


def _permuted(plain: Any, step: int) -> None:
    with torch.no_grad():
        plain.words.weight.copy_(plain.words.weight[torch.arange(NUM_IDS).roll(step)])


def _centred(plain: Any, step: int) -> None:
    with torch.no_grad():
        plain.words.weight -= plain.words.weight.mean(0, keepdim=True)
        plain.words.weight /= plain.words.weight.norm(dim=1, keepdim=True).clamp(min=0.5)


CHANGES = {
    "a_layer_pruned_for_some_steps": _pruned,
    "weights_drawn_anew": _reset,
    "weights_shrunk_and_perturbed": _perturbed,
    "rows_permuted": _permuted,
    "rows_centred_and_kept_in_a_ball": _centred,
}


def _changed(name: str, change: Callable[[Any, int], None]) -> None:
    def run(training: Training) -> None:
        plain, model = wrapped(training)
        optimizer = adam(training, model)
        for k in range(6):
            torch.manual_seed(k)
            change(plain, k)
            train(training, model, optimizer, range(k, k + 1))
        training.note([each.sum() for each in plain.parameters()])

    run.__name__ = name
    scheme(run)


for _name, _change in CHANGES.items():
    _changed(_name, _change)
