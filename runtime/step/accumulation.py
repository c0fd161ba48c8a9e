"""Follows autograd while it accumulates gradients, for eager calls: when a backward begins, which gradients it
computes, how it ends.

Contract
    A backward begins where autograd reaches a result of the model, or a parameter that the loss reads by itself, before
    it accumulates anything. It ends with the engine's last callback, once for all calls of the model that it goes
    through. Its gradients are taken out of `.grad`, which is restored: the step delivers gradients for all parameters
    together, or for none. A callback that the engine drops without calling it belongs to a backward that has raised.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from embrace_fx.runtime.step.gradient_hooks import NodeHook, is_hooked
from embrace_fx.runtime.step.gradient_step import GradientStep
from embrace_fx.vocabulary.plain_objects import is_plain_object

_NO_CALL = (
    "backward() computed gradients of parameters without an earlier call of the compiled model, so these gradients "
    "would not be averaged over ranks. Call the model that compile() returned. Add terms that depend only on "
    "parameters, such as weight penalties, to the loss of that call"
)

_RAISED = "the backward failed on this rank, with an error of its own"


@dataclass
class _EagerBackward:
    """The state of a running backward of an eager call."""

    step: GradientStep
    task: int  # autograd's id of the backward; a nested backward, such as that of a checkpoint, has another one
    before: dict[str, Tensor] = field(default_factory=dict)  # parameter -> its `.grad` before, if it had one
    # Parameters whose `.grad` stays in place, because their hooks must see the sum of the old and the new gradient.
    kept: set[str] = field(default_factory=set)
    reached: dict[str, None] = field(default_factory=dict)  # parameters with a gradient, in order of accumulation


class _End:
    """A callback that the autograd engine calls at the end of a backward."""

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation: Accumulation | None = accumulation

    def __call__(self) -> None:
        accumulation, self._accumulation = self._accumulation, None
        assert accumulation is not None
        accumulation.end()

    def __del__(self) -> None:
        if self._accumulation is not None:
            self._accumulation.fail()


class Accumulation:
    """Follows autograd while it accumulates the gradients of one model's parameters.

    Args:
        look: a weak reference to a method. It is called with the gradients of a backward, by parameter name, before
            they are exchanged.

    Attributes:
        parameters: name -> parameter, for parameters whose gradients are exchanged.
        backward: the backward that is running, or None.
    """

    def __init__(self, look: weakref.ReferenceType[Callable[[Mapping[str, Tensor]], None]]) -> None:
        self._look = look
        self.parameters: dict[str, nn.Parameter] = {}
        self._nodes: list[Any] = []  # keeps the nodes of the parameters alive, because autograd does not
        self._handles: list[Any] = []
        self.backward: _EagerBackward | None = None
        self._waiting: list[weakref.ref[GradientStep]] = []  # calls whose backward may still run, in order
        # The call of the last backward. A backward that reaches only parameters is attributed to it.
        self._last: GradientStep | None = None
        self._nests: bool | None = None  # whether a backward has contained another one, or None before the first

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Starts watching the autograd nodes that accumulate the gradients of these parameters."""
        if [*map(id, parameters.values())] == [*map(id, self.parameters.values())]:
            return
        self.forget()
        self.parameters = dict(parameters)
        # Hooks refer to this object weakly, because the garbage collector does not see references from C++.
        itself = weakref.ref(self)
        for name, parameter in parameters.items():
            with torch.enable_grad():
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
            self._handles.append(node.register_prehook(NodeHook(_on_backward_node, itself, None)))
            self._handles.append(node.register_hook(NodeHook(_on_accumulated, itself, name)))
            self._nodes.append(node)

    def forget(self) -> None:
        """Stops watching the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        self.parameters, self._last = {}, None

    def expect(self, step: GradientStep, results: Any) -> None:
        """Attributes backwards that start at a call's returned results to the call's step."""
        self._waiting = [each for each in self._waiting if each() is not None] + [weakref.ref(step)]
        leaves = [leaf for leaf in _tensors_in(results) if leaf.requires_grad and leaf.grad_fn is not None]
        step.end_forward(leaves)
        itself = weakref.ref(self)
        for node in {leaf.grad_fn for leaf in leaves}:
            assert node is not None
            node.register_prehook(partial(_on_backward_node, itself, step))

    def begin(self, step: GradientStep | None) -> None:
        """Begins a backward that started at the results of `step`, or, if None, elsewhere: it is the last call's."""
        if not self._accumulates_parameters():
            return
        of_results = step is not None
        if step is None:
            step = next((found for each in reversed(self._waiting) if (found := each()) is not None), self._last)
        if step is None:
            raise RuntimeError(_NO_CALL)
        backward = self.backward = _EagerBackward(step, torch._C._current_graph_task_id())
        torch.autograd.Variable._execution_engine.queue_callback(_End(self))
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and is_hooked(parameter):
                backward.before[name] = parameter.grad.clone()
                backward.kept.add(name)
            elif parameter.grad is not None:
                backward.before[name], parameter.grad = parameter.grad, None
        with torch.no_grad():
            step.begin_backward(of_results=of_results)

    def _accumulates_parameters(self) -> bool:
        """Returns whether the running backward accumulates into `.grad`. This is not so under `torch.autograd.grad`."""
        try:
            return any(map(torch._C._will_engine_execute_node, self._nodes))
        except RuntimeError:  # torch raises under `torch.autograd.grad` of a parameter
            return False

    def end(self) -> None:
        """Ends the backward, and reduces its gradients over ranks. Collective."""
        self._nests = bool(self._nests)
        step, gradients = self._finish_backward()
        if (look := self._look()) is not None:
            look(gradients)
        step.exchange(gradients)
        self._last = step

    def fail(self) -> None:
        """Tells the other ranks that this rank's backward has raised an error. Suppresses errors of other ranks."""
        if self.backward is None:
            return
        step, _ = self._finish_backward()
        with contextlib.suppress(Exception):
            step.exchange({}, RuntimeError(_RAISED))

    def _finish_backward(self) -> tuple[GradientStep, dict[str, Tensor]]:
        """Restores `.grad`. Returns the call, and the gradients by name, in the order of their accumulation."""
        backward, self.backward = self.backward, None
        assert backward is not None
        found = [(name, self.parameters[name].grad) for name in backward.reached]
        gradients = {
            name: self._added_by(backward, name) if name in backward.kept or gradient.requires_grad else gradient
            for name, gradient in found
            if gradient is not None
        }
        for name, parameter in self.parameters.items():
            parameter.grad = backward.before.get(name)
        return backward.step, gradients

    def _added_by(self, backward: _EagerBackward, name: str) -> Tensor:
        """Returns what this backward has added to a parameter's `.grad`."""
        found = self.parameters[name].grad
        assert found is not None
        return found.detach() - backward.before[name] if name in backward.kept else found.detach()


