"""What loops do with optimizers: steps, closures, hooks, schedulers, groups, several of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, ExponentialLR, OneCycleLR, StepLR

import embrace_fx
from tests.support.beside import take_steps
from tests.support.scenario import OPTIMIZERS, Training, scenario
from tests.support.sides import NUM_WORDS, Matching

ADAMW = OPTIMIZERS["adamw"]


STEPS = 20
LOWEST = 10
"""From this row of words on, each row k is read in two steps alone, which are k - `LOWEST` apart."""


def _plain(name: str, make: Callable[..., Optimizer], scheduler: Callable[[Any], Any] | None = None) -> None:
    """Enters plain steps between which rows rest for 1 to 19 steps."""

    def run(training: Training) -> None:
        batches = [training.batch(step) for step in range(STEPS)]
        for step, (words_BL, _, _) in enumerate(batches):
            rests = STEPS - 2 - 2 * step if 2 * step < STEPS else 2 * step - STEPS + 1
            words_BL.remainder_(LOWEST)
            words_BL[0, :2] = torch.tensor([LOWEST + rests, min(LOWEST + rests, NUM_WORDS - 2) + 1])
        scheduled = scheduler(training.optimizer) if scheduler else None
        for batch in training.lookahead(batches):
            training.update(batch)
            if scheduled is not None:
                scheduled.step()

    run.__name__ = f"plain {name}"
    scenario(optimizer=make)(run)


_ONE_CYCLE = partial(OneCycleLR, max_lr=0.02, total_steps=STEPS + 1)
_NEAR: dict[str, Any] = {"lr": 0.02, "eps": 1e-3}

KINDS: dict[str, tuple[Any, ...]] = {
    "sgd": (partial(SGD, lr=0.1),),
    "sgd, decay": (partial(SGD, lr=0.1, weight_decay=0.1),),
    "momentum": (partial(SGD, lr=0.05, momentum=0.9),),
    "momentum, dampening": (partial(SGD, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),),
    "momentum, maximize": (partial(SGD, lr=0.01, momentum=0.5, weight_decay=0.1, maximize=True),),
    "momentum, foreach": (partial(SGD, lr=0.05, momentum=0.9, foreach=True),),
    "momentum, fused": (partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True),),
    "momentum, cyclic": (
        partial(SGD, lr=0.05, momentum=0.9),
        partial(CyclicLR, base_lr=0.01, max_lr=0.05, step_size_up=6),
    ),
    "nesterov": (partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),),
    "adam": (partial(Adam, **_NEAR),),
    "adam, amsgrad": (partial(Adam, amsgrad=True, **_NEAR),),
    "adam, decay": (partial(Adam, weight_decay=0.1, **_NEAR),),
    "adam, amsgrad, decay, maximize": (partial(Adam, amsgrad=True, weight_decay=0.1, maximize=True, **_NEAR),),
    "adam, decoupled": (partial(Adam, weight_decay=0.1, decoupled_weight_decay=True, **_NEAR),),
    "adam, foreach": (partial(Adam, foreach=True, **_NEAR),),
    "adam, fused": (partial(Adam, fused=True, weight_decay=0.1, **_NEAR),),
    "adamw, amsgrad": (partial(AdamW, weight_decay=0.1, amsgrad=True, **_NEAR),),
    "adamw, fused, amsgrad": (partial(AdamW, weight_decay=0.1, amsgrad=True, fused=True, **_NEAR),),
    "adamw, foreach, maximize": (partial(AdamW, weight_decay=0.1, foreach=True, maximize=True, **_NEAR),),
    "adamw, one cycle": (partial(AdamW, weight_decay=0.1, **_NEAR), _ONE_CYCLE),
    "adamw, tensor lr": (
        lambda parameters: AdamW(parameters, torch.tensor(0.01), eps=1e-3, foreach=False),
        partial(CosineAnnealingLR, T_max=20),
    ),
    "adamax": (partial(Adamax, **_NEAR),),
    "adamax, decay, maximize, foreach": (partial(Adamax, weight_decay=0.1, maximize=True, foreach=True, **_NEAR),),
    "nadam": (partial(NAdam, **_NEAR),),
    "nadam, decay, maximize": (partial(NAdam, weight_decay=0.1, momentum_decay=0.01, maximize=True, **_NEAR),),
    "nadam, decoupled, foreach": (
        partial(NAdam, weight_decay=0.1, decoupled_weight_decay=True, foreach=True, **_NEAR),
    ),
    "radam": (partial(RAdam, **_NEAR),),
    "radam, decay": (partial(RAdam, weight_decay=0.1, **_NEAR),),
    "radam, decoupled, foreach": (
        partial(RAdam, weight_decay=0.1, decoupled_weight_decay=True, foreach=True, **_NEAR),
    ),
    "rmsprop": (partial(RMSprop, **_NEAR),),
    "rmsprop, momentum": (partial(RMSprop, lr=0.001, momentum=0.9, eps=0.1),),
    "rmsprop, momentum, centered": (partial(RMSprop, lr=0.001, momentum=0.9, centered=True, eps=0.1),),
    "rmsprop, decay, foreach, maximize": (partial(RMSprop, weight_decay=0.1, foreach=True, maximize=True, **_NEAR),),
    "rprop": (partial(Rprop, lr=0.001),),
    "rprop, steps, foreach": (partial(Rprop, lr=0.001, etas=(0.6, 1.1), step_sizes=(1e-5, 0.01), foreach=True),),
    "adadelta": (partial(Adadelta, lr=1.0),),
    "adadelta, decay, foreach": (partial(Adadelta, lr=1.0, weight_decay=0.1, rho=0.8, foreach=True),),
    "adagrad": (partial(Adagrad, lr=0.05, eps=1e-3),),
    "adagrad, lr decay, start": (partial(Adagrad, lr=0.05, eps=1e-3, lr_decay=0.05, initial_accumulator_value=0.1),),
    "adagrad, decay, maximize": (partial(Adagrad, lr=0.05, eps=1e-3, weight_decay=0.01, maximize=True),),
    "row-wise adagrad": (partial(embrace_fx.RowWiseAdagrad, lr=0.05),),
    "asgd": (partial(ASGD, lr=0.05, t0=5.0, weight_decay=0.1),),
}
for _name, _case in KINDS.items():
    _plain(_name, *_case)


@scenario(optimizer=None, fresh=True)
def closures_of_LBFGS_with_a_line_search(training: Training) -> None:
    """By the mean over ranks, as under DDP they must: by its own loss each rank would search another line."""
    optimizer = training.optimize(LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    for batch in training.batches(4):

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = training.model(*batch)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            return mean / dist.get_world_size()

        training.note(optimizer.step(closure))


@scenario(optimizer=None, fresh=True)
def closures_of_LBFGS(training: Training) -> None:
    optimizer = training.optimize(LBFGS, lr=0.1, max_iter=2)
    for batch in training.batches(4):

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = training.model(*batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    training.optimizers.clear()  # do not compare its state, which includes this rank's loss


@scenario()
def steps_every_second_time(training: Training) -> None:
    batches = training.batches()
    for first in batches:
        training.model(*first).backward()
        training.update(next(batches))


@scenario(optimizer=ADAMW)
def steps_taken_twice(training: Training) -> None:
    for batch in training.batches():
        training.model(*batch).backward()
        training.optimizer.step()
        training.optimizer.step()
        training.optimizer.zero_grad()


@scenario(optimizer=ADAMW)
def hooks_of_the_optimizer(training: Training) -> None:
    def halve(*_: Any) -> None:
        for parameter in training.dense:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    training.optimizer.register_step_pre_hook(halve)
    training.optimizer.register_step_post_hook(lambda *_: training.note(training.module.first.weight))
    for step, batch in enumerate(training.batches()):
        training.update(batch)
        if step == 3:
            training.optimizer.register_step_post_hook(lambda *_: training.note(1.0))


@scenario(optimizer=ADAMW)
def hooks_added_after_a_step(training: Training) -> None:
    for step, batch in enumerate(training.batches()):
        training.model(*batch).backward()
        training.optimizer.step()
        if step == 1:
            training.optimizer.register_step_post_hook(lambda *_: training.note(1.0))
        training.optimizer.zero_grad()


@scenario()
def schedulers(training: Training) -> None:
    made = StepLR(training.optimizer, 2), ExponentialLR(training.optimizer, 0.9)
    for batch in training.batches(8):
        training.update(batch)
        for each in made:
            each.step()


@scenario(optimizer=lambda parameters: SGD(parameters, lr=torch.tensor(0.1), momentum=0.9))
def rates_in_tensors(training: Training) -> None:
    scheduler = ExponentialLR(training.optimizer, 0.5)
    for batch in training.batches():
        training.update(batch)
        scheduler.step()
        training.optimizer.param_groups[0]["momentum"] *= 0.9


@scenario()
def learning_rates_written(training: Training) -> None:
    for step, batch in enumerate(training.batches()):
        training.update(batch)
        for group in training.optimizer.param_groups:
            group["lr"] = 0.3 / (step + 2)


@scenario(optimizer=None)
def a_group_of_each_parameter(training: Training) -> None:
    groups = [{"params": [p], "lr": 0.01 * k} for k, p in enumerate(training.model.parameters(), 1)]
    optimizer = training.optimize(AdamW, groups, eps=1e-3)
    take_steps(training.model, optimizer, training.batches())


@scenario(optimizer=ADAMW)
def the_optimizer_saved_and_loaded(training: Training) -> None:
    for step, batch in enumerate(training.batches()):
        training.model(*batch).backward()
        training.optimizer.step()
        state = copy.deepcopy(training.optimizer.state_dict())
        if step % 2:
            training.optimizer.load_state_dict(state)
        training.optimizer.zero_grad()


def _two(training: Training) -> tuple[Any, Any]:
    """Of parameters that share buckets."""
    first, second = training.module.first, training.module.second
    one = training.optimize(Adam, [first.weight, second.weight, training.module.words.weight], lr=0.02, eps=1e-3)
    rest = [first.bias, second.bias, training.module.items.weight]
    return one, training.optimize(SGD, rest, lr=0.05, momentum=0.9)


@scenario(optimizer=None)
def two_optimizers_step_in_turn(training: Training) -> None:
    """The second one every other time, over the sum of two gradients."""
    often, seldom = _two(training)
    for step, batch in enumerate(training.batches()):
        training.model(*batch).backward()
        often.step()
        often.zero_grad()
        training.note(training.module.first.bias.grad.norm())
        if step % 2:
            seldom.step()
            seldom.zero_grad()


@scenario(optimizer=None)
def two_optimizers_of_which_one_drops(training: Training) -> None:
    first, second = _two(training)
    for step, batch in enumerate(training.batches()):
        training.model(*batch).backward()
        first.step()
        if step % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()


@scenario(optimizer=None)
def two_optimizers_with_a_look_in_between(training: Training) -> None:
    """The second one's gradients are clipped when the first has stepped."""
    first, second = _two(training)
    for batch in training.batches():
        training.model(*batch).backward()
        first.step()
        training.note(nn.utils.clip_grad_norm_([p for g in second.param_groups for p in g["params"]], 0.1))
        second.step()
        first.zero_grad()
        second.zero_grad()


