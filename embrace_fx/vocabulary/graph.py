"""The training graph: one FX graph of a model's forward and backward, with the meaning of every input and output.

Contract
    A graph's placeholders and outputs have a *role*: plain data that says what the value is in the user's model.
    Passes read and write roles, never names. `TrainingGraph` is a value: a pass copies it (`edit`), returns the copy.

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
from embrace_fx.vocabulary.row_space import RowSpace
from embrace_fx.vocabulary.sizes import NOTHING_EXPECTED, ExpectedSizes
from embrace_fx.vocabulary.step_variant import Varied

T = TypeVar("T")

PHASES = ("unique", "ids", "forward", "backward")
"""The phases of a partitioned graph, in execution order."""

Values = dict[str, Any]
"""Name of a `Saved` role -> the value that a phase saves for later ones."""

LateModule = _LazyGraphModule
"""A graph module whose Python code is generated when it is first called or read."""


@dataclass(frozen=True)
class Parameter:
    """A trainable or frozen parameter, by its fully qualified name in the user's model (the first name when tied)."""

    name: str


@dataclass(frozen=True)
class Buffer:
    """A buffer, by its fully qualified name."""

    name: str


@dataclass(frozen=True)
class BatchInput:
    """Tensor number `index` among the flattened arguments of the model's call."""

    index: int


@dataclass(frozen=True)
class Tangent:
    """The gradient that reaches the model's output number `index`."""

    index: int


@dataclass(frozen=True)
class Saved:
    """A value that an earlier phase saves for a later one (only in a partitioned graph)."""

    name: str


@dataclass(frozen=True)
class Shard:
    """The columns of table `table` that this rank owns: V x d."""

    table: str


InputRole = Parameter | Buffer | BatchInput | Tangent | Saved | Shard


@dataclass(frozen=True)
class Result:
    """Tensor number `index` among the flattened results of the model's call."""

    index: int


@dataclass(frozen=True)
class Mutation:
    """The new value of state that the forward mutates (BatchNorm's running mean, a batch tensor written in place)."""

    of: Parameter | Buffer | BatchInput


@dataclass(frozen=True)
class Gradient:
    """The dense gradient of a parameter (averaged over ranks once communication is placed) or of a batch tensor."""

    of: Parameter | BatchInput


@dataclass(frozen=True)
class GradientOfRows:
    """One part of a coalesced row gradient: `ids` (K,) int64, sorted and unique, or `rows` (K, d).

    Attributes:
        table: a table, or a row space.
        members: the tables of a space.
    """

    table: str
    part: str
    members: tuple[str, ...] = ()

    @property
    def tables(self) -> tuple[str, ...]:
        """The parameters that the gradient belongs to."""
        return self.members or (self.table,)


@dataclass(frozen=True)
class GradientOfShard:
    """The part (V', D) of a table's dense gradient that an output layer gives the rows that this rank owns; the mean
    over ranks. Rows of lookups come beside it, as `GradientOfRows`."""

    table: str


@dataclass(frozen=True)
class PendingGradients:
    """The gradients of a bucket's parameters, which the launcher is still reducing."""

    bucket: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class PendingRows:
    """The row gradient, in flight to its owners, of a table or of a row space with these members."""

    table: str
    members: tuple[str, ...] = ()

    @property
    def tables(self) -> tuple[str, ...]:
        """The parameters that the gradient belongs to."""
        return self.members or (self.table,)


OutputRole = Result | Mutation | Gradient | GradientOfRows | GradientOfShard | PendingGradients | PendingRows | Saved


FROM_GRADIENT = "gradient"
"""The kind of a lookup that no graph shows. Its rows follow from the table's gradient: the rows that are not zero, or
those of a sparse one."""

SPARSE_LOOKUP = "embrace_fx: sparse"
"""Key in `meta["custom"]` of a node that a lookup with `sparse=True` has made."""


