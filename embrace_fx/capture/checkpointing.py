"""Activation checkpointing: marks the nodes of a graph that `torch.utils.checkpoint` recomputes in the backward.

While a model is traced, `torch.utils.checkpoint.checkpoint` (in both modes, and as Dynamo's op) marks the nodes of its
function instead of saving the function's inputs. `passes/memory` reads the marks. Regions can be nested, so a node has
a *path*: the numbers of its regions, outermost first.

`node.meta["region"]` of a forward node is its path, () outside of all regions. For a backward node it is the path of
the forward node that it differentiates, or missing if unknown. `node.meta["kept"]` is true for a node that a selective
policy saves, so that the innermost region does not recompute it.

rewrite: h = relu(addmm(b, x, w)); y = addmm(c, h, v)           of checkpoint(mlp, x) in the first region
     ->  the same nodes, with meta["region"] = (0,); the backward nodes of relu and addmm have (0,) too
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_SAVING = (torch_checkpoint.CheckpointPolicy.MUST_SAVE, torch_checkpoint.CheckpointPolicy.PREFER_SAVE)


@contextlib.contextmanager
def record_checkpoint_regions() -> Iterator[None]:
    """Opens a context in which tracing marks each node of a function under `torch.utils.checkpoint` with the function's
    region. A region is a tuple of numbers: those of the enclosing regions, outermost first, then its own number.
    """
    regions = _Regions()
    generator, function = torch_checkpoint._checkpoint_without_reentrant_generator, torch_checkpoint.CheckpointFunction
    torch_checkpoint._checkpoint_without_reentrant_generator = regions.without_reentrant
    torch_checkpoint.CheckpointFunction = regions  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch_checkpoint._checkpoint_without_reentrant_generator = generator
        torch_checkpoint.CheckpointFunction = function  # type: ignore[misc]


class _Regions:
    """Replaces the functions of `torch.utils.checkpoint` (both modes) during tracing, and marks the nodes of
    checkpointed functions with their region.
    """

    def __init__(self) -> None:
        self._path: tuple[int, ...] = ()
        self._numbers = itertools.count()

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Replaces `CheckpointFunction.apply`, which implements the reentrant mode. Runs the function once, in a new
        region.

        Args:
            preserve: whether torch would restore random states in the backward; ignored.
            args: the function's arguments.
        """
        with self._open_region(contextlib.nullcontext()):
            return function(*args)

    def without_reentrant(
        self,
        fn: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Callable[[], tuple[Any, Any]] = torch_checkpoint.noop_context_fn,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        """Replaces torch's generator that runs before and after a function in the non-reentrant mode, and takes the
        same arguments. Marks the function's nodes with a new region instead of saving its inputs.
        """
        forward_context, _ = context_fn()
        with self._open_region(forward_context):
            yield

    @contextlib.contextmanager
    def _open_region(self, context: Any) -> Iterator[None]:
        """Opens a new region. Sets `meta["region"]` of the nodes traced in it to the numbers of the enclosing regions
        and the region's own number. Nodes that an inner region has marked keep their mark.

        Args:
            context: the user's context for the forward, such as a selective checkpointing policy. Entered inside the
                region.
        """
        mode = get_proxy_mode()
        around, self._path = self._path, (*self._path, next(self._numbers))
        path = self._path
        before = len(mode.tracer.graph.nodes) if mode is not None else 0
        try:
            with context:
                yield
        finally:
            self._path = around
        if mode is not None:
            nodes = mode.tracer.graph.nodes
            for node in itertools.islice(reversed(nodes), len(nodes) - before):
                # This entry was set by a selective checkpointing policy, or by Dynamo, which sets it to "always".
                policy = node.meta.pop("recompute", None)
                if "region" not in node.meta:
                    node.meta["region"], node.meta["kept"] = path, policy in _SAVING


def mark_backward(graph: fx.Graph) -> None:
    """Copies the checkpoint region in `meta["region"]` from each forward node to the backward nodes that differentiate
    it.
    """
    if not any(node.meta.get("region") for node in graph.nodes):
        return
    differentiated: dict[int, tuple[int, ...]] = {}
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if node.op == "call_function" and node.meta.get("partitioner_tag") != "is_backward" and number is not None:
            # Of nodes with the same sequence number, autograd differentiates only the first.
            differentiated.setdefault(number, node.meta.get("region", ()))
    for node in graph.nodes:
        if node.meta.get("partitioner_tag") == "is_backward" and node.meta.get("seq_nr") in differentiated:
            node.meta["region"] = differentiated[node.meta["seq_nr"]]
