"""Decides at the first training call, before anything is captured, whether a graph gives a model anything.

Contract
    A graph gives shards, a memory budget, compiled regions, and what options ask for. Shards are priced for the tables
    that lookups may read, with the rows that the batch can hold, and for output layers whose labels are in the batch.
    Whole tables are waited for behind the backward, of shards a schedule hides half. Beside tables worth sharding, a
    graph also hides in the next forward what buckets take longer than the backward. All this must save a tenth of the
    step, whose compute is estimated from the parameters and the batch, and repay the capture in 500 steps. Otherwise
    the model runs as it is written for good, with its gradients in buckets.
    Ranks decide alike: by model and options, and by one plan for the batches of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embrace_fx.capture.gradient_graph import as_lookups, gradient_graph
from embrace_fx.cost import links as cost
from embrace_fx.cost.links import CORE
from embrace_fx.passes.planner.pricing import HEAD_EXCHANGES
from embrace_fx.passes.planner.step_cost import LEAST_MS, bucket_ms
from embrace_fx.planning.findings import find, plan_on_links
from embrace_fx.runtime.probe.probe import GLANCE_ERROR
from embrace_fx.session.programs import Programs
from embrace_fx.setup.agreement import agree_on_first_call
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.exactness import semantics
from embrace_fx.vocabulary.plan import SHARDED, Plan
from embrace_fx.vocabulary.schedule import AUTO

FEW_TABLES = 8
"""Most tables that are priced one by one: more of them share start-ups, which only a graph shows."""
WORTH = 0.1
"""Share of a step that shards must save."""
CAPTURE_MS, REPAID_IN = 25.0, 500
"""Milliseconds that capture and passes take for each parameter, of 12 layers of a Transformer on one core; steps that
must save as much."""
LEAST_SHARE = 1 / 16
"""Share of a table's rows that the largest number of a tensor reaches if it is likely to hold the table's ids."""
FLOPS = 6
"""Floating-point operations of a parameter for each position of a batch: two in the forward, four in the backward."""

BACKWARD = 2 / 3
"""Share of a step's compute that is the backward's."""

PARAMETER_MS = 0.05
"""Milliseconds that autograd and an optimizer take for a parameter of any size."""
AWAITED = 0.5
"""Share of a sharded table's exchange that a step waits for (`passes/planner/step_cost.py`)."""

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
    ids = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() and leaf.dtype in _INTEGERS]
    tables, heads = _tables(model), _heads(model)
    if len(tables) > FEW_TABLES or (tables and not all(communicator.gather(bool(ids), bool))):
        return ""
    if heads and not all(communicator.gather(all(_has_labels(ids, head) for head in heads.values()), bool)):
        heads = {}  # without labels in the batch, the loss is outside of the model, where "auto" shards no head
    advice = "route='graph' captures"
    if not tables and not heads:
        return f"it has no table that only lookups read; {advice}"
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    graph = as_lookups(gradient_graph(trained, [*tables], {}, frozenset()))
    findings = find(context, graph, [_rows(ids, table) for table in tables.values()], frozenset(), schedule="none")
    dense = sum(p.numel() for name, p in trained.items() if name not in tables and p.dim() > 1)
    positions = max(communicator.gather(max(each.numel() for each in ids), int))
    capture_ms = CAPTURE_MS * len(trained)

    def worth(plan: Plan) -> _Worth:
        """Predicts what a graph saves per step."""
        compute_ms = FLOPS * dense * positions / CORE.flops_per_ms + PARAMETER_MS * len(trained)
        compute_ms /= min(plan.links.pace, 1.0)  # ranks may share a core
        shards_ms = _saved_ms(plan) + sum(_saved_by_head_ms(plan, head, positions) for head in heads.values())
        return _Worth(compute_ms, capture_ms, shards_ms, _hidden_ms(plan, compute_ms))

    plan = plan_on_links(context, findings, None, roughly=True)
    if plan.links_are == "probed" and worth(plan).may_repay(GLANCE_ERROR):  # exact links may decide otherwise
        plan = plan_on_links(context, findings, None)
    programs.links = plan.links if plan.links_are == "probed" else None
    found = worth(plan)
    return "" if found.may_repay() else f"{found.described(', '.join({**tables, **heads}))}; {advice}"


