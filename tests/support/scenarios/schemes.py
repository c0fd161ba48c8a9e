"""What loops do that tutorials do not: models of their own, with results, branches and hooks of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.scenario import Training, scenario

NUM_IDS, DIM = 24, 4
Scheme = Callable[[Training], None]


def scheme(function: Scheme) -> Scheme:
    """Enters a scenario of models of its own, whose parameters a batch need not all use."""
    reference = partial(DistributedDataParallel, find_unused_parameters=True)
    return scenario(optimizer=None, fresh=True, reference=reference)(function)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_IDS, DIM)
        self.hidden = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, 1)

    def encode(self, ids: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.hidden(self.words(ids))))

    def score(self, ids: Tensor) -> Tensor:
        return self.out(self.encode(ids)).squeeze(-1)

    def forward(self, ids: Tensor) -> Any:
        return self.score(ids)


def ids_of(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randint(NUM_IDS, shape or (5,), generator=torch.Generator().manual_seed(100 * step + rank))


def adam(training: Training, *models: Any) -> Adam:
    return training.optimize(Adam, [p for each in models for p in each.parameters()], lr=0.02, eps=1e-3)


def step_of(training: Training, optimizer: Any, loss: Tensor) -> None:
    """Takes a step, and records its loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    training.note(loss)


def train(training: Training, model: Any, optimizer: Any, steps: range) -> None:
    for k in steps:
        step_of(training, optimizer, model(ids_of(training.rank, k)).square().mean())


def wrapped(training: Training) -> tuple[Any, Any]:
    """Returns a plain model, and the same model wrapped."""
    plain = Words()
    return plain, training.wrap(plain)


def stepped(training: Training, steps: int, plain: Any = None, **options: Any) -> Iterator[tuple[int, Any, Any]]:
    """Trains a model, `Words` if none is given; yields (step, the plain model, the wrapped model) after each step."""
    plain = plain or Words()
    model = training.wrap(plain, **options)
    optimizer = adam(training, model)
    for k in range(steps):
        train(training, model, optimizer, range(k, k + 1))
        yield k, plain, model


def loss_of(model: Any, training: Training, step: int) -> Tensor:
    found: Tensor = model(ids_of(training.rank, step)).square().mean()
    return found


@scheme
def a_dict_of_losses_and_none(training: Training) -> None:
    class Losses(Words):
        def forward(self, ids: Tensor, target: Tensor | None = None) -> Any:
            x = self.score(ids)
            if target is None:
                return None, {"logits": x}
            return {"mse": F.mse_loss(x, target), "l1": F.l1_loss(x, target)}, {"logits": x}

    model = training.wrap(Losses())
    optimizer = adam(training, model)
    for k in range(4):
        losses, _ = model(ids_of(training.rank, k), torch.ones(5))
        step_of(training, optimizer, losses["mse"] + losses["l1"])
        if k == 2:
            model.eval()
            with torch.no_grad():
                training.note(*model(ids_of(0, 90)))
            model.train()


@scheme
def a_module_in_two_places(training: Training) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            words = nn.Embedding(NUM_IDS, DIM)
            self.left = nn.Sequential(words, nn.Linear(DIM, DIM))
            self.right = nn.ModuleDict({"words": words, "mix": nn.Linear(DIM, DIM)})

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (self.left(a) * self.right["mix"](self.right["words"](b))).sum(-1).mean()

    model = training.wrap(Twice())
    optimizer = adam(training, model)
    for k in range(4):
        step_of(training, optimizer, model(ids_of(training.rank, k), ids_of(training.rank, 50 + k)))


