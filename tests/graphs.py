"""What the tests of passes share: captured graphs, their text, and running one as it stands.

A graph is run by the runtime's own lowering and kernels, so that two graphs can be compared by what they compute. What
reads as one program before `Partition` is run as one; the phases of a partitioned graph are run one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from embrace_fx.passes.tables import find_tables
from embrace_fx.runtime.communicator import Communicator
from embrace_fx.runtime.lower import lower
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from embrace_fx.capture import capture
from embrace_fx.compiler import Pass, analyse
from embrace_fx.graph import (
    BatchInput,
    Buffer,
    Gradient,
    InputRole,
    OutputRole,
    Parameter,
    RowGradient,
    Saved,
    Shard,
    Table,
    Tangent,
    TrainingGraph,
    inputs_of,
    outputs_of,
)
from embrace_fx.ops import own_columns

Outputs = dict[OutputRole, Tensor]


def analysed(model: nn.Module, *args: Any, train: bool = True, **kwargs: Any) -> TrainingGraph:
    """The captured graph of a model's call, its tables found."""
    return analyse(capture(model, args, kwargs, train=train))


def apply(graph: TrainingGraph, *passes: Pass) -> TrainingGraph:
    for each in passes:
        graph = each(graph)
    return graph


def text(module: fx.GraphModule) -> str:
    """A graph's printed text without what differs between machines: the paths of source files."""
    printed = module.print_readable(print_output=False, include_stride=False, include_device=False)
    lines = (re.sub(r"# File: \S*?([^/\s]+):\d+ in (\w+), code:", r"# \1, \2:", line) for line in printed.splitlines())
    return "\n".join(line.rstrip() for line in lines)


def table_of(graph: TrainingGraph, parameter: str) -> Table:
    (found,) = (table for table in find_tables(graph) if table.parameter == parameter)
    return found


def targets(module: fx.GraphModule) -> list[str]:
    """The ops a graph calls, in order."""
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def run_graph(
    graph: TrainingGraph, model: nn.Module, *args: Any, communicator: Communicator | None = None, seed: int = 0
) -> Outputs:
    """Runs a graph on a batch: role -> value.

    Tangents are drawn with `seed`. A sharded table's coalesced row gradient comes back as the dense gradient (V, d) of
    this rank's columns, under the role that the whole table's gradient has. The model is left as it was.

    Args:
        communicator: the ranks; None: this process alone.
    """
    communicator = communicator or Communicator(None)
    leaves = pytree.tree_leaves((args, {}))
    values: dict[InputRole, Any] = {}
    found: Outputs = {}
    torch.manual_seed(seed)
    with torch.no_grad():
        for module in graph.phases.values() or (graph.module,):
            arguments = [
                values[role] if role in values else _input(role, node, model, leaves, communicator)
                for node, role in inputs_of(module)
            ]
            outputs = lower(module, _launches(communicator, graph))(arguments)
            for (node, role), value in zip(outputs_of(module), outputs, strict=True):
                if node is not None:
                    (values if isinstance(role, Saved) else found)[role] = value  # type: ignore[index]
    return _with_whole_gradients(found, model)


def _launches(communicator: Communicator, graph: TrainingGraph) -> Mapping[str, Any]:
    names = [node.meta["tables"] for node in graph.graph.nodes if node.name == "ids"]

    def all_gather_ids(unique: Sequence[Tensor], num_rows: Sequence[int], group: str, group_size: int) -> Any:
        return communicator.all_gather_ids(unique, num_rows, group, group_size, names[0])

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
            leaf = leaves[index]
            return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
        case Tangent(index):
            value = node.meta["val"]
            generator = torch.Generator().manual_seed(index)
            return torch.randn(tuple(map(int, value.shape)), dtype=value.dtype, generator=generator)
    raise AssertionError(f"no phase before it saves {role}")


def _with_whole_gradients(found: Outputs, model: nn.Module) -> Outputs:
    whole = {role: value for role, value in found.items() if not isinstance(role, RowGradient)}
    for role, ids in found.items():
        if isinstance(role, RowGradient) and role.part == "ids":
            rows = found[RowGradient(role.table, "rows")]
            assert bool((ids[1:] > ids[:-1]).all()), "row gradients are coalesced and sorted"
            num_rows = model.get_parameter(role.table).shape[0]
            whole[Gradient(Parameter(role.table))] = rows.new_zeros((num_rows, rows.shape[1])).index_add_(0, ids, rows)
    return whole


def assert_equal_outputs(found: Outputs, expected: Outputs, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Every output of the one is an output of the other, with the same value."""
    assert found.keys() == expected.keys()
    for role, value in expected.items():
        torch.testing.assert_close(found[role], value, rtol=rtol, atol=atol, msg=lambda text, role=role: f"{role}: {text}")


def mean_over_ranks(outputs: Outputs, communicator: Communicator) -> Outputs:
    """What a rank is to end up with, from its own outputs: gradients averaged, the tables' cut to its columns later."""
    mean: Outputs = {}
    for role, value in outputs.items():
        if isinstance(role, Gradient) and isinstance(role.of, Parameter):
            value = value.clone()
            dist.all_reduce(value, group=communicator.group)
            value = value / communicator.world_size
        mean[role] = value
    return mean


def own_part(outputs: Outputs, sharded: Sequence[str], communicator: Communicator) -> Outputs:
    """The same with the gradients of `sharded` tables cut to this rank's columns."""
    own = dict(outputs)
    for name in sharded:
        role = Gradient(Parameter(name))
        first, last = own_columns(own[role].shape[1], communicator.world_size, communicator.rank)
        own[role] = own[role][:, first:last]
    return own

