"""The update of a table shard from coalesced row gradients, as the user's torch.optim object defines it.

Contract
    Rows `ids` of the shard and of its state move as torch's single-tensor update moves them, in the same order of
    operations; all other rows stand still. Where that equals the optimizer's own semantics is decided in
    `embrace_fx.vocabulary.exactness`.
    The update of an element depends on that element alone: one step's rows may be applied in disjoint parts (prior,
    then delayed), in any order and in shards of any width, with the same bits.

Shape legend
    V rows of the table; d columns of it that this rank owns, 0 where there are fewer columns than ranks; K rows with
    gradient, 0 where no rank read the table.

State has torch's names, types and shapes (the shard's), so that a checkpoint of the plain model can be cut into it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from embrace_fx.runtime.kernels import gpu
from embrace_fx.runtime.tables.own_step import State


class RowOptimizer(ABC):
    """Updates rows as one class of optimizer does. Holds nothing: shard, state and options are the caller's."""

    @abstractmethod
    def init_state(self, shard: Tensor, group: Mapping[str, Any]) -> State:
        """The state of a shard (V, d) before the first step, for the options of its param group."""

    @abstractmethod
    def advance(self, state: State) -> None:
        """Counts one iteration; to be called once before its first `apply`, also where the table got no gradient."""

    @torch.no_grad()
    def apply(self, shard: Tensor, state: State, ids: Tensor, rows: Tensor, group: Mapping[str, Any]) -> None:
        """Updates rows of the shard and of its state in place.

        Args:
            shard: (V, d), written.
            state: as `init_state` made it, written.
            ids: (K,) int64, sorted and unique.
            rows: (K, d), the shard's dtype: the gradient of each row, summed over its lookups, averaged over ranks.
            group: the options of this iteration.
        """
        for block_ids, block_rows in _blocks(ids, rows):
            self._update(shard, state, block_ids, block_rows, group)

    @abstractmethod
    def _update(self, shard: Tensor, state: State, ids: Tensor, rows: Tensor, group: Mapping[str, Any]) -> None:
        """`apply` for rows few enough that their intermediate values stay in cache."""


def row_optimizer(kind: type[Optimizer]) -> RowOptimizer:
    """The row update of an optimizer class.

    Raises:
        TypeError: the class is not known to update rows. Derived classes are not known either: they may do anything.
    """
    if kind not in _ROW_OPTIMIZERS:
        known = ", ".join(k.__name__ for k in _ROW_OPTIMIZERS)
        raise TypeError(
            f"expected one of {known} as the optimizer of a sharded table, found {kind.__name__}: "
            "keep the table data-parallel"
        )
    return _ROW_OPTIMIZERS[kind]


class _RowSGD(RowOptimizer):
    """Updates rows as SGD does. State: `momentum_buffer` with momentum, nothing without."""

    def init_state(self, shard: Tensor, group: Mapping[str, Any]) -> State:
        # torch starts a buffer as a copy of the first gradient; zeros give a row the same at its first touch, because
        # the gradient enters undamped (dampening with momentum is not updated by rows).
        return {"momentum_buffer": torch.zeros_like(shard)} if group["momentum"] != 0 else {}

    def advance(self, state: State) -> None:
        """SGD does not count iterations."""

    @torch.no_grad()
    def apply(self, shard: Tensor, state: State, ids: Tensor, rows: Tensor, group: Mapping[str, Any]) -> None:
        if group["momentum"] != 0 or group["weight_decay"] != 0 or (shard.is_cuda and _fused(shard, rows, state)):
            super().apply(shard, state, ids, rows, group)
            return
        # One pass and no intermediate values: to gather, add and scatter takes half as long again on shards of 128
        # columns and more, and blocks would only add to it.
        lr = float(group["lr"])
        shard.index_add_(0, ids, rows, alpha=lr if group.get("maximize", False) else -lr)

    def _update(self, shard: Tensor, state: State, ids: Tensor, rows: Tensor, group: Mapping[str, Any]) -> None:
        if group["momentum"] != 0 and state.get("momentum_buffer") is None:
            state.update(self.init_state(shard, group))  # a scheduler or a checkpoint switched momentum on
        if shard.is_cuda and _fused(shard, rows, state):
            gpu.sgd_rows(
                shard,
                state["momentum_buffer"] if group["momentum"] != 0 else None,
                ids,
                rows,
                lr=float(group["lr"]),
                momentum=group["momentum"],
                weight_decay=group["weight_decay"],
                nesterov=group["nesterov"],
                maximize=group.get("maximize", False),
            )
            return
        gradient = _descent(rows, group)
        weight = shard.index_select(0, ids)
        if group["weight_decay"] != 0:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        if group["momentum"] != 0:
            buffer = state["momentum_buffer"].index_select(0, ids).mul_(group["momentum"]).add_(gradient)
            state["momentum_buffer"].index_copy_(0, ids, buffer)
            gradient = gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        shard.index_copy_(0, ids, weight.add_(gradient, alpha=-float(group["lr"])))


