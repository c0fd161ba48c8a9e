"""What the tests of passes share: small models, their captured graphs, the graphs' text, and running one as it stands.

A graph is run by the runtime's own lowering, kernels and launches, so that two graphs can be compared by what they
compute: the joint one as one program, the phases of a partitioned one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from embrace_fx.capture import capture
from embrace_fx.passes.pipeline import Pass, with_tables
from embrace_fx.passes.shard import ShardTables
from embrace_fx.passes.verifier.invariants import verify
from embrace_fx.runtime.lower.lower import lower_phase
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.step_handshake import StepHandshake
from embrace_fx.vocabulary.graph import (
    BatchInput,
    Buffer,
    Gradient,
    GradientOfRows,
    InputRole,
    OutputRole,
    Parameter,
    Saved,
    Shard,
    TableSpec,
    Tangent,
    TrainingGraph,
    inputs_of,
    outputs_of,
)
from embrace_fx.vocabulary.ops import op_name, own_columns

V, D = 10, 4
"""Rows and columns of the tables of `Tables`."""

IDS = torch.tensor([[1, 2, 2], [3, 0, 1]])
BAG = torch.tensor([1, 2, 2, 3, 0, 1])
OFFSETS = torch.tensor([0, 2, 2, 5])
"""Four bags of `BAG`; the second one is empty."""

Outputs = dict[OutputRole, Tensor]


class Classifier(nn.Module):
    """The model of most golden texts: a table with padding, one linear layer, a sum for a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D, padding_idx=0)
        self.classify = nn.Linear(D, 3)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.classify(self.words(ids))
        return scores.sum()


class Tables(nn.Module):
    """Two tables, a linear layer and a vector. The test provides the forward, which takes the model first."""

    def __init__(self, forward: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D, **options)
        self.other = nn.Embedding(V, D)
        self.linear = nn.Linear(D, D)
        self.vector = nn.Parameter(torch.linspace(0.5, 1.5, BAG.numel()))
        self.own_forward = forward

    @property
    def weight(self) -> Tensor:
        return self.table.weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(self, *args, **kwargs)


def tables_model(forward: Callable[..., Any], **options: Any) -> Tables:
    """`Tables` in float64, its parameters the same at every call."""
    torch.manual_seed(0)
    return Tables(forward, **options).double()


def classifier() -> Classifier:
    """`Classifier` in float64, its parameters the same at every call."""
    torch.manual_seed(0)
    return Classifier().double()


def analysed(model: nn.Module, *args: Any, train: bool = True, **kwargs: Any) -> TrainingGraph:
    """The captured graph of a model's call, its tables found."""
    return with_tables(capture(model, args, kwargs, train=train).graph)


def apply(graph: TrainingGraph, *passes: Pass) -> TrainingGraph:
    for each in passes:
        graph = each(graph)
    return graph


def verified(rewrite: Pass, graph: TrainingGraph, captured: TrainingGraph | None = None) -> TrainingGraph:
    """Returns a graph after a pass, which must be legal; the graph before it must not have changed."""
    before = text(graph.module)
    result = rewrite(graph)
    verify(result, after=type(rewrite).__name__, captured=captured or graph, previous=graph)
    assert text(graph.module) == before
    return result


def sharding(*tables: str, rank: int = 0, world_size: int = 1) -> ShardTables:
    """The pass that shards `tables`."""
    return ShardTables(tables, (), rank, world_size)


def table_of(graph: TrainingGraph, parameter: str = "table.weight") -> TableSpec:
    (found,) = (table for table in graph.tables if table.parameter == parameter)
    return found


def targets(nodes: fx.Graph | Iterable[fx.Node]) -> list[str]:
    """The ops that nodes call, in order, without overload."""
    listed = nodes.nodes if isinstance(nodes, fx.Graph) else nodes
    return [n.target.name().partition(".")[0] for n in listed if isinstance(n.target, torch._ops.OpOverload)]


def text(module: fx.GraphModule) -> str:
    """A graph's printed text, without the paths and numbers of source lines, and without the ends of lifetimes."""
    printed = module.print_readable(print_output=False, include_stride=False, include_device=False)
    printed = re.sub(r"# File: \S*?([^/\s]+):\d+ in (\S+), code:", r"# \1, \2:", printed)
    printed = printed.replace("# No stacktrace found for following nodes", "# (from a pass)")
    return "\n".join(re.sub(r";  [\w = ]+ = None$", "", line).rstrip() for line in printed.splitlines())


