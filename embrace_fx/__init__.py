"""embrace_fx: a PyTorch compiler for distributed training of models with large embedding tables.

`embrace_fx.compile(model, optimizer=...)` replaces `DistributedDataParallel(model)`: see `embrace_fx.api`.
`embrace_fx.plan(model, batch, ...)` predicts what it would decide on any cluster: see `embrace_fx.what_if`.

Names are imported on first use, because torch's compiler, which most of them need, takes seconds to load.
"""

from __future__ import annotations

from importlib import import_module, metadata, util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embrace_fx.api import compile, full_state_dict, save_full_state_dict
    from embrace_fx.capture.errors import CaptureError
    from embrace_fx.compiled_model import CompiledModel
    from embrace_fx.cost.devices import DEVICES, Device
    from embrace_fx.cost.links import Cluster, Link
    from embrace_fx.runtime.ranks.failure import DeadRank, DivergedReplicas, PeerFailure, StuckRank
    from embrace_fx.setup.agreement import SetUpError
    from embrace_fx.vocabulary.plan import Candidate, Decision, Grid, Plan
    from embrace_fx.vocabulary.row_wise import RowWiseAdagrad
    from embrace_fx.what_if import plan

    __version__: str

__all__ = [
    "DEVICES",
    "Candidate",
    "CaptureError",
    "Cluster",
    "CompiledModel",
    "DeadRank",
    "Decision",
    "Device",
    "DivergedReplicas",
    "Grid",
    "Link",
    "PeerFailure",
    "Plan",
    "RowWiseAdagrad",
    "SetUpError",
    "StuckRank",
    "__version__",
    "compile",
    "full_state_dict",
    "plan",
    "save_full_state_dict",
]

_MODULES = {
    "DEVICES": "cost.devices",
    "Candidate": "vocabulary.plan",
    "CaptureError": "capture.errors",
    "Cluster": "cost.links",
    "CompiledModel": "compiled_model",
    "DeadRank": "runtime.ranks.failure",
    "Decision": "vocabulary.plan",
    "Device": "cost.devices",
    "DivergedReplicas": "runtime.ranks.failure",
    "Grid": "vocabulary.plan",
    "Link": "cost.links",
    "PeerFailure": "runtime.ranks.failure",
    "Plan": "vocabulary.plan",
    "RowWiseAdagrad": "vocabulary.row_wise",
    "SetUpError": "setup.agreement",
    "StuckRank": "runtime.ranks.failure",
    "compile": "api",
    "full_state_dict": "api",
    "plan": "what_if",
    "save_full_state_dict": "api",
}

# In a source tree, passes and runtime are beside this folder; installation makes them parts of the package.
if util.find_spec("embrace_fx.passes") is None:
    raise ImportError(
        f"embrace_fx is not installed; this is its source tree, {__path__[0]}. Run `make env` there and use "
        ".venv/bin/python, or run `pip install .`."
    )

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            found = metadata.version("embrace-fx")
        elif name in _MODULES:
            found = getattr(import_module(f"embrace_fx.{_MODULES[name]}"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
