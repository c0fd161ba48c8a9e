"""Attributes of DistributedDataParallel that libraries read and set on a compiled model.

Reading returns the value that applies to a compiled model. Attributes of DDP's internals, such as its Reducer, raise an
AttributeError.

Setting `require_backward_grad_sync` or `require_forward_param_sync` has the same effect as under DDP. Attributes that
make no difference to a compiled model accept any value, and other options only their current value. `module` cannot be
set.

The user's model may have attributes with the same names, which take precedence when read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from embrace_fx.session.session import Session

_READ: Mapping[str, Callable[[Any], Any]] = {  # attribute of DDP -> how to read it from a `Session`
    "require_backward_grad_sync": lambda session: session.state.synchronised,
    "require_forward_param_sync": lambda session: session.programs.buffers.due,
    "find_unused_parameters": lambda session: True,
    "static_graph": lambda session: False,
    "gradient_as_bucket_view": lambda session: False,
    "broadcast_buffers": lambda session: session.options.shares_buffers,
    "mixed_precision": lambda session: None,
    "device_ids": lambda session: None,
    "output_device": lambda session: None,
    "dim": lambda session: 0,
    "device": lambda session: next(session.model.parameters()).device,
    "device_type": lambda session: next(session.model.parameters()).device.type,
    "parameters_to_ignore": lambda session: set(session.state.ignored),
    "modules_buffers": lambda session: list(session.model.buffers()),
    "named_module_buffers": lambda session: dict(session.model.named_buffers()),
    "will_sync_module_buffers": lambda session: session.programs.buffers.shares_next,
    "_set_static_graph": lambda session: lambda: None,
    "_get_ddp_logging_data": lambda session: lambda: _ddp_logging_data(session),
    "_distributed_rank": lambda session: session.communicator.rank,
}
_ALWAYS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
"""Attributes that accept any value, because they make no difference to a compiled model."""
_GIVEN = {
    "broadcast_buffers": "broadcast_buffers",
    "forward_sync_buffers": "broadcast_buffers",
    "process_group": "process_group",
    "device_mesh": "process_group",
}
"""Maps each attribute to the option of `compile` that decides its value."""
SET = ("module", "require_backward_grad_sync", "require_forward_param_sync", *_GIVEN, *_ALWAYS)
"""Attributes that change the behavior of a DistributedDataParallel when they are set."""
_MACHINERY = (
    "reducer",
    "logger",
    "buffer_hook",
    "bucket_bytes_cap",
    "bucket_bytes_cap_default",
    "broadcast_bucket_size",
)
"""Attributes that each DistributedDataParallel object has in addition to the attributes of its class."""


def _ddp_logging_data(session: Session) -> dict[str, Any]:
    """Returns those fields of DDP's `_get_ddp_logging_data()` that have a value for a compiled model."""
    parameters = list(session.model.parameters())
    return {
        "world_size": session.communicator.world_size,
        "rank": session.communicator.rank,
        "backend_name": "" if session.communicator.group is None else dist.get_backend(session.communicator.group),
        "module_name": type(session.model).__name__,
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(each.numel() * each.element_size() for each in parameters),
        "broadcast_buffers": int(session.options.shares_buffers),
        "find_unused_parameters": 1,
        "gradient_as_bucket_view": 0,
        "can_set_static_graph": False,
    }


def read_attribute(session: Session, name: str, error: AttributeError) -> Any:
    """Returns a compiled model's value for a DistributedDataParallel attribute that libraries read.

    Args:
        error: the error of the failed lookup on the user's model. It is raised again if DDP has no such attribute
            either.

    Raises:
        AttributeError: the attribute belongs to DDP's internals, or does not exist.
    """
    if name in _READ:
        return _READ[name](session)
    if name in _MACHINERY or hasattr(DistributedDataParallel, name):
        raise AttributeError(
            f"A compiled model has no {name!r}, which is internal to DistributedDataParallel. See docs/from_ddp.md for "
            "what replaces each line of a DDP loop."
        ) from error
    raise error


def assign_attribute(session: Session, name: str, value: Any) -> None:
    """Sets an attribute of DistributedDataParallel on a compiled model. All ranks must set the same value.

    Raises:
        AttributeError: this attribute cannot be changed after `compile`.
    """
    if name == "module":
        raise AttributeError(
            f"The .module of a compiled model cannot be replaced by a {type(value).__name__}. Load the new weights "
            "with load_state_dict(), or compile the new module."
        )
    if name == "require_backward_grad_sync":
        session.state.synchronised = bool(value)
    elif name == "require_forward_param_sync":
        session.programs.buffers.due = bool(value)
    elif name in _GIVEN:
        of = {"process_group": session.communicator.group, "device_mesh": session.device_mesh}
        present = of.get(name, session.options.shares_buffers)
        if value is not present and value != present:
            raise AttributeError(
                f"{name} cannot be set to {value!r} after compile(): it is {present!r}. Pass {_GIVEN[name]}= to "
                "compile() instead."
            )
