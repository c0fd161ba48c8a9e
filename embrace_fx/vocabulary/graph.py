"""The training graph: one FX graph of a model's forward and backward, with a role for each input and output.

Contract
    Each placeholder and output has a *role*: plain data that says what the value is in the user's model. Passes read
    and write roles, never names. `TrainingGraph` is a value: a pass edits a copy (`edit`) and returns it.

Roles are stored in `node.meta["role"]` of each placeholder and in `node.meta["roles"]`, one per value, of the output.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from embrace_fx.vocabulary.head import PromisedLogits
from embrace_fx.vocabulary.joined_table import JoinedTable
from embrace_fx.vocabulary.sizes import NOTHING_EXPECTED, ExpectedSizes
from embrace_fx.vocabulary.step_variant import VariedPhase

T = TypeVar("T")

PHASES = ("unique", "ids", "forward", "backward")
"""The phases of a partitioned graph, in execution order."""

Values = dict[str, Any]
"""Name of a `Saved` role -> the value that a phase saves for later ones."""

LateModule = _LazyGraphModule
"""A graph module that generates its Python code when it is first called or read."""


@dataclass(frozen=True)
class Parameter:
    """Marks a graph input as a parameter. Inside `Gradient` or `Mutation`, tells which parameter the output belongs to.

    Attributes:
        name: the parameter's fully qualified name in the user's model (the first name if tied).
    """

    name: str


@dataclass(frozen=True)
class Buffer:
    """Marks a graph input as a buffer. Inside `Mutation`, tells which buffer is written. `name` is its fully qualified
    name in the user's model.
    """

    name: str


@dataclass(frozen=True)
class BatchInput:
    """Marks a graph input as a tensor of the batch. `index` is its position among the flattened arguments of the
    model's call.
    """

    index: int


@dataclass(frozen=True)
class Tangent:
    """Marks a graph input as the gradient (tangent) of one of the model's results, given by the result's index."""

    index: int


@dataclass(frozen=True)
class Saved:
    """Marks a value that one phase of a partitioned graph (such as the forward) returns, and a later phase takes as an
    input. `name` is the name of the node that computes it.
    """

    name: str


@dataclass(frozen=True)
class Shard:
    """Marks a graph input as this rank's shard of a table."""

    table: str


InputRole = Parameter | Buffer | BatchInput | Tangent | Saved | Shard


@dataclass(frozen=True)
class Result:
    """Marks a graph output as one of the model's results, given by its index among the flattened results."""

    index: int


@dataclass(frozen=True)
class Mutation:
    """Marks a graph output as the new value of a tensor that the forward writes in place, such as BatchNorm's running
    mean. `of` tells which tensor it is.
    """

    of: Parameter | Buffer | BatchInput


@dataclass(frozen=True)
class Gradient:
    """Marks a graph output as the dense gradient of `of`, a parameter or batch tensor. Once the passes have inserted
    communication, it is the mean over ranks.
    """

    of: Parameter | BatchInput


