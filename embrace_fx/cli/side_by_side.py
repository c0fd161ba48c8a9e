"""Compares the step times of DistributedDataParallel and embrace_fx on one model, in turns on the same ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import embrace_fx
from embrace_fx.runtime.probe.wire import sent_by_connection
from embrace_fx.vocabulary.plan_text import readable_bytes

WARM_UP_STEPS = 3
STEPS_PER_TURN = 5


class Contender:
    """One of the two systems to compare, with the measurements of its training steps.

    Attributes:
        model, optimizer: the model under this system, and its optimizer.
        args, kwargs: the batch on which all steps train.
        step_ms: the mean time of a step in each turn, in milliseconds.
        step_bytes: the mean number of bytes that a step sends in each turn. Empty if they cannot be measured.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.model, self.optimizer = model, optimizer
        is_named = isinstance(batch, dict)
        self.args: tuple[Any, ...] = () if is_named else batch if isinstance(batch, tuple) else (batch,)
        self.kwargs: dict[str, Any] = batch if is_named else {}
        self.step_ms: list[float] = []
        self.step_bytes: list[float] = []

    def train(self, steps: int) -> None:
        """Runs `steps` training steps on the batch."""
        for _ in range(steps):
            find_loss(self.model(*self.args, **self.kwargs)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def turn(self, steps: int) -> None:
        """Runs `steps` training steps between two barriers. Records the mean time of a step, and the mean number of
        bytes that it sends.
        """
        dist.barrier()
        began_s, before = time.perf_counter(), sent_by_connection()
        self.train(steps)
        dist.barrier()
        self.step_ms.append((time.perf_counter() - began_s) * 1e3 / steps)
        after = sent_by_connection()
        if before is not None and after is not None:
            self.step_bytes.append(sum(sent - before.get(key, 0) for key, sent in after.items()) / steps)


def compare(make: Callable[[], tuple[nn.Module, Any, torch.optim.Optimizer | None]], steps: int) -> list[str]:
    """Measures the step times of DistributedDataParallel and embrace_fx on the same model, in turns. Returns lines to
    print. Collective: initializes and destroys the default process group.

    Args:
        make: returns a new (model, batch, optimizer) at each call. If the optimizer is None, SGD is used.
        steps: the number of measured steps of each system, after warm-up.
    """
    dist.init_process_group()
    try:
        torch.manual_seed(0)
        model, batch, optimizer = make()
        ddp = Contender(DistributedDataParallel(model), optimizer or _default_optimizer(model), batch)
        torch.manual_seed(0)
        model, batch, optimizer = make()
        optimizer = optimizer or _default_optimizer(model)
        compiled = embrace_fx.compile(model, optimizer=optimizer)
        own = Contender(compiled, optimizer, batch)
        turns = -(-steps // STEPS_PER_TURN)
        for name, each in (("DDP", ddp), ("embrace_fx", own)):
            _print_progress(f"{name}: {WARM_UP_STEPS} steps to warm up")
            each.train(WARM_UP_STEPS)
        for turn in range(turns):
            _print_progress(f"turn {turn + 1} of {turns}, {STEPS_PER_TURN} steps of each")
            for each in (ddp, own) if turn % 2 == 0 else (own, ddp):
                each.turn(STEPS_PER_TURN)
        compiled.synchronize()
        return _result_lines(ddp, own, compiled)
    finally:
        dist.destroy_process_group()


def _print_progress(text: str) -> None:
    """Prints `text` on rank 0's stderr, because stdout is for the result."""
    if dist.get_rank() == 0:
        print(f"bench: {text}", file=sys.stderr, flush=True)


def find_loss(results: Any) -> Tensor:
    """Returns the loss among a model's results: their attribute `loss`, or the first scalar tensor.

    Raises:
        ValueError: there is neither.
    """
    if isinstance(found := getattr(results, "loss", None), Tensor):
        return found
    scalars = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor) and leaf.dim() == 0]
    if not scalars:
        raise ValueError(
            f"bench needs a model that returns its loss, but the model returned a {type(results).__name__} without a "
            "scalar tensor. Wrap the model in a module that returns the loss."
        )
    return scalars[0]


def _default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Returns an SGD optimizer with learning rate 0.01, for a factory that returns no optimizer."""
    return torch.optim.SGD(model.parameters(), 0.01)


def _result_lines(ddp: Contender, embrace: Contender, compiled: embrace_fx.CompiledModel) -> list[str]:
    """Returns the lines to print: the step times of both systems, their ratio, the bytes sent, and the report of the
    compiled model.

    Args:
        ddp, embrace: the measured steps under DDP and under embrace_fx.
        compiled: the model that `embrace_fx.compile` returned.
    """
    ddp_ms, own_ms = median(ddp.step_ms), median(embrace.step_ms)
    lines = [
        f"{dist.get_world_size()} ranks, medians over {len(ddp.step_ms)} turns of {STEPS_PER_TURN} steps, on one batch",
        f"DDP         {ddp_ms:9.2f} ms a step",
        f"embrace_fx  {own_ms:9.2f} ms a step, {ddp_ms / own_ms:.2f} times as fast",
    ]
    if ddp.step_bytes and embrace.step_bytes:
        by_ddp, by_own = (readable_bytes(median(each.step_bytes)) for each in (ddp, embrace))
        lines.append(f"rank 0 sends {by_ddp} a step under DDP, {by_own} under embrace_fx, measured on its connections")
    return [*lines, compiled.report()]
