"""Decides at the first training call, before anything is captured, whether a captured graph would be useful for a
model.

Contract
    Some options and layers require a graph, such as a memory budget or compiled regions. For all other models, a graph
    is useful only if shards are predicted to save time. The prediction includes the tables that only lookups may read,
    with the rows that the batch may contain, and output layers whose labels are in the batch. If shards would not save
    enough time (`passes/planner/capture_gain.py`), the model always runs eagerly, and its gradients are reduced in
    buckets.
    All ranks decide the same, because they have the same model and options, and one plan is made for the batches of all
    ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from embrace_fx.capture.gradient_graph import gradient_graph, with_assumed_lookups
from embrace_fx.capture.module_tables import (
    LAYERS,
    has_labels,
    possible_heads,
    possible_ids,
    possible_rows,
    possible_tables,
)
from embrace_fx.passes.planner.capture_gain import Capture
from embrace_fx.planning.findings import gather_findings, plan_on_links
from embrace_fx.runtime.probe.probe import GLANCE_ERROR
from embrace_fx.session.programs import Programs
from embrace_fx.setup.agreement import agree_on_first_call
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.exactness import row_update_semantics
from embrace_fx.vocabulary.schedule import AUTO

FEW_TABLES = 8
"""Maximum number of tables that are priced one by one. More tables share the start-up times of their exchanges, which
can be predicted only with a graph.
"""


def reason_to_run_eagerly(context: Context, programs: Programs, leaves: Sequence[Any]) -> str:
    """Decides at the first training call whether to capture the forward. Returns "" to capture it, or the reason, in
    one line, to run it eagerly. Collective.

    Args:
        leaves: the flattened arguments of the first training call.
    """
    communicator, model = context.communicator, context.model
    if communicator.world_size == 1:
        return ""
    if communicator.comm_hook is not None:
        return f"the communication hook {communicator.comm_hook.name} reduces whole gradients"
    if _requires_graph(context):
        return ""
    agree_on_first_call(communicator, context.activity(train=True), None)
    ids = possible_ids(leaves)
    tables, heads = possible_tables(model), possible_heads(model)
    if len(tables) > FEW_TABLES or (tables and not all(communicator.gather(bool(ids), bool))):
        return ""
    if heads and not all(communicator.gather(all(has_labels(ids, head) for head in heads.values()), bool)):
        heads = {}  # without labels, the loss is computed outside of the forward, and "auto" shards no output layer
    advice = "route='graph' captures"
    if not tables and not heads:
        return f"it has no table that only lookups read; {advice}"
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    either = {id(parameter) for parameter in (*tables.values(), *heads.values())}
    weighed = {name: parameter for name, parameter in trained.items() if id(parameter) in either}
    graph = with_assumed_lookups(gradient_graph(weighed, [*tables], {}, frozenset()))
    findings = gather_findings(
        context, graph, [possible_rows(ids, len(each)) for each in tables.values()], frozenset(), schedule="none"
    )
    if findings is not None:
        findings = replace(findings, facts=tuple(fact for fact in findings.facts if fact.name in weighed))
    dense = sum(p.numel() for name, p in trained.items() if name not in tables and p.dim() > 1)
    positions = max(communicator.gather(max(each.numel() for each in ids), int))
    other_bytes = sum(parameter.nbytes for name, parameter in trained.items() if name not in weighed)
    capture = Capture(len(trained), dense, positions, tuple(heads.values()), other_bytes)
    plan = plan_on_links(context, findings, None, roughly=True, other_bytes=other_bytes)
    # If a capture might pay, measure the links exactly. The rough measurement may be wrong by `GLANCE_ERROR`.
    if plan.links_are == "probed" and capture.pays(plan, GLANCE_ERROR):
        plan = plan_on_links(context, findings, None, other_bytes=other_bytes)
    programs.links = plan.links if plan.links_are == "probed" else None
    if capture.pays(plan):
        return ""
    return f"shards of {', '.join(tables | heads)} would save {capture.describe_savings(plan)}; {advice}"


def _requires_graph(context: Context) -> bool:
    """Returns whether the forward must be captured, because of an option or a layer that runs differently eagerly."""
    options, state = context.options, context.state
    asked = options.route, options.memory_budget, options.table_memory, options.given_plan
    usual = options.strategy == "auto" and options.schedule == AUTO and options.row_updates == "exact"
    usual &= options.backend == "eager" and options.rows == "exact"
    if any(each is not None for each in asked) or not usual or state.hooked or state.ignored:
        return True
    layers = [module for module in context.model.modules() if isinstance(module, LAYERS)]
    known_optimizers, updates = context.optimizer_hooks.known_optimizers, row_update_semantics(options.row_updates)
    apart = any(m.max_norm is not None or m.sparse for m in layers)
    return apart or any(
        known_optimizers.dense_update_policy(p, updates) == "lazy" for m in layers for p in m.parameters()
    )
