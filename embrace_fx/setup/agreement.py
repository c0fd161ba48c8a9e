"""Checks that ranks agree on model, optimizers and options; a rank that cannot continue reports it to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from embrace_fx.capture.errors import CaptureError
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.default_group import check_mesh
from embrace_fx.runtime.ranks.failure import PeerFailure, failure_text
from embrace_fx.runtime.ranks.step_checks import check_activities
from embrace_fx.runtime.ranks.step_handshake import HandshakeMessage, StepHandshake
from embrace_fx.runtime.step.gradient_hooks import has_node_hooks
from embrace_fx.runtime.tables.model_state import names_to_ignore
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.setup.options import Options
from embrace_fx.setup.replica_check import settings_of
from embrace_fx.setup.shared_memory import refuse_shared_memory


class SetUpError(ValueError, RuntimeError):
    """`compile` cannot train with these arguments: a ValueError and, like the errors of DDP's constructor, a
    RuntimeError.
    """


class RunsEagerly(Exception):
    """All ranks take the eager route because no graph holds some rank's forward, for the reason in the text."""


def agree_on_set_up(
    communicator: Communicator,
    model: nn.Module,
    optimizers: tuple[Optimizer, ...],
    options: Options,
    mesh: DeviceMesh | None = None,
    hook: str = "",
    *,
    is_called: bool = False,
) -> None:
    """Checks the arguments of all ranks together, because a rank that failed alone would leave the others waiting.

    Args:
        mesh: the device mesh given in place of a process group.
        hook: the communication hook's name.
        is_called: whether this is the first call, when all parameters may be frozen, like a discriminator's in a GAN.

    Raises:
        SetUpError: some rank's arguments are bad, or differ from rank 0's; on every rank, which names the first
            difference with both versions.
    """
    own: dict[str, str] | str
    try:
        options.check()
        check_mesh(mesh)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"compile(): model is {_what(model)}, not an nn.Module. Put a function into the forward of a module "
                "that holds its parameters."
            )
        if problem := next(_problems(model, optimizers, is_called=is_called), None):
            raise ValueError(problem)
        if options.backend == "inductor":
            from embrace_fx.runtime.lower.inductor import check_toolchain  # noqa: PLC0415  (takes seconds to import)

            check_toolchain({parameter.device.type for parameter in model.parameters()})
        refuse_shared_memory(model)
        own = {**describe(model, optimizers, options), "communication hook": hook or "none"}
    except ValueError as error:
        own = str(error)
    reports = communicator.gather(own, dict[str, str] | str)
    failures = {rank: report for rank, report in enumerate(reports) if isinstance(report, str)}
    if len(failures) == len(reports) and len({*failures.values()}) == 1:
        raise SetUpError(failures[0])
    if failures:
        raise SetUpError("; ".join(f"rank {rank}: {report}" for rank, report in failures.items()))
    first, *others = [report for report in reports if isinstance(report, dict)]
    for rank, other in enumerate(others, 1):
        for aspect in {**first, **other}:
            here, there = first.get(aspect, "nothing"), other.get(aspect, "nothing")
            if here != there:
                raise SetUpError(
                    f"compile(): model, optimizer or options differ between ranks. {aspect} is {there} on rank {rank}, "
                    f"and {here} on rank 0. Build all of them from the same code on every rank."
                )


