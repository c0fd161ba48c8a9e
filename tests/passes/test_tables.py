"""Which tables a graph has, how it uses them, and the function from a batch to their ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from embrace_fx.passes.partition import extract_ids
from embrace_fx.passes.planner.pricing import shard_blocker
from embrace_fx.vocabulary.graph import TableSpec, TrainingGraph, outputs_of
from embrace_fx.vocabulary.ops import argument, draws_random_numbers, set_argument
from tests.support.golden import check_golden
from tests.support.graphs import BAG, IDS, OFFSETS, Tables, analysed, table_of, tables_model, text
from tests.support.table_cases import ILLEGAL, LEGAL, bag, example


def test_golden_of_what_is_found() -> None:
    lines = []
    for name, case in (LEGAL | ILLEGAL).items():
        table = table_of(example(name)[1])
        blocker = shard_blocker(table)
        assert blocker is None if case.blocker is None else case.blocker in str(blocker), name
        uses = ", ".join(f"{use.kind} with {len(use.backward)} backward" for use in table.uses)
        lines.append(f"{name}: {table.use}, {uses}{f': {blocker}' * bool(blocker)}")
    check_golden("tables_found", "\n".join(lines))


def test_max_norm_is_seen_through_its_copies() -> None:
    table = table_of(analysed(tables_model(lambda m, x: m.table(x) + m.table(x + 1), max_norm=1.0), IDS))
    assert (table.use, table.max_norm, len(table.uses)) == ("sparse", True, 2)
    assert shard_blocker(table) == "max_norm rescales whole rows at each lookup"


@pytest.mark.parametrize(
    ("ids", "constant", "from_batch"),
    [
        (lambda m, x: x + 1, False, True),
        (lambda m, x: torch.arange(3), True, True),
        (lambda m, x: torch.arange(x.shape[1]), True, True),
        (lambda m, x: torch.randint(10, (3,)), False, True),
        (lambda m, x: (m.vector[:3] * 2).long(), True, False),
        (lambda m, x: x + (m.vector[0] * 0).long(), False, False),
        (lambda m, x: x.add_(1), False, False),
    ],
    ids=["batch", "constant", "size of the batch", "random", "parameter", "batch and parameter", "written in place"],
)
def test_what_the_ids_depend_on(ids: Callable[..., Tensor], constant: bool, from_batch: bool) -> None:
    model = tables_model(lambda m, x: m.table(ids(m, x)))
    (use,) = table_of(analysed(model, IDS.clone())).uses
    assert (use.constant_ids, use.ids_from_batch) == (constant, from_batch)


def test_a_buffer_that_the_forward_changes_is_no_constant() -> None:
    def forward(model: Tables, x: Tensor) -> Tensor:
        position = model.get_buffer("position")
        vectors: Tensor = model.table(position + x)
        position.add_(1)
        return vectors

    model = tables_model(forward)
    model.register_buffer("position", torch.zeros((), dtype=torch.int64))
    (changed,) = table_of(analysed(model, IDS)).uses
    model.own_forward = lambda m, x: m.table(m.get_buffer("position") + x)
    (read,) = table_of(analysed(model, IDS)).uses
    assert (changed.ids_from_batch, read.ids_from_batch) == (False, True)


def test_what_a_lookup_reads_besides_its_weight_is_no_table() -> None:
    """The per-sample weights of a bag and frozen ids are parameters that a lookup reads, but not tables."""
    model = tables_model(lambda m, x, o: bag(m, m.get_parameter("fixed"), o, per_sample_weights=m.vector))
    model.fixed = nn.Parameter(BAG, requires_grad=False)
    (table,) = analysed(model, BAG, OFFSETS).tables
    assert table.parameter == "table.weight"
    assert table.uses[0].ids_from_batch is False


def test_a_model_without_lookups_has_no_tables() -> None:
    assert analysed(tables_model(lambda m, x: m.linear(x)), torch.ones(2, 4).double()).tables == ()


def story(model: Tables, x: Tensor, offsets: Tensor) -> Tensor:
    """Uses tables in every supported way, for the golden text."""
    words: Tensor = model.table(x) + model.table((x + 1) % 10)
    tags = F.embedding_bag(x, model.other.weight, offsets, mode="mean", padding_idx=3)
    logits = model.linear(tags) @ model.other.weight.t()
    return words.sum() + logits.sum()


def listing(table: TableSpec) -> str:
    lines = [f"{table.parameter}: {table.num_rows} x {table.embedding_dim} {table.dtype}, {table.use}"]
    for use in table.uses:
        lines.append(f"  {use.kind} {use.lookup}")
        shown = (field for field in fields(use) if field.name not in ("kind", "lookup", "source"))
        lines += [f"    {field.name}: {getattr(use, field.name)}" for field in shown]
    return "\n".join([*lines, *(f"  dense user {name}" for name in table.dense_users)])


def test_golden() -> None:
    graph = analysed(tables_model(story), BAG, OFFSETS)
    check_golden("find_tables", "\n\n".join([text(graph.module), *map(listing, graph.tables)]))


def test_a_use_names_the_users_line() -> None:
    graph = analysed(tables_model(story), BAG, OFFSETS)
    first, second = (table.uses[0].source for table in graph.tables)
    line = story.__code__.co_firstlineno
    assert first.endswith(f"test_tables.py:{line + 2} in story")
    assert second.endswith(f"test_tables.py:{line + 3} in story")


def run(module: fx.GraphModule, batch: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    return list(module(batch))


def two_tables(model: Tables, x: Tensor) -> Tensor:
    shifted = (x + 1).clamp(max=9)
    return model.table(shifted) + model.other(shifted % x.shape[1]) + model.other(torch.arange(3))


def test_the_extracted_function_yields_the_ids_of_every_use() -> None:
    graph = analysed(tables_model(two_tables), IDS)
    extracted = extract_ids(graph, graph.tables)
    assert [role.name for _, role in outputs_of(extracted)] == [u.ids for t in graph.tables for u in t.uses]  # type: ignore[union-attr]
    for batch in (IDS, IDS * 3):
        shifted = (batch + 1).clamp(max=9)
        for found, expected in zip(run(extracted, batch), [shifted, shifted % 3, torch.arange(3)], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [(lambda m, x: m.table(x + torch.randint(2, (3,))), True), (lambda m, x: F.dropout(m.table(x)), False)],
    ids=["random ids", "random elsewhere"],
)
def test_whether_ids_are_drawn_at_random(forward: Callable[..., Tensor], expected: bool) -> None:
    graph = analysed(tables_model(forward), IDS)
    assert any(map(draws_random_numbers, extract_ids(graph, graph.tables).graph.nodes)) == expected


def lookup_node(graph: TrainingGraph) -> fx.Node:
    return graph.node("embedding")


def test_arguments_by_name_with_their_defaults() -> None:
    node = lookup_node(analysed(tables_model(lambda m, x: m.table(x)), IDS).edit())
    assert (argument(node, "padding_idx"), argument(node, "scale_grad_by_freq")) == (-1, False)
    set_argument(node, "scale_grad_by_freq", True)
    assert node.args[2:] == (-1, True)
    assert argument(node, "scale_grad_by_freq") is True
    with pytest.raises(KeyError, match=r"aten\.embedding\.default has no argument 'pad'. Its schema is aten"):
        argument(node, "pad")
