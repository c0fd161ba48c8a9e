"""What a graph launches, in order, and the hash by which ranks compare it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from embrace_fx.passes.collectives import collective_sequence, sequence_hash
from embrace_fx.passes.reduce import ReduceGradients
from embrace_fx.passes.shard import ShardTables
from embrace_fx.passes.verifier.invariants import verify
from embrace_fx.vocabulary.graph import Gradient, Parameter, Tangent, TrainingGraph
from embrace_fx.vocabulary.operation_id import OperationId
from tests.support.graphs import IDS, analysed, tables_model
from tests.support.graphs import D as WIDTH
from tests.support.hand_built_graphs import B, Builder, D, dense_graph, partitioned_graph, table_graph

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

TABLES, BUCKET = ("table.weight", "other.weight"), ("linear.weight", "linear.bias")


def two_tables(tables: tuple[str, ...] = TABLES, bucket: tuple[str, ...] = BUCKET) -> TrainingGraph:
    graph = analysed(tables_model(lambda model, ids: model.linear(model.table(ids) + model.other(ids))), IDS)
    return ReduceGradients((bucket,), 2)(ShardTables(tables, (), 0, 2)(graph))


def test_sequence_tells_group_op_id_and_what_is_packed() -> None:
    told = {(c.group, c.op.partition("::")[2], c.id, c.serves, c.shape) for c in collective_sequence(two_tables())}
    assert told == {
        ("ids", "all_gather_ids", "ids", TABLES, None),
        *(("embedding", "all_to_all_rows", f"{table} rows", (), None) for table in TABLES),
        *(("embedding", "all_to_all_gradients", f"{table} gradients", (), None) for table in TABLES),
        ("dense", "all_reduce_", "bucket 0 [0]", BUCKET, (str(WIDTH * WIDTH + WIDTH),)),
    }


def test_hash_tells_another_order_of_packing() -> None:
    others = [two_tables(), two_tables(tables=TABLES[::-1]), two_tables(bucket=BUCKET[::-1])]
    assert len({sequence_hash(graph) for graph in others}) == len(others)


def test_sequence_of_the_phases_is_that_of_the_joint_graph() -> None:
    graph = partitioned_graph()
    assert collective_sequence(graph) == collective_sequence(TrainingGraph(graph.module))


@pytest.mark.parametrize("make", [dense_graph, table_graph])
def test_hash_depends_neither_on_names_nor_on_the_batch(make: Callable[..., TrainingGraph]) -> None:
    graph = make()
    renamed = graph.edit()
    for k, node in enumerate(renamed.graph.nodes):
        node._rename(f"n{k}")
    assert sequence_hash(graph) == sequence_hash(renamed) == sequence_hash(make(batch=2 * B))


def two_reductions(names: tuple[str, str] = ("v", "w"), group: str = "dense", rows: int = D) -> TrainingGraph:
    b = Builder()
    tangents = [b.input(f"tangent_{k}", Tangent(k), rows, D) for k in range(2)]
    launches = [b.call(c10d.all_reduce.default, tangent, "sum", group) for tangent in tangents]
    for launch, name in zip(launches, names, strict=True):
        launch.meta["launch"] = OperationId("all_reduce", name)
    waits = [b.call(c10d.wait_tensor.default, launch) for launch in launches]
    return b.done(*((wait, Gradient(Parameter(name))) for wait, name in zip(waits, names, strict=True)))


def test_hash_tells_other_launches_apart() -> None:
    swapped = two_reductions()
    first, second = swapped.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    first.prepend(second)
    verify(swapped, after="Swap")
    others = [
        two_reductions(),
        swapped,
        two_reductions(names=("v", "u")),
        two_reductions(group="delayed"),
        two_reductions(rows=D + 1),
    ]
    assert len({sequence_hash(graph) for graph in others}) == len(others)
