"""What loops do to parameters and state between a step and the next call, by references of theirs.

A sharded table shows its own columns: what a scenario does to its memory is the same column by column.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.dlpack import from_dlpack

import embrace_fx
from tests.support.scenario import OPTIMIZERS, Mean, Training, Use, after_each_step, enter_all, own, scenario

ADAMW = OPTIMIZERS["adamw"]


def values(training: Training) -> list[Tensor]:
    """Returns copies of all parameters: this rank's columns of tables, and the whole dense parameters."""
    found = [training.columns(p.detach()) for p in training.tables] + [p.detach() for p in training.dense]
    return [each.clone() for each in found]


def kept(training: Training, make: Callable[[Any], Any]) -> list[Any]:
    """Returns values that are made from each parameter once, at the first call."""
    if not hasattr(training, "kept"):
        training.kept = [make(own(p)) for p in training.parameters]  # type: ignore[attr-defined]
    return training.kept  # type: ignore[attr-defined]


def shown(training: Training, held: list[Any]) -> list[Any]:
    """Returns kept values: this rank's columns of those of tables, and the others whole."""
    return [training.columns(each) for each in held[:2]] + held[2:]


READS: dict[str, Use] = {
    "every third read": lambda training, step: values(training) if step % 3 == 2 else None,
    "read by functions": lambda training, step: F.linear(torch.ones(8), *training.module.second.parameters()),
    "read by a submodule": lambda training, step: training.module.first(torch.ones(2, 6)),
    "numpy read by a view from before": lambda training, step: shown(
        training, [torch.from_numpy(each.copy()) for each in kept(training, lambda p: p.detach().numpy())]
    ),
}
enter_all(after_each_step, READS)


@after_each_step()
def one_dense_number_logged(training: Training, step: int) -> Any:
    first, second = training.module.first, training.module.second
    return second.bias[0].item(), first.weight.sum().item(), first.bias.tolist()


@after_each_step()
def read_by_operators_and_formats(training: Training, step: int) -> Any:
    bias, weight = training.module.first.bias, training.module.first.weight
    told = float(f"{bias[0]:.6f}"), len(repr(bias)) > 9, bool((bias == 0).all())
    return bias @ weight, told, torch.ops.aten.mul(bias, 2)


@after_each_step()
def target_network(training: Training, step: int) -> Any:
    targets = kept(training, lambda p: p.detach().clone())
    for target, parameter in zip(targets, training.parameters, strict=True):
        target.lerp_(own(parameter).detach(), 0.1)
    return shown(training, targets)


@after_each_step()
def foreach_average(training: Training, step: int) -> Any:
    averages = kept(training, torch.zeros_like)
    torch._foreach_lerp_(averages, [own(p).data for p in training.parameters], 0.3)
    return shown(training, averages)


@after_each_step()
def copies(training: Training, step: int) -> Any:
    module, stored = training.module, io.BytesIO()
    torch.save([module.first.weight, module.second.state_dict()], stored)
    stored.seek(0)
    again: Any = pickle.loads(pickle.dumps(module.second.bias))
    assert type(again) is type(copy.copy(module.first.bias)) is nn.Parameter
    return copy.deepcopy(module.first.weight), copy.copy(module.first.bias), again, torch.load(stored)


@after_each_step()
def identities(training: Training, step: int) -> Any:
    every: list[Any] = training.parameters
    assert all(isinstance(p, nn.Parameter) and hash(p) == id(p) for p in every)
    assert all(weakref.ref(p)() is p for p in every)
    assert all(p in set(every) for p in every)
    assert [p.shape for p in training.dense] == [p.size() for p in training.dense]
    assert all(p.requires_grad and p.is_leaf and p.element_size() == 8 for p in every)
    made = type(training.module.first.bias)(torch.ones(2), requires_grad=False)
    assert type(made) is nn.Parameter
    return values(training) if step == 3 else None


@after_each_step()
def read_by_a_thread(training: Training, step: int) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(values(training)))
    thread.start()
    thread.join()
    return found


