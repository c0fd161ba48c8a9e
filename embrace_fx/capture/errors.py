"""Explains why a capture failed: the user's line, and the reason that Dynamo found there."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._traceback import shorten_filename


class CaptureError(RuntimeError):
    """Raised if the model's forward cannot be captured as one graph.

    Attributes:
        raised: the error that the forward itself raises on this batch, or None.
        reason: the user's line, and the reason why it cannot be captured.
        where: the user's line, as "file:line in function", or "" if unknown.
        communicates: whether the forward calls a collective.
    """

    raised: Exception | None = None
    communicates = False

    def __init__(self, message: str, reason: str = "", where: str = "") -> None:
        super().__init__(message)
        self.reason = reason or _first_sentence(message)
        self.where = where


def _first_sentence(message: str) -> str:
    """Returns the first sentence of an error's message, without the model's class name before it."""
    sentence = " ".join(message.split()).partition(". ")[0]
    return re.sub(r"^\w+: ", "", sentence)


class RefusedError(CaptureError):
    """Raised if a model or batch has something that a graph cannot handle, such as backward hooks or nested tensors."""


def explain_failed_capture(model: nn.Module, error: Exception, raised: Exception | None) -> CaptureError:
    """Returns a `CaptureError` that explains to the user why a capture failed.

    Args:
        error: the error that the capture raised.
        raised: the error that the forward itself raises on the batch, or None if it runs.
    """
    kind, where = type(model).__name__, _user_line(error) or f"{type(model).__name__}.forward"
    skipped = _untraceable_call(error)
    found = f"{skipped}()" if skipped else f"{type(error).__name__}: {_first_lines(error)}"
    if raised is not None:
        failure = CaptureError(
            f"{kind}: the forward fails on this batch, at {_user_line(raised) or where}: {type(raised).__name__}: "
            f"{_first_lines(raised)}. Check the names, shapes, types and devices of the arguments. The model without "
            "embrace_fx should raise the same error."
        )
        failure.reason = ""  # no reason to run eagerly, because the plain forward fails, too
        if _comes_from_user_code(model, raised):
            failure.raised = raised
        return failure
    if (sent := _called_collective(error)) is not None:
        refusal = CaptureError(
            f"{kind}: the forward communicates, which cannot be captured. It calls torch.distributed.{sent}() at "
            f"{where} ({found}). Move the call into the training loop. Or leave out route='graph' and strategies that "
            "shard tables: the forward then runs eagerly, with whole tables.",
            f"{where} calls torch.distributed.{sent}()",
        )
        refusal.communicates = True
        return refusal
    return CaptureError(
        f"{kind}: the forward cannot be captured as one graph, at {where}: {found}. Rewrite that line so that it does "
        "not depend on tensor values (`.item()`, `if tensor:`, data-dependent shapes), or move it into the training "
        "loop. Or leave out route='graph': the forward then runs eagerly.",
        f"{where}: {_short_reason(error)}",
    )


def raised_by_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    """Returns the error that the forward itself raises on a batch, or None.

    If the error of the capture may come from the forward, this runs the forward once, eagerly and without gradients.
    The run stops at the forward's first collective. Buffers and random states are restored afterwards.

    Args:
        args, kwargs: the batch.
        error: the error that the capture raised.
    """
    of_forward = isinstance(error, TorchRuntimeError | TypeError | AttributeError | KeyError)
    leaves = [*pytree.tree_leaves((args, kwargs)), *model.parameters()]
    fake = any(isinstance(leaf, FakeTensor) or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in leaves)
    if not (of_forward or "Observed exception" in str(error)):
        return None
    if fake:  # meta tensors have no values to run the forward with
        return error if of_forward else _error_seen_by_dynamo(error)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng(), _StopAtCollectives():  # type: ignore[no-untyped-call]
            model(*args, **kwargs)
    except _CollectiveCalled:
        return None
    except Exception as raised:
        return raised
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return None


def _error_seen_by_dynamo(error: Exception) -> Exception | None:
    """Returns the built-in exception that the forward raised while Dynamo traced it. It is rebuilt from the message of
    Dynamo's error. Returns None if the message names no exception.
    """
    found = re.search(r"raised exception (\w+)(\(.*\))", str(error))
    kind = getattr(builtins, found[1], None) if found is not None else None
    try:
        given = ast.literal_eval(found[2] if found[2] == "()" else f"{found[2][:-1]},)") if found is not None else ()
    except (SyntaxError, ValueError):
        given = ()
    return kind(*given) if isinstance(kind, type) and issubclass(kind, Exception) else None


def _comes_from_user_code(model: nn.Module, raised: Exception) -> bool:
    """Returns whether an error of the forward was raised by the user's own code, not inside torch. The training loop
    may expect such an error.
    """
    frames = traceback.extract_tb(raised.__traceback__)
    own = getattr(sys.modules.get(type(model).__module__), "__file__", None)
    return not frames or frames[-1].filename == own or _is_user_code(frames[-1].filename)


class _CollectiveCalled(Exception):
    """Raised when a forward that runs on one rank alone reaches a collective, which would hang."""


class _StopAtCollectives(TorchDispatchMode):
    """A dispatch mode that raises `_CollectiveCalled` at a forward's first collective."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise _CollectiveCalled
        return func(*args, **(kwargs or {}))


