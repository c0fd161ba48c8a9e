"""A step with its nodes and storages numbered, for a search that reads them thousands of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import fx

from embrace_fx.passes.memory.place import NO_COPIES, CopyRate
from embrace_fx.passes.node_cost import NodeMs
from embrace_fx.passes.step_memory import StepMemory, Storage


@dataclass(frozen=True)
class Costs:
    """The times that a search for a choice needs.

    Attributes:
        node_ms: node -> its milliseconds.
        copies: how fast values are offloaded and reloaded.
    """

    node_ms: NodeMs
    copies: CopyRate = NO_COPIES


class Numbered:
    """A step whose nodes are numbered in the order in which they run, and storages as in `StepMemory.storages`.

    Attributes:
        ms: milliseconds of each node.
        inputs: node -> the nodes that it reads.
        memory: node -> the storages that its value lies in.
        makers: storage -> the node that makes it.
    """

    def __init__(self, held: StepMemory, costs: Costs) -> None:
        self.held = held
        self.copies = costs.copies
        self.position: dict[fx.Node, int] = {node: k for k, node in enumerate(held.nodes)}
        self.ms: Sequence[float] = [costs.node_ms(node) for node in held.nodes]
        self.inputs: Sequence[Sequence[int]] = [
            [self.position[value] for value in node.all_input_nodes if value in self.position] for node in held.nodes
        ]
        self._numbers = {id(storage): k for k, storage in enumerate(held.storages)}
        self.memory: Sequence[Sequence[int]] = [
            [self._numbers[id(s)] for s in held.memory[node]] for node in held.nodes
        ]
        self.makers: Sequence[int] = [self.position[storage.node] for storage in held.storages]

    def number(self, storage: Storage) -> int:
        """Returns the number of a storage."""
        return self._numbers[id(storage)]

    def names(self, storage: Storage) -> list[int]:
        """Returns the nodes whose values lie in a storage."""
        return [self.position[node] for node in storage.names]

    @cached_property
    def starts_ms(self) -> list[float]:
        """The time at which each node begins; one more: the end of the last."""
        return list(accumulate(self.ms, initial=0.0))

    def unread_ms(self, storage: Storage) -> float:
        """Returns the milliseconds from a storage's last read in the forward to its first in the backward."""
        return self.starts_ms[storage.first_backward or 0] - self.starts_ms[storage.last_forward + 1]