@dataclass(frozen=True)
class _Worth:
    """The predicted gain of a graph.

    Attributes:
        compute_ms: the compute of a step.
        capture_ms: the time of the capture.
        shards_ms: what shards save per step.
        hidden_ms: what the next forward hides per step.
    """

    compute_ms: float
    capture_ms: float
    shards_ms: float
    hidden_ms: float

    def may_repay(self, error: float = 1.0) -> bool:
        """Returns whether a graph saves enough, if it saves up to `error` times as much as predicted."""
        least_ms = max(WORTH * self.compute_ms, self.capture_ms / REPAID_IN)
        return error * (self.shards_ms + self.hidden_ms) > least_ms

    def described(self, names: str) -> str:
        """Describes the gain, with the names of tables and output layers."""
        hidden = f" and overlap {self.hidden_ms:.1f}" if self.hidden_ms >= LEAST_MS else ""
        saved = f"shards of {names} would save {self.shards_ms:.1f} ms{hidden} of a step of about"
        return f"{saved} {self.compute_ms:.0f} ms, a capture take {self.capture_ms / 1e3:.1f} s"


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
    apart = any(m.max_norm is not None or m.scale_grad_by_freq or m.sparse for m in layers)
    return apart or any(
        known_optimizers.dense_update_policy(p, updates) == "lazy" for m in layers for p in m.parameters()
    )


def _tables(model: nn.Module) -> dict[str, nn.Parameter]:
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


def _rows(ids: Sequence[Tensor], table: nn.Parameter) -> Tensor:
    """Returns the rows of a table that a batch can read: the numbers of the tensors that fit the table's rows best.

    Small numbers may be ids of a sorted or a large table, or counts. They are used only if there are no others.
    """
    fitting, likely = [], []
    for each in ids:
        least, most = (int(bound) for bound in each.aminmax())
        if least >= 0 and most < table.shape[0]:
            fitting.append(each.reshape(-1).cpu().to(torch.int64))
            likely += fitting[-1:] if LEAST_SHARE * table.shape[0] <= most else []
    found = likely or fitting
    return torch.cat(found).unique() if found else torch.arange(table.shape[0], device="cpu")


def _saved_by_head_ms(plan: Plan, head: nn.Parameter, positions: int) -> float:
    """Predicts the milliseconds that a sharded head saves per step, 0 for none. Every position counts as scored."""
    links, ranks, row_bytes = plan.links, plan.world_size, head.shape[1] * head.element_size()
    whole_ms = cost.all_reduce(head.nbytes, ranks).time_ms(links, "all_reduce")
    rows, states = cost.all_to_all(2 * positions * row_bytes, ranks), 2 * positions * row_bytes * (ranks - 1)
    exchanges = rows + cost.Exchange(states, HEAD_EXCHANGES * (ranks - 1))
    return max(0.0, whole_ms - exchanges.time_ms(links, "all_to_all"))


def _hidden_ms(plan: Plan, compute_ms: float) -> float:
    """Predicts how many milliseconds of the buckets' transfers the next forward hides per step: those that the
    backward, `BACKWARD` of the compute, does not.
    """
    late_ms = sum(bucket_ms(plan, names) for names in plan.buckets) - BACKWARD * compute_ms
    return min(max(late_ms, 0.0), (1 - BACKWARD) * compute_ms)


def _saved_ms(plan: Plan) -> float:
    """Predicts how many milliseconds of waiting per step shards save, compared with the cheapest exchanges of whole
    tables.
    """
    whole = {
        name: [c.predicted_ms for c in plan[name].candidates if c.strategy not in SHARDED] for name in plan.sharded
    }
    return sum(min(whole[name]) - AWAITED * plan[name].predicted_ms for name in plan.sharded)
