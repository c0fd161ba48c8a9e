"""What loops do to parameters between a step and the next call, by references of theirs.

A use is called as `use(side, step)` after every step; what it yields is compared between both sides. A sharded table
shows its own columns: uses do what is the same column by column.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.dlpack import from_dlpack

from tests.support.sides import Side

Use = Callable[[Side, int], Any]
USES: dict[str, Use] = {}


def use(function: Use, name: str = "") -> Use:
    """Enters a use under its name."""
    USES[name or function.__name__.replace("_", " ")] = function
    return function


def tables(side: Side) -> list[nn.Parameter]:
    return [side.plain.words.weight, side.plain.items.weight]


def dense(side: Side) -> list[nn.Parameter]:
    return [*side.plain.first.parameters(), *side.plain.second.parameters()]


def columns(side: Side, value: Any) -> Any:
    """This rank's columns of a table's values, or of what is of a table."""
    value = own(value)
    return value if side.is_compiled else value.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]


def own(parameter: Any) -> Any:
    """A parameter, or what there is of a sharded one, in the same memory."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def values(side: Side) -> list[Tensor]:
    """What all parameters hold, as far as both sides hold it."""
    found = [columns(side, p.detach()) for p in tables(side)] + [p.detach() for p in dense(side)]
    return [each.clone() for each in found]


def kept(side: Side, make: Callable[[nn.Parameter], Any]) -> list[Any]:
    """Made once, before the first step that is followed by a use."""
    if not hasattr(side, "kept"):
        side.kept = [make(own(p)) for p in (*tables(side), *dense(side))]  # type: ignore[attr-defined]
    found: list[Any] = side.kept  # type: ignore[attr-defined]
    return found


# -- reads -------------------------------------------------------------------------------------------------------------


@use
def read(side: Side, step: int) -> Any:
    return values(side)


@use
def every_third_read(side: Side, step: int) -> Any:
    return values(side) if step % 3 == 2 else None


@use
def one_dense_number_logged(side: Side, step: int) -> Any:
    return side.plain.second.bias[0].item(), side.plain.first.weight.sum().item(), side.plain.first.bias.tolist()


@use
def read_by_operators_and_formats(side: Side, step: int) -> Any:
    bias, weight = side.plain.first.bias, side.plain.first.weight
    told = float(f"{bias[0]:.6f}"), len(repr(bias)) > 9, bool((bias == 0).all())
    return bias @ weight, told, torch.ops.aten.mul(bias, 2)


@use
def read_by_functions(side: Side, step: int) -> Any:
    model = side.plain
    return F.linear(torch.ones(8, dtype=torch.float64), model.second.weight, bias=model.second.bias)


@use
def read_by_a_submodule(side: Side, step: int) -> Any:
    return side.plain.first(torch.ones(2, 6, dtype=torch.float64))


@use
def target_network(side: Side, step: int) -> Any:
    targets = kept(side, lambda p: p.detach().clone())
    for target, parameter in zip(targets, (*tables(side), *dense(side)), strict=True):
        target.lerp_(own(parameter).detach(), 0.1)
    return [columns(side, each) for each in targets[:2]] + targets[2:]


@use
def foreach_average(side: Side, step: int) -> Any:
    averages = kept(side, torch.zeros_like)
    torch._foreach_lerp_(averages, [own(p).data for p in (*tables(side), *dense(side))], 0.3)
    return [columns(side, each) for each in averages[:2]] + averages[2:]


@use
def numpy_read_by_a_view_from_before(side: Side, step: int) -> Any:
    views = kept(side, lambda p: p.detach().numpy())
    return [columns(side, torch.from_numpy(each.copy())) for each in views[:2]] + [each.copy() for each in views[2:]]


@use
def copies(side: Side, step: int) -> Any:
    model = side.plain
    stored = io.BytesIO()
    torch.save([model.first.weight, model.second.state_dict()], stored)
    stored.seek(0)
    again: Any = pickle.loads(pickle.dumps(model.second.bias))
    assert type(again) is type(copy.copy(model.first.bias)) is nn.Parameter
    return copy.deepcopy(model.first.weight), copy.copy(model.first.bias), again, torch.load(stored)


@use
def identities(side: Side, step: int) -> Any:
    every: list[Any] = [*tables(side), *dense(side)]
    assert all(isinstance(p, nn.Parameter) and hash(p) == id(p) for p in every)
    assert all(weakref.ref(p)() is p for p in every)
    assert all(p in set(every) for p in every)
    assert [p.shape for p in dense(side)] == [p.size() for p in dense(side)]
    assert all(p.requires_grad and p.is_leaf and p.element_size() == 8 for p in every)
    made = type(side.plain.first.bias)(torch.ones(2), requires_grad=False)
    assert type(made) is nn.Parameter
    return values(side) if step == 3 else None


@use
def read_by_a_thread(side: Side, step: int) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(values(side)))
    thread.start()
    thread.join()
    return found


def _sum(parameter: Tensor) -> Tensor:
    return (2 * parameter).sum()


