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


def check_arguments(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raises `ValueError` where a model or an optimizer is none, or they have nothing to do with each other."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"expected model to be an nn.Module, in compile(), found {_what(model)}. Put the function into the forward "
            "of a module that holds its parameters."
        )
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"expected optimizer to be a torch.optim.Optimizer, or several, in compile(), found {_what(optimizer)}."
                " Make it over the model's parameters first: torch.optim.Adagrad(model.parameters(), lr=0.01)."
            )
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"expected {type(optimizer).__name__} to hold parameters of {type(model).__name__}, in compile(), "
                "found that it holds none of them: its steps would leave the model as it is. Make it over this model's "
                "parameters()."
            )


def _what(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"{value!r} of type {type(value).__name__}"


def check_trainable(model: nn.Module) -> None:
    """Raises `ValueError` where a model has nothing to train."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "expected a model with at least one trainable parameter, in compile(), found none in "
            f"{type(model).__name__}. There is nothing to train or to communicate; call the model itself."
        )


def check_agreement(reports: Sequence[dict[str, Any] | str]) -> None:
    """Raises where a rank differs from rank 0, or has not come as far as to describe itself.

    Args:
        reports: what `describe` returned on each rank, or what is wrong with the rank's own arguments.

    Raises:
        ValueError: naming the rank, and what is wrong with its arguments, or the first aspect in which it differs from
            rank 0 with both versions of it; on every rank.
    """
    failures = [report for report in reports if isinstance(report, str)]
    if failures == list(reports) and len(set(failures)) == 1:
        raise ValueError(failures[0])
    if failures:
        found = (f"rank {rank}: {report}" for rank, report in enumerate(reports) if isinstance(report, str))
        raise ValueError("; ".join(found))
    described = [report for report in reports if isinstance(report, dict)]
    first = described[0]
    for rank, other in enumerate(described):
        for aspect in [*first, *(a for a in other if a not in first)]:
            expected, found = first.get(aspect, "nothing"), other.get(aspect, "nothing")
            if expected != found:
                raise ValueError(
                    "expected the same model, optimizer and options on every rank, in compile(), found on rank "
                    f"{rank}: {aspect} is {found}, on rank 0: {expected}. Build all of them from the same code on "
                    "every rank."
                )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def refuse_hooks(model: nn.Module) -> None:
    """Raises where a parameter has gradient hooks: gradients do not pass through autograd's accumulation here.

    Raises:
        ValueError: naming the parameter.
    """
    for name, parameter in model.named_parameters():
        if is_hooked(parameter):
            raise ValueError(
                f"expected parameters without gradient hooks, in compile(), found hooks on {name}: gradients are "
                "reduced and delivered whole, and a hook would not run. Remove the hook, and change gradients after "
                "backward()."
            )


def is_hooked(parameter: Tensor) -> bool:
    """Whether a parameter has gradient hooks."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def failure_text(failure: Exception) -> str:
    """A failure as other ranks are to read it; the library's own errors need no type."""
    return str(failure) if isinstance(failure, RuntimeError) else f"{type(failure).__name__}: {failure}"
