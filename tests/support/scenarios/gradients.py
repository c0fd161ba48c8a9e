"""What loops do with gradients: read, write, replace and keep them."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.scenario import OPTIMIZERS, Mean, Training, before_each_step, enter_all, scenario

ADAMW = OPTIMIZERS["adamw"]


@before_each_step()
def gradients_looked_at(training: Training) -> Any:
    gradient = training.module.first.weight.grad
    kinds = gradient.norm(), gradient[0, 0].item(), float(gradient.data.sum()), list(gradient.shape), gradient
    return *kinds, gradient.detach().clone() + gradient, (gradient > 0).tolist(), torch.isfinite(gradient).all()


@before_each_step()
def all_gradients_logged(training: Training) -> Any:
    found = []
    for parameter in training.parameters:
        assert parameter.grad is not None
        found += [parameter.grad.norm(p).item() for p in (1, 2, float("inf"))]
        found += [parameter.grad.norm(2, -1), parameter.grad.abs().max().item(), parameter.grad.mean().item()]
        assert torch.isfinite(parameter.grad).all()
    return found


@before_each_step()
def gradients_printed(training: Training) -> Any:
    """Prints a gradient. The text may name another class than under DDP, but must contain all numbers."""
    gradient = training.module.second.bias.grad
    numbers = [float(number) for number in re.findall(r"-?\d\.\d+(?:e[-+]\d+)?", f"{gradient}")]
    assert len(numbers) == gradient.numel(), f"{gradient}"
    return numbers


@before_each_step()
def gradients_copied(training: Training) -> Any:
    gradient = training.module.first.bias.grad
    file = io.BytesIO()
    torch.save({"b": gradient}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)["b"]
    return gradient.tolist(), gradient.numpy().tolist(), copy.deepcopy(gradient), stored


@scenario(optimizer=ADAMW)
def gradients_read_after_the_step(training: Training) -> None:
    for batch in training.batches(5):
        training.model(*batch).backward()
        training.optimizer.step()
        training.note(training.module.second.weight.grad, training.module.second.weight)
        training.note(training.module.first.weight.grad)
        training.optimizer.zero_grad()


USES: dict[str, Callable[[Training], Any]] = {
    "clipping": lambda training: nn.utils.clip_grad_norm_(training.model.parameters(), 0.05),
    "clipping by other norms": lambda training: [
        nn.utils.clip_grad_norm_(list(training.model.parameters()), most, norm)
        for norm, most in ((1, 1.0), (float("inf"), 0.01))
    ],
    "clipping of some": lambda training: nn.utils.clip_grad_norm_([training.module.second.weight], 0.01, foreach=False),
    "clipping by value": lambda training: nn.utils.clip_grad_value_(training.module.parameters(), 0.01),
    "gradients replaced without a look": lambda training: setattr(
        training.module.second.weight, "grad", torch.ones_like(training.module.second.weight)
    ),
    "gradients swapped between parameters": lambda training: setattr(
        training.module.second.bias, "grad", training.module.first.bias.grad[:6]
    ),
}
enter_all(before_each_step, USES)


@before_each_step()
def clipping_in_place(training: Training) -> None:
    for parameter in training.dense[:2]:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)


@before_each_step()
def clipping_of_data(training: Training) -> Any:
    """Clips `.grad.data`, as scripts did before `torch.no_grad`."""
    found = []
    for parameter in training.dense:
        assert parameter.grad is not None
        found.append(parameter.grad.data.norm(2).item())
        parameter.grad.data.clamp_(-0.01, 0.01)
    return found


@before_each_step()
def other_data_of_gradients_that_nobody_has_read(training: Training) -> None:
    for parameter in (training.module.first.weight, training.module.second.bias):
        parameter.grad.data = torch.full(parameter.shape, 0.25)


@before_each_step()
def clipping_all_at_once(training: Training) -> Any:
    gradients = [p.grad for p in training.dense if p.grad is not None]
    found = [norm.item() for norm in torch._foreach_norm(gradients)]
    torch._foreach_mul_(gradients, 0.25)
    return found


@before_each_step()
def all_gradients_scaled(training: Training) -> Any:
    for parameter in training.model.parameters():
        parameter.grad.mul_(0.5).add_(0.01)
    return [parameter.grad.norm().item() for parameter in training.parameters if parameter.grad is not None]


@before_each_step()
def all_gradients_replaced(training: Training) -> Any:
    for parameter in training.parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5
    return nn.utils.clip_grad_norm_(training.module.parameters(), 0.05)


@before_each_step()
def gradients_of_one_parameter_scaled(training: Training) -> None:
    training.module.first.weight.grad *= 0.5


@before_each_step()
def gradients_changed(training: Training) -> None:
    training.module.first.weight.grad *= 0.5
    training.module.first.bias.grad = training.module.first.bias.grad + 0.01
    training.module.second.weight.grad = None


@before_each_step()
def gradients_given_back(training: Training) -> None:
    gradient, training.module.first.bias.grad = training.module.first.bias.grad, None
    training.module.first.bias.grad = gradient


@before_each_step()
def rows_of_tables_scaled_by_their_ids(training: Training) -> None:
    gradient = training.module.words.weight.grad
    gradient[[-1, 3]] *= 3
    gradient[torch.arange(len(gradient)) > 9] *= 0.5


@before_each_step()
def rows_that_were_not_read_given_gradients(training: Training) -> None:
    training.module.items.weight.grad[torch.arange(20) > 9] += 0.1


def _scaled(training: Training, between: Callable[[torch.amp.GradScaler], Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for batch in training.batches():
        scaler.scale(training.model(*batch)).backward()
        training.note(between(scaler))
        scaler.step(training.optimizer)
        scaler.update()
        training.note(scaler.get_scale())
        training.optimizer.zero_grad()


@scenario()
def a_gradient_scaler(training: Training) -> None:
    _scaled(training, lambda scaler: None)


@scenario()
def a_gradient_scaler_with_clipping(training: Training) -> None:
    def clip(scaler: torch.amp.GradScaler) -> Tensor:
        scaler.unscale_(training.optimizer)
        return nn.utils.clip_grad_norm_(training.module.parameters(), 0.05)

    _scaled(training, clip)


@scenario()
def gradients_zeroed_before_the_backward(training: Training) -> None:
    for batch in training.batches():
        loss = training.model(*batch)
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()


@scenario()
def gradients_zeroed_in_place(training: Training) -> None:
    for step, batch in enumerate(training.batches()):
        training.optimizer.zero_grad(set_to_none=False)
        training.model(*batch).backward()
        if step % 3 == 2:
            training.note(training.module.second.bias.grad)
        training.optimizer.step()


@scenario()
def gradients_zeroed_before_the_step(training: Training) -> None:
    for step, batch in enumerate(training.batches()):
        training.model(*batch).backward()
        if step % 2:
            training.optimizer.zero_grad()
        training.optimizer.step()
        training.model.zero_grad()


@scenario()
def gradients_detached_and_zeroed_in_place(training: Training) -> None:
    """As optimizers did it before they had `set_to_none`."""
    for batch in training.batches(5):
        for parameter in training.parameters:
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        training.model(*batch).backward()
        training.optimizer.step()


@scenario()
def gradients_never_zeroed(training: Training) -> None:
    for batch in training.batches(5):
        training.model(*batch).backward()
        training.optimizer.step()


@scenario(optimizer=ADAMW)
def gradients_kept(training: Training) -> None:
    """One is read at once, one a step later, all at the end: as those do who compare the directions of two steps."""
    kept = []
    for step, batch in enumerate(training.batches()):
        training.model(*batch).backward()
        kept.append([p.grad for p in training.dense])
        training.step()
        if step % 3 == 1:
            training.note(kept[-1][0])
        elif step:
            training.note(kept[-2][0])
    training.note(kept)


@scenario(optimizer=ADAMW)
def dropped_gradients_kept(training: Training) -> None:
    """Keeps the gradients of a batch for which no step was taken."""
    batches = training.batches()
    for batch in batches:
        training.model(*batch).backward()
        kept = training.module.first.weight.grad
        training.optimizer.zero_grad()
        training.model(*next(batches)).backward()
        training.note(kept)
        training.step()


def _kept_and_used_again(training: Training, use: Callable[[list[Any]], Any], *, view: bool = False) -> None:
    """What is kept of one backward is used when another one has added to it."""
    batches = training.batches(4)
    for first in batches:
        training.model(*first).backward()
        kept: list[Any] = [p.grad for p in training.parameters]
        if view:
            kept = [gradient.view(-1) for gradient in kept]
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)
        training.model(*next(batches)).backward()
        training.note(use(kept))
        training.step()


@scenario(optimizer=ADAMW)
def a_kept_gradient_is_zeroed_and_used_again(training: Training) -> None:
    def use(kept: list[Any]) -> Any:
        for gradient in kept:
            gradient.mul_(0.5)
        return kept

    _kept_and_used_again(training, use)


@scenario(optimizer=ADAMW)
def a_kept_view_of_a_gradient_is_used_again(training: Training) -> None:
    _kept_and_used_again(training, lambda kept: [view.sum() for view in kept], view=True)


@scenario(optimizer=ADAMW)
def a_kept_gradient_grows(training: Training) -> None:
    batches = training.batches(4)
    for first in batches:
        training.model(*first).backward()
        kept = [p.grad for p in training.parameters]
        training.model(*next(batches)).backward()
        for gradient in kept:
            assert gradient is not None
            gradient.mul_(0.5)
        training.note(kept)
        training.step()


def _sum(training: Training) -> list[Any]:
    with training.model.no_sync():
        training.model(*training.batch(20)).backward()
    return [p.grad for p in training.parameters]


@scenario(optimizer=ADAMW)
def a_kept_sum_is_reduced(training: Training) -> None:
    kept = _sum(training)
    training.model(*training.batch(21)).backward()
    training.note([gradient.sum() for gradient in kept])
    for gradient in kept:
        gradient[:1] = 0.1
    training.step()


@scenario(optimizer=ADAMW)
def rows_of_a_sum_are_scaled(training: Training) -> None:
    for batch in training.batches(2):
        with training.model.no_sync():
            training.model(*training.batch(20)).backward()
            gradient = training.module.words.weight.grad
            gradient[2:5].mul_(0.5)
            gradient[7] = 0.0
        training.model(*batch).backward()
        training.note(training.module.words.weight.grad.norm())
        training.step()


@scenario(optimizer=ADAMW, refused="no_sync()")
def a_sum_is_asked_for(training: Training) -> None:
    _sum(training)[0].norm()


@scenario(optimizer=ADAMW, refused="no_sync()")
def a_view_of_a_sum_is_asked_for(training: Training) -> None:
    _sum(training)[0][2:5].sum()


@scenario(optimizer=ADAMW, refused="no_sync()")
def a_sum_is_clamped(training: Training) -> None:
    _sum(training)
    nn.utils.clip_grad_value_(training.parameters, 1e-4)


def _scaled_by(by: float, parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(by)


@scenario(fresh=True)
def hooks_of_all_kinds(training: Training) -> None:
    """Before the first call and later, of a table too; each sees this rank's own gradient."""
    module, rank, seen = training.module, training.rank, list[float]()
    module.first.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    module.second.weight.register_post_accumulate_grad_hook(partial(_scaled_by, rank + 1.0))
    for k in range(5):
        if k == 2:
            module.words.weight.register_hook(lambda g: g * (3.0 - rank))
            handle = module.second.bias.register_hook(lambda g: seen.append(float(g.sum())))
        if k == 4:
            handle.remove()
        if k % 2:
            with training.model.no_sync():
                training.model(*training.batch(50 + k)).backward()
        training.update(training.batch(k))
    training.note(seen)


@scenario(optimizer=OPTIMIZERS["momentum"], reference=Mean, fresh=True)
def frozen_at_first_and_later(training: Training) -> None:
    """Freezes a layer and a table. DDP knows only parameters that require gradients when it is constructed."""
    module, model = training.module, training.model
    module.second.bias.requires_grad_(False)
    for k in range(6):
        if k == 1:
            module.first.requires_grad_(False)
        if k == 2:
            module.words.requires_grad_(False)
        if k == 4:
            module.requires_grad_(True)
        model(*training.batch(k)).backward()
        training.step()
