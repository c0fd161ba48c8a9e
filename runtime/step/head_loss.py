"""The loss of a sharded head outside of the model, as one node of the user's autograd graph.

Contract
    Collective, in the forward and in the backward: ranks meet before each. The table's gradient is added to its `.grad`
    in the backward; that of a bias is this rank's share, whose mean over ranks is N times too small by itself and
    complete in the sum.

Shape legend: as in `embrace_fx/vocabulary/head_ops.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.flow.head_exchange import HeadExchange
from embrace_fx.runtime.kernels.head import (
    head_coefficients,
    head_gradient,
    head_loss,
    head_statistics,
    scored_positions,
    spread_positions,
)
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.head import PromisedLogits

_GROUP = "embedding"


@dataclass(frozen=True)
class LossArguments:
    """A sharded head, and how its losses are reduced: as `aten.nll_loss_forward` does."""

    promise: PromisedLogits
    state: ModelState
    communicator: Communicator
    reduction: int
    ignore_index: int


class HeadLoss(torch.autograd.Function):
    """Negative log-likelihoods of labels (M,) under logits of hidden states (M, D)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias: Tensor | None, head: LossArguments, labels: Tensor) -> Tensor:
        promise, state, communicator = head.promise, head.state, head.communicator
        table, ranks, rank = state.tables[promise.table], communicator.world_size, communicator.rank
        communicator.meet(f"loss of logits of the sharded {promise.table}")
        exchange = HeadExchange(communicator)
        where = promise.table, _GROUP, ranks
        positions, own = scored_positions(labels, head.ignore_index, table.shape[0])
        counts = communicator.wait(exchange.gather_counts(own, *where))
        labelling = exchange.gather_positions(own, counts, *where)
        gathering = exchange.gather_positions(hidden.index_select(0, positions), counts, *where)
        every_label, every_hidden = communicator.wait(labelling), communicator.wait(gathering)
        local = table.local.to(hidden.dtype)
        logits = every_hidden @ local.t()
        if bias is not None:
            logits += bias.detach()[rank::ranks].to(logits.dtype)
        of_rank = head_statistics(logits, every_label, promise.steps, rank, ranks)
        statistics = communicator.wait(exchange.scatter_positions(of_rank, counts, *where))
        loss, _, log_sums = head_loss(statistics, positions, labels, head.reduction, ranks)
        ctx.save_for_backward(hidden, local, logits, every_label, every_hidden, positions, counts, log_sums)
        ctx.head, ctx.bias = head, bias
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        head = ctx.head
        promise, state, communicator = head.promise, head.state, head.communicator
        hidden, local, logits, every_label, every_hidden, positions, counts, log_sums = ctx.saved_tensors
        table, ranks, rank = state.tables[promise.table], communicator.world_size, communicator.rank
        communicator.meet(f"gradient of the loss of logits of the sharded {promise.table}")
        exchange = HeadExchange(communicator)
        where = promise.table, _GROUP, ranks
        own = head_coefficients(gradient, log_sums, positions, head.reduction)
        coefficients = communicator.wait(exchange.gather_positions(own, counts, *where))
        of_logits = head_gradient(logits, every_label, coefficients, promise.steps, rank, ranks)
        sending = exchange.scatter_positions(of_logits @ local, counts, *where)
        of_table = (of_logits.t() @ (every_hidden / ranks)).to(table.local.dtype)
        table.add_dense_gradient(of_table, unreduced=not state.synchronised)
        of_bias = None
        if ctx.bias is not None:
            of_bias = torch.zeros_like(ctx.bias)
            of_bias[rank::ranks] = of_logits.sum(0).to(of_bias.dtype)
        of_hidden = spread_positions(communicator.wait(sending), positions, hidden, ranks)
        return of_hidden, of_bias, None, None
