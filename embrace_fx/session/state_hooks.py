"""What a session does when its model's state dict is taken or loaded, by whomever: hooks on the model.

Whoever holds the model (a Lightning module, an average of weights, `CompiledModel.module`) gets shards where a table is
sharded, and may load whole tensors. The hooks are part of the model when it is copied or pickled: the copy's do not
know the session, and a pickle of a model with sharded tables is refused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from embrace_fx.runtime.tables.layouts import Place
from embrace_fx.runtime.tables.state_dicts import REFUSAL, show_shards, take_own_parts

if TYPE_CHECKING:
    from embrace_fx.session.session import Session


class _Hook:
    """A hook that does not keep its session alive.

    Args:
        session: whose it is; None: nobody's, of a model that was copied.
        group, places: of such a copy: the ranks that its tables are spread over, and where they lie.
    """

    def __init__(
        self,
        session: Session | None = None,
        group: dist.ProcessGroup | None = None,
        places: Mapping[str, Place] | None = None,
    ) -> None:
        self._find_session = (lambda: None) if session is None else weakref.ref(session)
        self._group = group
        self._places = places or {}

    @property
    def session(self) -> Session | None:
        return self._find_session()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that the tables are spread over."""
        return self._group if self.session is None else self.session.group

    @property
    def places(self) -> Mapping[str, Place]:
        """Where the parts of sharded tables lie."""
        return self._places if self.session is None else self.session.places

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Tells of a rank that dies in a collective inside."""
        return contextlib.nullcontext() if self.session is None else self.session.watching()

    def __reduce__(self) -> Any:
        if self.session is not None and self.session.shards:
            raise TypeError(REFUSAL.format(f"a model whose tables {', '.join(self.session.shards)} are sharded"))
        return type(self), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)(group=self.group, places=self.places)


class ParametersMayChange(_Hook):
    """Before a state dict is taken: every update is applied."""

    def __call__(self, *_: Any) -> None:
        if self.session is not None:
            self.session.parameters_may_change()


class ShowShards(_Hook):
    """After a state dict is taken."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        def watch() -> contextlib.AbstractContextManager[None]:
            return self.watching()  # a function is copied with a state dict as it is, a method with its owner

        with watch():
            show_shards(state_dict, self.places, self.group, watch, prefix=prefix)


class TakeOwnPart(_Hook):
    """Before a state dict is loaded."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if self.session is not None:
            self.session.parameters_may_change()
        with self.watching():
            take_own_parts(state_dict, self.places, self.group, prefix=prefix)


class ParametersWereLoaded(_Hook):
    """After a state dict is loaded."""

    def __call__(self, *_: Any) -> None:
        if self.session is not None:
            self.session.parameters_were_loaded()


def add_state_hooks(session: Session) -> None:
    """Has the model's state dicts show what a session has made of it."""
    session.model.register_state_dict_pre_hook(ParametersMayChange(session))
    session.model.register_state_dict_post_hook(ShowShards(session))
    session.model.register_load_state_dict_pre_hook(TakeOwnPart(session))
    session.model.register_load_state_dict_post_hook(ParametersWereLoaded(session))
