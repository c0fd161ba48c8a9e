"""Prices what a capture gives: the waits that shards save per step, beside the time that the capture takes.

Contract
    A pure function of a plan and of a few counts, because it is asked before there is a graph. Whole tables are waited
    for behind the backward, of shards a schedule hides half: this must save a tenth of the step, whose compute is
    estimated from the parameters and the batch, and repay the capture in 500 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embrace_fx.cost import links as cost
from embrace_fx.cost.links import CORE
from embrace_fx.passes.planner.pricing import HEAD_EXCHANGES
from embrace_fx.vocabulary.plan import SHARDED, Plan

WORTH = 0.1
"""Share of a step that shards must save."""
CAPTURE_MS, REPAID_IN = 25.0, 500
"""Milliseconds that capture and passes take for each parameter, of 12 layers of a Transformer on one core; steps that
must save as much."""
FLOPS = 6
"""Floating-point operations of a parameter for each position of a batch: two in the forward, four in the backward."""
PARAMETER_MS = 0.05
"""Milliseconds that autograd and an optimizer take for a parameter of any size."""
AWAITED = 0.5
"""Share of a sharded table's exchange that a step waits for (`step_cost.py`)."""


@dataclass(frozen=True)
class Capture:
    """A capture that has not been made.

    Attributes:
        parameters: count of trained parameters.
        elements: elements of those that are multiplied with every position of a batch.
        positions: positions of the largest batch.
        heads: weights of output layers, of which every position counts as scored.
    """

    parameters: int
    elements: int
    positions: int
    heads: tuple[Tensor, ...]

    @property
    def capture_ms(self) -> float:
        """The time of the capture."""
        return CAPTURE_MS * self.parameters

    @property
    def compute_ms(self) -> float:
        """The compute of a step."""
        return FLOPS * self.elements * self.positions / CORE.flops_per_ms + PARAMETER_MS * self.parameters

    def pays(self, plan: Plan, error: float = 1.0) -> bool:
        """Returns whether the plan's shards save enough, or would if they saved `error` times as much."""
        return error * self._saved_ms(plan) > max(WORTH * self.compute_ms, self.capture_ms / REPAID_IN)

    def compared(self, plan: Plan) -> str:
        """Compares what shards save with a step and with the capture, in words."""
        saved_ms, step_ms, capture_s = self._saved_ms(plan), self.compute_ms, self.capture_ms / 1e3
        return f"{saved_ms:.1f} ms of a step of about {step_ms:.0f} ms, a capture take {capture_s:.1f} s"

    def _saved_ms(self, plan: Plan) -> float:
        """Predicts the waits that shards save per step, compared with the cheapest exchanges of whole tables."""
        whole = {
            name: [c.predicted_ms for c in plan[name].candidates if c.strategy not in SHARDED] for name in plan.sharded
        }
        of_tables = sum(min(whole[name]) - AWAITED * plan[name].predicted_ms for name in plan.sharded)
        return of_tables + sum(self._saved_by_head_ms(plan, head) for head in self.heads)

    def _saved_by_head_ms(self, plan: Plan, head: Tensor) -> float:
        """Predicts the milliseconds that a sharded output layer saves per step, 0 for none."""
        links, ranks = plan.links, plan.world_size
        both_ways = 2 * self.positions * head.shape[1] * head.element_size()
        whole_ms = cost.all_reduce(head.nbytes, ranks).time_ms(links, "all_reduce")
        states = cost.Exchange(both_ways * (ranks - 1), HEAD_EXCHANGES * (ranks - 1))
        exchanges = cost.all_to_all(both_ways, ranks) + states
        return max(0.0, whole_ms - exchanges.time_ms(links, "all_to_all"))
