"""The strategies by name. Each exchanges a gradient, and says into which units it cuts one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from embrace_fx.cost.exchanges import Prediction, predict
from embrace_fx.cost.sparsity import Sparsity, measure
from embrace_fx.runtime.exchanges import allgather, allreduce, omnireduce, ps, zen
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.gradient import Gradient, RowSet
from embrace_fx.runtime.exchanges.options import ExchangeOptions
from embrace_fx.runtime.exchanges.steps import Steps


@dataclass(frozen=True)
class Strategy:
    """One way to the mean of all ranks' gradients.

    Attributes:
        name: one of `STRATEGIES`.
        exchange: from this rank's gradient to the mean, of the same kind: dense, or the union of all ranks' rows. All
            ranks give the same options and gradients of one kind, shape and type. The mean has the same bits on all.
        units: what the strategy would put an index on.
    """

    name: str
    exchange: Callable[[Gradient, Channel, ExchangeOptions], Steps[Gradient]]
    units: Callable[[Gradient, ExchangeOptions], RowSet]

    def predict(self, sparsity: Sparsity, options: ExchangeOptions) -> Prediction:
        """Bytes and messages of gradients that are so sparse, in this strategy's units."""
        return predict(self.name, sparsity, scheme=options.scheme, slots=options.slots, cluster=options.cluster)

    def profile(self, by_rank: Sequence[Gradient], options: ExchangeOptions) -> Prediction:
        """Prices the exchange of these gradients, one per rank."""
        units = [self.units(gradient, options) for gradient in by_rank]
        first = units[0]
        sparsity = measure([u.ids for u in units], first.num_rows, first.width, first.rows.itemsize)
        return self.predict(sparsity, options)


STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("allreduce", allreduce.exchange, allreduce.units),
        Strategy("allgather", allgather.exchange, allgather.units),
        Strategy("omnireduce", omnireduce.exchange, omnireduce.units),
        Strategy("zen", zen.exchange, zen.units),
        Strategy("ps", ps.exchange, ps.units),
    )
}
