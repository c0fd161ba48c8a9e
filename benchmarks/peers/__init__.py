"""The systems that the lab compares, each run the way its own users run it.

BytePS and Parallax are not here: neither has a release for today's PyTorch. What they do to the wire is done by two
strategies of embrace_fx, which are ours and named so: `ours_parameter_server` and `ours_parallax`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from benchmarks.peers.base import Peer

_FORCED: tuple[str, ...] = ()
with suppress(ImportError):  # environments of other systems do not have embrace_fx
    from embrace_fx.vocabulary.plan import STRATEGIES

    _FORCED = STRATEGIES

ENVIRONMENTS = {"project": "embrace_fx.session.session", "torchrec": "torchrec", "horovod": "horovod.torch"}
"""The environments that run the systems, "project" this one and the others of build/peers, and what ranks import, which
all their systems share. embrace_fx is in the first alone: what the ranks of all of them import must do without it."""


@dataclass(frozen=True)
class System:
    """A system that the lab can measure.

    Attributes:
        made_by: module of this folder and name of the peer, imported where it runs: its environment alone has it.
        environment: a name of `ENVIRONMENTS`.
        alone: the system that computes the same without communication; empty for those themselves.
        options: the options of the peer.
        warm_up_steps: before it has settled. embrace_fx profiles its steps and orders its launches anew at the twelfth.
        slow_warm_up_steps: the same in slow motion, where fewer are profiled.
        rows: the factor on the number of rows of the model's tables. Batches read the same rows as before.
        measures_links: whether it measures the links while it opens, and uses the result.
    """

    made_by: str
    environment: str
    alone: str
    options: dict[str, Any] = field(default_factory=dict)
    warm_up_steps: int = 3
    slow_warm_up_steps: int = 3
    rows: int = 1
    measures_links: bool = False

    def peer(self) -> Peer:
        module, _, name = self.made_by.partition(".")
        found: Peer = getattr(import_module(f"benchmarks.peers.{module}"), name)(**self.options)
        return found


def embrace(alone: str = "embrace_alone", rows: int = 1, ours: bool = False, **options: Any) -> System:
    """`ours`: a stand-in for another system, which orders nothing."""
    settles_late = bool(alone) and not ours
    warm_up = (13, 6) if settles_late else (3, 3)
    return System("embrace.EmbraceFx", "project", alone, options, *warm_up, rows=rows, measures_links=True)


SYSTEMS: dict[str, System] = {
    "alone_dense": System("alone.Alone", "project", "", {"sparse": False}),
    "alone_sparse": System("alone.Alone", "project", "", {"sparse": True}),
    "embrace_alone": embrace(alone="", schedule="none", apart=True),
    "ddp": System("ddp.Ddp", "project", "alone_dense"),
    "ddp_sparse": System("ddp.Ddp", "project", "alone_sparse", {"sparse": True}),
    "ddp_compiled": System("ddp.Ddp", "project", "alone_dense", {"compiled": True}),
    "horovod": System("horovod_peer.Horovod", "horovod", "alone_dense", {"sparse": False}),
    "horovod_sparse": System("horovod_peer.Horovod", "horovod", "alone_sparse", {"sparse": True}),
    "torchrec_column": System("torchrec_peer.TorchRec", "torchrec", "alone_sparse", {"sharding": "column"}),
    "torchrec_row": System("torchrec_peer.TorchRec", "torchrec", "alone_sparse", {"sharding": "row"}),
    "torchrec_planner": System("torchrec_peer.TorchRec", "torchrec", "alone_sparse", {"sharding": "planner"}),
    "ours_parameter_server": embrace(ours=True, schedule="none", strategy={"*": "ps"}),
    "ours_parallax": embrace(ours=True, schedule="none", strategy={"tables.*": "ps"}),
    "embrace_none": embrace(schedule="none"),
    "embrace_vertical": embrace(schedule="vertical"),
    "embrace_horizontal": embrace(schedule="horizontal"),
    "embrace_2d": embrace(schedule="2d"),
    "embrace_auto": embrace(schedule="auto"),
    "embrace_2d_rows10": embrace(rows=10, schedule="2d"),
    **{f"forced_{strategy}": embrace(schedule="2d", strategy=strategy) for strategy in _FORCED},
}