@scheme
def a_sampler_that_keeps_the_last_batch(training: Training) -> None:
    data = TensorDataset(ids_of(7, 0, 23, 3), torch.linspace(-1, 1, 23))
    sampler: Any = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=training.rank, shuffle=True)
    loader, model = DataLoader(data, batch_size=5, sampler=sampler), training.wrap(Words())
    optimizer = training.optimize(AdamW, model.parameters(), lr=0.05, eps=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids, target in loader:
            step_of(training, optimizer, (model(ids).mean(-1) - target).square().mean())


@scheme
def freezing_in_turn(training: Training) -> None:
    plain = Words()
    model = training.wrap(plain)
    optimizer = training.optimize(SGD, model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    for k in range(6):
        plain.words.requires_grad_(k % 3 != 1)
        plain.hidden.requires_grad_(k % 3 != 2)
        train(training, model, optimizer, range(k, k + 1))


@scheme
def gradients_in_evaluation_mode(training: Training) -> None:
    plain = Words()
    model = training.wrap(plain)
    optimizer = training.optimize(SGD, model.parameters(), lr=0.1)
    for k in range(6):
        model.train(k % 3 != 2)
        plain.norm.eval()
        train(training, model, optimizer, range(k, k + 1))


@scheme
def pseudo_labels(training: Training) -> None:
    """Forwards without gradients between one with gradients and its backward."""
    model = training.wrap(Words())
    optimizer = adam(training, model)
    for k in range(4):
        ids = ids_of(training.rank, k)
        first = model(ids)
        with torch.no_grad() if k % 2 else torch.set_grad_enabled(False):
            label = model(ids.flip(0))
        with torch.inference_mode():
            training.note(model(ids_of(0, 77)).sum())
        step_of(training, optimizer, (first - label.flip(0) + 0.3).square().mean())


@scheme
def losses_reduced_for_the_log(training: Training) -> None:
    """The user's own collectives, one of them under the backward, and a loop that all leave on rank 0's word."""
    model = training.wrap(Words())
    optimizer = adam(training, model)
    for k in range(5):
        optimizer.zero_grad()
        loss = model(ids_of(training.rank, k)).square().mean()
        total = loss.detach().clone()
        sent: Any = dist.all_reduce(total, async_op=True)
        loss.backward()
        sent.wait()
        optimizer.step()
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, loss.item())
        dist.barrier()
        stop = torch.tensor(float(k == 3))
        dist.broadcast(stop, 0)
        training.note(total, sum(found))
        if stop:
            break


@scheme
def hooks_on_results(training: Training) -> None:
    model = training.wrap(Words())
    optimizer = training.optimize(SGD, model.parameters(), lr=0.1)
    for k in range(3):
        out = model(ids_of(training.rank, k))
        out.retain_grad()
        out.register_hook(lambda g: g * 2)
        step_of(training, optimizer, out.square().mean())
        training.note(out.grad.norm())


@scheme
def a_whole_model_in_bfloat16(training: Training) -> None:
    model = training.wrap(Words().bfloat16())
    optimizer = training.optimize(SGD, model.parameters(), lr=0.1)
    for k in range(3):
        step_of(training, optimizer, model(ids_of(training.rank, k)).float().square().mean())


@scheme
def synced_by_attribute(training: Training) -> None:
    """As Lightning's strategies and Accelerate's `accumulate` do it."""
    model = training.wrap(Words())
    optimizer = adam(training, model)
    for k in range(6):
        model.require_backward_grad_sync = k % 3 == 2
        loss = model(ids_of(training.rank, k)).square().mean()
        model.require_backward_grad_sync = True  # has no effect, because DDP reads the value in the forward
        loss.backward()
        training.note(loss, model.module.out.bias.grad)  # records local gradients or, in every third step, reduced ones
        if k % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


class Normed(Words):
    """Has buffers, which are broadcast to all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(DIM)

    def encode(self, ids: Tensor) -> Tensor:
        return self.batch_norm(super().encode(ids))


@scheme
def buffers_shared_by_attribute(training: Training) -> None:
    model = training.wrap(Normed())
    optimizer = adam(training, model)
    for k in range(5):
        if k == 3:
            model.require_forward_param_sync = False
        step_of(training, optimizer, model(ids_of(training.rank, k)).square().mean())
        training.note(model.require_forward_param_sync)
        with model.no_sync():
            model(ids_of(training.rank, k + 20))
        training.note(model.require_forward_param_sync)
        model.require_forward_param_sync = True
    training.note(
        model.will_sync_module_buffers(), len(model.modules_buffers), sorted(dict(model.named_module_buffers))
    )


@scheme
def attributes_that_trainers_ask_for(training: Training) -> None:
    model = training.wrap(Words())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # DDP warns about find_unused_parameters
        model._set_static_graph()
    for name in ("broadcast_buffers", "forward_sync_buffers", "find_unused_parameters"):
        setattr(model, name, True)  # assigning the current value is allowed
    train(training, model, adam(training, model), range(1))
    logged = model._get_ddp_logging_data()
    names = ("world_size", "rank", "backend_name", "module_name", "num_parameter_tensors")
    training.note([logged[name] for name in names])
    training.note(model.device_ids, model.output_device, model.dim, model.device.type, model.parameters_to_ignore)
    training.note(getattr(model, "no such name", "none"), hasattr(model, "no_sync"), model.mixed_precision)
