"""Reduces gradients of parameters that a loss reads directly, outside of the model's call.

    loss = model(x) + penalty(model.module.scale)

Autograd brings two gradients to `scale`. The program reduces the one that comes through the call. The one through
`penalty` is this rank's own: here it becomes the mean over ranks, as under DDP.

A sharded table's gradient is of the whole table (`embrace_fx.runtime.tables.shard_rules`): each rank adds its own part
of the mean to the rows that the call brings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.gradient_hooks import NodeHook
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.runtime.tables.table_shard import TableShard


class ExternalGradients:
    """Hooks that reduce over ranks the gradients of parameters that a loss reads directly, outside of the model's call.

    The hooks are on the autograd nodes that accumulate gradients. The model's own backward does not run these nodes,
    because it stores gradients in `.grad` itself.
    """

    def __init__(self, state: ModelState, communicator: Communicator) -> None:
        self._state = state
        self._communicator = communicator
        self._unused: frozenset[str] = frozenset()
        self._nodes: list[Any] = []  # keeps the nodes and their hooks alive, because parameters do not
        self._handles: list[Any] = []

    def watch(self, unused: frozenset[str]) -> None:
        """Adds hooks to all parameters that require gradients. The model's own graphs read none of `unused`."""
        self._unused = unused
        self.stop()
        if self._communicator.world_size == 1:
            return
        seen: set[int] = set()
        for name in self._state.names:
            parameter = self._state.parameter(name)
            if name not in self._state.ignored and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                self._handles.append(node.register_prehook(NodeHook(self._reduce, name)))
                self._nodes.append(node)

    def stop(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def _reduce(self, name: str, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Reduces a gradient over ranks before autograd accumulates it. Called as a hook. Returns a tuple with the mean
        over ranks, or None to leave the gradient unchanged. For a sharded table, stores the mean in the table and
        returns (None,).
        """
        state, (gradient,) = self._state, gradients
        table = state.tables.get(name)
        if table is not None and table.layout.mesh is None:
            table = None
        if table is not None and (isinstance(gradient, TableShard) or not self._runs_through_a_call()):
            raise RuntimeError(
                f"backward(): the loss reads the sharded {name} but does not depend on a call of the model. Add this "
                "term to the loss of a call of the model, and call backward() on the sum. Or do not shard the table: "
                f"strategy={{{name!r}: 'allreduce'}}."
            )
        if gradient is None or not self._runs_through_a_call():
            return None
        if not state.synchronised and table is None:
            if name not in self._unused:
                return None  # under `no_sync` the gradient is added to a sum that is reduced later
            raise RuntimeError(
                f"backward() under no_sync(): the loss reads {name} outside of forward(), and the resulting gradient "
                "would never be reduced over ranks. Move this computation into the model's forward()."
            )
        gradient = gradient.to_dense() if table is not None and gradient.is_sparse else gradient
        mean, what = gradient.clone(memory_format=torch.contiguous_format), f"gradient of {name} outside of the model"
        self._communicator.progress.record(what)
        launched = self._communicator.all_reduce_(mean, "sum", "dense")
        mean = self._communicator.wait(launched, what).div_(self._communicator.world_size)
        if table is None:
            return (mean,)
        table.add_whole_gradient(mean)
        return (None,)

    def _runs_through_a_call(self) -> bool:
        """Returns whether the running backward goes through a call of the model. All ranks run such a backward; others
        may run on this rank only.
        """
        calls: Any = self._state.awaiting_backward
        to_come = any(torch._C._will_engine_execute_node(call.anchor) for call in tuple(calls))
        return to_come or torch._C._current_graph_task_id() == self._state.graph_task
