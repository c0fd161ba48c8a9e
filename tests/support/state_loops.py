"""Training loops that a user may write, by name: what they do with parameters, state, schedulers and hooks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from tests.support.loops import Loop, named_in
from tests.support.sides import Side, draw_batches
from tests.support.training import whole, whole_parameters

STATE_LOOPS: dict[str, Loop] = {}
loop = named_in(STATE_LOOPS)


@loop
def parameters_read(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.update(batch)
        values = whole_parameters(side.model)
        side.log += [float(value.norm()) for value in values.values()]


@loop
def parameters_clamped(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.update(batch)
        with torch.no_grad():
            for parameter in side.model.parameters():
                parameter.clamp_(-0.3, 0.3)


@loop
def parameters_of_submodules_clamped(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.update(batch)
        side.model.first.weight.data.clamp_(-0.1, 0.1)


@loop
def modules_clamped_by_a_function(side: Side, rank: int) -> None:
    def clamp(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.clamp_(-0.1, 0.1)

    for batch in side.lookahead(draw_batches(rank)):
        side.update(batch)
        side.model.apply(clamp)


@loop
def state_written_through_the_state_dict(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.update(batch)
        with torch.no_grad():
            for value in side.model.state_dict().values():
                value.mul_(0.9)


@loop
def state_of_the_plain_model_read(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.update(batch)
        side.log += [float(value.norm()) for value in whole(side.plain.state_dict().items()).values()]


@loop
def state_saved_and_loaded(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(draw_batches(rank))):
        if step == 3:
            saved = {name: value.clone() for name, value in side.model.state_dict().items()}
        side.update(batch)
        if step == 5:
            side.model.load_state_dict(saved)


@loop
def state_read_on_one_rank(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.model(*batch).backward()
        if rank == 0:
            side.model.state_dict()
        dist.barrier()
        side.step()
        side.optimizer.zero_grad()
        if rank == 0:
            side.model.state_dict()
            side.optimizer.state_dict()
        dist.barrier()


@loop
def optimizer_state_read(side: Side, rank: int) -> None:
    for batch in side.lookahead(draw_batches(rank)):
        side.update(batch)
        of_first = side.optimizer.state_dict()["state"].get(1, {})  # plain SGD has none
        side.log += [float(value.sum()) for value in of_first.values() if isinstance(value, Tensor)]


@loop
def schedulers(side: Side, rank: int) -> None:
    side.scheduler.step_size = 2
    made_after = ExponentialLR(side.optimizer, 0.9)
    for batch in side.lookahead(draw_batches(rank, 12)):
        side.update(batch)
        side.scheduler.step()
        made_after.step()


@loop
def a_gradient_scaler(side: Side, rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for batch in side.lookahead(draw_batches(rank)):
        scaler.scale(side.model(*batch)).backward()
        side.reduce()
        scaler.step(side.optimizer)
        scaler.update()
        side.log.append(scaler.get_scale())
        side.optimizer.zero_grad()


@loop
def learning_rates_written(side: Side, rank: int) -> None:
    for step, batch in enumerate(side.lookahead(draw_batches(rank))):
        side.update(batch)
        for group in side.optimizer.param_groups:
            group["lr"] = 0.3 / (step + 2)


@loop
def hooks_of_the_optimizer(side: Side, rank: int) -> None:
    side.optimizer.register_step_post_hook(lambda *arguments: side.log.append(1.0))
    for batch in side.lookahead(draw_batches(rank)):
        side.update(batch)
