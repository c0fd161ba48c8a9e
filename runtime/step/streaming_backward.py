"""A backward of the eager route that runs in pieces, so that each bucket is sent as soon as its gradients exist.

Autograd runs the backward then, and accumulates one gradient after the other.

rewrite:  backward   b0 = pack_bucket([g3, g2]); s0 = submit_chunk(b0); b1 = pack_bucket([g1]); s1 = submit_chunk(b1)
                     t0 = await_chunk(s0); t1 = await_chunk(s1); ...
     ->   piece 0    b0 = pack_bucket([g3, g2]); s0 = submit_chunk(b0)      as soon as g3 and g2 are there
          piece 1    b1 = pack_bucket([g1]); s1 = submit_chunk(b1)          then, as soon as g1 is
          rest       t0 = await_chunk(s0); t1 = await_chunk(s1); ...        at the end
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from embrace_fx.runtime.step.runnable_phase import Runnable, store_saved
from embrace_fx.vocabulary.graph import LateModule, OutputRole, Saved, Tangent, Values, inputs_of, outputs_of
from embrace_fx.vocabulary.ops import op_name

_Output = tuple[fx.Node | None, OutputRole]


class StreamingBackward:
    """A backward of the eager route that runs in pieces. `lower` converts the graph of one piece to a function."""

    def __init__(self, module: fx.GraphModule, lower: Callable[[fx.GraphModule], Runnable]) -> None:
        *pieces, rest = map(lower, modules := _split_by_bucket(module))
        needed = [{role.index for _, role in inputs_of(each) if isinstance(role, Tangent)} for each in modules]
        self._pieces = [*zip(pieces, needed, strict=False)]
        self._piece_of = {tangent: k for k, (_, each) in enumerate(self._pieces) for tangent in each}
        self._rest = rest
        self.begin()

    @property
    def roles(self) -> tuple[OutputRole, ...]:
        """The roles of the backward's outputs."""
        return self._rest.roles

    def source(self) -> str:
        """Returns the Python code of all pieces, in the order in which they run."""
        return "\n".join(piece.source() for piece in (*[piece for piece, _ in self._pieces], self._rest))

    def begin(self) -> None:
        """Begins a backward. Resets the record of pieces that have run."""
        self._run, self._values = 0, Values()
        # For each piece, the gradients that have not been recorded yet.
        self._missing = [set(needed) for _, needed in self._pieces]

    def record(self, tangent: int) -> bool | None:
        """Records a gradient. Returns whether it completes the next piece, or None if its piece has been sent."""
        piece = self._piece_of.get(tangent)
        if piece is None:
            return False
        if piece < self._run:
            return None
        missing = self._missing[piece]
        missing.discard(tangent)
        return piece == self._run and not missing

    def run_ready(self, tangents: Mapping[int, Tensor]) -> None:
        """Runs the next pieces in order, up to the first without all of its gradients (`tangents`, by index)."""
        for piece, needed in self._pieces[self._run :]:
            if not needed <= tangents.keys():
                return
            self._run += 1
            store_saved(piece.roles, piece((), {}, tangents), self._values)

    def __call__(self, leaves: Sequence[Any], values: Values, tangents: Mapping[int, Tensor]) -> tuple[Any, ...]:
        """Runs the remaining pieces of the backward, and resets for the next backward."""
        self.run_ready(tangents)
        saved = {**values, **self._values}
        self.begin()
        return self._rest(leaves, saved, tangents)


def _split_by_bucket(module: fx.GraphModule) -> list[fx.GraphModule]:
    """Splits a backward into one piece for each bucket, and a last piece with all other nodes."""
    left = dict.fromkeys(node for node in module.graph.nodes if node.op == "call_function")
    found = []
    for node in [*left]:
        if op_name(node) != "embrace::pack_bucket":
            continue
        piece = {each for each in node.all_input_nodes if each.op == "call_function"}
        last: fx.Node | None = node
        while last is not None:
            piece.add(end := last)
            last = next((user for user in end.users if op_name(user) == "embrace::submit_chunk"), None)
        found.append(_extract(module, piece, [(end, Saved(end.name))]))
        for each in piece:
            left.pop(each, None)
    return [*found, _extract(module, left, [*outputs_of(module)])]


def _extract(module: fx.GraphModule, nodes: Collection[fx.Node], outputs: Sequence[_Output]) -> fx.GraphModule:
    """Copies nodes to a graph with these outputs. Values that they read from other nodes become its inputs."""
    read = {each for node in nodes for each in node.all_input_nodes} | {value for value, _ in outputs}
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node in read and node not in nodes:
            env[node] = graph.placeholder(node.name)
            env[node].meta = {"role": Saved(node.name), **node.meta}
    for node in module.graph.nodes:
        if node in nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
    output = graph.output(tuple(env[value] if value is not None else None for value, _ in outputs))
    output.meta["roles"] = tuple(role for _, role in outputs)
    # Generate the Python code only when it is read, because only the lowered pieces run.
    return LateModule(module, graph)