@dataclass(frozen=True)
class TableUse:
    """One lookup of a table in the forward.

    Attributes:
        lookup: name of the lookup node (`embedding`, `_embedding_bag`).
        backward: names of the nodes that make this lookup's share of the table's gradient.
        ids: name of the node that computes the ids.
        padding_idx: the row that gets no gradient, -1 for none.
        kind: "embedding", "bag:sum" / "bag:mean" / "bag:max", or `FROM_GRADIENT`.
        constant_ids: the ids do not depend on the batch (position and type tables).
        ids_from_batch: the ids depend only on the batch (and random draws), not on parameters or other ranks.
        scale_grad_by_freq: gradients are divided by the id's count in the batch.
        source: the user's line, `file:line in function`, for messages.
        sparse: it asks for a sparse gradient (`sparse=True`).
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


@dataclass(frozen=True)
class Table:
    """An embedding weight and all that the graph does with it.

    `use` is "sparse" (only lookups), "dense" (only matmuls and the like: no lookup reads it) or "mixed" (both: a tied
    softmax). A table's gradient has few rows only when its use is sparse.
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
        if not self.dense_users:
            return "sparse"
        return "mixed" if self.uses else "dense"

    @property
    def has_sparse_gradient(self) -> bool:
        """Whether autograd makes its gradient sparse (COO): each lookup asks for it, and nothing else adds to it."""
        return self.use == "sparse" and all(use.sparse and not use.scale_grad_by_freq for use in self.uses)

    def with_dense_gradient(self) -> Table:
        """Copies it, as looked up without asking for sparse gradients."""
        return replace(self, uses=tuple(replace(use, sparse=False) for use in self.uses))


@dataclass(frozen=True)
class TrainingGraph:
    """A graph module whose placeholders and outputs have roles.

    `module` is the joint forward and backward; after `Partition` it is kept for reading, and `phases` holds the graphs
    that run: "unique" (batch -> rows read), "ids" (their exchange -> routing), "forward" (-> results, mutations,
    saved), "backward" (tangents, saved -> gradients). `results_behind`: parameter -> the results that its gradient
    comes from. `varied`: the phase that is of another variant than the steady one; None: no phase is.
    `memory_limit`: bytes that a step may hold; None: no limit.
    `expected`: numbers in place of data-dependent sizes; equal on all ranks. `spaces`: name of a parameter -> the
    row space that it is, where tables have become one. `promised`: index of a result that is hidden states -> the
    logits that are made of them when they are read.
    """

    module: fx.GraphModule
    tables: tuple[Table, ...] = ()
    phases: dict[str, fx.GraphModule] = field(default_factory=dict)
    results_behind: dict[str, frozenset[int]] = field(default_factory=dict)
    varied: Varied | None = None
    memory_limit: int | None = None
    expected: ExpectedSizes = NOTHING_EXPECTED
    spaces: Mapping[str, RowSpace] = field(default_factory=dict)
    promised: Mapping[int, PromisedLogits] = field(default_factory=dict)

    def members(self, parameter: str) -> tuple[str, ...]:
        """Returns the tables of a row space; of anything else, ()."""
        space = self.spaces.get(parameter)
        return () if space is None else space.tables

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def edit(self) -> TrainingGraph:
        """Copies the graph for rewriting in place; node names and meta are kept, fake values are shared."""
        return replace(self, module=copy_module(self.module))

    def node(self, name: str) -> fx.Node:
        found: fx.Node
        for found in self.graph.nodes:
            if found.name == name:
                return found
        raise KeyError(f"the graph has no node named {name!r}")

    def inputs(self) -> Iterator[tuple[fx.Node, InputRole]]:
        return inputs_of(self.module)

    def outputs(self) -> Iterator[tuple[fx.Node | None, OutputRole]]:
        return outputs_of(self.module)


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """Copies graph and node meta; the attributes (constants) of the module and its fake values are shared.

    The copy's Python code is generated when it is first called or read, because most graphs never run.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copied = env[node] = graph.node_copy(node, env.__getitem__)  # copies its meta too
        if copied.name != node.name:
            copied.name = node.name
    graph._codegen = copy.copy(module.graph._codegen)
    return LateModule(module, graph)


def inputs_of(module: fx.GraphModule) -> Iterator[tuple[fx.Node, InputRole]]:
    for node in module.graph.nodes:
        if node.op == "placeholder":
            yield node, node.meta["role"]


def outputs_of(module: fx.GraphModule) -> Iterator[tuple[fx.Node | None, OutputRole]]:
    output = module.graph.output_node()
    values = output.args[0]
    assert isinstance(values, list | tuple)
    yield from zip(values, output.meta["roles"], strict=True)


def parameters_of(module: fx.GraphModule) -> dict[str, fx.Node]:
    """Maps each parameter that a module reads to its placeholder."""
    return {role.name: node for node, role in inputs_of(module) if isinstance(role, Parameter)}


def gradients_of(module: fx.GraphModule) -> dict[str, fx.Node | None]:
    """Maps each parameter to its dense gradient, where a module returns one."""
    found = ((role.of, node) for node, role in outputs_of(module) if isinstance(role, Gradient))
    return {of.name: node for of, node in found if isinstance(of, Parameter)}


def written_by(module: fx.GraphModule) -> frozenset[Parameter | Buffer | BatchInput]:
    """Lists the parameters, buffers and batch tensors that a module writes."""
    return frozenset(role.of for _, role in outputs_of(module) if isinstance(role, Mutation))


def reached(
    starts: Iterable[T],
    following: Callable[[T], Iterable[T]],
    joins: Callable[[T, set[T]], bool] = lambda each, found: True,
) -> set[T]:
    """Walks from some nodes to those that follow, and on from these; returns all, the first ones included.

    Args:
        joins: (node, those found so far) -> whether it is walked to; asked anew from each node that it follows.
    """
    found = set(starts)
    waiting = list(found)
    while waiting:
        for each in following(waiting.pop()):
            if each not in found and joins(each, found):
                found.add(each)
                waiting.append(each)
    return found


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the nodes and all nodes that they depend on, without placeholders."""
    found = reached(nodes, lambda node: node.all_input_nodes)
    return {node for node in found if node.op != "placeholder"}


