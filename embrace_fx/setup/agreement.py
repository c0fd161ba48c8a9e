"""Checks that ranks agree on model, optimizers and options; a rank that cannot continue reports it to the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from embrace_fx.capture.errors import CaptureError
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.default_group import check_mesh
from embrace_fx.runtime.ranks.failure import PeerFailure, failure_text
from embrace_fx.runtime.ranks.step_checks import check_activities
from embrace_fx.runtime.ranks.step_handshake import HandshakeMessage, StepHandshake
from embrace_fx.runtime.tables.model_state import ModelState, ignored_names
from embrace_fx.setup.model_checks import check_model
from embrace_fx.setup.options import Options


class SetUpError(ValueError, RuntimeError):
    """Raised if `compile` cannot train a model with the given arguments. It is a ValueError and, like the errors of
    DDP's constructor, a RuntimeError.
    """


class RunsEagerly(Exception):
    """Raised on all ranks to run the forward eagerly, because some rank cannot capture it. The message says why."""


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
    """Checks the arguments of all ranks together, because other ranks would wait for a rank that fails alone.

    Args:
        optimizers, options: the arguments of `compile`.
        mesh: the device mesh given in place of a process group.
        hook: the communication hook's name, or "".
        is_called: whether this is the first call. Unlike in `compile`, all parameters may then be frozen, as those of a
            GAN's discriminator are in some calls.

    Raises:
        SetUpError: some rank's arguments are bad, or differ from rank 0's. Raised on every rank, with the first
            difference.
    """
    own: dict[str, str] | str
    try:
        options.check()
        check_mesh(mesh)
        check_model(model, optimizers, is_called=is_called)
        if options.backend == "inductor":
            from embrace_fx.runtime.lower.inductor import check_toolchain  # noqa: PLC0415  (takes seconds to import)

            check_toolchain({parameter.device.type for parameter in model.parameters()})
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
                    f"and {here} on rank 0. Create model, optimizer and options with the same code on every rank."
                )


def describe(model: nn.Module, optimizers: Sequence[Optimizer], options: Options) -> dict[str, str]:
    """Describes this rank's model, optimizers and options, for ranks to compare. Maps each aspect, such as "parameter
    0.weight", to a text.
    """
    ignored = ignored_names(model)
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
            settings = comparable_options(group)
            known = (names.get(id(parameter), "not of the model") for parameter in group["params"])
            held = [name for name in known if name not in ignored]
            found[f"optimizer {k}, param group {g}"] = f"{type(optimizer).__name__} {settings} over {held}"
    found["options"] = options.text_to_compare()
    return found


def replicated_values(state: ModelState, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for everything that must be equal on all ranks: parameters, options of param groups, and
    optimizer state.

    The elements of sharded tables and of their optimizer state are left out, because each is on one rank only. Step
    counters of their optimizers are included. Buffers are left out, because they may legitimately differ between steps.
    """
    # A tied parameter counts once, by its first name.
    names = {id(state.parameter(name)): name for name in reversed(state.names)}
    sharded = {id(table.parameter) for table in state.tables.values() if table.layout.mesh is not None}
    for key, name in names.items():
        if key not in sharded and name not in state.ignored:
            yield name, state.parameter(name)
    for k, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        for g, group in enumerate(optimizer.param_groups):
            yield f"param group {g} of optimizer {k} ({kind})", comparable_options(group)
        for parameter, of_parameter in optimizer.state.items():
            name = names.get(id(parameter), "")
            for key, value in of_parameter.items() if name and name not in state.ignored else ():
                is_part = isinstance(value, Tensor) and value.dim() > 0 and id(parameter) in sharded
                if not is_part:
                    yield f"{key} of {name} ({kind})", value


def comparable_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a param group, without its parameters, as values that can be compared between ranks."""
    options = ((key, value) for key, value in group.items() if key != "params")
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in options}


def agree_on_first_call(
    communicator: Communicator, activity: int, failure: Exception | None, route: str | None = "graph"
) -> str:
    """Checks, before there is a plan, that all ranks make the same call and that none has failed to capture its batch.
    Collective.

    Args:
        activity: the mode of the call, as returned by `Context.activity`.
        failure: the error with which this rank could not capture its batch, or None.
        route: the option `route` of `compile`.

    Returns:
        The reason why all ranks run the forward eagerly, or "" if all have captured it.

    Raises:
        CaptureError: some rank could not capture its batch; raised on every rank. If the forward itself has raised an
            error on this rank, that error is raised instead.
    """
    reason = runs_eagerly_for(failure, route)
    own = (activity, None if failure is None else failure_text(failure), reason)
    everyone = communicator.gather(own, tuple[int, str | None, str])
    check_activities([activity for activity, *_ in everyone])
    for rank, (_, report, reason) in enumerate(everyone):
        if report is not None and not reason:
            text = report if len(everyone) == 1 else f"the capture failed on rank {rank}: {report}"
            raise _error_of_forward(failure) or CaptureError(text) from failure
    return next((reason for *_, reason in everyone if reason), "")


def runs_eagerly_for(failure: Exception | None, route: str | None) -> str:
    """Returns the reason to run a forward eagerly after its capture failed, or "" if it must not run eagerly.

    Args:
        failure: the error of the capture, or None.
        route: the option `route` of `compile`.
    """
    if route == "graph" or not isinstance(failure, CaptureError) or failure.raised is not None:
        return ""
    return failure.reason


def give_up(announcements: StepHandshake, failure: Exception) -> NoReturn:
    """Announces to the other ranks that this rank has failed and will not run the step. Then raises an error on every
    rank.

    Raises:
        CaptureError: the failure is a `CaptureError`; raised on this rank only. If the forward itself has raised an
            error, that error is raised instead.
        PeerFailure: raised on all other ranks, and on this rank after any other failure.
    """
    report = None
    try:
        announcements.announce(HandshakeMessage(failure=failure_text(failure)))
    except PeerFailure as raised:
        report = raised
    if isinstance(failure, CaptureError):
        raise _error_of_forward(failure) or failure
    assert report is not None  # an announced failure makes `announce` raise on every rank
    raise report from failure


def _error_of_forward(failure: Exception | None) -> Exception | None:
    """Returns the exception that the user's own forward raised during a failed capture, or None."""
    raised = failure.raised if isinstance(failure, CaptureError) else None
    if raised is not None:
        raised.add_note(f"Raised by the forward while it was captured: {failure}")
    return raised