def _on_accumulated(itself: weakref.ref[Accumulation], name: str, *_: Any) -> None:
    """Sends a parameter's bucket once it is complete. A hook that runs after autograd has accumulated a gradient."""
    accumulation = itself()
    if accumulation is None or (backward := accumulation.backward) is None:
        return
    backward.reached[name] = None
    if torch._C._current_graph_task_id() != backward.task:
        accumulation._nests = True
    gradient = accumulation.parameters[name].grad
    if accumulation._nests is False and gradient is not None:
        is_own = name not in backward.kept and not gradient.requires_grad
        backward.step.add(name, gradient if is_own else accumulation._added_by(backward, name))


def _on_backward_node(itself: weakref.ref[Accumulation], step: GradientStep | None, *_: Any) -> None:
    """Begins a backward, or records that the running one goes through this call too. A hook that runs before an
    autograd node at which a backward of the model may start.

    Args:
        step: the call whose result the node computes, or None if the node accumulates a parameter's gradient.
    """
    accumulation = itself()
    if accumulation is None:
        return
    if accumulation.backward is None:
        accumulation.begin(step)
    elif step is not None:
        step.program.state.awaiting_backward.discard(step)


def _tensors_in(results: Any) -> Sequence[Tensor]:
    """Returns all tensors in a call's results, including those in containers and objects."""
    found: list[Tensor] = []
    waiting, seen = [results], set[int]()
    while waiting:
        for leaf in pytree.tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif is_plain_object(leaf) and id(leaf) not in seen and not isinstance(leaf, nn.Module):
                seen.add(id(leaf))
                waiting.append(vars(leaf))
    return found
