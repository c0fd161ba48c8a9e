"""Makes the launches that other ranks wait for, with zeros, when this rank cannot finish a phase.

Contract
    A rank that fails in the middle of a phase (out of memory, a label outside of its classes) submits what it has not
    submitted yet, in the order of the phase, in the sizes that all ranks know. So no other rank is left waiting in a
    collective; what they receive is thrown away, for this rank shares its failure before anything is applied.

Shape legend: as in `embrace_fx/vocabulary/ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.runtime.flow.comm_pipeline import CommPipeline
from embrace_fx.runtime.ranks.communicator import InFlight, counts_as_lists
from embrace_fx.vocabulary.graph import Saved, Values
from embrace_fx.vocabulary.head_ops import HEAD_LAUNCHES
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.ops import LAUNCHES, SUBMISSIONS, op_name

Call = Callable[..., Any]


@dataclass(frozen=True)
class _RegisteredLaunch:
    """A collective that a phase launches, with what is needed to launch it if the phase fails."""

    op: str
    id: OperationId | None  # None if it is launched immediately, without the launcher
    call: Call
    arguments: tuple[Any, ...]  # of `call`; a value that a phase has saved is represented by its `Saved` role
    like: Tensor | None  # a fake tensor with the shape and dtype of what is sent, or None


class MissingLaunches:
    """Launches the collectives that a failed phase has not launched, because other ranks wait for them. Sends zeros.

    Attributes:
        on_the_spot: whether the phase makes some launches immediately, without the launcher.
    """

    def __init__(self, flow: CommPipeline) -> None:
        self._flow, self._communicator = flow, flow.communicator
        self._launches: list[_RegisteredLaunch] = []
        self._names: set[str] = set()  # names of saved values
        self.on_the_spot = False

    def add(self, node: fx.Node, call: Call) -> Call:
        """Registers a node if it launches a collective. Returns `call`, or a wrapper that counts its calls."""
        op = op_name(node)
        if op not in SUBMISSIONS | LAUNCHES or not self._flow.shares_failures:
            return call
        arguments = tuple(map(_to_saved_role, node.args))
        self._names.update(each.name for each in arguments if isinstance(each, Saved))
        sent = node.args[0] if isinstance(node.args[0], fx.Node) else None
        like = sent.meta["val"] if sent is not None else None
        launch = self._flow.launcher.launch_of(node)
        self._launches.append(_RegisteredLaunch(op, launch, call, arguments, like))
        if launch is not None:
            return call
        self.on_the_spot = True

        def launched(*arguments: Any) -> Any:
            self._made += 1
            return call(*arguments)

        launched.__name__ = getattr(call, "__name__", "launched")
        return launched

    def begin(self, values: Values) -> Values:
        """Begins a phase. Returns the saved `values` that are needed to make the phase's launches if it fails."""
        self._made = 0  # count of launches made without a launcher in this run of the phase
        return {name: values[name] for name in self._names if name in values}

    def submit(self, values: Values) -> None:
        """Makes the launches that the failed phase has not made. `values` is the result of `begin`."""
        if self._flow.awaits_ids and any(each.id is not None and each.id.needs_lookahead for each in self._launches):
            self._flow.await_ids()  # this also divides the next batch's rows into early and late ones
        made, under_way = self._made, list[InFlight]()
        for each in self._launches:
            if each.id is None and made:
                made -= 1
            elif each.id is None:
                under_way.append(self._make(each, values))
            elif self._flow.launcher.expects(each.id):
                self._make(each, values)
        for launched in under_way:
            self._communicator.wait(launched)

    def _make(self, launch: _RegisteredLaunch, values: Values) -> Any:
        """Makes a missing launch, with zeros in place of the tensor to send. Returns what the launch returns."""
        first, *rest = (values[each.name] if isinstance(each, Saved) else each for each in launch.arguments)
        void = first if launch.like is None else self._zeros(launch, rest)
        return launch.call(void, *rest)

    def _zeros(self, launch: _RegisteredLaunch, arguments: list[Any]) -> Tensor | None:
        """Returns zeros in the shape of the tensor that a launch sends, or None if it needs no tensor. `arguments` are
        the launch's other arguments; for a launch of the output layer's exchange, the first is set to None.
        """
        like, rank = launch.like, self._communicator.rank
        assert like is not None
        if launch.op in ("embrace::submit_rows", "embrace::gather_counts"):
            return None  # submit_rows looks up its rows itself, and gather_counts sends a count of zero
        if launch.op in HEAD_LAUNCHES:  # the exchange computes the number of rows from the announced counts
            arguments[0] = None
            return torch.zeros((0, *like.shape[1:]), dtype=like.dtype, device=like.device)
        if launch.op in ("embrace::submit_chunk", "_c10d_functional::all_reduce_", "embrace::exchange_gradient_"):
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        if launch.op == "embrace::submit_gradients":
            counts, shape = arguments[1], [int(arguments[1][rank]), like.shape[1]]
        else:
            counts, width = counts_as_lists(arguments[0]), arguments[1]
            if launch.op == "embrace::all_to_all_gradients":
                shape = [sum(counts[rank]) * width]
            else:
                row = rank // (len(counts) // len(counts[0]))
                shape = [sum(of_rank[row] for of_rank in counts), like.shape[1]]
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _to_saved_role(argument: Any) -> Any:
    """Returns the role of a saved value, None for another node or a list of nodes, and a constant as it is."""
    if isinstance(argument, fx.Node):
        role = argument.meta.get("role")
        return role if argument.op == "placeholder" and isinstance(role, Saved) else None
    if isinstance(argument, list | tuple) and any(isinstance(each, fx.Node) for each in argument):
        return None
    return argument
