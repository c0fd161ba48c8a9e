"""embrace_fx: a PyTorch compiler for distributed training of models with large embedding tables.

`embrace_fx.compile(model, optimizer=...)` stands where `DistributedDataParallel(model)` would: see `embrace_fx.api`.
"""

from embrace_fx.api import CompiledModel, compile
from embrace_fx.capture import CaptureError
from embrace_fx.plan import Decision, Plan
from embrace_fx.runtime.failure import DeadRank, PeerFailure

__all__ = ["CaptureError", "CompiledModel", "DeadRank", "Decision", "PeerFailure", "Plan", "compile"]
