"""What nodes call: each by its own launch, whatever their order, and the exchanges as the flow does them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn

import embrace_fx.vocabulary.flow_ops  # noqa: F401  (declares the ops)
from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.ranks.announcement import Announcements
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.bindings import Bindings
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.graph import Shard, TrainingGraph
from embrace_fx.vocabulary.operation_id import IDS, OperationId, chunk_id
from tests.support.flows import DELAYED, EARLY, LATE, PRIOR, Listening, listening_flow

embrace = torch.ops.embrace


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))


@dataclass
class Bound:
    """The calls of a graph's nodes, and what hears them."""

    bindings: Bindings
    state: ModelState
    table: Listening
    flow: Flow

    def call(self, node: fx.Node, *args: Any) -> Any:
        found = self.bindings.call(node)
        assert found is not None
        return found(*args)


def bound(flow: Flow | None = None, table: Listening | None = None) -> Bound:
    state, announcements = ModelState(Layer()), Announcements(Communicator(None))
    graph = TrainingGraph(fx.GraphModule(nn.Module(), fx.Graph()))
    flow = flow or Flow.within_steps(announcements)
    bindings = Bindings(graph, state, announcements, (("weight", "bias"),), flow, Cluster())
    return Bound(bindings, state, table or Listening(), flow)


@pytest.fixture
def overlapped() -> Iterator[Bound]:
    """Under a flow."""
    table = Listening()
    flow = listening_flow(table, lambda: None)
    yield bound(flow, table)
    flow.launcher.close()


def node(target: Any, launch: OperationId | None = None, **meta: Any) -> fx.Node:
    """One that calls an op on a placeholder."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    value.meta["role"] = Shard("t")
    found = graph.call_function(target, (value,))
    found.meta |= meta if launch is None else {"launch": launch, **meta}
    return found


ROWS, COUNTS = torch.tensor([1, 2]), torch.tensor([2])


@pytest.mark.parametrize(
    ("target", "launch", "args", "told"),
    [
        (embrace.submit_rows.default, LATE, (ROWS, ROWS, COUNTS, "t", torch.float32, "rows"), "submit_rows"),
        (embrace.await_rows.default, LATE, (ROWS, COUNTS, "t", torch.float32, "t rows"), "await_rows"),
        (embrace.update_rows.default, PRIOR, (ROWS, "t", "t prior"), "update_rows"),
        (embrace.update_rows.default, DELAYED, (ROWS, "t", "t delayed"), "update_rows"),
        (embrace.submit_rows.default, EARLY, (ROWS, ROWS, COUNTS, "t", torch.float32, ""), "submit_rows"),
        (
            embrace.submit_gradients.default,
            PRIOR,
            (ROWS, ROWS, COUNTS, "t", -1, 1.0, "t prior"),
            "submit_gradients",
        ),
    ],
)  # fmt: skip
def test_a_node_calls_its_tables_exchange_with_its_own_launch(
    overlapped: Bound, target: Any, launch: OperationId, args: tuple[Any, ...], told: str
) -> None:
    overlapped.call(node(target, launch), *args)

    assert overlapped.table.heard == [(told, launch)]


def test_the_next_batchs_ids_are_the_flows(overlapped: Bound, monkeypatch: pytest.MonkeyPatch) -> None:
    assert overlapped.flow is not None
    told: list[str] = []
    monkeypatch.setattr(overlapped.flow, "submit_ids", lambda *_: told.append("submitted"))
    monkeypatch.setattr(overlapped.flow, "await_ids", lambda *_: told.append("awaited"))

    overlapped.call(node(embrace.submit_ids.default, IDS), [ROWS], "ids")
    overlapped.call(node(embrace.await_ids.default, IDS), [ROWS], "ids")

    assert told == ["submitted", "awaited"]


def test_without_a_flow_no_node_is_one_of_its() -> None:
    assert bound().bindings.call(node(embrace.await_chunk.default, chunk_id(0, 0))) is None


def test_a_bucket_is_packed_in_the_order_of_its_parameters_and_scaled() -> None:
    each = bound()

    flat = each.call(node(embrace.pack_bucket.default, bucket=0), [torch.tensor([2.0, 4.0]), torch.tensor([6.0])], 0.5)

    assert flat.tolist() == [1.0, 2.0, 3.0]


def test_a_bucket_takes_along_what_backwards_under_no_sync_have_left() -> None:
    each = bound()
    each.state.parameter("bias").grad = torch.tensor([10.0])
    each.state.unreduced.add("bias")

    flat = each.call(node(embrace.pack_bucket.default, bucket=0), [torch.tensor([2.0, 4.0]), torch.tensor([6.0])], 0.5)

    assert flat.tolist() == [1.0, 2.0, 8.0]


def test_rows_that_rest_take_their_steps_before_they_are_looked_up() -> None:
    each = bound()
    order: list[object] = []

    class Resting:
        def look_up(self, ids: Tensor) -> Tensor:
            order.append(ids.tolist())
            return shard[ids]

    each.state.tables["t"] = cast(Any, Resting())
    shard = torch.arange(6.0).view(3, 2)

    lookup = node(embrace.lookup.default)
    lookup.args = (*lookup.args, lookup.graph.placeholder("ids"))

    found = each.call(lookup, shard, ROWS)

    assert order == [[1, 2]]
    assert torch.equal(found, shard[1:])
