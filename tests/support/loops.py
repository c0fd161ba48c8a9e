"""Training loops that a user may write, by name: what loops do beside their steps.

Each is written once, for a compiled model under "2d" with lookahead and for the plain one: see `tests.support.sides`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from embrace_fx.runtime.ranks.failure import PeerFailure
from tests.support.sides import NUM_WORDS, Side, Words, draw_batch, draw_batches

Loop = Callable[[Side, int], None]
LOOPS: dict[str, Loop] = {}


def named_in(loops: dict[str, Loop]) -> Callable[[Loop], Loop]:
    """A decorator that enters a loop under its name, in words."""

    def enter(function: Loop) -> Loop:
        loops[function.__name__.replace("_", " ")] = function
        return function

    return enter


loop = named_in(LOOPS)


# the batches


@loop
def several_epochs(side: Side, rank: int) -> None:
    for epoch in range(3):
        for batch in side.lookahead(draw_batches(rank, 4, 4 * epoch)):
            side.update(batch)


@loop
def epochs_left_early(side: Side, rank: int) -> None:
    for epoch in range(3):
        for step, batch in enumerate(side.lookahead(draw_batches(rank, 6, 6 * epoch))):
            side.update(batch)
            if step == 3:
                break


@loop
def no_lookahead(side: Side, rank: int) -> None:
    for batch in draw_batches(rank, 14):
        side.update(batch)


@loop
def lengths_that_vary(side: Side, rank: int) -> None:
    for batch in side.lookahead([draw_batch(step, rank, 2 + (step * (rank + 2)) % 5) for step in range(12)]):
        side.update(batch)


@loop
def batches_of_its_own_between(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(draw_batches(rank, 10))):
        side.update(batch)
        if step % 3 == 2:
            side.update(draw_batch(50 + step, rank))


@loop
def batches_moved(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.update((batch[0].clone(), *batch[1:]))


@loop
def batches_written(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(draw_batches(rank))):
        if step % 2:
            batch[0][0, 0] = step
        side.update(batch)


WARNED = frozenset({"batches of its own between", "batches moved", "batches written"})
"""Loops whose batches are not those that were looked ahead to: the compiled model says so, once."""


@loop
def evaluations_between(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(draw_batches(rank))):
        side.update(batch)
        side.model.eval()
        with torch.inference_mode() if step % 2 == 0 else torch.no_grad():
            side.log.append(float(side.model(*draw_batch(40, 0))))
        side.model.train()


@loop
def evaluations_inside(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        loss = side.model(*batch)
        with torch.no_grad():
            side.log.append(float(side.model(*draw_batch(40, 0))))
        loss.backward()
        side.step()
        side.optimizer.zero_grad()


# forwards and backwards


@loop
def two_losses(side: Side, rank: int) -> None:
    batches = side.lookahead(draw_batches(rank, 12))
    for first in batches:
        (side.model(*first) + 2 * side.model(*next(batches))).backward()
        side.step()
        side.optimizer.zero_grad()


@loop
def two_forwards_first(side: Side, rank: int) -> None:
    batches = side.lookahead(draw_batches(rank, 12))
    for first in batches:
        losses = [side.model(*first), side.model(*next(batches))]
        losses[0].backward()
        losses[1].backward()
        side.step()
        side.optimizer.zero_grad()


@loop
def backwards_in_other_order(side: Side, rank: int) -> None:
    batches = side.lookahead(draw_batches(rank, 12))
    for first in batches:
        losses = [side.model(*first), side.model(*next(batches))]
        losses[1].backward()
        losses[0].backward()
        side.step()
        side.optimizer.zero_grad()


@loop
def forwards_without_backward(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(draw_batches(rank, 10))):
        loss = side.model(*batch)
        if step % 3:
            loss.backward()
            side.step()
            side.optimizer.zero_grad()


@loop
def backwards_without_step(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(draw_batches(rank, 10))):
        side.model(*batch).backward()
        if step % 3:
            side.step()
            side.optimizer.zero_grad()


@loop
def steps_without_backward(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.update(batch)
        side.step()


@loop
def accumulation(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(draw_batches(rank, 12))):
        with side.no_sync() if step % 3 < 2 else contextlib.nullcontext():
            side.model(*batch).backward()
        if step % 3 == 2:
            side.step()
            side.optimizer.zero_grad()


@loop
def closures(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):

        def closure(batch: Words = batch) -> Tensor:
            side.optimizer.zero_grad()
            loss: Tensor = side.model(*batch)
            loss.backward()
            side.reduce()
            return loss

        side.optimizer.step(closure)


# gradients


@loop
def clipping(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.model(*batch).backward()
        side.log.append(float(side.clip(0.05)))
        side.step()
        side.optimizer.zero_grad()


@loop
def clipping_by_value(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.model(*batch).backward()
        side.reduce()
        nn.utils.clip_grad_value_(side.plain.parameters(), 0.01)
        side.step()
        side.optimizer.zero_grad()


@loop
def all_gradients_scaled_and_logged(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.model(*batch).backward()
        side.reduce()
        for parameter in side.model.parameters():
            parameter.grad.mul_(0.5).add_(0.01)
            side.log += [float(parameter.grad.norm(p)) for p in (1, 2, float("inf"))]
            side.log += [float(parameter.grad.abs().max()), float(parameter.grad.mean())]
            assert torch.isfinite(parameter.grad).all()
        side.step()
        side.optimizer.zero_grad()


@loop
def all_gradients_replaced(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.model(*batch).backward()
        side.reduce()
        for parameter in side.plain.parameters():
            parameter.grad = parameter.grad * 0.5
        side.log.append(float(nn.utils.clip_grad_norm_(side.plain.parameters(), 0.05)))
        side.step()
        side.optimizer.zero_grad()


@loop
def a_gradient_scaler_with_clipping(side: Side, rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for batch in side.lookahead(draw_batches(rank)):
        scaler.scale(side.model(*batch)).backward()
        side.reduce()
        scaler.unscale_(side.optimizer)
        side.log.append(float(nn.utils.clip_grad_norm_(side.plain.parameters(), 0.05)))
        scaler.step(side.optimizer)
        scaler.update()
        side.optimizer.zero_grad()


@loop
def gradients_zeroed_before_the_backward(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        loss = side.model(*batch)
        side.optimizer.zero_grad()
        loss.backward()
        side.step()


@loop
def gradients_zeroed_in_place(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.optimizer.zero_grad(set_to_none=False)
        side.model(*batch).backward()
        side.step()


@loop
def gradients_zeroed_before_the_step(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(draw_batches(rank))):
        side.model(*batch).backward()
        if step % 2:
            side.optimizer.zero_grad()
        side.step()
        side.model.zero_grad()


@loop
def gradients_never_zeroed(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank, 5)):
        side.model(*batch).backward()
        side.step()


@loop
def gradients_looked_at(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.model(*batch).backward()
        side.reduce()
        gradient = side.plain.first.weight.grad
        side.log += [float(gradient.norm()), gradient[0, 0].item(), float(gradient.data.sum())]
        side.step()
        side.optimizer.zero_grad()


@loop
def gradients_kept(side: Side, rank: int) -> None:
    kept = []
    for batch in side.lookahead(draw_batches(rank)):
        side.model(*batch).backward()
        side.reduce()
        kept.append(side.plain.first.weight.grad)
        side.step()
        side.optimizer.zero_grad()
        if len(kept) % 3 == 1:
            side.log.append(float(kept[-1].norm()))
    side.log += [float(gradient.norm()) for gradient in kept]


@loop
def gradients_changed(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.model(*batch).backward()
        side.reduce()
        side.plain.first.weight.grad *= 0.5
        side.plain.first.bias.grad = side.plain.first.bias.grad + 0.01
        side.plain.second.weight.grad = None
        side.step()
        side.optimizer.zero_grad()


@loop
def gradients_of_one_parameter_scaled(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.model(*batch).backward()
        side.reduce()
        side.plain.first.weight.grad *= 0.5
        side.step()
        side.optimizer.zero_grad()


@loop
def a_penalty_outside_of_the_model(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        penalty = sum(p.square().sum() for p in side.model.first.parameters())
        (side.model(*batch) + penalty).backward()
        side.step()
        side.optimizer.zero_grad()


# failures


@loop
def a_loss_that_is_not_a_number(side: Side, rank: int) -> None:
    batches = draw_batches(rank, 10)
    for step in (2, 6):
        if rank == 1:
            batches[step][2].fill_(torch.nan)
    for step, batch in enumerate(side.lookahead(batches)):
        if step in {2, 6}:
            if side.is_compiled:
                with pytest.raises(FloatingPointError, match=r"rank\(s\) 1\."):
                    side.model(*batch).backward()
            continue
        side.update(batch)


@loop
def an_id_outside_of_a_table(side: Side, rank: int) -> None:
    batches = draw_batches(rank, 10)
    for step in (3, 4, 8):
        if rank == step % 2:
            batches[step][0][1, 1] = NUM_WORDS
    for step, batch in enumerate(side.lookahead(batches)):
        if step in {3, 4, 8}:
            if side.is_compiled:
                with pytest.raises(PeerFailure, match=f"rank {step % 2}: expected ids from 0 to 29"):
                    side.model(*batch)
            continue
        side.update(batch)
