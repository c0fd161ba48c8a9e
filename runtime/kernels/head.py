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
    """Implements the op `scored_positions`: returns [the positions of the labels that are not `ignore_index`, these
    labels]. Raises `IndexError` if one is not a row of the table, which has `num_rows`.
    """
    positions = labels.ne(ignore_index).nonzero().view(-1)
    scored = labels.index_select(0, positions).to(torch.int64)
    outside = scored.lt(0) | scored.ge(num_rows)
    if scored.is_cuda:
        torch._assert_async(outside.any().logical_not())
    elif bool(outside.any()):
        raise IndexError(
            f"the loss has the label {int(scored[outside][0])}, but labels go from 0 to {num_rows - 1}, except "
            f"{ignore_index}, which is ignored. Check the labels."
        )
    return [positions, scored]


def _own_labels(labels: Tensor, logits: Tensor, rank: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Returns, for each label (P,), whether this rank has its row, and the row's index in the shard (any index if not).

    Args:
        logits: this rank's columns of the logits, (P, V').
        group_size: the number of ranks.
    """
    return labels % group_size == rank, (labels // group_size).clamp(max=logits.shape[1] - 1)


def apply_steps(values: Tensor, steps: str) -> list[Tensor]:
    """Applies an output layer's element-wise steps to logits. Returns the values before the first step, and after
    each.
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
    """Computes the gradient of logits before an output layer's element-wise steps.

    Args:
        gradient: the gradient of the values after the last step; may be overwritten.
        values: the result of `apply_steps`.
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
    """Implements the op `head_statistics`: statistics of this rank's columns of the logits at each position, after
    applying `steps`. `group_size` is the number of ranks.

    Columns: the maximum, the sum of exponentials, the label's logit, and for smoothed labels the sum of the logits.
    """
    values = apply_steps(logits, steps)[-1].to(softmax_dtype(steps, logits.dtype))
    top = values.amax(1).clamp(min=torch.finfo(values.dtype).min)  # avoid nan if all logits of a rank are -inf
    total = (values - top[:, None]).exp_().sum(1)
    own, rows = _own_labels(labels, logits, rank, group_size)
    label = values.gather(1, rows[:, None])[:, 0].masked_fill(own.logical_not(), 0)
    return torch.stack([top, total, label, *([values.sum(1)] if smooths else [])], 1)


def chunk_bounds(size: int, chunk: int, chunks: int) -> tuple[int, int]:
    """Returns the first position of a chunk, and the first one after it, among a rank's `size` positions."""
    return size * chunk // chunks, size * (chunk + 1) // chunks


def chunk_of_positions(rows: Tensor, counts: Tensor, chunk: int, chunks: int) -> Tensor:
    """Implements the op `chunk_of_positions`: returns the rows of one chunk of each rank's positions. `counts` (N,) are
    the numbers of rows of each rank.
    """
    if chunks == 1:
        return rows
    of_ranks = rows.split(counts.tolist())
    return torch.cat([own[slice(*chunk_bounds(len(own), chunk, chunks))] for own in of_ranks])


def _group_by_sender(chunks: list[Tensor], group_size: int) -> Tensor:
    """Joins the values received for this rank's positions in several chunks, (N * S, ..) each, and groups them by
    sending rank: (N, S, ..). `group_size` is N.
    """
    found = [each.view(group_size, len(each) // group_size, *each.shape[1:]) for each in chunks]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def head_loss(
    statistics: list[Tensor], positions: Tensor, labels: Tensor, weight: Tensor | None, reduction: int, group_size: int
) -> list[Tensor]:
    """Implements the op `head_loss`, which documents the arguments: combines the statistics of all ranks into the loss.
    Returns [the loss, the count or weight of scored labels, the logarithm of each position's sum of exponentials].
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
    """Implements the op `head_smoothing`, which documents the arguments: returns the sum of the log-softmax over all
    classes at each position; 0 for ignored labels.
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
    """Implements the op `head_coefficients`, which documents the arguments: returns the factors of each position from
    which all ranks compute their logits' gradients.
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
    """Implements the op `head_gradient`, which documents the arguments: computes the gradient of this rank's columns of
    the logits.
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
    """Implements the op `spread_positions`, which documents the arguments: sums the values that all ranks have computed
    for each position, and writes the sums to the positions' rows.
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
