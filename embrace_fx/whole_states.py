"""State dicts with every sharded tensor whole, as what is not a compiled model asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class HasState(Protocol):
    """What has a state dict: a module, an optimizer."""

    def state_dict(self) -> dict[str, Any]: ...


def full_state_dict(stateful: HasState | dict[str, Any]) -> dict[str, Any]:
    """`stateful.state_dict()` with every sharded tensor whole, on every rank: what `torch.save` on one rank wants.

    Collective. For an optimizer, a model that contains a compiled one, an average of its weights; or a state dict.
    """
    from embrace_fx.runtime.tables.state_dicts import whole_state  # noqa: PLC0415  (DTensor takes a while to import)

    found: dict[str, Any] = whole_state(stateful if isinstance(stateful, dict) else stateful.state_dict())
    return found


def save_full_state_dict(stateful: HasState | dict[str, Any], path: str | Path) -> None:
    """The file that `torch.save(full_state_dict(stateful), path)` would write, without any rank holding a table whole.

    Collective; rank 0 writes. `torch.load(path, mmap=True)` reads it back so that each rank takes its own columns only:
    `model.load_state_dict` and `optimizer.load_state_dict` take what it returns.
    """
    from embrace_fx.runtime.tables.whole_files import write_whole  # noqa: PLC0415  (DTensor takes a while to import)

    write_whole(stateful if isinstance(stateful, dict) else stateful.state_dict(), Path(path))
