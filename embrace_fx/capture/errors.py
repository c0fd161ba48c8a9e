"""What is said of a model that cannot be captured: the user's line, and what each route found."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn


class CaptureError(RuntimeError):
    """The model's forward cannot be captured as one graph.

    Attributes:
        raised: what the forward itself raises, by a line of the user's; None: it is captured as far as it goes.
    """

    raised: Exception | None = None


class RefusedError(CaptureError):
    """The model's forward does what no graph can do at each call; another route would leave it out silently."""


def explain(model: nn.Module, failures: Sequence[tuple[str, Exception]]) -> str:
    """A `CaptureError`'s message.

    Args:
        failures: (route, what it raised), in the order tried.
    """
    where = next((line for _, e in failures if (line := _user_line(e))), f"{type(model).__name__}.forward")
    reasons = "\n".join(f"  {route}: {type(e).__name__}: {_first_lines(e)}" for route, e in failures)
    if (sent := next((name for _, e in failures if (name := _collective(e))), None)) is not None:
        return (
            f"expected collectives that a graph can hold, in {type(model).__name__}, at {where}, found "
            f"torch.distributed.{sent}() ({reasons.splitlines()[0].strip()}). Use all_reduce, "
            "broadcast, all_gather, reduce_scatter, all_to_all_single or "
            "those of torch.distributed.nn, without async_op, or communicate in the training loop."
        )
    if (skipped := next((name for _, e in failures if (name := _skipped(e)) in _UNSIZED), None)) is not None:
        return (
            f"expected a forward whose sizes depend on no values, in {type(model).__name__}, at {where}, found "
            f"{skipped}(). {_UNSIZED[skipped]}"
        )
    if (own := next((e for route, e in failures if route == "direct" and _is_of_forward(e)), None)) is not None:
        return (
            f"expected a batch that the forward takes, in {type(model).__name__}, at {_user_line(own) or where}, found "
            f"that the forward fails on it while it is traced: {type(own).__name__}: {_first_lines(own)}. Call the "
            "model with the arguments, names, shapes, types and devices that it expects; the plain model tells "
            "whether it takes them.\n"
            f"Found:\n{reasons}"
        )
    return (
        f"expected a forward that can be captured as one graph, in {type(model).__name__}, at "
        f"{where}.\nFound:\n{reasons}\n"
        "Rewrite that line so that it does not depend on tensor values (no `.item()`, no `if tensor:`, no "
        "data-dependent shapes), or move it out of the model into the training loop."
    )


def raised_by_forward(model: nn.Module, failures: Sequence[tuple[str, Exception]]) -> Exception | None:
    """What a line of the user's raises, on any batch like this one: with the plain model it would be the same."""
    own = getattr(sys.modules.get(type(model).__module__), "__file__", None)
    for route, error in failures:
        if route == "direct" and _is_of_forward(error):
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            if raised_in == own or _is_of_user(raised_in):
                return error
    return None


def shortfall(failures: Sequence[tuple[str, Exception]]) -> str:
    """In one line, why routes did not take a model that a later one has taken; empty where the first one did."""
    return "; ".join(f"{_user_line(error) or 'forward'}: {_first_lines(error)}" for _, error in failures)


def _is_of_forward(error: Exception) -> bool:
    """Whether a forward would raise this in eager mode too: what tracing alone raises speaks of its fake tensors."""
    spoken = str(error).lower()
    of_tracing = "fake" in spoken or "subclass" in spoken or "symbolic" in spoken or "data-dependent" in spoken
    return type(error).__module__ == "builtins" and not isinstance(error, AssertionError) and not of_tracing


_UNSIZED = {
    "pack_padded_sequence": (
        "Pack the ids in the training loop and pass the PackedSequence: the forward looks up its data, and hands the "
        "recurrent network PackedSequence(rows, *ids[1:])."
    ),
    "pad_packed_sequence": "Return the packed data, or the last states.",
}
"""Functions of torch.nn.utils.rnn that no route takes, and what to do instead."""


def _skipped(error: Exception) -> str | None:
    """The function that Dynamo does not look into, where that is why it has given up."""
    found = re.search(r"marked that the function `(\w+)`", str(error))
    return None if found is None else found[1]


def _collective(error: Exception) -> str | None:
    """The function of torch.distributed, called by the forward, in which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (f.name for f in frames if f.filename in (dist.distributed_c10d.__file__, dist.nn.functional.__file__))
    return next(own, None)


def _user_line(error: Exception) -> str | None:
    """The last line of the user's code: Dynamo prints it, the direct route has it in the traceback."""
    printed = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', str(error).partition("from user code")[2])
    frames = printed or [(f.filename, str(f.lineno), f.name) for f in traceback.extract_tb(error.__traceback__)]
    own = [f for f in frames if _is_of_user(f[0])]
    return "{}:{} in {}".format(*own[-1]) if own else None


def _is_of_user(file: str) -> bool:
    library = __file__.rsplit("/", 2)[0]
    return not file.startswith((torch.__file__.rpartition("/")[0], library, inspect.__file__, "<"))


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or "no message"