def run_graph(
    graph: TrainingGraph,
    model: nn.Module,
    *args: Any,
    communicator: Communicator | None = None,
    seed: int = 0,
    kernels: Mapping[str, Any] | None = None,
) -> Outputs:
    """Runs a graph on a batch: role -> value. The model is left as it was.

    Tangents are those of `tangent`, the same at every call. A sharded table's row gradient comes back as the dense
    gradient (V, d) of this rank's columns, under the role that the gradient of the whole table has.

    Args:
        communicator: the ranks; None: this process alone.
        seed: of the random numbers that the graph draws.
        kernels: op name -> what is called instead.
    """
    communicator = communicator or Communicator(None)
    leaves = pytree.tree_leaves((args, {}))
    values: dict[Any, Any] = {}
    found: Outputs = {}
    torch.manual_seed(seed)
    with torch.no_grad():
        for module in graph.phases.values() or (graph.module,):
            inputs = [
                values[role] if role in values else _input(role, node, model, leaves, communicator)
                for node, role in inputs_of(module)
            ]
            outputs = lower_phase(module, by_op({**_launches(communicator, module), **(kernels or {})}))(inputs)
            for (node, role), value in zip(outputs_of(module), outputs, strict=True):
                if node is not None:
                    (values if isinstance(role, Saved) else found)[role] = value
    return _with_whole_gradients(found, model)


def tangent(like: Tensor, index: int = 0) -> Tensor:
    """The gradient that `run_graph` gives result `index`, of which `like` has the shape and the dtype."""
    return torch.randn(tuple(map(int, like.shape)), dtype=like.dtype, generator=torch.Generator().manual_seed(index))


def _launches(communicator: Communicator, module: fx.GraphModule) -> Mapping[str, Any]:
    names = [node.meta["tables"] for node in module.graph.nodes if "tables" in node.meta]

    def all_gather_ids(unique: Sequence[Tensor], num_rows: Sequence[int], group: str, group_size: int) -> Any:
        return StepHandshake(communicator).all_gather_ids(unique, num_rows, group, group_size, names[0], {})

    return {**communicator.launches(), "embrace::all_gather_ids": all_gather_ids}


def _input(role: InputRole, node: fx.Node, model: nn.Module, leaves: list[Any], communicator: Communicator) -> Any:
    match role:
        case Parameter(name):
            return model.get_parameter(name).detach().clone()
        case Shard(name):
            weight = model.get_parameter(name).detach()
            first, last = own_columns(weight.shape[1], communicator.world_size, communicator.rank)
            return weight[:, first:last].contiguous()
        case Buffer(name):
            return model.get_buffer(name).clone()
        case BatchInput(index):
            return leaves[index].detach().clone()
        case Tangent(index):
            return tangent(node.meta["val"], index)
    raise AssertionError(f"no earlier phase saves {role}")


def _with_whole_gradients(found: Outputs, model: nn.Module) -> Outputs:
    whole: Outputs = {role: value for role, value in found.items() if not isinstance(role, GradientOfRows)}
    for role, ids in found.items():
        if isinstance(role, GradientOfRows) and role.part == "ids":
            rows = found[replace(role, part="rows")]
            assert bool((ids[1:] > ids[:-1]).all()), f"expected sorted unique ids, found {ids}"
            num_rows = model.get_parameter(role.table).shape[0]
            whole[Gradient(Parameter(role.table))] = rows.new_zeros((num_rows, rows.shape[1])).index_add_(0, ids, rows)
    return whole


def averaged(outputs: Outputs, parameters: Collection[str], communicator: Communicator) -> Outputs:
    """Collective: the same outputs, the gradients of `parameters` averaged over ranks."""
    result = dict(outputs)
    for name in sorted(parameters):
        mean = outputs[Gradient(Parameter(name))] / communicator.world_size
        dist.all_reduce(mean)
        result[Gradient(Parameter(name))] = mean
    return result


def own_part(outputs: Outputs, sharded: Sequence[str], communicator: Communicator) -> Outputs:
    """The same outputs, the gradients of `sharded` tables cut to this rank's columns."""
    result = dict(outputs)
    for name in sharded:
        whole = outputs[Gradient(Parameter(name))]
        first, last = own_columns(whole.shape[1], communicator.world_size, communicator.rank)
        result[Gradient(Parameter(name))] = whole[:, first:last]
    return result


def assert_equal_outputs(found: Outputs, expected: Outputs, *, tolerance: float = 1e-12) -> None:
    """Fails unless both have the same outputs with the same values."""
    __tracebackhide__ = True
    assert found.keys() == expected.keys()
    for role, value in expected.items():
        torch.testing.assert_close(
            found[role], value, rtol=tolerance, atol=tolerance, msg=f"{role}: found {found[role]}, expected {value}"
        )


def by_op(calls: Mapping[str, Callable[..., Any]]) -> Callable[[fx.Node], Callable[..., Any] | None]:
    """What a node calls, by the name of its op."""
    return lambda node: calls.get(op_name(node))