class _Reading(SGD):
    """Reads parameters of another optimizer in its step."""

    read: Callable[[], None]

    def step(self, closure: Any = None) -> Any:
        self.read()
        return super().step(closure)


@scenario(optimizer=None)
def two_optimizers_of_which_one_reads_what_the_other_updates(training: Training) -> None:
    layer, words = training.module.first, training.module.words
    first = training.optimize(Adam, [layer.weight, words.weight], lr=0.02, eps=1e-3)
    second = training.optimize(_Reading, [layer.bias, training.module.items.weight], lr=0.05)
    second.read = lambda: training.note(words.weight.norm() + first.state[layer.weight]["exp_avg"].norm())
    for batch in training.batches():
        training.model(*batch).backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()


@scenario(optimizer=None)
def two_optimizers_of_one_parameter(training: Training) -> None:
    first, second = training.optimize(SGD, lr=0.1), training.optimize(Adagrad, training.tables, lr=0.1, eps=1e-3)
    for batch in training.batches():
        training.model(*batch).backward()
        first.step()
        second.step()
        first.zero_grad()


@scenario(optimizer=None)
def parameters_without_an_optimizer(training: Training) -> None:
    optimizer = training.optimize(Adam, training.dense[:1], lr=0.1)
    take_steps(training.model, optimizer, training.batches(4))
    training.note([parameter.grad for parameter in training.dense[1:]])


