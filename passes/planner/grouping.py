"""Groups what is sent together: dense gradients in buckets, sharded tables in joined tables. Cuts both into pieces.

Contract
    Tables of a joined table are sharded by columns, have the same width, dtype and param group, and get gradients from
    the same results. A table with a padding row has no bag lookups. If communication overlaps compute, no node computes
    between their lookups, nor between the places where their gradients are complete (`passes/overlap/submit_early.py`),
    so that none waits longer for another than packing takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import ceil

from torch import Tensor, fx

from embrace_fx.cost import links as cost
from embrace_fx.passes.narrow import exchange_dtypes
from embrace_fx.passes.node_cost import is_heavy
from embrace_fx.passes.planner.step_cost import one_way_bytes
from embrace_fx.vocabulary.graph import TableSpec, TableUse, TrainingGraph, gradients_of, parameters_of
from embrace_fx.vocabulary.joined_table import JOINED_TABLE_BYTES, JoinedTable
from embrace_fx.vocabulary.plan import EXCHANGES, Plan
from embrace_fx.vocabulary.schedule import INTO_FORWARD, Cuts


def with_buckets(plan: Plan, graph: TrainingGraph) -> Plan:
    """Returns a copy of the plan in which the gradients of unsharded parameters are grouped in buckets. Buckets are
    launched in about the order in which the backward computes them.

    Parameters are grouped in the order in which the forward reads them, so that the forward needs all parameters of a
    bucket at about the same time. Parameters that the forward does not read keep their order. A bucket has one dtype
    and a size chosen by the cost model. A parameter with a sparse exchange has its own bucket.
    """
    if plan.world_size == 1:
        return plan
    alone = {decision.parameter for decision in plan if decision.strategy in EXCHANGES}
    reduced = alone.union(decision.parameter for decision in plan if decision.strategy == "allreduce")
    position = {node: k for k, node in enumerate(graph.graph.nodes)}
    gradients, parameters = gradients_of(graph.module).items(), parameters_of(graph.module)
    produced = {name: node for name, node in gradients if name in reduced and node is not None}
    read = {n: min((position[user] for user in parameters[n].users), default=len(position)) for n in produced}
    sizes = {name: node.meta["val"].numel() * node.meta["val"].element_size() for name, node in produced.items()}
    together = sum(sizes[name] for name in produced if name not in alone)
    # True if the graph only exchanges gradients: they are its inputs then.
    given = all(node.op == "placeholder" for node in produced.values())
    read_later = plan.schedule_name in INTO_FORWARD and not given
    limit = cost.choose_bucket_bytes(plan.links, plan.world_size, together, read_later=read_later)
    buckets: list[list[str]] = []
    filled, dtype = 0, None
    for name in sorted(produced, key=lambda n: (read[n], n if read[n] < len(position) else "")):
        apart = name in alone or (bool(buckets) and buckets[-1][-1] in alone)
        if not buckets or apart or filled + sizes[name] > limit or produced[name].meta["val"].dtype != dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += sizes[name]
        dtype = produced[name].meta["val"].dtype
    elsewhere = tuple(sorted(reduced - set(produced)))  # parameters that only other ranks' first batches read
    return replace(plan, buckets=(*map(tuple, reversed(buckets)), *((name,) for name in elsewhere)))


@dataclass(frozen=True)
class Joinable:
    """A sharded table that may be joined with other tables, and the properties that all tables of a joined table must
    share.

    Attributes:
        param_group: the index of the table's param group.
        part_bytes: bytes of the largest shard on any rank.
    """

    table: TableSpec
    param_group: int
    part_bytes: int


def plan_joined_tables(
    graph: TrainingGraph, tables: Collection[Joinable], *, overlaps: bool
) -> tuple[JoinedTable, ...]:
    """Returns groups of two or more tables to join to one table each, in the order of their lookups.

    Args:
        graph: the captured graph.
        tables: the tables sharded by columns.
        overlaps: whether communication overlaps compute; then joined tables must be needed at about the same time.
    """
    fit = [each for each in tables if all(_can_be_joined(use) for use in each.table.uses)]
    if len(fit) < 2:
        return ()
    order = _GraphOrder(graph)
    runs: list[list[Joinable]] = []
    for each in sorted(fit, key=lambda each: order.lookup(each.table)):
        alike = (run for run in runs if order.shared_properties(run[-1]) == order.shared_properties(each))
        small = (run for run in alike if sum(part.part_bytes for part in (*run, each)) <= JOINED_TABLE_BYTES)
        run = next((run for run in small if not overlaps or order.are_neighbours(run[-1], each)), None)
        if run is None:
            runs.append([each])
        else:
            run.append(each)
    return tuple(_make_joined_table([each.table for each in run]) for run in runs if len(run) > 1)


def _make_joined_table(tables: list[TableSpec]) -> JoinedTable:
    """Returns the description of a joined table: one table that has the rows of all `tables`."""
    paddings = {table.parameter: table.uses[0].padding_idx for table in tables}
    return JoinedTable.from_tables({table.parameter: table.num_rows for table in tables}, paddings)


def _can_be_joined(use: TableUse) -> bool:
    """Returns whether a table that is read by the lookup `use` can be joined with other tables."""
    if not use.lookup:  # a graph that only exchanges gradients has no lookups
        return False
    return use.padding_idx < 0 or (use.kind == "embedding" and not use.scale_grad_by_freq)


class _GraphOrder:
    """The positions of lookups, table gradients and compute-heavy nodes in a captured graph."""

    def __init__(self, graph: TrainingGraph) -> None:
        self._behind: Mapping[str, frozenset[int]] = graph.results_behind
        self._dtypes = exchange_dtypes(graph)
        self._nodes = {node.name: node for node in graph.graph.nodes}
        self._position = {name: k for k, name in enumerate(self._nodes)}
        self._computes = [k for k, node in enumerate(graph.graph.nodes) if is_heavy(node)]
        computing = set(self._computes)
        # Value -> position of the last compute node that it depends on, or of itself.
        self._had: dict[fx.Node, int] = {}
        for k, node in enumerate(graph.graph.nodes):
            before = max((self._had[value] for value in node.all_input_nodes), default=0)
            self._had[node] = k if k in computing else before

    def lookup(self, table: TableSpec) -> int:
        """Returns the position of a table's first lookup."""
        return min(self._position[use.lookup] for use in table.uses)

    def _gradient(self, table: TableSpec) -> int:
        """Returns the position of the last compute-heavy node on which a table's gradient depends, or -1 if it has
        none.
        """
        nodes = [node for use in table.uses for name in use.backward if (node := self._nodes.get(name)) is not None]
        return max((self._had[node] for node in nodes), default=-1)

    def are_neighbours(self, one: Joinable, other: Joinable) -> bool:
        """Returns whether tables `one` and `other` can share an exchange without delay: no compute-heavy node lies
        between their lookups or between their gradients.
        """
        between = [sorted(map(where, (one.table, other.table))) for where in (self.lookup, self._gradient)]
        return not any(first < 0 or any(first < at < last for at in self._computes) for first, last in between)

    def shared_properties(self, each: Joinable) -> tuple[object, ...]:
        """Returns the properties in which a table must agree with all tables that are joined with it: its width,
        dtypes, param group, and the results through which it gets a gradient.
        """
        table = each.table
        return (
            table.embedding_dim,
            table.dtype,
            self._dtypes[table.parameter],
            each.param_group,
            self._behind.get(table.parameter),
        )


