"""The systems that the lab compares, each run the way its own users run it.

BytePS and Parallax are not here: neither has a release for today's PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from benchmarks.peers.base import Peer

ENVIRONMENTS = {"project": "embrace_fx", "torchrec": "torchrec", "horovod": "horovod.torch"}
"""The environments that run the systems, "project" this one and the others of build/peers, and what ranks import."""


@dataclass(frozen=True)
class System:
    """An entry of the lab.

    Attributes:
        made_by: module of this folder and name of the peer, imported where it runs: its environment alone has it.
        environment: a name of `ENVIRONMENTS`.
        alone: the system that computes the same without communication; empty for those two themselves.
        options: of the peer.
    """

    made_by: str
    environment: str
    alone: str
    options: dict[str, Any] = field(default_factory=dict)

    def peer(self) -> Peer:
        module, _, name = self.made_by.partition(".")
        found: Peer = getattr(import_module(f"benchmarks.peers.{module}"), name)(**self.options)
        return found


SYSTEMS: dict[str, System] = {
    "alone_dense": System("alone.Alone", "project", "", {"sparse": False}),
    "alone_sparse": System("alone.Alone", "project", "", {"sparse": True}),
    "ddp": System("ddp.Ddp", "project", "alone_dense"),
    "ddp_sparse": System("ddp.Ddp", "project", "alone_sparse", {"sparse": True}),
    "ddp_compiled": System("ddp.Ddp", "project", "alone_dense", {"compiled": True}),
    "horovod": System("horovod_peer.Horovod", "horovod", "alone_dense", {"sparse": False}),
    "horovod_sparse": System("horovod_peer.Horovod", "horovod", "alone_sparse", {"sparse": True}),
    "torchrec_column": System("torchrec_peer.TorchRec", "torchrec", "alone_sparse", {"sharding": "column"}),
    "torchrec_row": System("torchrec_peer.TorchRec", "torchrec", "alone_sparse", {"sharding": "row"}),
    "torchrec_planner": System("torchrec_peer.TorchRec", "torchrec", "alone_sparse", {"sharding": "planner"}),
    "embrace_none": System("embrace.EmbraceFx", "project", "alone_sparse", {"schedule": "none"}),
    "embrace_horizontal": System("embrace.EmbraceFx", "project", "alone_sparse", {"schedule": "horizontal"}),
    "embrace_vertical": System("embrace.EmbraceFx", "project", "alone_sparse", {"schedule": "vertical"}),
    "embrace_2d": System("embrace.EmbraceFx", "project", "alone_sparse", {"schedule": "2d"}),
}