def after_tangents(module: fx.GraphModule) -> set[fx.Node]:
    """Returns the tangents and all nodes that depend on one."""
    tangents = (node for node, role in inputs_of(module) if isinstance(role, Tangent))
    return reached(tangents, lambda node: node.users)


def set_outputs(module: fx.GraphModule, outputs: list[tuple[fx.Node | None, OutputRole]]) -> None:
    """Sets the values and roles of the graph's output node."""
    output = module.graph.output_node()
    output.args = (tuple(value for value, _ in outputs),)
    output.meta["roles"] = tuple(role for _, role in outputs)


def results_behind(graph: TrainingGraph) -> dict[str, frozenset[int]]:
    """Maps each parameter of a captured graph to the results that its gradient comes from; to all where to none."""
    tangents = {node: frozenset({role.index}) for node, role in graph.inputs() if isinstance(role, Tangent)}
    every = frozenset[int]().union(*tangents.values())
    behind: dict[fx.Node, frozenset[int]] = {}
    for node in graph.graph.nodes:
        behind[node] = tangents.get(node) or frozenset().union(*{behind[n] for n in node.all_input_nodes})
    gradients = gradients_of(graph.module).items()
    return {name: behind[node] or every for name, node in gradients if node is not None}


_OWN = f"{Path(__file__).parents[1]}{os.sep}"


def source_of(node: fx.Node) -> str:
    """Returns a node's line in the user's source, `file:line in function`, or its name where the capture kept none."""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    for frame in reversed(frames):
        file, line, function = (part.strip() for part in frame.split(",")[:3])
        file = file.removeprefix("File ").strip('"')
        if not file.startswith(_OWN):  # torch 2.11 records a mode's call of the function as well
            return f"{file}:{line.removeprefix('line ')} {function}"
    return f"node {node.name}"
