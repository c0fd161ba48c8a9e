"""The cache of a model's programs: call -> key -> captures that calls of the key may share -> program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.capture import Captured
from embrace_fx.runtime.step.program import Program
from embrace_fx.vocabulary.graph import TrainingGraph


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call of the model, as passed (`args`, `kwargs`) and flattened.

    Attributes:
        leaves: the flattened arguments, of the structure `spec`.
        train: whether a backward may follow.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    train: bool


@dataclass
class Entry:
    """One capture of the forward, and the programs compiled from it.

    Attributes:
        captured: the capture. `analysed` is its graph with tables found, and `train` whether it has a backward.
        programs: whether gradients are accumulated (`no_sync`) -> program, built when first needed.
        reused: how many calls have used the capture, besides the one for which it was made.
    """

    captured: Captured
    analysed: TrainingGraph
    train: bool
    programs: dict[bool, Program] = field(default_factory=dict)
    reused: int = 0


@dataclass
class Entries:
    """The captures (`found`) of calls with the same cache key, which differ only in shapes and constants.

    Attributes:
        shapes: for each captured batch, index of a tensor -> its shape.
        values: names of values that have changed and so are inputs of graphs.
        deciding: names of values that have changed but cannot become inputs.
    """

    found: list[Entry] = field(default_factory=list)
    shapes: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    values: frozenset[str] = frozenset()
    deciding: frozenset[str] = frozenset()

    def accepting(self, leaves: Sequence[Any]) -> Entry | None:
        """Returns the capture that is valid for a batch, given flattened, or None if there is none."""
        for entry in self.found:
            if entry.captured.accepts(leaves):
                return entry
        return None


class ProgramCache(dict[Any, Entries]):
    """The entries of a model's calls, by `call_key`.

    Calls with the same arguments share their `shapes`: sizes that vary in training also vary in an evaluation.

    Attributes:
        captures: the number of captures made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0
        self._shapes: dict[Any, list[dict[int, tuple[int, ...]]]] = {}

    def __missing__(self, key: Any) -> Entries:
        self[key] = found = Entries(shapes=self._shapes.setdefault(key[0], []))
        return found

    def entries(self) -> Iterator[Entry]:
        """Yields every entry: one per capture."""
        for each in self.values():
            yield from each.found


@dataclass
class StepCounters:
    """The counters and requests that all calls of a model share.

    Attributes:
        calls: number of training calls.
        replan_for: the reason why this rank requests another plan, or "".
        rows_seen: watched table -> how many rows the next step reads.
        authority: the rank whose buffers the other ranks get.
        uneven: whether ranks may have run different numbers of optimizer steps (`join`).
        ahead: how many batches the loader is read ahead.
    """

    calls: int = 0
    replan_for: str = ""
    rows_seen: dict[str, int] = field(default_factory=dict)
    authority: int = 0
    uneven: bool = False
    ahead: int = 0


def call_key(modes: tuple[bool, ...], leaves: Sequence[Any], spec: pytree.TreeSpec, train: bool) -> Any:
    """Returns the cache key of a call: structure, dtypes, autocast, and the training modes of all modules. Calls with
    one key differ only in shapes and constants.

    Args:
        leaves: the flattened arguments.
        spec: the unique object for this structure, as returned by `flatten_arguments`.
    """
    autocast: tuple[Any, ...] = ()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            autocast += (device, torch.get_autocast_dtype(device))
    return (id(spec), signature(leaves)), train, modes, autocast


def signature(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the types, dtypes and devices of flattened arguments, which must match for a capture to be valid."""
    found: list[Any] = []
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor)
        found.append((leaf.dtype, leaf.device, leaf.dim(), leaf.requires_grad) if is_tensor else type(leaf))
    return tuple(found)