@scenario(optimizer=ADAMW, fresh=True)
def read_by_a_thread_at_any_time(training: Training) -> None:
    ends = threading.Event()

    def look() -> None:
        while not ends.is_set():
            values(training)

    thread = threading.Thread(target=look)
    for step, batch in enumerate(training.batches(20)):
        training.update(batch)
        if step == 0:  # not during the capture, which temporarily replaces parameters
            thread.start()
    ends.set()
    thread.join()


@scenario(optimizer=ADAMW, fresh=True)
def read_when_the_compiled_model_has_gone(training: Training) -> None:
    module = training.module
    for batch in training.batches(3):
        training.update(batch)
    training.drop()
    gc.collect()
    training.note(*map(training.columns, (module.words.weight.detach(), module.items.weight.detach())))
    training.note(module.first.state_dict(), module.second.state_dict())


def _doubled_sum(parameter: Tensor) -> Tensor:
    return (2 * parameter).sum()


@after_each_step()
def read_by_a_compiled_function(training: Training, step: int) -> Any:
    return torch.compile(_doubled_sum, backend="eager")(training.module.first.weight)


@after_each_step()
def a_loss_of_dense_parameters_alone(training: Training, step: int) -> Any:
    weight = training.module.first.weight
    return torch.autograd.grad(weight.square().sum(), [weight])


@scenario()
def whole_parameters_read(training: Training) -> None:
    for batch in training.batches():
        training.update(batch)
        training.note([value.norm() for value in embrace_fx.full_state_dict(training.model).values()])


@scenario()
def state_of_the_plain_model_read(training: Training) -> None:
    for batch in training.batches():
        training.update(batch)
        training.note(training.module.state_dict())


@scenario()
def state_read_on_one_rank(training: Training) -> None:
    for batch in training.batches():
        training.model(*batch).backward()
        if training.rank == 0:
            training.model.state_dict()
        dist.barrier()
        training.step()
        if training.rank == 0:
            training.model.state_dict()
            training.optimizer.state_dict()
        dist.barrier()


def every(of: Callable[[Training], Any], change: Callable[[Any], Any], *, tracked: bool = True) -> Use:
    """Returns a use that applies `change` to each object that `of` returns."""

    def use(training: Training, step: int) -> None:
        with torch.set_grad_enabled(tracked):
            for each in of(training):
                change(each)

    return use


def before(make: Callable[[Any], Any]) -> Callable[[Training], list[Any]]:
    """Returns a function that returns the values kept of a training's parameters."""
    return lambda training: kept(training, make)


def _other_data(p: nn.Parameter) -> None:
    p.data = p.data * 0.9


WRITES: dict[str, Use] = {
    "data clamped": every(lambda training: training.parameters, lambda p: p.data.clamp_(-0.3, 0.3)),
    "clamped without gradient": every(
        lambda training: training.model.parameters(), lambda p: p.clamp_(-0.3, 0.3), tracked=False
    ),
    "written through the state dict": every(
        lambda training: training.model.state_dict().values(), lambda value: value.mul_(0.9), tracked=False
    ),
    "foreach written": every(
        lambda training: [[*training.tables, *training.dense]], lambda p: torch._foreach_mul_(p, 0.95), tracked=False
    ),
    "numpy written": every(
        lambda training: [own(p).detach().numpy() for p in training.parameters], lambda p: np.multiply(p, 0.95, out=p)
    ),
    "data from before written": every(before(lambda p: p.data), lambda each: each.mul_(0.95)),
    "numpy from before written": every(
        before(lambda p: np.asarray(p.detach())), lambda each: np.multiply(each, 0.95, out=each)
    ),
    "a view from before written": every(before(lambda p: p.detach().view(-1)), lambda each: each.clamp_(-0.3, 0.3)),
    "memory by dlpack written": every(before(lambda p: from_dlpack(p.detach())), lambda each: each.mul_(0.95)),
    "a storage from before written": every(
        lambda training: kept(training, lambda p: p.untyped_storage())[2:],
        lambda each: torch.empty(0).set_(each).mul_(0.95),
    ),
}
enter_all(after_each_step, WRITES)
NEW_DATA: dict[str, Use] = {
    "one vector written": every(
        lambda training: [training.dense], lambda p: vector_to_parameters(0.9 * parameters_to_vector(p), p)
    ),
    "other data": every(lambda training: training.dense, _other_data),
}
enter_all(after_each_step, NEW_DATA, fresh=True)


