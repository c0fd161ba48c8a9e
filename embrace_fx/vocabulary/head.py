"""What a graph's output layer over a table does with the product of hidden states and table.

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
    """Formats the element-wise steps between an output layer's product and its logits as text, for graphs.

    >>> steps_to_text([("div", 30.0, None), ("tanh", 0.0, None), ("to", 0.0, torch.float32)])
    'div 30.0, tanh, to float32'
    """
    return ", ".join(" ".join((name, *_operand_text(name, by, dtype))) for name, by, dtype in steps)


def _operand_text(name: str, operand: float, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Returns the text of a step's operand: a number, or a dtype for "to"; empty for a step without one."""
    if name == "tanh":
        return ()
    return (str(operand) if dtype is None else str(dtype).removeprefix("torch."),)


@lru_cache(maxsize=64)
def steps_from_text(steps: str) -> tuple[Step, ...]:
    """Parses the text that `steps_to_text` returns."""
    return tuple(_parse_step(*each.split()) for each in steps.split(", ") if each)


def _parse_step(name: str, operand: str = "") -> Step:
    """Parses one element-wise step from its name and its operand's text."""
    return (name, 0.0, getattr(torch, operand)) if name == "to" else (name, float(operand or 0), None)


def last_dtype(steps: str) -> torch.dtype | None:
    """Returns the dtype of the last cast among the steps, or None if they cast nothing."""
    return next((dtype for _, _, dtype in reversed(steps_from_text(steps)) if dtype is not None), None)


def softmax_dtype(steps: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which to compute a softmax after `steps`: never half precision. `dtype` is that of the
    product.
    """
    last = last_dtype(steps) or dtype
    return last if last.itemsize >= 4 else torch.float32


@dataclass(frozen=True)
class HeadPlan:
    """The plan for an output layer over a sharded table: how the hidden states of a batch's positions are exchanged.

    Attributes:
        chunks: the count of chunks in which positions are sent.
        scored: the share of positions that have a label, from 0 to 1, in the first batch.
        sent_bytes: predicted bytes that one rank sends per step.
    """

    chunks: int = 1
    scored: float = 1.0
    sent_bytes: int = 0


@dataclass(frozen=True)
class PromisedLogits:
    """Logits (.., V) of a sharded output layer that are computed only when the caller reads them. The model's graph
    returns hidden states (.., D) instead.

    Attributes:
        table: the parameter whose rows the logits are products with.
        bias: the added parameter, or "" for none.
        steps: the ops after the product, as text made by `steps_to_text`.
        narrow: the dtype of the product, or None for the table's.
        chunks: the count of chunks of scored positions in which a loss outside of the model is computed.
        keeps_logits: whether such a loss keeps the logits of all chunks for its backward instead of recomputing them.
    """

    table: str
    bias: str
    steps: str
    narrow: torch.dtype | None
    chunks: int = 1
    keeps_logits: bool = True