class _RowAdagrad(RowOptimizer):
    """State: `step` (float tensor on the host), `sum`."""

    def init_state(self, shard: Tensor, group: Mapping[str, Any]) -> State:
        return {"step": _zero_step(group), "sum": torch.full_like(shard, group["initial_accumulator_value"])}

    def advance(self, state: State) -> None:
        _advance_tensor_step(state)

    def _update(self, shard: Tensor, state: State, ids: Tensor, rows: Tensor, group: Mapping[str, Any]) -> None:
        step_size = group["lr"] / (1 + (state["step"].item() - 1) * group["lr_decay"])
        if shard.is_cuda and _fused(shard, rows, state):
            gpu.adagrad_rows(
                shard,
                state["sum"],
                ids,
                rows,
                step_size=float(step_size),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                maximize=group.get("maximize", False),
            )
            return
        gradient = _descent(rows, group)
        weight = shard.index_select(0, ids)
        if group["weight_decay"] != 0:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        total = state["sum"].index_select(0, ids).addcmul_(gradient, gradient)
        state["sum"].index_copy_(0, ids, total)
        weight.addcdiv_(gradient, total.sqrt_().add_(group["eps"]), value=-float(step_size))
        shard.index_copy_(0, ids, weight)


class _RowAdam(RowOptimizer):
    """Adam and AdamW, which are one update with two places for the weight decay.

    State: `step` (float tensor on the host), `exp_avg`, `exp_avg_sq`, with amsgrad also `max_exp_avg_sq`.
    """

    def init_state(self, shard: Tensor, group: Mapping[str, Any]) -> State:
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        return {"step": _zero_step(group), **{name: torch.zeros_like(shard) for name in names}}

    def advance(self, state: State) -> None:
        _advance_tensor_step(state)

    def _update(self, shard: Tensor, state: State, ids: Tensor, rows: Tensor, group: Mapping[str, Any]) -> None:
        (beta1, beta2), lr, weight_decay = group["betas"], group["lr"], group["weight_decay"]
        step = state["step"].item()
        step_size = lr / (1 - beta1**step)
        if shard.is_cuda and _fused(shard, rows, state):
            decoupled = group["decoupled_weight_decay"]
            gpu.adam_rows(
                shard,
                state["exp_avg"],
                state["exp_avg_sq"],
                state["max_exp_avg_sq"] if group["amsgrad"] else None,
                ids,
                rows,
                step_size=float(step_size),
                betas=(float(beta1), float(beta2)),
                eps=group["eps"],
                correction=(1 - beta2**step) ** -0.5,
                weight_decay=0.0 if decoupled else weight_decay,
                shrink=float(1 - lr * weight_decay) if decoupled else 1.0,
                maximize=group.get("maximize", False),
            )
            return
        gradient = _descent(rows, group)
        weight = shard.index_select(0, ids)
        if weight_decay != 0 and group["decoupled_weight_decay"]:
            weight.mul_(float(1 - lr * weight_decay))
        elif weight_decay != 0:
            gradient = gradient.add(weight, alpha=weight_decay)

        exp_avg = state["exp_avg"].index_select(0, ids).lerp_(gradient, 1 - beta1)
        state["exp_avg"].index_copy_(0, ids, exp_avg)
        second = state["exp_avg_sq"].index_select(0, ids).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg_sq"].index_copy_(0, ids, second)
        if group["amsgrad"]:
            second = torch.maximum(state["max_exp_avg_sq"].index_select(0, ids), second)
            state["max_exp_avg_sq"].index_copy_(0, ids, second)

        denominator = second.sqrt_().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        shard.index_copy_(0, ids, weight.addcdiv_(exp_avg, denominator, value=-float(step_size)))


