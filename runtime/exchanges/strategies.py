"""The strategies by name. Each exchanges a gradient, says into which units it cuts one, and predicts its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from embrace_fx.runtime.exchanges import allgather, allreduce, omnireduce, ps, zen
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.gradient import Gradient, RowSet
from embrace_fx.runtime.exchanges.options import Options
from embrace_fx.runtime.exchanges.prediction import Prediction, Sparsity, measure
from embrace_fx.runtime.exchanges.steps import Steps


@dataclass(frozen=True)
class Strategy:
    """One way to the mean of all ranks' gradients.

    Attributes:
        exchange: from this rank's gradient to the mean, of the same kind: dense, or the union of all ranks' rows. All
            ranks give the same options and gradients of one kind, shape and type. The mean has the same bits on all.
        units: what the strategy would put an index on; `measure` these for `predict`.
        predict: bytes and messages.
    """

    exchange: Callable[[Gradient, Channel, Options], Steps[Gradient]]
    units: Callable[[Gradient, Options], RowSet]
    predict: Callable[[Sparsity, Options], Prediction]

    def profile(self, by_rank: Sequence[Gradient], options: Options) -> Prediction:
        """What exchanging these gradients costs, one per rank."""
        return self.predict(measure([self.units(gradient, options) for gradient in by_rank]), options)


STRATEGIES: Mapping[str, Strategy] = {
    "allreduce": Strategy(allreduce.exchange, allreduce.units, allreduce.predict),
    "allgather": Strategy(allgather.exchange, allgather.units, allgather.predict),
    "omnireduce": Strategy(omnireduce.exchange, omnireduce.units, omnireduce.predict),
    "zen": Strategy(zen.exchange, zen.units, zen.predict),
    "ps": Strategy(ps.exchange, ps.units, ps.predict),
}
