"""The cache of a model's programs. A call's key selects cache entries, each with a capture and the programs compiled
from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.capture import Captured
from embrace_fx.runtime.step.program import Program
from embrace_fx.vocabulary.graph import TrainingGraph


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call of the model.

    Attributes:
        args, kwargs: the arguments as passed.
        leaves: the flattened arguments.
        spec: the tree structure of the arguments.
        train: whether gradients are enabled, so that a backward may follow.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    train: bool


@dataclass
class Entry:
    """A cache entry: one capture of the forward, and the programs compiled from it.

    Attributes:
        captured: the capture.
        analysed: the captured graph, in which tables have been found.
        train: whether the graph has a backward.
        programs: the program that reduces gradients (key False), and the one that accumulates them under `no_sync` (key
            True). Each is compiled when first needed.
        reused: the number of calls that have used the capture, besides the call for which it was made.
    """

    captured: Captured
    analysed: TrainingGraph
    train: bool
    programs: dict[bool, Program] = field(default_factory=dict)
    reused: int = 0


@dataclass
class Entries:
    """The cache entries of calls with the same cache key, which differ only in shapes and constants.

    Attributes:
        found: the entries, in the order of their capture.
        shapes: for each capture, the shapes of the tensors in its batch, by index among the flattened arguments.
        values: names of numbers that have changed between calls, and have therefore become inputs of graphs.
        deciding: names of numbers that have changed but cannot become inputs, because their values decide what is
            computed.
    """

    found: list[Entry] = field(default_factory=list)
    shapes: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    values: frozenset[str] = frozenset()
    deciding: frozenset[str] = frozenset()

    def accepting(self, leaves: Sequence[Any]) -> Entry | None:
        """Returns the first entry whose capture is valid for a flattened batch (`leaves`), or None."""
        for entry in self.found:
            if entry.captured.accepts(leaves):
                return entry
        return None


class ProgramCache(dict[Any, Entries]):
    """The cache entries of a model's calls, by cache key (`call_key`).

    Calls whose arguments have the same structure and dtypes share one list `Entries.shapes`, in training and in
    evaluation.

    Attributes:
        captures: the number of captures made so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0
        self._shapes: dict[Any, list[dict[int, tuple[int, ...]]]] = {}

    def __missing__(self, key: Any) -> Entries:
        self[key] = found = Entries(shapes=self._shapes.setdefault(key[0], []))
        return found

    def entries(self) -> Iterator[Entry]:
        """Returns an iterator over every cache entry of every key."""
        return chain.from_iterable(each.found for each in self.values())


@dataclass
class StepCounters:
    """The counters and requests that all calls of a model share.

    Attributes:
        calls: the number of training calls.
        replan_for: the reason why this rank requests another plan, or "".
        rows_seen: the number of rows that the next step reads, by the name of the table, for tables in `Plan.watched`.
        authority: the rank whose buffers all ranks use.
        uneven: whether ranks may have run different numbers of optimizer steps (`join`).
        ahead: the number of batches that are read from the loader in advance.
    """

    calls: int = 0
    replan_for: str = ""
    rows_seen: dict[str, int] = field(default_factory=dict)
    authority: int = 0
    uneven: bool = False
    ahead: int = 0


def call_key(modes: tuple[bool, ...], leaves: Sequence[Any], spec: pytree.TreeSpec, train: bool) -> Any:
    """Returns the cache key of a call: structure and dtypes of its arguments, modes of modules, autocast, and whether
    it trains. Calls with equal keys differ only in shapes and constants.

    Args:
        modes: the training mode of each module, then `requires_grad` of each parameter.
        leaves: the flattened arguments.
        spec: the tree structure of the arguments, as returned by `flatten_arguments`.
        train: whether gradients are enabled.
    """
    enabled = filter(torch.is_autocast_enabled, ("cpu", "cuda"))
    autocast = tuple((device, torch.get_autocast_dtype(device)) for device in enabled)
    return (id(spec), signature(leaves)), train, modes, autocast


def signature(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the types, dtypes, devices and numbers of dimensions of flattened arguments, which a capture fixes."""
    found = [
        (leaf.dtype, leaf.device, leaf.dim(), leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in leaves
    ]
    return tuple(found)
