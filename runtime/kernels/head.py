"""Kernels for an output layer over a table whose rows are sharded. The ops are described in
`embrace_fx/vocabulary/head_ops.py`.

Shape legend: as there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embrace_fx.vocabulary.head import softmax_dtype, steps_from_text


def scored_positions(labels: Tensor, ignore_index: int, num_rows: int) -> list[Tensor]:
    """Implements the op `scored_positions`: finds the labels (L,) that count in the loss. Returns [positions of the
    labels that are not `ignore_index` (S,), these labels (S,)].

    Args:
        num_rows: the number of rows of the output layer's table, which is the number of classes.

    Raises:
        IndexError: a label is not a row of the table. On CUDA, a device-side assertion fails instead.
    """
    positions = labels.ne(ignore_index).nonzero().view(-1)
    scored = labels.index_select(0, positions).to(torch.int64)
    outside = scored.lt(0) | scored.ge(num_rows)
    if scored.is_cuda:
        torch._assert_async(outside.any().logical_not())
    elif bool(outside.any()):
        raise IndexError(
            f"the loss got the label {int(scored[outside][0])}, but labels go from 0 to {num_rows - 1} (or are "
            f"{ignore_index}, which the loss ignores). Check the labels of the batch."
        )
    return [positions, scored]


def _own_labels(labels: Tensor, logits: Tensor, rank: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Finds the labels whose rows are in this rank's shard of the table. Returns (mask of these labels (P,), each
    label's row in the shard (P,)). The row of a label outside the shard is meaningless.

    Args:
        labels: (P,), row indices in the whole table.
        logits: (P, V'), the logits of this rank's shard.
        group_size: the number of ranks.
    """
    return labels % group_size == rank, (labels // group_size).clamp(max=logits.shape[1] - 1)


def apply_steps(values: Tensor, steps: str) -> list[Tensor]:
    """Applies an output layer's element-wise steps to logits, such as a scale or a tanh. Returns the values before the
    first step and after each step.

    Args:
        values: the logits.
        steps: the steps as text.
    """
    found = [values]
    for name, by, dtype in steps_from_text(steps):
        last = found[-1]
        if dtype is not None:
            found.append(last.to(dtype))
        elif name == "tanh":
            found.append(last.tanh())
        else:
            found.append(last * by if name == "mul" else last / by)
    return found


def gradient_of_steps(gradient: Tensor, values: list[Tensor], steps: str) -> Tensor:
    """Computes the gradient of the logits from the gradient of the values that `apply_steps` has computed from them.

    Args:
        gradient: the gradient of the values after the last step. It may be overwritten.
        values: the result of `apply_steps`.
        steps: the steps as text, as for `apply_steps`.
    """
    for (name, by, _), before, after in reversed(
        list(zip(steps_from_text(steps), values[:-1], values[1:], strict=True))
    ):
        if name == "to":
            gradient = gradient.to(before.dtype)
        elif name == "tanh":
            gradient = torch.ops.aten.tanh_backward(gradient, after)
        else:
            gradient = gradient.mul_(by) if name == "mul" else gradient.div_(by)
    return gradient


def head_statistics(logits: Tensor, labels: Tensor, smooths: bool, steps: str, rank: int, group_size: int) -> Tensor:
    """Implements the op `head_statistics`: computes the softmax statistics of this rank's columns of the logits.

    Args:
        logits: (P, V'), this rank's columns of the logits at all positions.
        labels: (P,), the label of each position.
        smooths: whether the loss smooths labels.
        steps: element-wise steps to apply to the logits first, as text.
        group_size: the number of ranks.

    Returns:
        (P, 3): the maximum, the sum of the exponentials of the logits minus this maximum, and the label's logit, or 0
            if another rank has the label. If the loss smooths labels, (P, 4), where the last column is the sum of the
            logits.
    """
    values = apply_steps(logits, steps)[-1].to(softmax_dtype(steps, logits.dtype))
    # A finite maximum avoids nan if all logits of a rank are -inf.
    top = values.amax(1).clamp(min=torch.finfo(values.dtype).min)
    total = (values - top[:, None]).exp_().sum(1)
    own, rows = _own_labels(labels, logits, rank, group_size)
    label = values.gather(1, rows[:, None])[:, 0].masked_fill(own.logical_not(), 0)
    return torch.stack([top, total, label, *([values.sum(1)] if smooths else [])], 1)


def chunk_bounds(size: int, chunk: int, chunks: int) -> tuple[int, int]:
    """Returns (start, end) of chunk number `chunk` if `size` positions are divided into `chunks` chunks."""
    return size * chunk // chunks, size * (chunk + 1) // chunks


def chunk_of_positions(rows: Tensor, counts: Tensor, chunk: int, chunks: int) -> Tensor:
    """Implements the op `chunk_of_positions`: divides each rank's rows into `chunks` chunks, and returns the rows of
    chunk number `chunk` of every rank, concatenated.

    Args:
        rows: (P, ..), the rows of all ranks, rank after rank.
        counts: (N,), the number of rows of each rank.
    """
    if chunks == 1:
        return rows
    of_ranks = rows.split(counts.tolist())
    return torch.cat([own[slice(*chunk_bounds(len(own), chunk, chunks))] for own in of_ranks])


def _group_by_sender(chunks: list[Tensor], group_size: int) -> Tensor:
    """Joins the values that this rank has received for its positions, and groups them by the rank that sent them.
    Returns (N, S, ..).

    Args:
        chunks: for each chunk of positions, the values from all ranks, (N * positions of the chunk, ..).
        group_size: the number of ranks (N).
    """
    found = [each.view(group_size, len(each) // group_size, *each.shape[1:]) for each in chunks]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def head_loss(
    statistics: list[Tensor], positions: Tensor, labels: Tensor, weight: Tensor | None, reduction: int, group_size: int
) -> list[Tensor]:
    """Implements the op `head_loss`: combines the softmax statistics of all ranks into this rank's loss. Returns [the
    loss, the number or total weight of the scored labels, the log of each position's sum of exponentials (S,)].

    Args:
        statistics: for each chunk of positions, the results of `head_statistics` from all ranks.
        positions: (S,), the indices of the labels that are not ignored.
        labels: (L,), all labels of this rank.
        weight: (V,), the weight of each class, or None.
        reduction: 0 for none, 1 for the mean, 2 for the sum.
        group_size: the number of ranks.
    """
    tops, totals, of_labels, *_ = _group_by_sender(statistics, group_size).unbind(2)
    top = tops.amax(0)
    log_sums = top + (totals * (tops - top).exp()).sum(0).log()
    losses = log_sums - of_labels.sum(0)
    if weight is None:
        scored = losses.new_full((), len(positions))
    else:
        weights = _label_weights(weight, labels, positions)
        losses, scored = losses * weights, weights.sum().to(losses.dtype)
    if reduction == 0:
        return [losses.new_zeros(labels.shape).index_copy_(0, positions, losses), scored, log_sums]
    return [losses.sum() / scored if reduction == 1 else losses.sum(), scored, log_sums]


def _label_weights(weight: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    """Returns the class weights of the labels at these positions."""
    return weight.index_select(0, labels.index_select(0, positions))


def head_smoothing(
    statistics: list[Tensor], log_sums: Tensor, positions: Tensor, like: Tensor, num_rows: int, group_size: int
) -> Tensor:
    """Implements the op `head_smoothing`: returns, for each label, the sum of the log-softmax over all classes (L,).
    The sum is 0 for ignored labels.

    Args:
        statistics: for each chunk of positions, the results of `head_statistics` from all ranks.
        log_sums: (S,), the log of each position's sum of exponentials, from `head_loss`.
        positions: (S,), the indices of the labels that are not ignored.
        like: a tensor with L rows.
        num_rows: the number of classes.
        group_size: the number of ranks.
    """
    sums = _group_by_sender(statistics, group_size)[:, :, 3].sum(0) - num_rows * log_sums
    return sums.new_zeros(like.shape[:1]).index_copy_(0, positions, sums)


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
    """Implements the op `head_coefficients`: computes, for each position, the coefficients from which every rank
    computes the gradient of its logits. Returns (S, 2), or (S, 4) for smoothed labels.

    Args:
        grad_output: the gradient of the loss.
        grad_sums: (L,), the gradient of the result of `head_smoothing`, or None if labels are not smoothed.
        log_sums: (S,), the log of each position's sum of exponentials, from `head_loss`.
        positions: (S,), the indices of the labels that are not ignored.
        labels, weight, reduction: as for `head_loss`.
        num_rows: the number of classes.
    """
    weights = None if weight is None else _label_weights(weight, labels, positions)
    if reduction == 0:
        gradient = grad_output.index_select(0, positions)
    else:
        scored = max(len(positions), 1) if weights is None else weights.sum()
        gradient = (grad_output / scored if reduction == 1 else grad_output).expand(len(positions))
    gradient = (gradient if weights is None else gradient * weights).to(log_sums.dtype)
    if grad_sums is None:
        return torch.stack([log_sums, gradient], 1)
    of_sums = grad_sums.index_select(0, positions).to(log_sums.dtype)
    return torch.stack([log_sums, gradient - num_rows * of_sums, gradient, of_sums], 1)


def head_gradient(
    logits: Tensor, labels: Tensor, coefficients: Tensor, steps: str, rank: int, group_size: int
) -> Tensor:
    """Implements the op `head_gradient`: returns the gradient of the loss with respect to this rank's columns of the
    logits, (P, V').

    Args:
        logits: (P, V'), this rank's columns of the logits at all ranks' positions.
        labels: (P,), the label of each position.
        coefficients: the results of `head_coefficients` of all ranks.
        steps: the element-wise steps that were applied to the logits, as text.
        group_size: the number of ranks.
    """
    values, (log_sums, of_softmax, *smoothing) = apply_steps(logits, steps), coefficients.unbind(1)
    gradient = (values[-1].to(coefficients.dtype) - log_sums[:, None]).exp_().mul_(of_softmax[:, None])
    of_label, of_sums = smoothing or (of_softmax, None)
    if of_sums is not None:
        gradient += of_sums[:, None]
    own, rows = _own_labels(labels, logits, rank, group_size)
    gradient.scatter_add_(1, rows[:, None], of_label.neg().masked_fill(own.logical_not(), 0)[:, None])
    return gradient_of_steps(gradient.to(values[-1].dtype), values, steps)


def spread_positions(parts: list[Tensor], rows: Tensor, like: Tensor, group_size: int) -> Tensor:
    """Implements the op `spread_positions`: sums the values that all ranks have computed for this rank's positions.
    Returns a tensor shaped like `like`, with the sums at `rows` and zeros elsewhere.

    Args:
        parts: for each chunk of positions, the values from all ranks.
        rows: (S,), the row of the result for each position.
        group_size: the number of ranks.
    """
    summed = _group_by_sender(parts, group_size).sum(0)
    return summed.new_zeros(like.shape).index_add_(0, rows, summed)


KERNELS: dict[str, Callable[..., object]] = {
    "embrace::scored_positions": scored_positions,
    "embrace::chunk_of_positions": chunk_of_positions,
    "embrace::head_statistics": head_statistics,
    "embrace::head_loss": head_loss,
    "embrace::head_smoothing": head_smoothing,
    "embrace::head_coefficients": head_coefficients,
    "embrace::head_gradient": head_gradient,
    "embrace::spread_positions": spread_positions,
}
"""Op name -> kernel."""
