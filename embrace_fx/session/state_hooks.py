"""Hooks on a model's state dict, which inform the model's session when the state is read or loaded.

Any holder of the model, such as a Lightning module or an average of weights, gets the shards of sharded tables, and may
load whole tensors. The hooks are copied and pickled with the model. A copy's hooks have no session. Unpickled hooks do
nothing, so a pickled model can be loaded without this package. A model with sharded tables cannot be pickled.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.state_dicts import check_names, convert_state_dict, insert_shards
from embrace_fx.runtime.tables.table_shard import REFUSAL
from embrace_fx.setup.log import log

if TYPE_CHECKING:
    from embrace_fx.session.session import Session


class PlacedTables:
    """Stores, for a model, the layouts of the tables that a session has sharded, and the session's hooks on the state
    dict.

    Attributes:
        layouts: the layout of each sharded table by name. A tied table is listed under each of its names.
        copies: hooks of copies of the model that were made while its tables were whole.
        handles: torch's handles, which remove the session's hooks from the model.
        kept: the session, until it is closed. This reference keeps the session alive even if the compiled model is
            gone, because pending updates must be applied when the plain model is read.
    """

    kept: Session | None = None

    def __init__(self, layouts: Mapping[str, Layout] | None = None) -> None:
        self.layouts = dict(layouts or {})
        self.copies: weakref.WeakSet[StateHook] = weakref.WeakSet()
        self.handles: list[RemovableHandle] = []

    def record(self, session: Session) -> None:
        """Records the layouts of a session's tables."""
        self.layouts = session.state.layouts
        if self.layouts and self.copies and session.communicator.rank == 0:
            log(_MADE_BEFORE, ", ".join(self.layouts))
        self.copies.clear()


_MADE_BEFORE = (
    "the tables %s are now sharded, but an earlier copy of the model has whole ones. Each update of the copy from the "
    "model, as in an average of its weights, then gathers the tables. Make the copy after the first call of the model"
)


class StateHook:
    """A hook on a model's state dict.

    Args:
        act: the function to call, with this hook and the arguments of torch's hook.
        session: the model's session (the state of its compilation), or None on a copy of the model.
        placed: the layouts of tables, used if there is no session.
    """

    def __init__(self, act: Callable[..., None], session: Session | None, placed: PlacedTables) -> None:
        self._find_session = (lambda: None) if session is None else weakref.ref(session)
        self._act, self._placed = act, placed

    def __call__(self, *args: Any) -> None:
        self._act(self, *args)

    @property
    def session(self) -> Session | None:
        """The session of the compiled model, or None if it no longer exists."""
        return self._find_session()

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The layouts of the model's sharded tables, by each of their names."""
        return self._placed.layouts if self.session is None else self.session.state.layouts

    @property
    def trainer(self) -> Session | None:
        """The model's session if the compiled model has been called and is not closed, otherwise None. Such a session
        can make tables whole.
        """
        return self.session if self.session is not None and self.session.is_training else None

    @property
    def why_not_compiled(self) -> str | None:
        """The reason why the model cannot be compiled again, or None if it can."""
        if self.layouts and self.trainer is None:
            return f"an earlier compile() left only this rank's shards of {', '.join(self.layouts)}"
        return None

    def naming_dead_ranks(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context. If a collective inside it fails, the error names the ranks that have died."""
        return contextlib.nullcontext() if self.session is None else self.session.communicator.watching()

    def __reduce__(self) -> Any:
        if self.session is not None and self.session.shards:
            raise TypeError(REFUSAL.format(f"a model whose tables {', '.join(self.session.shards)} are sharded"))
        return getattr, (contextlib.nullcontext(), "__exit__")  # pickles as a function that does nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHook:
        copied = StateHook(self._act, None, PlacedTables(self.layouts))
        if not self.layouts:
            self._placed.copies.add(copied)
        return copied


def _before_saving(hook: StateHook, *_: Any) -> None:
    """Applies pending updates before a state dict is taken."""
    if hook.session is not None:
        hook.session.programs.apply_pending()


def _after_saving(hook: StateHook, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replaces the sharded tables in a state dict by tensors that `torch.distributed.checkpoint` can save as shards.

    Args:
        prefix: the prefix of the model's names in the state dict.
    """
    with hook.naming_dead_ranks():
        insert_shards(state_dict, hook.layouts, prefix=prefix)


def _before_loading(hook: StateHook, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Prepares a state dict for loading. Replaces each whole table that the model has sharded by this rank's shard of
    it.

    Args:
        prefix: the prefix of the model's names in the state dict.
    """
    check_names(module, state_dict, prefix)
    _before_saving(hook)
    with hook.naming_dead_ranks():
        convert_state_dict(state_dict, hook.layouts, module.get_parameter, prefix=prefix)


def _after_loading(hook: StateHook, *_: Any) -> None:
    """Makes the session use the loaded parameters."""
    if hook.session is not None:
        hook.session.parameters_were_loaded()


def add_state_hooks(session: Session) -> PlacedTables:
    """Registers hooks that save and load shards in the model's state dict. Returns the record of the model's sharded
    tables.
    """
    placed, model = PlacedTables(), session.model
    placed.kept = session
    placed.handles = [
        model.register_state_dict_pre_hook(StateHook(_before_saving, session, placed)),
        model.register_state_dict_post_hook(StateHook(_after_saving, session, placed)),
        model.register_load_state_dict_pre_hook(StateHook(_before_loading, session, placed)),
        model.register_load_state_dict_post_hook(StateHook(_after_loading, session, placed)),
    ]
    return placed


def release_from_session(model: nn.Module) -> None:
    """Ends the session of an earlier `compile` of the model, if there is one. Collective.

    Raises:
        RuntimeError: the model has gradients that were accumulated and not reduced.
    """
    hooks: list[Any] = list(model._state_dict_pre_hooks.values())
    for hook in hooks:
        if isinstance(hook, StateHook) and (session := hook.session) is not None:
            if session.state.unreduced:
                raise RuntimeError(
                    "compile(): the model is compiled already, and has gradients that were accumulated under "
                    "no_sync(). Call optimizer.step() and zero_grad() first."
                )
            session.release()
