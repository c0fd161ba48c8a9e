"""Invariants of a whole training graph, across all modules that run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import fx
from torch.utils import _pytree as pytree

from embrace_fx.passes.collectives import (
    EQUAL_SHAPES,
    Collective,
    collective_sequence,
    group_of,
    is_launch,
    launch_options,
    running_modules,
)
from embrace_fx.passes.verifier.violation import Violation
from embrace_fx.vocabulary.graph import (
    Gradient,
    GradientOfRows,
    GradientOfShard,
    Mutation,
    OutputRole,
    Parameter,
    PendingGradients,
    PendingRows,
    Result,
    TrainingGraph,
    outputs_of,
)
from embrace_fx.vocabulary.ops import op_name
from embrace_fx.vocabulary.submissions import overlaps_steps


def parameters_updated_once(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """Checks that each trained parameter has exactly one gradient. It is either dense, or consists of row ids and their
    gradient rows.

    A sharded output layer's table has one dense gradient of this rank's shard, and may also have ids with rows.

    A parameter is trained if it has a gradient in the captured graph. It is also trained if a pass has added its
    gradient, because only other ranks' batches use the parameter.
    """
    found = _gradients(graph)
    for name in _gradients(captured) | found:
        parts = found.get(name, Counter())
        legal = (
            {"dense": 1},
            {"ids": 1, "rows": 1},
            {"pending rows": 1},
            {"shard": 1},
            {"shard": 1, "ids": 1, "rows": 1},
        )
        # True after the pass that shards output layers and before the pass that shards lookups.
        lookups_to_shard = not graph.phases and parts == {"dense": 1, "shard": 1}
        if not parts and any(name == promise.table for promise in graph.promised.values()):
            continue  # a loss outside of the model computes the gradient of this parameter
        if parts not in legal and not lookups_to_shard:
            got = " and ".join(f"{count} x {part}" for part, count in sorted(parts.items())) or "none"
            remedy = "keep one Gradient or pending output, or the outputs of rows and of the shard"
            yield Violation(None, f"one gradient of {name}: 1 x dense, or 1 x ids and 1 x rows", got, remedy)


def forward_kept(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """Checks that the graph has the results and mutations of the captured graph, each once and in the same order."""
    expected = [role for role in _output_roles(captured) if isinstance(role, Result | Mutation)]
    found = [role for role in _output_roles(graph) if isinstance(role, Result | Mutation)]
    if expected != found:
        yield Violation(None, f"outputs {expected}", f"{found}", "keep the forward's outputs, and their order")


def collectives_in_one_order(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that collectives cannot differ between ranks.

    A rank knows only its own graph. This check requires that no launch's identity depends on the batch, that all
    launches in a process group have the same group size, and that partitioning has kept the order in each group. The
    runtime compares the identities between ranks by `sequence_hash`.
    """
    sizes: dict[str, int] = {}
    for module in (graph.module, *graph.phases.values()):
        for launch in filter(is_launch, module.graph.nodes):
            yield from _batch_dependence(launch)
            group, size = group_of(launch), launch_options(launch).get("group_size")
            if size is not None and sizes.setdefault(group, size) != size:
                remedy = "give all launches of a group the same group_size"
                yield Violation(launch, f"{sizes[group]} ranks in group {group}", f"{size}", remedy)
    if not graph.phases or overlaps_steps(graph):
        return  # the schedule determines the order; `exchanged_once` checks that no launch was lost
    joint, run = (_by_group(collective_sequence(g)) for g in (TrainingGraph(graph.module), graph))
    for group in sorted(joint | run):
        if joint.get(group) != run.get(group):
            expected = f"the phases to launch, in group {group}, {joint.get(group, 'nothing')}"
            yield Violation(None, expected, f"{run.get(group, 'nothing')}", "keep each group's order in the partition")


def _output_roles(graph: TrainingGraph) -> Iterator[OutputRole]:
    """Yields the role of each graph output that is not None: what the output is, such as a parameter's gradient."""
    for module in running_modules(graph):
        yield from (role for value, role in outputs_of(module) if value is not None)


def _gradients(graph: TrainingGraph) -> dict[str, Counter[str]]:
    """Counts each parameter's gradients among the outputs, by kind: "dense", "ids", "rows", "pending rows" or
    "shard".
    """
    found: dict[str, Counter[str]] = {}
    for role in _output_roles(graph):
        match role:
            case Gradient(of=Parameter(name)):
                for each in graph.members(name) or (name,):
                    found.setdefault(each, Counter())["dense"] += 1
            case GradientOfRows():
                for name in role.tables:
                    found.setdefault(name, Counter())[role.part] += 1
            case GradientOfShard(table):
                found.setdefault(table, Counter())["shard"] += 1
            case PendingGradients(parameters=names):
                for name in names:
                    found.setdefault(name, Counter())["dense"] += 1
            case PendingRows():
                for name in role.tables:
                    found.setdefault(name, Counter())["pending rows"] += 1
    return found


def _batch_dependence(launch: fx.Node) -> Iterator[Violation]:
    """Yields a violation for each option or shape of a collective that depends on the batch."""
    remedy = "launch what is equal on all ranks: their batches are not"
    for name, value in launch_options(launch).items():
        if any(not isinstance(leaf, int | float | str) for leaf in pytree.tree_leaves(value)):
            yield Violation(launch, f"a plain number or text as {name}", f"{value}", remedy)
    shape = launch.meta["val"].shape
    if op_name(launch) in EQUAL_SHAPES and not all(isinstance(size, int) for size in shape):
        yield Violation(launch, "a shape that is equal on all ranks", f"{list(shape)}", remedy)


def _by_group(sequence: Iterable[Collective]) -> dict[str, list[Collective]]:
    """Groups collectives by process group, in the order of the sequence."""
    groups: dict[str, list[Collective]] = {}
    for collective in sequence:
        groups.setdefault(collective.group, []).append(collective)
    return groups
