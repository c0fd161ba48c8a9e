"""Describes how an output layer over a sharded table is computed: its steps, its exchanges, and logits computed on
demand.

`Step`s are the element-wise ops between the product and the softmax, in order: ("div", 30.0, None), ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

Step = tuple[str, float, torch.dtype | None]
"""("mul" or "div", a number, None), ("tanh", 0.0, None), or ("to", 0.0, a dtype)."""


def steps_to_text(steps: Sequence[Step]) -> str:
    """Formats the element-wise ops between an output layer's product and its logits as text, to be stored in a
    graph.

    >>> steps_to_text([("div", 30.0, None), ("tanh", 0.0, None), ("to", 0.0, torch.float32)])
    'div 30.0, tanh, to float32'
    """
    return ", ".join(" ".join((name, *_operand_text(name, by, dtype))) for name, by, dtype in steps)


def _operand_text(name: str, operand: float, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Formats the operand of an element-wise op. Returns a tuple with one text: the dtype for "to", the number for
    "mul" and "div". Returns () for "tanh", which has no operand.

    Args:
        name: the name of the op.
        operand: the number, if the op has one.
        dtype: the dtype for "to", or None.
    """
    if name == "tanh":
        return ()
    return (str(operand) if dtype is None else str(dtype).removeprefix("torch."),)


@lru_cache(maxsize=64)
def steps_from_text(steps: str) -> tuple[Step, ...]:
    """Parses the text that `steps_to_text` has made. Returns a tuple (name, number, dtype) for each element-wise op."""
    return tuple(_parse_step(*each.split()) for each in steps.split(", ") if each)


def _parse_step(name: str, operand: str = "") -> Step:
    """Parses the name of an element-wise op, such as "div", and the text of its operand. Returns (name, number, dtype):
    the dtype is None except for "to", and the number is 0 if the op has none.
    """
    return (name, 0.0, getattr(torch, operand)) if name == "to" else (name, float(operand or 0), None)


def last_dtype(steps: str) -> torch.dtype | None:
    """Returns the dtype of the last cast in a sequence of element-wise ops, or None if there is no cast.

    Args:
        steps: the ops, as text made by `steps_to_text`.
    """
    return next((dtype for _, _, dtype in reversed(steps_from_text(steps)) if dtype is not None), None)


def softmax_dtype(steps: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which to compute a softmax of an output layer's logits: that of the last cast, but at least
    32 bits.

    Args:
        steps: the element-wise ops between the layer's product and the softmax, as text made by `steps_to_text`.
        dtype: the dtype of the product.
    """
    last = last_dtype(steps) or dtype
    return last if last.itemsize >= 4 else torch.float32


@dataclass(frozen=True)
class HeadPlan:
    """The plan for an output layer whose table is sharded by rows: how the ranks exchange hidden states.

    Attributes:
        chunks: the number of chunks into which the labelled positions are divided for the exchange.
        scored: the share of the first batch's positions that have a label, from 0 to 1.
        sent_bytes: predicted bytes that one rank sends per step.
    """

    chunks: int = 1
    scored: float = 1.0
    sent_bytes: int = 0


@dataclass(frozen=True)
class PromisedLogits:
    """Logits (.., V) of a sharded output layer that are computed only when the caller reads them. The graph returns
    their hidden states (.., D) instead.

    Attributes:
        table: name of the output layer's weight.
        bias: name of the output layer's bias, or "".
        steps: the element-wise ops between the layer's product and the logits, as text made by `steps_to_text`.
        narrow: the dtype of the product, or None for the table's own.
        chunks: the number of chunks in which a loss outside of the model is computed.
        keeps_logits: whether a loss outside of the model keeps all logits for its backward instead of recomputing them.
    """

    table: str
    bias: str
    steps: str
    narrow: torch.dtype | None
    chunks: int = 1
    keeps_logits: bool = True
