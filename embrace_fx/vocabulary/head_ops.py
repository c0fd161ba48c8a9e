"""Declares the `embrace::` ops of an output layer and its loss over a table whose rows are sharded over ranks.

Shape legend, beside that of `embrace_fx/vocabulary/ops.py`
    M positions of this rank, of which S are scored: their label is not `ignore_index`; L labels; P = sum of S over
    ranks; V' rows of the table that this rank owns: row r, r + N, r + 2 N, .. on rank r.

`launch` is the id of a launch as text, for people who read the graph; the id itself is `node.meta["launch"]`.

`steps` are the element-wise ops between the product with the table and the softmax, in order, as text that
`embrace_fx.vocabulary.head` writes and reads: "div 30.0, tanh, mul 30.0, to float32".

Example, two ranks, V = 4: rank 0 scores one position with label 2 and has logits [1, 2, 3, 0] for it; rank 1 scores
none. Rank 0 computes columns 0 and 2, [1, 3], and rank 1 columns 1 and 3, [2, 0].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embrace_fx.vocabulary.fake_results import empty_as, op, unknown_size
from embrace_fx.vocabulary.head import softmax_dtype


@op("scored_positions", "(Tensor labels, int ignore_index, int num_rows) -> Tensor[]")
def scored_positions(labels: Tensor, ignore_index: int, num_rows: int) -> list[Tensor]:
    """Finds the scored labels, which are the entries of `labels` (L,) that differ from `ignore_index`. Returns [their
    positions (S,), the scored labels (S,)], where S is their number. Raises if a scored label is not a row of the
    table.

    Example: labels [-100, 2], ignore_index -100 -> [1], [2].

    Args:
        num_rows: the number of rows of the table.
    """
    scored = empty_as(labels, (unknown_size(),), dtype=torch.int64)
    return [scored, torch.empty_like(scored)]


@op("gather_counts", "(Tensor labels, str table, str group, int group_size, str launch) -> Tensor")
def gather_counts(labels: Tensor, table: str, group: str, group_size: int, launch: str) -> Tensor:
    """Launches an AllGather of each rank's number of scored labels, which are those that the loss does not ignore. The
    result is (N,) on the host.

    Args:
        labels: the scored labels (S,) of this rank.
        table: the name of the output layer's table.
        group: the communication class, such as "embedding".
        group_size: the number of ranks (N).
        launch: the launch's id as text.
    """
    return torch.empty((group_size,), dtype=torch.int64, device="cpu")


_CHUNK = (
    "(Tensor rows, Tensor counts, int chunk, int chunks, str table, str group, int group_size, str launch) -> Tensor"
)


@op("gather_positions", _CHUNK)
def gather_positions(
    rows: Tensor, counts: Tensor, chunk: int, chunks: int, table: str, group: str, group_size: int, launch: str
) -> Tensor:
    """Launches a gather of one chunk of the scored positions, which are those whose label the loss does not ignore.
    Each rank passes one row for each of its S scored positions, (S, ..). It receives the rows of the chunk's P
    positions from all ranks, (P, ..), in rank order.

    Example: chunk 1 of 2, with 3 positions on rank 0 and 4 on rank 1: rows 1 and 2 of rank 0, 2 and 3 of rank 1.

    Args:
        counts: the result of `gather_counts`: the number of scored positions of each rank, (N,).
        chunk, chunks: the index of the chunk, and the number of chunks.
        table: the name of the output layer's table.
        group: the communication class, such as "embedding".
        group_size: the number of ranks (N).
        launch: the launch's id as text.
    """
    return empty_as(rows, (unknown_size(), *rows.shape[1:]))


@op("scatter_positions", _CHUNK)
def scatter_positions(
    rows: Tensor, counts: Tensor, chunk: int, chunks: int, table: str, group: str, group_size: int, launch: str
) -> Tensor:
    """Launches the inverse of `gather_positions`. Each rank passes a row for each of the P positions of a chunk, (P,
    ..). It receives the rows for its own S positions from all N ranks, (N * S, ..), in rank order.

    The other arguments are those of `gather_positions`.
    """
    return empty_as(rows, (unknown_size(), *rows.shape[1:]))


@op("chunk_of_positions", "(Tensor rows, Tensor counts, int chunk, int chunks) -> Tensor")
def chunk_of_positions(rows: Tensor, counts: Tensor, chunk: int, chunks: int) -> Tensor:
    """Returns the rows of one chunk of the scored positions, which are those whose label the loss does not ignore.

    Args:
        rows: a row for each of the P scored positions of all ranks, (P, ..), in rank order.
        counts: the result of `gather_counts`: the number of scored positions of each rank, (N,).
        chunk, chunks: the index of the chunk, and the number of chunks.
    """
    return empty_as(rows, (unknown_size(), *rows.shape[1:]))


@op("head_statistics", "(Tensor logits, Tensor labels, bool smooths, str steps, int rank, int group_size) -> Tensor")
def head_statistics(logits: Tensor, labels: Tensor, smooths: bool, steps: str, rank: int, group_size: int) -> Tensor:
    """Returns the statistics from which `head_loss` computes a softmax over the columns of all ranks. For each of P
    positions, they are the maximum of this rank's logits, the sum of the logits' exponentials relative to this maximum,
    and the logit of the position's label (0 if another rank has it), (P, 3). With `smooths`, a fourth column has the
    sum of the logits.

    Example: [[3, 1 + exp(-2), 3]] on rank 0 for its logits [1, 3], [[2, 1 + exp(-2), 0]] on rank 1 for [2, 0].

    Args:
        logits: this rank's V' columns of the logits, (P, V').
        labels: the labels (P,) of the same positions.
        smooths: whether the loss smooths labels.
        steps: element-wise ops to apply to the logits first, as text made by `steps_to_text`.
        group_size: the number of ranks.
    """
    return empty_as(logits, (logits.shape[0], 4 if smooths else 3), dtype=softmax_dtype(steps, logits.dtype))


@op(
    "head_loss",
    "(Tensor[] statistics, Tensor positions, Tensor labels, Tensor? weight, int reduction, int group_size) -> Tensor[]",
)
def head_loss(
    statistics: list[Tensor],
    positions: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    reduction: int,
    group_size: int,
) -> list[Tensor]:
    """Computes a loss from the statistics of all ranks. Returns [the loss, the total weight of the scored positions,
    the log of the sum of exponentials for each scored position (S,)].

    Example, one position with logits [1, 2, 3, 0] and label 2: the loss is log(exp(1) + exp(2) + exp(3) + exp(0)) - 3.

    Args:
        statistics: for each chunk, `head_statistics` of this rank's positions from every rank, (N * S, 3).
        positions: the scored positions (S,), whose label is not ignored.
        labels: all labels (L,) of this rank.
        weight: the weight of each class (V,), or None, as for `aten.nll_loss_forward`.
        reduction: 0 for none, 1 for mean, 2 for sum. With 0, the loss is 0 where the label is ignored.
        group_size: the number of ranks (N).
    """
    loss = (labels.shape[0],) if reduction == 0 else ()
    first = statistics[0]
    return [empty_as(first, loss), empty_as(first, ()), empty_as(first, (positions.shape[0],))]


@op(
    "head_smoothing",
    "(Tensor[] statistics, Tensor log_sums, Tensor positions, Tensor like, int num_rows, int group_size) -> Tensor",
)
def head_smoothing(
    statistics: list[Tensor], log_sums: Tensor, positions: Tensor, like: Tensor, num_rows: int, group_size: int
) -> Tensor:
    """Computes the sum of the log-softmax over all rows of the table, for each of L positions, from the statistics of
    all ranks. Returns a tensor (L,), which is 0 where the label is ignored.

    Example, one position with logits [1, 2, 3, 0]: [6 - 4 * log(exp(1) + exp(2) + exp(3) + exp(0))].

    Args:
        statistics: for each chunk, `head_statistics` of this rank's positions from every rank, (N * S, 4).
        log_sums: the log of the sum of exponentials (S,), from `head_loss`.
        positions: the S scored positions, whose label is not ignored.
        like: a tensor (L, ..) with as many rows as there are positions.
        num_rows: the number of rows of the table (V).
        group_size: the number of ranks (N).
    """
    return empty_as(statistics[0], like.shape[:1])


@op(
    "head_coefficients",
    "(Tensor grad_output, Tensor? grad_sums, Tensor log_sums, Tensor positions, Tensor labels, Tensor? weight, "
    "int reduction, int num_rows) -> Tensor",
)
def head_coefficients(
    grad_output: Tensor,
    grad_sums: Tensor | None,
    log_sums: Tensor,
    positions: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    reduction: int,
    num_rows: int,
) -> Tensor:
    """Returns the numbers from which other ranks compute the gradient of the logits of this rank's S scored positions.

    Without label smoothing, these are two numbers for each position, (S, 2): the log of the sum of exponentials, and
    the gradient c of the position's own loss. With label smoothing, they are four numbers, (S, 4): the log, c - b V, c
    and b.

    Args:
        grad_output: the gradient of the loss.
        grad_sums: the gradient b (L,) of the result of `head_smoothing`, or None if labels are not smoothed.
        log_sums: the log of the sum of exponentials (S,), from `head_loss`.
        positions: the scored positions (S,), whose label is not ignored.
        labels: all L labels of this rank.
        weight, reduction: as for `head_loss`.
        num_rows: the number of rows of the table (V).
    """
    return empty_as(log_sums, (log_sums.shape[0], 2 if grad_sums is None else 4))


@op(
    "head_gradient",
    "(Tensor logits, Tensor labels, Tensor coefficients, str steps, int rank, int group_size) -> Tensor",
)
def head_gradient(
    logits: Tensor, labels: Tensor, coefficients: Tensor, steps: str, rank: int, group_size: int
) -> Tensor:
    """Returns the gradient of this rank's V' columns of the logits as they were before `steps`, (P, V'), for the P
    scored positions of all ranks.

    After `steps`, it is (softmax - one-hot) times the gradient of the position's loss. Where labels are smoothed, it is
    softmax (c - b V) - one-hot c + b, with the numbers of `head_coefficients`.

    Args:
        logits: this rank's columns of the logits, (P, V').
        labels: the labels (P,) of the positions.
        coefficients: all ranks' results of `head_coefficients`, (P, 2) or (P, 4).
        steps: the element-wise ops that were applied to the logits, as text made by `steps_to_text`.
        group_size: the number of ranks.
    """
    return torch.empty_like(logits)


@op("spread_positions", "(Tensor[] parts, Tensor rows, Tensor like, int group_size) -> Tensor")
def spread_positions(parts: list[Tensor], rows: Tensor, like: Tensor, group_size: int) -> Tensor:
    """Sums, for each scored position of this rank, the values that all ranks have computed for it. Returns a tensor
    shaped like `like` (M, D) with the sums in the rows `rows` and zeros in all other rows.

    Args:
        parts: for each chunk, the values for this rank's positions from every rank, (N * S, D).
        rows: the indices (S,) of the scored positions.
        like: a tensor of the result's shape.
        group_size: the number of ranks (N).
    """
    return empty_as(parts[0], like.shape)


_OPS: Sequence[str] = ("gather_counts", "gather_positions", "scatter_positions")
HEAD_LAUNCHES = frozenset(f"embrace::{name}" for name in _OPS)
"""Ops of a head whose result is in flight."""