@use
def read_by_a_compiled_function(side: Side, step: int) -> Any:
    if not hasattr(side, "compiled"):
        side.compiled = torch.compile(_sum, backend="eager")  # type: ignore[attr-defined]
    return side.compiled(side.plain.first.weight)  # type: ignore[attr-defined]


@use
def a_loss_of_dense_parameters_alone(side: Side, step: int) -> Any:
    (gradient,) = torch.autograd.grad(side.plain.first.weight.square().sum(), [side.plain.first.weight])
    return gradient


# -- writes ------------------------------------------------------------------------------------------------------------


@use
def data_clamped(side: Side, step: int) -> Any:
    for p in (*tables(side), *dense(side)):
        p.data.clamp_(-0.3, 0.3)


@use
def clamped_without_gradient(side: Side, step: int) -> Any:
    with torch.no_grad():
        for p in (*tables(side), *dense(side)):
            p.clamp_(-0.3, 0.3)


@use
def the_padding_row_zeroed(side: Side, step: int) -> Any:
    side.plain.items.weight.data[3].zero_()
    with torch.no_grad():
        side.plain.words.weight[5] = 0.25


@use
def one_vector_written(side: Side, step: int) -> Any:
    vector_to_parameters(0.9 * parameters_to_vector(dense(side)), dense(side))


@use
def foreach_written(side: Side, step: int) -> Any:
    with torch.no_grad():
        torch._foreach_mul_([*tables(side), *dense(side)], 0.95)


@use
def other_data(side: Side, step: int) -> Any:
    for p in dense(side):
        p.data = p.data * 0.9


@use
def other_memory(side: Side, step: int) -> Any:
    with torch.no_grad():
        side.plain.first.weight.set_((side.plain.first.weight * 0.9).detach())


@use
def numpy_written(side: Side, step: int) -> Any:
    for p in (*tables(side), *dense(side)):
        array = own(p).detach().numpy()
        array *= 0.95


@use
def data_from_before_written(side: Side, step: int) -> Any:
    for each in kept(side, lambda p: p.data):
        each.mul_(0.95)


@use
def numpy_from_before_written(side: Side, step: int) -> Any:
    for each in kept(side, lambda p: np.asarray(p.detach())):
        each *= 0.95


@use
def a_view_from_before_written(side: Side, step: int) -> Any:
    for each in kept(side, lambda p: p.detach().view(-1)):
        each.clamp_(-0.3, 0.3)


@use
def memory_by_dlpack_written(side: Side, step: int) -> Any:
    for each in kept(side, lambda p: from_dlpack(p.detach())):
        each.mul_(0.95)


@use
def a_storage_from_before_written(side: Side, step: int) -> Any:
    for each in kept(side, lambda p: p.untyped_storage())[2:]:
        torch.empty(0, dtype=torch.float64).set_(each).mul_(0.95)


@use
def seldom_written_by_data_from_before(side: Side, step: int) -> Any:
    held = kept(side, lambda p: p.data)
    if step % 3 == 0:
        for each in held:
            each.mul_(0.9)


@use
def a_broadcast_after_one_rank_has_looked(side: Side, step: int) -> Any:
    if dist.get_rank() == 0:
        side.plain.first.weight.sum().item()
    with torch.no_grad():
        for p in dense(side):
            dist.broadcast(p.data, 0)
            dist.broadcast(p, 0)


@use
def averages_after_one_rank_has_looked(side: Side, step: int) -> Any:
    if dist.get_rank() == 1:
        side.plain.first.weight.sum().item()
    with torch.no_grad():
        for p in dense(side):
            dist.all_reduce(p)
            p.div_(dist.get_world_size())


@use
def frozen_for_a_while(side: Side, step: int) -> Any:
    side.plain.second.bias.requires_grad_(step % 2 == 0).requires_grad_(True)
    side.plain.second.bias.requires_grad = True


@use
def written_by_one_thread_while_training_waits(side: Side, step: int) -> Any:
    thread = threading.Thread(target=lambda: [p.data.mul_(0.95) for p in (*tables(side), *dense(side))])
    thread.start()
    thread.join()


# -- the optimizer's ---------------------------------------------------------------------------------------------------


@use
def the_optimizer_copied(side: Side, step: int) -> Any:
    found = copy.deepcopy(side.optimizer).state_dict()["state"]
    of_dense = [2, 3] if step == 0 else [1, 2, 3, 4]  # in the order of the model's parameters
    return [(found[k]["exp_avg"], found[k]["step"]) for k in of_dense if k in found]


@use
def momentum_reset(side: Side, step: int) -> Any:
    if step % 3 == 1:
        for p in dense(side):
            side.optimizer.state[p]["exp_avg"].zero_()


@use
def state_read(side: Side, step: int) -> Any:
    return [side.optimizer.state[p]["exp_avg"].clone() for p in dense(side)]


@use
def state_of_tables_read(side: Side, step: int) -> Any:
    return [columns(side, state["exp_avg"].clone()) for p, state in side.optimizer.state.items() if p.shape[0] > 8]


@use
def state_emptied(side: Side, step: int) -> Any:
    if step == 3:
        side.optimizer.state.clear()


@use
def other_state(side: Side, step: int) -> Any:
    if step == 3:
        side.optimizer.state = defaultdict(dict)
