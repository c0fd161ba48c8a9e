"""embrace_fx: a PyTorch compiler for distributed training of models with large embedding tables.

`embrace_fx.compile(model, optimizer=...)` stands where `DistributedDataParallel(model)` would: see `embrace_fx.api`.
`embrace_fx.plan(model, batch, ...)` tells beforehand what it would decide, on any cluster: see `embrace_fx.what_if`.
"""

from embrace_fx.api import CompiledModel, compile, full_state_dict
from embrace_fx.capture.errors import CaptureError
from embrace_fx.cost.devices import DEVICES, Device
from embrace_fx.cost.links import Cluster, Link
from embrace_fx.runtime.ranks.failure import DeadRank, PeerFailure
from embrace_fx.vocabulary.plan import Candidate, Decision, Grid, Plan
from embrace_fx.what_if import plan

__all__ = [
    "DEVICES",
    "Candidate",
    "CaptureError",
    "Cluster",
    "CompiledModel",
    "DeadRank",
    "Decision",
    "Device",
    "Grid",
    "Link",
    "PeerFailure",
    "Plan",
    "compile",
    "full_state_dict",
    "plan",
]