def _untraceable_call(error: Exception) -> str:
    """Returns the name of the function that Dynamo refuses to trace, or "" if the error has another reason."""
    found = re.search(r"marked that the function `(\w+)`", str(error))
    return "" if found is None else found[1]


def _short_reason(error: Exception) -> str:
    """Returns the reason of a failed capture in one line, such as the function that Dynamo does not trace, or the first
    line of the error.
    """
    if skipped := _untraceable_call(error):
        return f"calls {skipped}()"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return "its sizes depend on values" if line.startswith(("Consider annotating", "Could not")) else line.rstrip(".")


def _called_collective(error: Exception) -> str | None:
    """Returns the name of the function of torch.distributed that raised the error, or None."""
    files = (dist.distributed_c10d.__file__, dist.nn.functional.__file__)
    refused = re.match(r"torch\.distributed\.(\w+) ", str(error))
    names = [name for file, _, name in _frames(error) if file in files] if refused is None else [refused[1]]
    return names[0] if names else None


def _user_line(error: Exception) -> str | None:
    """Returns the innermost line of user code in an error's traceback, as "file:line in function", or None."""
    if isinstance(error, CaptureError) and error.where:
        return error.where
    own = [frame for frame in _frames(error) if _is_user_code(frame[0])]
    return "{}:{} in {}".format(*own[-1]) if own else None


def _frames(error: Exception) -> list[tuple[str, str, str]]:
    """Returns (file, line, function) of each frame of an error, from Dynamo's message or the traceback."""
    if printed := re.findall(r'File "([^"]+)", line (\d+), in (\S+)', str(error).partition("from user code")[2]):
        return printed
    found = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        reader = frame.f_locals.get("self")
        if isinstance(reader, InstructionTranslatorBase) and (line := (reader.f_code, reader.lineno)) not in found:
            found.append(line)
    if found:
        return [(code.co_filename, str(line), code.co_name) for code, line in found]
    return [(frame.filename, str(frame.lineno), frame.name) for frame in traceback.extract_tb(error.__traceback__)]


def line_of_branch(conditions: Sequence[str]) -> str:
    """Returns the user's line that branches on the last of `conditions`, as "file:line in function", or "" if unknown.

    torch shortens the file's path in the conditions. The full path is looked up among the loaded files.

    Args:
        conditions: the source locations of torch's guards, as text.
    """
    found = [match for each in conditions if (match := re.search(r"# (\S+):(\d+) in (\S+)", each)) is not None]
    if not found:
        return ""
    shortened, line, name = found[-1].groups()
    modules = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    files = (file for file in (*modules, *list(linecache.cache)) if file.endswith(shortened))
    file = next((file for file in files if shorten_filename(file) == shortened), shortened)
    return f"{file}:{line} in {name}"


def _is_user_code(file: str) -> bool:
    """Returns whether a source file belongs to the user, rather than to torch, Python's inspect or this package."""
    library = __file__.rsplit("/", 2)[0]
    return not file.startswith((torch.__file__.rpartition("/")[0], library, inspect.__file__, "<"))


def _first_lines(error: Exception) -> str:
    """Returns the first two lines of an error's text, without a period at the end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") or "no message"