@scenario(optimizer=None, fresh=True)
def an_optimizer_made_before_the_model_is_wrapped(training: Training) -> None:
    module = Matching()
    optimizer = training.optimize(AdamW, module.parameters(), lr=0.02, eps=1e-3)
    model = training.wrap(module)
    take_steps(model, optimizer, [training.batch(step) for step in range(4)])


@scenario(optimizer=None)
def a_step_written_by_hand(training: Training) -> None:
    for batch in training.batches(4):
        training.model(*batch).backward()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


@scenario(optimizer=ADAMW)
def other_betas(training: Training) -> None:
    """With the later betas, a momentum does not decay to zero, so that no step can be skipped."""
    for step, batch in enumerate(training.batches(8)):
        training.update(batch)
        for group in training.optimizer.param_groups:
            group["betas"] = (0.9, 0.999) if step < 3 else (0.7, 0.9) if step < 5 else (0.9, 0.5)


@scenario(optimizer=ADAMW)
def another_kind_of_optimizer(training: Training) -> None:
    for step, batch in enumerate(training.batches(8)):
        if step == 4:
            training.optimizers.clear()
            training.optimizer = training.optimize(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
        training.update(batch)


@scenario(optimizer=ADAMW)
def an_optimizer_that_takes_up_more_state(training: Training) -> None:
    for step, batch in enumerate(training.batches(8)):
        training.update(batch)
        if step == 4:
            if training.is_compiled:
                training.model.synchronize()  # needed, because the state is read without `state_dict()`
            for group in training.optimizer.param_groups:
                group["amsgrad"] = True
            for state in training.optimizer.state.values():
                if "exp_avg_sq" in state:  # some cases run this scenario with another optimizer
                    state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()


def _removed(training: Training, table: nn.Parameter) -> None:
    for step, batch in enumerate(training.batches(9)):
        if step == 2:
            for group in training.optimizer.param_groups:
                group["params"] = [each for each in group["params"] if each is not table]
            training.optimizer.state.pop(table)
        if step == 5:
            training.optimizer.add_param_group({"params": [table], "lr": 0.05, "weight_decay": 0.1})
        training.model(*batch).backward()
        if 2 <= step < 5:
            table.grad = None
        training.step()


@scenario(optimizer=OPTIMIZERS["momentum"])
def the_first_table_removed_from_its_group_and_added_again(training: Training) -> None:
    _removed(training, training.module.words.weight)


@scenario(optimizer=ADAMW)
def the_last_table_removed_from_its_group_and_added_again(training: Training) -> None:
    _removed(training, training.module.items.weight)


@scenario(optimizer=ADAMW)
def state_loaded_between_backward_and_step(training: Training) -> None:
    saved: Any = None
    for step, batch in enumerate(training.batches(8)):
        training.model(*batch).backward()
        if step == 3:
            saved = copy.deepcopy(training.optimizer.state_dict())
        if step == 5:
            training.optimizer.load_state_dict(saved)
        training.step()
