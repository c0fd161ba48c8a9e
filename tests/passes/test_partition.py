"""Cutting the joint graph: each node in one phase, every value where it is needed, the results unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from embrace_fx.passes.partition import Partition
from embrace_fx.vocabulary.graph import Buffer, Mutation, Saved, TrainingGraph, inputs_of, outputs_of
from tests.support.golden import check_golden
from tests.support.graphs import (
    IDS,
    Tables,
    analysed,
    assert_equal_outputs,
    classifier,
    run_graph,
    sharding,
    tables_model,
    targets,
    text,
    verified,
)
from tests.support.table_cases import LEGAL, example, plain

TABLE = "table.weight"


def partitioned(graph: TrainingGraph) -> TrainingGraph:
    return verified(Partition(), graph)


def before_the_forward(graph: TrainingGraph) -> list[fx.GraphModule]:
    """Returns the phases that the ids pass before the forward."""
    names = list(graph.phases)
    return [graph.phases[name] for name in names[: names.index("forward")]]


def saved(*phases: fx.GraphModule) -> list[str]:
    return [role.name for phase in phases for _, role in outputs_of(phase) if isinstance(role, Saved)]


def computed(module: fx.GraphModule) -> list[str]:
    """Returns the nodes that are neither inputs nor the output."""
    return [node.name for node in module.graph.nodes if node.op not in ("placeholder", "output")]


CUT = (
    "one lookup",
    "two lookups of the same ids",
    "a lookup without gradient",
    "ids used elsewhere",
    "ids computed from ids",
    "ids are a result",
    "the batch is a result",
    "random ids",
    "random ids after a draw",
    "dropout",
    "a mean bag",
    "two weighted bags",
    "a bag and a lookup",
)
"""The cases that differ in what crosses a cut."""


@pytest.mark.parametrize("name", CUT)
def test_the_phases_share_the_nodes_and_compute_what_the_joint_graph_does(name: str) -> None:
    (model, graph), args = example(name), LEGAL[name].args
    joint = sharding(TABLE)(graph)
    cut = partitioned(joint)
    assert_equal_outputs(run_graph(cut, model, *args), run_graph(joint, model, *args))
    in_phases = Counter(name for module in cut.phases.values() for name in computed(module))
    assert in_phases == Counter(computed(joint.module))


def test_golden() -> None:
    """One table, one dense layer, and the joint graph left as it was."""
    joint = sharding("words.weight", world_size=2)(analysed(classifier(), IDS))
    graph = partitioned(joint)
    check_golden("partition", "\n\n".join(f"# {name}\n{text(module)}" for name, module in graph.phases.items()))
    assert graph.module is joint.module
    assert joint.phases == {}


def test_without_tables_nothing_comes_before_the_forward() -> None:
    model = tables_model(plain)
    joint = analysed(model, IDS)
    graph = partitioned(joint)
    assert not any(computed(phase) for phase in before_the_forward(graph))
    assert_equal_outputs(run_graph(graph, model, IDS), run_graph(joint, model, IDS))


@pytest.mark.parametrize(
    ("forward", "train"),
    [(plain, False), (lambda m, x: m.linear(m.table(x)).detach(), True)],
    ids=["evaluation", "nothing to differentiate"],
)
def test_without_gradients_there_is_no_backward(forward: Callable[..., Any], train: bool) -> None:
    phases = partitioned(sharding(TABLE)(analysed(tables_model(forward), IDS, train=train))).phases
    assert list(phases)[-1] == "forward"
    assert saved(phases["forward"]) == []


def test_a_gradient_that_the_forward_has_computed() -> None:
    """d/dw of (w * x.sum()).sum() is what the forward has, times the tangent."""
    model = tables_model(lambda m, x: (m.vector * x.sum()).sum() + m.table(x).sum())
    joint = sharding(TABLE)(analysed(model, IDS))
    assert_equal_outputs(run_graph(partitioned(joint), model, IDS), run_graph(joint, model, IDS))


def counting(model: Tables, ids: Tensor) -> Tensor:
    model.get_buffer("calls").add_(1)
    return model.linear(model.table(ids)) * model.get_buffer("calls")


def test_mutated_state_is_written_back_in_place_at_the_end_of_the_forward() -> None:
    model = tables_model(counting)
    model.register_buffer("calls", torch.zeros((), dtype=torch.float64))
    joint = sharding(TABLE)(analysed(model, IDS))
    graph = partitioned(joint)

    (state,) = (n for n, role in inputs_of(graph.phases["forward"]) if role == Buffer("calls"))
    (written,) = (n for n, role in outputs_of(graph.phases["forward"]) if role == Mutation(Buffer("calls")))

    assert written is not None
    assert written.target is torch.ops.aten.copy_.default
    assert written.args[0] is state
    assert targets(graph.phases["forward"].graph)[-1] == "aten::copy_"
    found, expected = run_graph(graph, model, IDS), run_graph(joint, model, IDS)
    assert_equal_outputs(found, expected)
    assert found[Mutation(Buffer("calls"))].item() == 1.0
