"""`JoinExchanges`: a graph that uses less than the plan exchanges launches all of it; results and gradients stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embrace_fx.passes.collectives import sequence_hash
from embrace_fx.passes.join_exchanges import ExchangedParameter, JoinExchanges, idle_graph
from embrace_fx.passes.partition import Partition
from embrace_fx.passes.reduce import ReduceGradients
from embrace_fx.passes.shard import ShardTables
from embrace_fx.vocabulary.graph import TrainingGraph
from tests.support.graphs import IDS, D, Tables, V, analysed, tables_model, verified

DTYPE, CPU = torch.float64, torch.device("cpu")
PART = JoinExchanges(
    {
        "table.weight": ExchangedParameter((V, D), DTYPE, CPU, padding_idx=-1),
        "other.weight": ExchangedParameter((V, D), DTYPE, CPU, padding_idx=-1),
        "linear.weight": ExchangedParameter((D, D), DTYPE, CPU),
        "linear.bias": ExchangedParameter((D,), DTYPE, CPU),
    }
)
BUCKETS = (("linear.weight", "linear.bias"),)


def both(model: Tables, ids: Tensor) -> Tensor:
    return model.linear(model.table(ids) + model.other(ids))


def one(model: Tables, ids: Tensor) -> Tensor:
    return model.table(ids) * 2


def unread(model: Tables, ids: Tensor) -> Tensor:
    """Looks up the second table without a gradient."""
    return model.linear(model.table(ids) + model.other(ids).detach())


def launched(graph: TrainingGraph) -> str:
    """Returns a hash of a graph's launches that does not depend on their order."""
    sharded = ShardTables(("table.weight", "other.weight"), (), 0, 2)(verified(PART, graph))
    return sequence_hash(Partition()(ReduceGradients(BUCKETS, 2)(sharded)), ordered=False)


def test_graphs_of_all_branches_launch_the_same() -> None:
    whole = analysed(tables_model(both), IDS)
    idle = idle_graph("linear.bias", torch.zeros(D, dtype=DTYPE))
    found = {launched(each) for each in (whole, *(analysed(tables_model(f), IDS) for f in (one, unread)), idle)}
    assert len(found) == 1


def test_a_graph_that_uses_everything_is_returned_as_it_is() -> None:
    graph = analysed(tables_model(both), IDS)
    assert PART(graph) is graph


def test_a_table_with_max_norm_is_to_be_read_by_every_batch() -> None:
    with pytest.raises(ValueError, match=r"has no lookup in other\.weight"):
        JoinExchanges(renormed=("other.weight",))(analysed(tables_model(one), IDS))