@after_each_step()
def modules_clamped_by_a_function(training: Training, step: int) -> None:
    def clamp(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.clamp_(-0.1, 0.1)

    training.model.apply(clamp)


@after_each_step()
def the_padding_row_zeroed(training: Training, step: int) -> None:
    training.module.items.weight.data[3].zero_()
    with torch.no_grad():
        training.module.words.weight[5] = 0.25


@after_each_step(fresh=True, reference=Mean)
def other_memory(training: Training, step: int) -> None:
    with torch.no_grad():
        training.module.first.weight.set_((training.module.first.weight * 0.9).detach())


@after_each_step()
def seldom_written_by_data_from_before(training: Training, step: int) -> None:
    held = kept(training, lambda p: p.data)
    if step % 3 == 0:
        for each in held:
            each.mul_(0.9)


@after_each_step()
def a_broadcast_after_one_rank_has_looked(training: Training, step: int) -> None:
    if training.rank == 0:
        training.module.first.weight.sum().item()
    with torch.no_grad():
        for p in training.dense:
            dist.broadcast(p.data, 0)
            dist.broadcast(p, 0)


@after_each_step()
def averages_after_one_rank_has_looked(training: Training, step: int) -> None:
    if training.rank == 1:
        training.module.first.weight.sum().item()
    with torch.no_grad():
        for p in training.dense:
            dist.all_reduce(p)
            p.div_(dist.get_world_size())


@after_each_step()
def frozen_for_a_while(training: Training, step: int) -> None:
    training.module.second.bias.requires_grad_(step % 2 == 0).requires_grad_(True)
    training.module.second.bias.requires_grad = True


@after_each_step()
def written_by_a_thread_while_training_waits(training: Training, step: int) -> None:
    thread = threading.Thread(target=lambda: [p.data.mul_(0.95) for p in training.parameters])
    thread.start()
    thread.join()


@scenario(optimizer=ADAMW, fresh=True)
def data_exchanged_and_put_back(training: Training) -> None:
    for batch in training.batches(3):
        training.update(batch)
        held = [parameter.data for parameter in training.parameters]
        for parameter in training.parameters:
            parameter.data = parameter.data * 0.5
        with torch.no_grad():
            training.note(training.model(*training.batch(30)))
        for parameter, data in zip(training.parameters, held, strict=True):
            parameter.data = data


@scenario(optimizer=ADAMW, fresh=True)
def data_exchanged_trained_and_put_back(training: Training) -> None:
    for batch in training.batches(3):
        held = [parameter.data for parameter in training.parameters]
        for parameter in training.parameters:
            parameter.data = parameter.data.clone()
        training.update(batch)
        for parameter, data in zip(training.parameters, held, strict=True):
            parameter.data = data


@scenario(optimizer=ADAMW, fresh=True)
def all_data_are_views_of_a_vector(training: Training) -> None:
    for batch in training.batches(3):
        training.update(batch)
        count = sum(parameter.numel() for parameter in training.parameters)
        vector_to_parameters(torch.linspace(-1, 1, count), training.parameters)


@scenario(optimizer=ADAMW)
def weights_saved_and_loaded(training: Training) -> None:
    saved: dict[str, Tensor] = {}
    for step, batch in enumerate(training.batches(6)):
        if step == 2:
            saved = {name: value.clone() for name, value in training.model.state_dict().items()}
        training.update(batch)
        if step == 3:
            training.model.load_state_dict(saved)