@dataclass(frozen=True)
class GradientOfRows:
    """Marks a graph output as one part of a table's row gradient. A row gradient consists of two tensors: the int64 ids
    (K,) of the rows that have a gradient, sorted and unique, and the gradients (K, d) of these rows.

    Attributes:
        table: the name of a table, or of a joined table.
        part: "ids" or "rows", the part that the output has.
        members: for a joined table, the names of its tables.
    """

    table: str
    part: str
    members: tuple[str, ...] = ()

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables that the gradient belongs to: the tables of a joined table, or the only one."""
        return self.members or (self.table,)


@dataclass(frozen=True)
class GradientOfShard:
    """Marks a graph output as the dense gradient (V', D) of this rank's shard of a table, which has V' rows. The
    gradient comes from an output layer, and is the mean over ranks.

    The gradient from lookups is a separate `GradientOfRows`.
    """

    table: str


@dataclass(frozen=True)
class PendingGradients:
    """Marks a graph output as a bucket whose gradients are still being reduced at the end of a backward.

    Attributes:
        bucket: the bucket's index in the plan.
        parameters: names of the bucket's parameters.
    """

    bucket: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class PendingRows:
    """Marks a graph output as a row gradient that is still being exchanged at the end of a backward.

    Attributes:
        table: the name of a table, or of a joined table.
        members: for a joined table, the names of its tables.
    """

    table: str
    members: tuple[str, ...] = ()

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables whose gradient is being exchanged: the tables of a joined table, or the only one."""
        return self.members or (self.table,)


OutputRole = Result | Mutation | Gradient | GradientOfRows | GradientOfShard | PendingGradients | PendingRows | Saved


FROM_GRADIENT = "gradient"
"""The kind of a lookup that is not in the graph. Its rows are taken from the table's gradient: those that are not zero,
or those of a sparse gradient."""

SPARSE_LOOKUP = "embrace_fx: sparse"
"""Key in `meta["custom"]` of nodes that a lookup with `sparse=True` created."""


@dataclass(frozen=True)
class TableUse:
    """One lookup of a table in the forward.

    Attributes:
        lookup: name of the lookup node (`embedding`, `_embedding_bag`).
        backward: names of the nodes that compute this lookup's share of the table's gradient.
        ids: name of the node that computes the ids.
        padding_idx: the row that gets no gradient, or -1.
        kind: "embedding", "bag:sum", "bag:mean", "bag:max", or `FROM_GRADIENT`.
        constant_ids: whether the ids are the same for every batch, as for tables of positions or token types.
        ids_from_batch: whether the ids depend only on the batch and random draws, not on parameters or other ranks. If
            they are drawn at random, all earlier draws must also depend on nothing else.
        scale_grad_by_freq: whether gradients are divided by the id's count in the batch.
        source: the user's source line, as `file:line in function`, for messages.
        sparse: whether the lookup requests a sparse gradient (`sparse=True`).
        drawn_late: whether the ids are drawn after random numbers that depend on parameters or other ranks, such as the
            dropout of looked-up rows.
    """

    lookup: str
    backward: tuple[str, ...]
    ids: str
    padding_idx: int
    kind: str
    constant_ids: bool
    ids_from_batch: bool
    scale_grad_by_freq: bool
    source: str
    sparse: bool = False
    drawn_late: bool = False


@dataclass(frozen=True)
class TableSpec:
    """An embedding table in the graph, and how the forward reads it.

    `use` is "sparse" (only lookups), "dense" (no lookup, only matmuls and the like) or "mixed" (both: a tied softmax).
    A table's gradient has few rows only if its use is sparse.

    Attributes:
        parameter: the table's name in the user's model.
        num_rows, embedding_dim, dtype: the size and dtype of the whole table.
        uses: the lookups that read the table.
        dense_users: names of the nodes that read the table without a lookup.
        max_norm: whether a lookup first rescales the rows that it reads to a maximum norm.
    """

    parameter: str
    num_rows: int
    embedding_dim: int
    dtype: torch.dtype
    uses: tuple[TableUse, ...]
    dense_users: tuple[str, ...]
    max_norm: bool

    @property
    def use(self) -> str:
        """How the forward reads the table: "sparse" if only lookups read it, "dense" if only other ops do, "mixed" if
        both do.
        """
        if not self.dense_users:
            return "sparse"
        return "mixed" if self.uses else "dense"

    @property
    def has_sparse_gradient(self) -> bool:
        """Whether the table's gradient is sparse (COO) in eager mode: only lookups with `sparse=True`, and without
        `scale_grad_by_freq`, read the table.
        """
        return self.use == "sparse" and all(use.sparse and not use.scale_grad_by_freq for use in self.uses)


@dataclass(frozen=True)
class TrainingGraph:
    """An FX graph of a model's forward and backward. Each input and output is marked with its role (`Parameter`,
    `Gradient`, ..).

    Attributes:
        module: the joint graph of forward and backward. After the pass `Partition`, it is no longer changed, and
            `phases` run instead.
        phases: the graphs that run after the pass `Partition`: "unique" (finds the rows that a batch reads), "ids"
            (exchanges their ids), "forward" (computes results, mutations and saved values), "backward" (computes
            gradients from tangents and saved values).
        results_behind: parameter -> indices of the model's results through which it gets a gradient.
        varied: for a graph of a variant of the step, such as the first step: the phase that differs from the steady
            step, in which the previous and the next batch are known. None for the steady step.
        memory_limit: maximum bytes that a step may hold, or None for no limit.
        expected: numbers to assume for sizes that depend on data, equal on all ranks.
        spaces: name of a joined table -> the tables that it stacks.
        promised: index of a result -> how its logits are computed on demand. The graph returns hidden states instead of
            these logits.
    """

    module: fx.GraphModule
    tables: tuple[TableSpec, ...] = ()
    phases: dict[str, fx.GraphModule] = field(default_factory=dict)
    results_behind: dict[str, frozenset[int]] = field(default_factory=dict)
    varied: VariedPhase | None = None
    memory_limit: int | None = None
    expected: ExpectedSizes = NOTHING_EXPECTED
    spaces: Mapping[str, JoinedTable] = field(default_factory=dict)
    promised: Mapping[int, PromisedLogits] = field(default_factory=dict)

    def members(self, parameter: str) -> tuple[str, ...]:
        """Returns the names of the tables that are stacked in the joined table `parameter`, or () if it is not a joined
        table.
        """
        space = self.spaces.get(parameter)
        return () if space is None else space.tables

    @property
    def graph(self) -> fx.Graph:
        """The FX graph of the joint module."""
        return self.module.graph

    def edit(self) -> TrainingGraph:
        """Returns a copy of the training graph whose joint graph can be rewritten in place. Node names and metadata are
        kept, fake values are shared.
        """
        return replace(self, module=copy_module(self.module))

    def node(self, name: str) -> fx.Node:
        """Returns the node with this name. Raises `KeyError` if there is none."""
        found: fx.Node | None = next((node for node in self.graph.nodes if node.name == name), None)
        if found is None:
            raise KeyError(f"The graph has no node named {name!r}. Print its attribute `graph` to see the names.")
        return found

    def inputs(self) -> Iterator[tuple[fx.Node, InputRole]]:
        """Yields (placeholder, role) for each input of the joint graph. The role tells what the input is, such as
        `Parameter`.
        """
        return inputs_of(self.module)

    def outputs(self) -> Iterator[tuple[fx.Node | None, OutputRole]]:
        """Yields (node, role) for each output of the joint graph. The node is None if the output is None. The role
        tells what the output is, such as `Gradient`.
        """
        return outputs_of(self.module)


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """Copies a module's graph and its nodes' metadata. Constants and fake values are shared.

    The copy generates its Python code when it is first called or read, because most graphs never run.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copied = env[node] = graph.node_copy(node, env.__getitem__)  # `node_copy` also copies the node's metadata
        if copied.name != node.name:
            copied.name = node.name
    graph._codegen = copy.copy(module.graph._codegen)
    return LateModule(module, graph)


def inputs_of(module: fx.GraphModule) -> Iterator[tuple[fx.Node, InputRole]]:
    """Yields (placeholder, role) for each input of a module. The role tells what the input is, such as `Parameter`."""
    for node in module.graph.nodes:
        if node.op == "placeholder":
            yield node, node.meta["role"]


def outputs_of(module: fx.GraphModule) -> Iterator[tuple[fx.Node | None, OutputRole]]:
    """Yields (node, role) for each output of a module. The node is None if the output is None. The role tells what the
    output is, such as `Gradient`.
    """
    output = module.graph.output_node()
    values = output.args[0]
    assert isinstance(values, list | tuple)
    yield from zip(values, output.meta["roles"], strict=True)


def parameters_of(module: fx.GraphModule) -> dict[str, fx.Node]:
    """Maps the name of each parameter that a module reads to its placeholder."""
    return {role.name: node for node, role in inputs_of(module) if isinstance(role, Parameter)}


def gradients_of(module: fx.GraphModule) -> dict[str, fx.Node | None]:
    """Maps the name of each parameter for which a module returns a dense gradient to the node that computes the
    gradient.
    """
    found = ((role.of, node) for node, role in outputs_of(module) if isinstance(role, Gradient))
    return {of.name: node for of, node in found if isinstance(of, Parameter)}


def written_by(module: fx.GraphModule) -> frozenset[Parameter | Buffer | BatchInput]:
    """Returns the parameters, buffers and batch tensors that a module writes in place, such as BatchNorm's running
    mean.
    """
    return frozenset(role.of for _, role in outputs_of(module) if isinstance(role, Mutation))


def reached(
    starts: Iterable[T],
    successors: Callable[[T], Iterable[T]],
    may_visit: Callable[[T, set[T]], bool] = lambda each, found: True,
) -> set[T]:
    """Returns `starts` and all nodes that can be reached from them.

    Args:
        successors: returns the nodes that directly follow a node.
        may_visit: returns whether to visit a node, given the node and the set of nodes reached so far. If it returns
            False, it is called again whenever the node is reached from another node.
    """
    found = set(starts)
    waiting = list(found)
    while waiting:
        for each in successors(waiting.pop()):
            if each not in found and may_visit(each, found):
                found.add(each)
                waiting.append(each)
    return found


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the given nodes and all nodes that they depend on, without placeholders."""
    found = reached(nodes, lambda node: node.all_input_nodes)
    return {node for node in found if node.op != "placeholder"}


def after_tangents(module: fx.GraphModule) -> set[fx.Node]:
    """Returns the nodes of the backward: the inputs that are gradients of the model's results (tangents), and all nodes
    that depend on them.
    """
    tangents = (node for node, role in inputs_of(module) if isinstance(role, Tangent))
    return reached(tangents, lambda node: node.users)


def set_outputs(module: fx.GraphModule, outputs: list[tuple[fx.Node | None, OutputRole]]) -> None:
    """Replaces a module's outputs by (node, role) pairs. The node is None for an output that is None. The role tells
    what the output is, such as `Gradient`.
    """
    output = module.graph.output_node()
    output.args = (tuple(value for value, _ in outputs),)
    output.meta["roles"] = tuple(role for _, role in outputs)


def results_behind(graph: TrainingGraph) -> dict[str, frozenset[int]]:
    """Maps each parameter to the indices of the model's results through which it gets a gradient. If the graph does not
    show them, maps the parameter to the indices of all results.
    """
    tangents = {node: frozenset({role.index}) for node, role in graph.inputs() if isinstance(role, Tangent)}
    every = frozenset[int]().union(*tangents.values())
    behind: dict[fx.Node, frozenset[int]] = {}
    for node in graph.graph.nodes:
        behind[node] = tangents.get(node) or frozenset().union(*{behind[n] for n in node.all_input_nodes})
    gradients = gradients_of(graph.module).items()
    return {name: behind[node] or every for name, node in gradients if node is not None}


_OWN = f"{Path(__file__).parents[1]}{os.sep}"


def source_of(node: fx.Node) -> str:
    """Returns the user's source line of a node, `file:line in function`, or the node's name if it is not known."""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    for frame in reversed(frames):
        file, line, function, *_ = map(str.strip, frame.split(","))
        file = file.removeprefix("File ").strip('"')
        # Skip this package's frames, which torch 2.11 records if torch function modes are active.
        if not file.startswith(_OWN):
            return f"{file}:{line.removeprefix('line ')} {function}"
    return f"node {node.name}"
