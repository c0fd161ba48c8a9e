"""Decides at the first training call, before anything is captured, whether a graph gives a model anything.

Contract
    A graph gives shards, a memory budget, compiled regions, and what options ask for. Shards are priced for the tables
    that lookups may read, with the rows that the batch can hold, and for output layers whose labels are in the batch.
    If they do not pay (`passes/planner/capture_gain.py`), the model runs as it is written for good, with its gradients
    in buckets.
    Ranks decide alike: by model and options, and by one plan for the batches of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from embrace_fx.capture.gradient_graph import as_lookups, gradient_graph
from embrace_fx.passes.planner.capture_gain import Capture
from embrace_fx.planning.findings import find, plan_on_links
from embrace_fx.runtime.probe.probe import GLANCE_ERROR
from embrace_fx.session.programs import Programs
from embrace_fx.setup.agreement import agree_on_first_call
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.exactness import semantics
from embrace_fx.vocabulary.schedule import AUTO

FEW_TABLES = 8
"""Most tables that are priced one by one: more of them share start-ups, which only a graph shows."""
LEAST_SHARE = 1 / 16
"""Share of a table's rows that the largest number of a tensor reaches if it is likely to hold the table's ids."""

_LAYERS = (nn.Embedding, nn.EmbeddingBag)
_INTEGERS = (torch.int64, torch.int32)


def runs_as_written(context: Context, programs: Programs, leaves: Sequence[Any]) -> str:
    """Returns the reason, in one line, why a model is not captured, or "" if it is. Collective.

    Args:
        leaves: the arguments of the first training call, flattened.
    """
    if (hook := context.communicator.comm_hook) is not None and context.communicator.world_size > 1:
        return f"the communication hook {hook.name} reduces whole gradients"
    if context.communicator.world_size == 1 or _asks_for_a_graph(context):
        return ""
    communicator, model = context.communicator, context.model
    agree_on_first_call(communicator, context.activity(train=True), None)
    ids = ids_in(leaves)
    tables, heads = tables_of(model), _heads(model)
    if len(tables) > FEW_TABLES or (tables and not all(communicator.gather(bool(ids), bool))):
        return ""
    if heads and not all(communicator.gather(all(_has_labels(ids, head) for head in heads.values()), bool)):
        heads = {}  # without labels in the batch, the loss is outside of the model, where "auto" shards no head
    advice = "route='graph' captures"
    if not tables and not heads:
        return f"it has no table that only lookups read; {advice}"
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    either = {id(parameter) for parameter in (*tables.values(), *heads.values())}
    weighed = {name: parameter for name, parameter in trained.items() if id(parameter) in either}
    graph = as_lookups(gradient_graph(weighed, [*tables], {}, frozenset()))
    findings = find(context, graph, [rows_in(ids, len(each)) for each in tables.values()], frozenset(), schedule="none")
    if findings is not None:
        findings = replace(findings, facts=tuple(fact for fact in findings.facts if fact.name in weighed))
    dense = sum(p.numel() for name, p in trained.items() if name not in tables and p.dim() > 1)
    positions = max(communicator.gather(max(each.numel() for each in ids), int))
    capture = Capture(len(trained), dense, positions, tuple(heads.values()))
    plan = plan_on_links(context, findings, None, roughly=True)
    if plan.links_are == "probed" and capture.pays(plan, GLANCE_ERROR):  # exact links may decide otherwise
        plan = plan_on_links(context, findings, None)
    programs.links = plan.links if plan.links_are == "probed" else None
    if (plan.sharded or heads) and capture.pays(plan):
        return ""
    return f"shards of {', '.join(tables | heads)} would save {capture.compared(plan)}; {advice}"


def _asks_for_a_graph(context: Context) -> bool:
    """Returns whether an option requires a graph, or a layer's eager lookups would differ from DDP's."""
    options, state = context.options, context.state
    asked = options.route, options.memory_budget, options.table_memory, options.given_plan
    usual = options.strategy == "auto" and options.schedule == AUTO and options.row_updates == "exact"
    usual &= options.backend == "eager" and options.rows == "exact"
    if any(each is not None for each in asked) or not usual or state.hooked or state.ignored:
        return True
    layers = [module for module in context.model.modules() if isinstance(module, _LAYERS)]
    known_optimizers, updates = context.optimizer_hooks.known_optimizers, semantics(options.row_updates)
    apart = any(m.max_norm is not None or m.sparse for m in layers)
    return apart or any(
        known_optimizers.dense_update_policy(p, updates) == "lazy" for m in layers for p in m.parameters()
    )


def tables_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that lookups may read: of lookup layers, unless shared, and of the user's own modules."""
    named = [(f"{name}.", module) for name, module in model.named_modules() if module._parameters]
    shared = Counter(id(parameter) for _, module in named for parameter in module._parameters.values())
    layers = [
        (f"{prefix}{name}".removeprefix("."), parameter)  # the root's prefix is "."
        for prefix, module in named
        if isinstance(module, _LAYERS) or not type(module).__module__.startswith("torch.nn.")
        for name, parameter in module._parameters.items()
    ]
    return {n: p for n, p in layers if p is not None and p.requires_grad and p.dim() == 2 and shared[id(p)] == 1}


def _heads(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights of output layers, which are linear layers with a row for each row of a lookup layer."""
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = {id(layer.weight): f"{name}.weight" for name, layer in layers if layer.out_features in rows}
    return {name: p for name in found.values() if (p := model.get_parameter(name)).requires_grad}


def _has_labels(ids: Sequence[Tensor], head: nn.Parameter) -> bool:
    """Returns whether a batch has ids and labels: two or more tensors whose largest numbers fit a head's rows."""
    largest = [int(each.max()) for each in ids]
    return sum(LEAST_SHARE * len(head) <= most < len(head) for most in largest) > 1


def ids_in(leaves: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors of a batch that may hold ids."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() and leaf.dtype in _INTEGERS]


def rows_in(ids: Sequence[Tensor], num_rows: int) -> Tensor:
    """Returns the rows of a table that a batch can read: the numbers of the tensors that fit the table's rows best.

    Small numbers may be ids of a sorted or a large table, or counts. They are used only if there are no others.
    """
    fitting, likely = [], []
    for each in ids:
        least, most = (int(bound) for bound in each.aminmax())
        if least >= 0 and most < num_rows:
            fitting.append(each.reshape(-1).cpu().to(torch.int64))
            likely += fitting[-1:] if LEAST_SHARE * num_rows <= most else []
    found = likely or fitting
    return torch.cat(found).unique() if found else torch.arange(num_rows, device="cpu")
