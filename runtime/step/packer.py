"""Packs the gradients of one bucket into one tensor, whose memory later steps reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embrace_fx.runtime.step.gradient_hooks import run_accumulate_hooks, run_tensor_hooks
from embrace_fx.runtime.tables.model_state import ModelState


@dataclass(eq=False)
class Packer:
    """Packs the gradients of one bucket into one flat tensor, whose memory later steps reuse."""

    state: ModelState
    names: tuple[str, ...]
    scales: bool  # whether to divide by the number of ranks, which a communication hook of the user does itself
    # Whether to keep the memory on a host, because the system would have to zero newly allocated memory. On a device,
    # the allocator keeps memory by itself.
    keeps_memory: bool
    _kept: Tensor | None = None

    def __call__(self, gradients: Sequence[Tensor], scale: float) -> Tensor:
        parts = gradients
        if self.state.hooked or self.state.unreduced:
            part = self._gradient_to_reduce if self.state.hooked else self.state.with_unreduced
            parts = [part(name, gradient) for name, gradient in zip(self.names, gradients, strict=True)]
        scale = scale * self.state.gradient_scale if self.scales else 1.0
        if parts[0].is_sparse:  # a sparse gradient has a bucket of its own
            flat = parts[0].coalesce()
            return flat.mul_(scale) if scale != 1.0 else flat
        kept = self._kept
        if kept is not None and (kept.dtype != parts[0].dtype or _is_shared(kept)):
            kept = None
        if len(parts) == 1:
            flat = torch.mul(parts[0].reshape(-1), scale, out=kept)  # multiply into the kept memory in one pass
        else:
            flat = torch.cat([part.reshape(-1) for part in parts], out=kept)
            if scale != 1.0:
                flat.mul_(scale)
        if not self.keeps_memory or flat.device.type != "cpu":
            return flat
        self._kept = flat
        return flat.detach()  # return a separate tensor, so that references to the kept memory can be counted

    def _gradient_to_reduce(self, name: str, gradient: Tensor) -> Tensor:
        """Returns `gradient` plus those of earlier backwards under `no_sync`, after the parameter's hooks."""
        state = self.state
        if name not in state.hooked or name in state.unreached:
            return state.with_unreduced(name, gradient)
        parameter = state.parameter(name)
        part = state.with_unreduced(name, run_tensor_hooks(parameter, gradient))
        return run_accumulate_hooks(parameter, part, None if name in state.unreduced else parameter.grad)


def _is_shared(kept: Tensor) -> bool:
    """Returns whether any other tensor, such as a `.grad`, shares the memory of `kept`."""
    storage = kept.untyped_storage()
    # 2 is the count if only `kept` and `storage` refer to the memory.
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2
