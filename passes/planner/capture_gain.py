"""Decides whether capturing the forward pays: whether the waits saved per step outweigh the time of the capture.

Contract
    A pure function of a plan and of a few counts, because it is asked before there is a graph. Whole tables are waited
    for behind the backward, of shards a schedule hides half. A graph also hides in the next forward what buckets take
    longer than the backward. Both together must save a tenth of the step, whose compute is estimated from the
    parameters and the batch, and repay the capture in 500 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embrace_fx.cost import links as cost
from embrace_fx.cost.links import CORE
from embrace_fx.passes.planner.pricing import HEAD_EXCHANGES
from embrace_fx.passes.planner.step_cost import LEAST_MS, bucket_ms
from embrace_fx.vocabulary.plan import SHARDED, Plan

WORTH = 0.1
"""Share of a step that a graph must save."""
CAPTURE_MS, REPAID_IN = 25.0, 500
"""Milliseconds that capture and passes take for each parameter, of 12 layers of a Transformer on one core; steps that
must save as much."""
FLOPS = 6
"""Floating-point operations of a parameter for each position of a batch: two in the forward, four in the backward."""
BACKWARD = 2 / 3
"""Share of a step's compute that is the backward's."""
PARAMETER_MS = 0.05
"""Milliseconds that autograd and an optimizer take for a parameter of any size."""
AWAITED = 0.5
"""Share of a sharded table's exchange that a step waits for (`step_cost.py`)."""


@dataclass(frozen=True)
class Capture:
    """A possible capture of a model's forward as a graph, with the sizes from which its cost and gain are predicted.

    Attributes:
        parameters: the number of trained parameters.
        elements: the total number of elements of the parameters that are multiplied with every position of a batch.
        positions: the number of positions (tokens) of the largest batch.
        heads: the weights of output layers. Every position is assumed to have a label.
        other_bytes: bytes of all parameters that are not tables or weights of output layers, and that the plan does not
            contain.
    """

    parameters: int
    elements: int
    positions: int
    heads: tuple[Tensor, ...]
    other_bytes: int

    @property
    def capture_ms(self) -> float:
        """The predicted milliseconds of capturing and compiling the model."""
        return CAPTURE_MS * self.parameters

    def compute_ms(self, plan: Plan) -> float:
        """Estimates the milliseconds of compute per step. They are longer if ranks share a core."""
        alone_ms = FLOPS * self.elements * self.positions / CORE.flops_per_ms + PARAMETER_MS * self.parameters
        return alone_ms / min(plan.links.pace, 1.0)

    def pays(self, plan: Plan, error: float = 1.0) -> bool:
        """Returns whether a captured graph is predicted to save enough time per step to be worth its capture.

        Args:
            error: a factor on the predicted savings, for an optimistic estimate.
        """
        saved_ms = error * (self._saved_by_shards_ms(plan) + self._hidden_ms(plan))
        return saved_ms > max(WORTH * self.compute_ms(plan), self.capture_ms / REPAID_IN)

    def describe_savings(self, plan: Plan) -> str:
        """Returns a text with the milliseconds that sharding saves per step, the step's milliseconds, and the seconds
        of a capture.
        """
        hidden_ms = self._hidden_ms(plan)
        hidden = f" and overlap {hidden_ms:.1f}" if hidden_ms >= LEAST_MS else ""
        saved = f"{self._saved_by_shards_ms(plan):.1f} ms{hidden} of a step of about {self.compute_ms(plan):.0f} ms"
        return f"{saved}, and a capture would take {self.capture_ms / 1e3:.1f} s"

    def _hidden_ms(self, plan: Plan) -> float:
        """Predicts how many milliseconds of gradient AllReduces per step the next forward hides, if the backward is too
        short to hide them.
        """
        compute_ms = self.compute_ms(plan)
        others_ms = cost.all_reduce(self.other_bytes, plan.world_size).time_ms(_flat_links(plan), "all_reduce")
        late_ms = others_ms + sum(bucket_ms(plan, names) for names in plan.buckets) - BACKWARD * compute_ms
        return min(max(late_ms, 0.0), (1 - BACKWARD) * compute_ms)

    def _saved_by_shards_ms(self, plan: Plan) -> float:
        """Predicts how many milliseconds per step are saved if tables and output layers are sharded, compared with the
        cheapest exchange of the gradients of whole tables.
        """
        whole = {
            name: [c.predicted_ms for c in plan[name].candidates if c.strategy not in SHARDED] for name in plan.sharded
        }
        of_tables = sum(min(whole[name]) - AWAITED * plan[name].predicted_ms for name in plan.sharded)
        return of_tables + sum(self._saved_by_head_ms(plan, head) for head in self.heads)

    def _saved_by_head_ms(self, plan: Plan, head: Tensor) -> float:
        """Predicts the milliseconds per step that are saved if the output layer with the weight `head` is sharded.
        Returns 0 if nothing is saved.
        """
        links, ranks = _flat_links(plan), plan.world_size
        both_ways = 2 * self.positions * head.shape[1] * head.element_size()
        whole_ms = cost.all_reduce(head.nbytes, ranks).time_ms(links, "all_reduce")
        states = cost.Exchange(both_ways * (ranks - 1), HEAD_EXCHANGES * (ranks - 1))
        exchanges = cost.all_to_all(both_ways, ranks) + states
        return max(0.0, whole_ms - exchanges.time_ms(links, "all_to_all"))


def _flat_links(plan: Plan) -> cost.Cluster:
    """Returns an equivalent of the plan's cluster with one rank per machine."""
    return plan.links.flattened(plan.world_size)