class _RowSparseAdam(RowOptimizer):
    """State: `step` (int), `exp_avg`, `exp_avg_sq`."""

    def init_state(self, shard: Tensor, group: Mapping[str, Any]) -> State:
        return {"step": 0, "exp_avg": torch.zeros_like(shard), "exp_avg_sq": torch.zeros_like(shard)}

    def advance(self, state: State) -> None:
        state["step"] += 1

    def _update(self, shard: Tensor, state: State, ids: Tensor, rows: Tensor, group: Mapping[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        step = state["step"]
        step_size = group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        if shard.is_cuda and _fused(shard, rows, state):
            gpu.adam_rows(
                shard,
                state["exp_avg"],
                state["exp_avg_sq"],
                None,
                ids,
                rows,
                step_size=float(step_size),
                betas=(float(beta1), float(beta2)),
                eps=group["eps"],
                correction=1.0,
                maximize=group.get("maximize", False),
            )
            return
        gradient = _descent(rows, group)
        exp_avg = state["exp_avg"].index_select(0, ids)
        exp_avg.add_(gradient.sub(exp_avg).mul_(1 - beta1))
        state["exp_avg"].index_copy_(0, ids, exp_avg)
        exp_avg_sq = state["exp_avg_sq"].index_select(0, ids)
        exp_avg_sq.add_(gradient.square().sub_(exp_avg_sq).mul_(1 - beta2))
        state["exp_avg_sq"].index_copy_(0, ids, exp_avg_sq)

        # SparseAdam, unlike Adam, leaves the bias of the second moment out of the term that eps is added to.
        update = exp_avg.div_(exp_avg_sq.sqrt_().add_(group["eps"])).mul_(-float(step_size))
        shard.index_copy_(0, ids, shard.index_select(0, ids).add_(update))


_ADAM = _RowAdam()
_ROW_OPTIMIZERS: dict[type[Optimizer], RowOptimizer] = {
    SGD: _RowSGD(),
    Adagrad: _RowAdagrad(),
    Adam: _ADAM,
    AdamW: _ADAM,
    SparseAdam: _RowSparseAdam(),
}

_ELEMENTS_PER_THREAD = 32768
"""Elements a CPU thread takes of one operation: torch's grain size, and few enough to stay in cache between two."""


def _blocks(ids: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cuts an update on the CPU into blocks whose intermediate values fit in cache; on a device it is one block.

    Of use because an update is a dozen passes over (K, d) values: in memory each of them would cost as much as the
    reading of the table.
    """
    if rows.device.type != "cpu":
        yield ids, rows
        return
    size = max(1, torch.get_num_threads() * _ELEMENTS_PER_THREAD // max(1, rows.shape[1]))
    yield from zip(ids.split(size), rows.split(size), strict=True)


def _fused(shard: Tensor, rows: Tensor, state: State) -> bool:
    """Whether one Triton kernel makes the whole update; otherwise it is made of torch's ops, on CUDA too."""
    parts = (part for part in state.values() if isinstance(part, Tensor) and part.ndim > 0)
    return all(gpu.takes(tensor) for tensor in (shard, rows, *parts))


def _descent(rows: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The gradient to descend."""
    return -rows if group.get("maximize", False) else rows


def _zero_step(group: Mapping[str, Any]) -> Tensor:
    """A step counter of torch's type, on the host whatever `fused` says: every update reads its value there."""
    wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")


def _advance_tensor_step(state: State) -> None:
    # A checkpoint loaded under `fused` puts the counter on the device: brought home once, it stalls no later update.
    state["step"] = state["step"].cpu().add_(1)