def describe(model: nn.Module, optimizers: Sequence[Optimizer], options: Options) -> dict[str, str]:
    """Returns text about a rank's model, optimizers and options, by aspect, for ranks to compare."""
    ignored = names_to_ignore(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = any(getattr(hook, "trainer", None) is not None for hook in model._state_dict_pre_hooks.values())
    found: dict[str, str] = {"model": f"{type(model).__name__}{', which is compiled already' if trained else ''}"}
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, each in named:
            if name not in ignored:
                frozen = ", frozen" if kind == "parameter" and not each.requires_grad else ""
                found[f"{kind} {name}"] = f"{tuple(each.shape)} {each.dtype}{frozen}"
    for k, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            settings = settings_of(group)
            known = (names.get(id(parameter), "not of the model") for parameter in group["params"])
            held = [name for name in known if name not in ignored]
            found[f"optimizer {k}, param group {g}"] = f"{type(optimizer).__name__} {settings} over {held}"
    found["options"] = options.agreed()
    return found


def _problems(model: nn.Module, optimizers: Sequence[Any], *, is_called: bool) -> Iterator[str]:
    """Yields the reasons why a model cannot be trained: a wrapper, an optimizer, a parameter."""
    kind, hooks = type(model).__name__, [*model._state_dict_pre_hooks.values()]
    # The wrapper of torch.compile.
    by_torch = isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules
    if by_torch or getattr(type(model), "_wraps_a_model", False):
        yield (
            f"compile(): model is a {kind}, which wraps a model already. Pass the model that it wraps: compile() "
            "replaces the wrapper."
        )
    for name, module in model.named_modules():
        if getattr(type(module), "_wraps_a_model", False):
            yield (
                f"compile(): {name} in this {kind} is compiled already. Compile the whole model, with the plain module "
                "in that place."
            )
    for hook in hooks:
        if taken := getattr(hook, "taken", ""):
            yield (
                f"compile(): cannot take this {kind}: {taken}. Load its full_state_dict() into a new model, and "
                "compile that."
            )
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            yield (
                f"compile(): optimizer is {_what(optimizer)}, not a torch.optim.Optimizer or several. Create it first, "
                "for example torch.optim.Adagrad(model.parameters(), lr=0.01)."
            )
        elif not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            yield (
                f"compile(): {type(optimizer).__name__} holds no parameter of {kind}, so its steps "
                "would not change the model. Create it with this model's parameters()."
            )
    yield from _problems_of_parameters(model, is_called=is_called)


def _problems_of_parameters(model: nn.Module, *, is_called: bool) -> Iterator[str]:
    """Yields the problems of a model's parameters, for messages."""
    kind, hooks = type(model).__name__, [*model._state_dict_pre_hooks.values()]
    if not is_called and not any(parameter.requires_grad for parameter in model.parameters()):
        yield f"compile(): {kind} has no trainable parameter, so there is nothing to train. Call the model itself."
    placed = {id(layout) for hook in hooks for layout in getattr(hook, "layouts", {}).values()}
    named: Any = model.named_parameters()
    for name, parameter in named:
        if not isinstance(parameter, nn.Parameter):
            yield (
                f"The model is called with another tensor in place of {name}, but gradients belong to the model's own "
                "parameters. Give functional_call tensors for all parameters and buffers, or call the plain model."
            )
        if isinstance(parameter, TableShard) and id(parameter.spread) not in placed:
            yield (
                f"{name} is sharded by another compiled model, so this rank has only a shard of it. Keep a table that "
                f"several models read whole in each of them, with strategy={{{name!r}: 'allreduce'}}, or compile one "
                "module that contains these models."
            )
        if parameter.requires_grad and has_node_hooks(parameter):
            yield (
                f"compile(): {name} has a hook on the autograd node that accumulates its gradient, and that node never "
                "runs here. Use register_post_accumulate_grad_hook(), or step the optimizer after backward()."
            )
    ignored = names_to_ignore(model)
    for name, module in model.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if weight in ignored and getattr(module, "scale_grad_by_freq", False):
            yield (
                f"compile(): {weight} is to be ignored and has scale_grad_by_freq, which counts ids over all ranks. "
                "Turn it off, or divide the gradient in a hook of the parameter."
            )


def _what(value: object) -> str:
    """Describes a value in an error message by its type."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"{value!r} of type {type(value).__name__}"


def agree_on_first_call(
    communicator: Communicator,
    activity: int,
    failure: Exception | None,
    route: str | None = "graph",
) -> str:
    """Checks, before there is a plan, that all ranks make the same call and none has failed to capture. Collective.

    Args:
        failure: the error with which this rank could not capture its batch, or None.
        route: the requested route.

    Returns:
        The reason why all ranks run the forward eagerly, or "" if all have captured it.

    Raises:
        CaptureError: a rank could not capture; on every rank. A rank whose forward raises by itself raises that error.
    """
    reason = runs_eagerly_for(failure, route)
    own = (activity, None if failure is None else failure_text(failure), reason)
    everyone = communicator.gather(own, tuple[int, str | None, str])
    check_activities([activity for activity, *_ in everyone])
    for rank, (_, report, reason) in enumerate(everyone):
        if report is not None and not reason:
            text = report if len(everyone) == 1 else f"the capture failed on rank {rank}: {report}"
            raise _of_forward(failure) or CaptureError(text) from failure
    return next((reason for *_, reason in everyone if reason), "")


def runs_eagerly_for(failure: Exception | None, route: str | None) -> str:
    """Returns the reason why a forward that could not be captured runs eagerly, or "" if it does not."""
    if route == "graph" or not isinstance(failure, CaptureError) or failure.raised is not None:
        return ""
    return failure.reason


def give_up(announcements: StepHandshake, failure: Exception) -> NoReturn:
    """Announces a failure in place of a step, so that other ranks do not wait, and raises it.

    Raises:
        CaptureError: the failure itself, if it is one (or the forward's own error); other ranks raise PeerFailure.
        PeerFailure: any other failure, on every rank.
    """
    report = None
    try:
        announcements.announce(HandshakeMessage(failure=failure_text(failure)))
    except PeerFailure as raised:
        report = raised
    if isinstance(failure, CaptureError):
        raise _of_forward(failure) or failure
    assert report is not None  # an announced failure raises on every rank
    raise report from failure


def _of_forward(failure: Exception | None) -> Exception | None:
    """Returns the user's own exception that made a capture fail, or None."""
    raised = failure.raised if isinstance(failure, CaptureError) else None
    if raised is not None:
        raised.add_note(f"Raised by the forward while it was captured: {failure}")
    return raised
