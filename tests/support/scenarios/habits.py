"""Habits of scripts that others have written: what they log of states, average, return from closures, and call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.scenario import OPTIMIZERS, Training, scenario
from tests.support.sides import Matching, draw_batch

ASKED: tuple[Callable[[Tensor], Any], ...] = (
    lambda value: value.quantile(0.9).item(),
    lambda value: int(value.argmax()),
    lambda value: torch.histc(value, 8, -2, 2),
    lambda value: (value == 0).double().mean().item(),
    lambda value: F.kl_div(value.log_softmax(1), (-value).softmax(1), reduction="batchmean").item(),
    lambda value: torch.linalg.svdvals(value)[:3],
    lambda value: F.cosine_similarity(value[3], value[5], dim=0).item(),
    lambda value: value.norm(dim=1).sort().values[:4],
    lambda value: torch.cdist(value[:4], value[4:8]).sum().item(),
    lambda value: value.flatten().topk(5).values,
)


@scenario(optimizer=OPTIMIZERS["adamw"], fresh=True)
def questions_to_tables_and_averages_in_states(training: Training) -> None:
    for batch in training.batches(3):
        training.update(batch)
        table = training.module.state_dict()["words.weight"]
        training.note([ask(value) for value in (table, training.module.words.weight.detach()) for ask in ASKED])
        state = training.optimizer.state_dict()["state"].get(0, {})
        if "exp_avg" in state:
            training.note([ask(state["exp_avg"]) for ask in ASKED])


@scenario(optimizer=OPTIMIZERS["adamw"], fresh=True)
def targets_that_follow_by_states(training: Training) -> None:
    """Updates five target networks from state dicts, starting with whole tensors from before the first call."""
    start = training.module.state_dict()
    soft, hard = Matching(), Matching()
    soft.load_state_dict(start)
    moving, summed = copy.deepcopy(dict(start)), {name: value.clone() * 0 for name, value in start.items()}
    shadow = [value.detach().clone() for value in training.module.parameters()]
    for batch in training.batches(4):
        training.update(batch)
        state = training.module.state_dict()
        hard.load_state_dict(state)
        with torch.no_grad():
            for target, source in zip(soft.parameters(), training.module.parameters(), strict=True):
                target.data.copy_(0.9 * target.data + 0.1 * source.data)
            for name, value in moving.items():
                value.lerp_(state[name], 0.2)
            torch._foreach_mul_(shadow, 0.8)
            torch._foreach_add_(shadow, [value.detach() for value in training.module.parameters()], alpha=0.2)
        summed = {name: summed[name] + state[name].detach().cpu().clone() for name in state}
        training.note(hard(*draw_batch(40, 0)), soft(*draw_batch(40, 0)))
    training.note(list(moving.values()), list(summed.values()), shadow, list(soft.parameters()))


RETURNED: Mapping[str, Callable[[Tensor], Any]] = {
    "float": Tensor.item,
    "tensor": Tensor.detach,
    "nothing": lambda loss: None,
    "tuple": lambda loss: (loss.item(), 3),
    "dict": lambda loss: {"loss": loss.item()},
    "another": lambda loss: loss * 2,
}


@scenario(fresh=True)
def closures_that_return_anything(training: Training) -> None:
    for batch, returned in zip(training.batches(6), RETURNED.values(), strict=True):

        def closure(batch: Any = batch, returned: Callable[[Tensor], Any] = returned) -> Any:
            training.optimizer.zero_grad()
            loss = training.model(*batch)
            loss.backward()
            return returned(loss)

        training.note(training.optimizer.step(closure))


@scenario(optimizer=OPTIMIZERS["adamw"], fresh=True)
def an_adversary_on_a_table(training: Training) -> None:
    """As FGM: the table moves along its gradient for a second backward, and goes back."""
    table = training.module.words.weight
    for batch in map(training.batch, range(4)):
        training.model(*batch).backward()
        kept, norm = table.data.clone(), table.grad.norm()
        table.data.add_(0.3 * table.grad / norm)
        training.note(norm, training.model(*batch).backward())
        table.data = kept
        training.step()


@scenario(optimizer=OPTIMIZERS["adamw"], fresh=True)
def methods_of_modules(training: Training) -> None:
    """Calls methods of `nn.Module` between two steps that do not change the model."""
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda model: model.requires_grad_(True),
        lambda model: model.apply(lambda module: None),
        lambda model: model.double(),
        lambda model: model.to("cpu"),
        lambda model: model.train(),
    )
    for batch, call in zip(training.batches(5), calls, strict=True):
        training.note(call(training.model) is training.model, sum(p.numel() for p in training.model.parameters()))
        training.model.zero_grad(set_to_none=False)
        training.model(*batch).backward()
        training.optimizer.step()


@scenario(optimizer=OPTIMIZERS["adamw"], fresh=True)
def calls_that_are_checkpointed(training: Training) -> None:
    """Checkpoints a call, so that the backward calls the model again."""
    for batch in map(training.batch, range(4)):
        loss = checkpoint(training.model, *batch, use_reentrant=False)
        loss.backward()
        training.note(loss)
        training.step()