def cut_communication(plan: Plan, parameter: Callable[[str], Tensor]) -> Cuts:
    """Chooses the chunk sizes of each bucket, and the number of pieces of each table's delayed gradients (those of rows
    that the next batch does not read).

    Pieces are sized as if all of the first batch's rows were delayed.

    Args:
        parameter: function that returns a parameter by its name.
    """
    chunks = tuple(tuple(_chunk_sizes(plan, bucket, [*map(parameter, bucket)])) for bucket in plan.buckets)
    if not plan.looks_ahead:
        return Cuts(chunks, ())
    piece_bytes = cost.choose_chunk_bytes(plan.links, plan.world_size, "all_to_all") * (plan.world_size - 1)
    own = {name: one_way_bytes(plan, tables) * plan.world_size for name, tables in plan.overlapped.items()}
    return Cuts(chunks, tuple((name, max(1, round(nbytes / piece_bytes))) for name, nbytes in own.items()))


def _chunk_sizes(plan: Plan, bucket: tuple[str, ...], parameters: list[Tensor]) -> list[int]:
    """Returns the number of elements of each chunk of a bucket's AllReduce. The chunks are equal, and have about the
    size that the cost model chooses.

    Schedule "none" reduces whole buckets, because no launch overtakes another one. A sparse exchange is not divided
    either.

    Args:
        bucket: the names of the bucket's parameters.
        parameters: the bucket's parameters.
    """
    elements = sum(parameter.numel() for parameter in parameters)
    if plan.schedule_name == "none" or bucket[0] in plan.exchanged:
        return [elements]
    wanted = cost.choose_chunk_bytes(plan.links, plan.world_size) / parameters[0].element_size()
    size = ceil(elements / max(1, round(elements / wanted)))
    return [min(size, elements - start) for start in range(0, elements, size)]
