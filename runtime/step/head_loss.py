"""Computes a loss outside of the model from logits of a sharded output layer, as one autograd node.

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
import torch.nn.functional as F
from torch import Tensor

from embrace_fx.runtime.flow.head_exchange import HeadExchange
from embrace_fx.runtime.kernels.head import (
    chunk_of_positions,
    head_coefficients,
    head_gradient,
    head_loss,
    head_smoothing,
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
    """A sharded output layer, and the arguments of `F.cross_entropy` on its logits."""

    promise: PromisedLogits
    state: ModelState
    communicator: Communicator
    reduction: int  # 0 for "none", 1 for "mean", 2 for "sum"
    ignore_index: int
    weight: Tensor | None
    smoothing: float  # 0 if `weight` is given, because the two together are not supported


class HeadLoss(torch.autograd.Function):
    """The cross entropy of labels (M,) and logits that a sharded output layer computes from hidden states (M, D)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias: Tensor | None, head: LossArguments, labels: Tensor) -> Tensor:
        """Computes the loss over all ranks' shards of the output layer. Collective."""
        promise, state, communicator = head.promise, head.state, head.communicator
        table, ranks, rank = state.tables[promise.table], communicator.world_size, communicator.rank
        communicator.wait_for_ranks(f"loss of logits of the sharded {promise.table}")
        exchange, chunks = HeadExchange(communicator), promise.chunks
        where = promise.table, _GROUP
        positions, own_labels = scored_positions(labels, head.ignore_index, table.shape[0])
        counts = communicator.wait(exchange.gather_counts(own_labels, *where))
        labelling, own = exchange.gather_positions(own_labels, counts, 0, 1, *where), hidden.index_select(0, positions)
        gathering = [exchange.gather_positions(own, counts, chunk, chunks, *where) for chunk in range(chunks)]
        all_labels, local = communicator.wait(labelling), table.local.to(hidden.dtype)
        own_bias = None if bias is None else bias.detach()[rank::ranks].to(hidden.dtype)
        sending, every_hidden, every_logits = [], [], []
        for chunk in range(chunks):
            every_hidden.append(communicator.wait(gathering[chunk]))
            logits = F.linear(every_hidden[-1], local, own_bias)
            chunk_labels = chunk_of_positions(all_labels, counts, chunk, chunks)
            of_rank = head_statistics(logits, chunk_labels, head.smoothing > 0, promise.steps, rank, ranks)
            sending.append(exchange.scatter_positions(of_rank, counts, chunk, chunks, *where))
            if promise.keeps_logits:
                every_logits.append(logits)
        statistics = [communicator.wait(each) for each in sending]
        loss, scored, log_sums = head_loss(statistics, positions, labels, head.weight, head.reduction, ranks)
        if head.smoothing:
            sums = head_smoothing(statistics, log_sums, positions, labels, table.shape[0], ranks)
            smooth = -sums if head.reduction == 0 else -sums.sum() / (scored if head.reduction == 1 else 1)
            loss = (1 - head.smoothing) * loss + head.smoothing / table.shape[0] * smooth
        kept = (hidden, local, own_bias, head.weight, labels, all_labels, positions, counts, log_sums)
        ctx.save_for_backward(*kept, *every_hidden, *every_logits)
        ctx.head, ctx.bias = head, bias
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of hidden states and bias, and stores that of the output layer's shard. Collective."""
        head = ctx.head
        promise, state, communicator = head.promise, head.state, head.communicator
        hidden, local, own_bias, _, labels, all_labels, positions, counts, log_sums, *saved = ctx.saved_tensors
        table, ranks, rank = state.tables[promise.table], communicator.world_size, communicator.rank
        communicator.wait_for_ranks(f"gradient of the loss of logits of the sharded {promise.table}")
        exchange, chunks = HeadExchange(communicator), promise.chunks
        where = promise.table, _GROUP
        own = _gradient_coefficients(head, gradient, log_sums, positions, labels, table.shape[0])
        all_coefficients = communicator.wait(exchange.gather_positions(own, counts, 0, 1, *where))
        of_table, of_own_bias, sending = torch.zeros_like(local), local.new_zeros(len(local)), []
        for chunk in range(chunks):
            every_hidden = saved[chunk]
            logits = saved[chunks + chunk] if promise.keeps_logits else F.linear(every_hidden, local, own_bias)
            chunk_labels = chunk_of_positions(all_labels, counts, chunk, chunks)
            coefficients = chunk_of_positions(all_coefficients, counts, chunk, chunks)
            of_logits = head_gradient(logits, chunk_labels, coefficients, promise.steps, rank, ranks)
            sending.append(exchange.scatter_positions(of_logits @ local, counts, chunk, chunks, *where))
            of_table.addmm_(of_logits.t(), every_hidden / ranks)
            if own_bias is not None:
                of_own_bias += of_logits.sum(0)
        table.add_dense_gradient(of_table.to(table.local.dtype), unreduced=not state.synchronised)
        of_bias = None
        if ctx.bias is not None:
            of_bias = torch.zeros_like(ctx.bias)
            of_bias[rank::ranks] = of_own_bias.to(of_bias.dtype)
        of_hidden = spread_positions([communicator.wait(each) for each in sending], positions, hidden, ranks)
        return of_hidden, of_bias, None, None


def _gradient_coefficients(
    head: LossArguments, gradient: Tensor, log_sums: Tensor, positions: Tensor, labels: Tensor, num_rows: int
) -> Tensor:
    """Returns the coefficients (S, 2), or (S, 4) with label smoothing, from which every rank computes the gradient of
    its part of the logits.

    Args:
        log_sums: (S,), for each position the log of the sum of the exponentials of its logits.
        positions: (S,), the indices of the labels that are not ignored.
    """
    of_sums = None
    if head.smoothing:
        scored = max(len(positions), 1) if head.reduction == 1 else 1
        of_sums = (gradient * (-head.smoothing / num_rows / scored)).expand(labels.shape)
        gradient = gradient * (1 - head.smoothing)
    return head_coefficients(gradient, of_sums, log_sums, positions, labels, head.weight, head.reduction, num_rows)
