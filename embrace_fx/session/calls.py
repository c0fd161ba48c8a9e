"""Groups a model's calls into kinds that captures may share, and holds the captures and their programs."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The arguments of a call, also flattened.

    Attributes:
        leaves: the flattened arguments, of the structure `spec`.
        train: a backward may follow.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    train: bool


@dataclass
class Variant:
    """A capture with its programs.

    Attributes:
        programs: by whether gradients are accumulated (`no_sync`); each built when first needed under the plan in use.
        reused: number of calls that have used it after the one it was captured for.
    """

    captured: Captured
    analysed: TrainingGraph
    train: bool
    programs: dict[bool, Program] = field(default_factory=dict)
    reused: int = 0


@dataclass
class Kind:
    """Calls that differ only in shapes and constants: structure, dtypes, training mode and autocast are the same.

    Attributes:
        shapes: of each captured batch, index of a tensor -> its shape.
        values: names of values that have changed and are inputs of graphs.
        deciding: names of values that have changed and cannot be inputs.
    """

    variants: list[Variant] = field(default_factory=list)
    shapes: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    values: frozenset[str] = frozenset()
    deciding: frozenset[str] = frozenset()


class Kinds(dict[Any, Kind]):
    """The kinds of calls that a model has had, by `kind_key`.

    Kinds with the same arguments share their `shapes`: sizes that vary in training also vary in an evaluation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[Any, list[dict[int, tuple[int, ...]]]] = {}

    def __missing__(self, key: Any) -> Kind:
        self[key] = kind = Kind(shapes=self._shapes.setdefault(key[0], []))
        return kind


def kind_key(modes: tuple[bool, ...], leaves: Sequence[Any], spec: pytree.TreeSpec, train: bool) -> Any:
    """Makes the key that calls of one kind share; `modes`: the training modes of all modules."""
    signature = tuple(
        (leaf.dtype, leaf.device, leaf.dim(), leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in leaves
    )
    autocast = tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )
    return (spec, signature), train, modes, autocast
