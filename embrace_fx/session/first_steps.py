"""Decides, by first steps on the eager route, whether the capture of a model that takes seconds to capture pays.

Contract
    A capture pays where it may hide a tenth of a step: the exchange of whole tables that would be sharded, which starts
    as the backward ends, and the time by which buckets outlast the backward. Rows and times are known after some steps;
    links are probed then. Small models, large tables, and models with options that ask for a graph are captured at
    once. Ranks decide alike: at first by model and options, later by the measurements of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from embrace_fx.cost import links as cost
from embrace_fx.planning.findings import find, plan_on_links
from embrace_fx.planning.scheduling import PROFILED, PROFILED_AFTER
from embrace_fx.runtime.launch.tally import Tally
from embrace_fx.session.calls import Variant
from embrace_fx.session.gradient_graph import as_lookups
from embrace_fx.session.plan_in_use import PlanInUse
from embrace_fx.setup.setting import Setting
from embrace_fx.vocabulary.exactness import semantics
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.plan_text import readable_bytes
from embrace_fx.vocabulary.schedule import AUTO, FULL

MANY_PARAMETERS = 40
"""Least number of trained parameters: capturing this many takes more than a second."""
SMALL_TABLES_BYTES = 32 * 2**20
"""Most bytes of all tables: their dense gradients are sent until rows are known."""
FEW_TABLES = 8
"""Most tables: more of them would share start-ups, which only a graph shows."""
MEASURED_STEPS = PROFILED_AFTER + PROFILED + 1
"""Steps until the schedule has profiled its own steps, which a switch would lose."""
WORTH = 0.1
"""Share of a step that a capture must be able to hide."""

_LAYERS = (nn.Embedding, nn.EmbeddingBag)


def run_as_written(setting: Setting) -> str:
    """Returns the reason why a model's first steps are not captured, in one line; "": they are."""
    options, model, state = setting.options, setting.model, setting.state
    asks = options.route, options.memory_budget, options.given_plan, setting.communicator.comm_hook
    usual = options.strategy == "auto" and options.schedule in (AUTO, FULL) and options.row_updates == "exact"
    if setting.communicator.world_size == 1 or any(each is not None for each in asks) or not usual:
        return ""
    exact = options.rows == "exact" and options.table_memory is None
    if options.backend != "eager" or not exact or state.hooked or state.ignored:
        return ""
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    tables = _tables(model)
    nbytes = sum(each.numel() * each.element_size() for each in tables)
    if trained < MANY_PARAMETERS or len(tables) > FEW_TABLES or nbytes > SMALL_TABLES_BYTES or _needs_graph(setting):
        return ""
    return (
        f"its tables are small ({readable_bytes(nbytes)}), and {trained} parameters take seconds to capture; "
        "route='graph' captures"
    )


def weigh(setting: Setting, planned: PlanInUse, variant: Variant, rows: Sequence[Tensor]) -> str | None:
    """Weighs the gain of a capture. Collective.

    Args:
        rows: of each table, the rows of a recent gradient.

    Returns:
        The gain, in one line; "": there is none; None: it cannot be told now.
    """
    if planned.calls.uneven or not planned.may_change(variant):
        return None
    planned.calls.asks_to_plan = False
    findings = find(setting, as_lookups(variant.analysed), rows, frozenset(), schedule="none")
    would = plan_on_links(setting, findings, None)
    everyone = setting.communicator.gather(_measured(setting.stepping.recorder.tally), tuple[float, float] | None)
    if any(each is None for each in everyone):
        return None
    measured = [each for each in everyone if each is not None]
    backward_ms, step_ms = (min(each[k] for each in measured) for k in (0, 1))
    tables_ms, late_ms = _tables_ms(would), max(_buckets_ms(would) - backward_ms, 0.0)
    if tables_ms + late_ms <= WORTH * step_ms:
        return ""
    names = ", ".join(would.sharded) or "none"
    return f"it may hide {tables_ms:.1f} ms of tables ({names}), {late_ms:.1f} of buckets, of a step's {step_ms:.1f} ms"


def _tables(model: nn.Module) -> list[nn.Parameter]:
    """Finds the parameters that lookups may read: those of lookup layers, unless shared, and of the user's modules."""
    read = [module for module in model.modules() if module._parameters]
    shared = Counter(id(parameter) for module in read for parameter in module._parameters.values())
    layers = [m for m in read if isinstance(m, _LAYERS) or not type(m).__module__.startswith("torch.nn.")]
    found = (p for m in layers for p in m._parameters.values() if p is not None and p.dim() == 2)
    return list({id(p): p for p in found if shared[id(p)] == 1}.values())


def _needs_graph(setting: Setting) -> bool:
    """Tells whether lookups would differ from DDP's on the eager route, or only rows with gradient are updated."""
    layers = [module for module in setting.model.modules() if isinstance(module, _LAYERS)]
    holders, updates = setting.stepping.holders, semantics(setting.options.row_updates)
    apart = any(m.max_norm is not None or m.scale_grad_by_freq or m.sparse for m in layers)
    return apart or any(holders.moving(m.weight, updates) == "lazy" for m in layers)


def _measured(tally: Tally) -> tuple[float, float] | None:
    """Returns (ms of the shortest backward, ms of the shortest step) without the first step; None: too few steps."""
    steps = [parts for parts, _ in tally.steps][1:]
    if len(steps) < PROFILED:
        return None
    return min(parts.get("backward", 0.0) for parts in steps) * 1e3, min(sum(p.values()) for p in steps) * 1e3


def _tables_ms(plan: Plan) -> float:
    """Predicts the milliseconds that the tables to be sharded take after a backward while they are whole."""
    whole = [[c.predicted_ms for c in plan[name].candidates if c.strategy != "alltoall"] for name in plan.sharded]
    return sum(min(each, default=0.0) for each in whole)


def _buckets_ms(plan: Plan) -> float:
    """Predicts the milliseconds to AllReduce all gradients but tables', bucket by bucket."""
    links, dense = plan.links.among(plan.world_size), 0.0
    for bucket in plan.buckets:
        ddp_bytes = sum(plan[name].ddp_bytes_per_step for name in bucket if not plan[name].is_table)
        own_bytes = ddp_bytes * plan.world_size // (2 * (plan.world_size - 1))
        dense += cost.all_reduce(own_bytes, plan.world_size).time_ms(links, "all_reduce") if own_bytes else 0.0
    return dense
