"""What all ranks must have in common before they train together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def describe(model: nn.Module, optimizers: Sequence[Optimizer], options: object) -> dict[str, Any]:
    """A rank's model, optimizers and options, as comparable text by aspect."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {"model": type(model).__name__}
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        found[f"parameter {name}"] = f"{tuple(parameter.shape)} {parameter.dtype}{frozen}"
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = f"{tuple(buffer.shape)} {buffer.dtype}"
    for k, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            settings = {key: _plain(value) for key, value in group.items() if key != "params"}
            held = [names.get(id(parameter), "not of the model") for parameter in group["params"]]
            found[f"optimizer {k}, param group {g}"] = f"{type(optimizer).__name__} {settings} over {held}"
    found["options"] = repr(options)
    return found


def check_agreement(described: Sequence[dict[str, Any]]) -> None:
    """Raises where a rank differs from rank 0.

    Raises:
        ValueError: naming the ranks, the first aspect in which they differ, and both versions of it; on every rank.
    """
    first = described[0]
    for rank, other in enumerate(described):
        for aspect in [*first, *(a for a in other if a not in first)]:
            expected, found = first.get(aspect, "nothing"), other.get(aspect, "nothing")
            if expected != found:
                raise ValueError(
                    f"expected the same model, optimizer and options on every rank, in compile(), found on rank {rank}: "
                    f"{aspect} is {found}, on rank 0: {expected}. Build all of them from the same code on every rank."
                )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
