"""Names and state dicts of a compiled model, which detect code that expects DDP's prefix "module.".

Names are the plain model's, so that `name.startswith("module.emb")` or `name[7:]`, written for DistributedDataParallel,
would do nothing or cut into the name, without a word. Both raise here. Where the prefix is only looked for
(`name.startswith("module.")`, `name.removeprefix("module.")`), a name is as any other string.

Sets and dicts compare hashes first, so that `name in {"module.emb.weight"}` and `rates.get(name, 0.1)` ask a name for
nothing but its hash: the set or dict is then read from the frame that asks. A dict of tensors may be a checkpoint,
whose names may have the prefix.
"""

from __future__ import annotations

import codecs
import dis
import sys
from collections import OrderedDict
from collections.abc import ItemsView, Iterator, KeysView, Mapping
from functools import cache
from types import CodeType, FrameType
from typing import Any, TypeVar

PREFIX = "module."
T = TypeVar("T")


class Name(str):
    """The name of a parameter, buffer or module. It equals the plain string, but detects code that looks for DDP's
    prefix "module.".
    """

    __slots__ = ()

    def __hash__(self) -> int:
        caller = sys._getframe(1)
        if caller.f_code.co_code[caller.f_lasti] in _LOOKUPS:
            names, prefixed = _searched_container(caller), PREFIX + self
            if prefixed in names and str(self) not in names and not hasattr(names[prefixed], "shape"):
                self._refuse_if_prefixed(prefixed, super().__eq__)
        return super().__hash__()

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        """Returns whether the name starts with `prefix`. Raises `ValueError` if `prefix` begins with DDP's "module."
        and the name starts only with the rest of `prefix`.
        """
        found = super().startswith(prefix, *bounds)
        if not found:
            for each in prefix if isinstance(prefix, tuple) else (prefix,):
                self._refuse_if_prefixed(each, super().startswith)
        return found

    def __contains__(self, part: Any) -> bool:
        found = super().__contains__(part)
        if not found:
            self._refuse_if_prefixed(part, super().startswith)
        return found

    def __eq__(self, other: object) -> bool:
        found = super().__eq__(other)
        if found is False:
            self._refuse_if_prefixed(other, super().__eq__)
        return found

    def __getitem__(self, index: Any) -> str:
        found = super().__getitem__(index)
        if index == _CUT and not (found and (found[0] == "." or super().__getitem__(len(PREFIX) - 1) in "._")):
            raise ValueError(
                f"Names in a compiled model do not begin with {PREFIX!r}, so {str(self)!r}[{len(PREFIX)}:] cuts into "
                f"the name itself. Use name.removeprefix({PREFIX!r}), which also works with DistributedDataParallel."
            )
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Use codecs.encode(), the only function that returns a string and that torch.load(weights_only=True) allows.
        return codecs.encode, (codecs.encode(str(self), "rot13"), "rot13")

    def _refuse_if_prefixed(self, prefix: object, matches: Any) -> None:
        """Raises `ValueError` if `prefix` begins with DDP's "module." and the rest of it matches this name. Code that
        compares names in this way was written for DDP, and would select no parameters of a compiled model.

        Args:
            prefix: the object that the name was compared with.
            matches: returns whether this name matches a string.
        """
        if isinstance(prefix, str) and len(prefix) > len(PREFIX) and prefix.startswith(PREFIX):
            rest = prefix[len(PREFIX) :]
            if matches(rest):
                raise ValueError(
                    f"Names in a compiled model do not begin with {PREFIX!r}, but {str(self)!r} was compared with "
                    f"{prefix!r}. Compare {rest!r} with name.removeprefix({PREFIX!r}), which also works with "
                    "DistributedDataParallel."
                )


_CUT = slice(len(PREFIX), None)
_LOOKUPS = (dis.opmap["CONTAINS_OP"], dis.opmap["CALL"])


def _searched_container(frame: FrameType) -> Mapping[Any, Any]:
    """Finds the set or dict in which the code of a frame looks up a name. Returns a dict, with the elements of a set as
    keys, or {} if the container cannot be found from the code.
    """
    found: Any = None
    for kind, what in _loads_of_container(frame.f_code, frame.f_lasti):
        if kind == "LOAD_CONST":
            found = what
        elif kind == "LOAD_ATTR":
            found = getattr(found, what, None)
        else:
            found = frame.f_locals.get(what, frame.f_globals.get(what))
    if isinstance(found, set | frozenset):
        return dict.fromkeys(map(str, found))
    return found if isinstance(found, dict) else {}


@cache
def _loads_of_container(code: CodeType, last: int) -> tuple[tuple[str, Any], ...]:
    """Returns the instructions that load the container of `name in container` or `container.get(name)`, as pairs
    (opcode name, argument). Returns () for other code.

    Args:
        code: the code that looks up the name.
        last: the offset of the instruction that looks up the name.
    """
    before = [each for each in dis.get_instructions(code) if each.offset < last and each.opname not in _IDLE]
    if code.co_code[last] == dis.opmap["CALL"]:
        while before and before[-1].argval != "get":
            if before.pop().opname == "CALL":
                return ()
        before = before[:-1]
    path: list[tuple[str, Any]] = []
    for each in reversed(before):
        what = each.argval[-1] if isinstance(each.argval, tuple) else each.argval
        kind = next((kind for kind in _LOADS if each.opname.startswith(kind)), "")
        path.append((kind, what))
        if kind != "LOAD_ATTR":
            return tuple(reversed(path)) if kind else ()
    return ()


_IDLE = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL")
_LOADS = ("LOAD_CONST", "LOAD_ATTR", "LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")


def wrap_names(named_values: Iterator[tuple[str, T]], prefix: str) -> Iterator[tuple[str, T]]:
    """Yields each (name, value) of `named_values` with the name as a `Name`, which detects code that expects DDP's
    prefix.

    Args:
        named_values: the names and values.
        prefix: the prefix that an enclosing module has put before the names. If it is not "", names are not wrapped.
    """
    return named_values if prefix else ((Name(name), value) for name, value in named_values)


class StateDict(OrderedDict[str, Any]):
    """A state dict of a compiled model. Iterating over it yields each key as a `Name`. Looking up a key with DDP's
    prefix "module." returns the value of the key without the prefix.

    When pickled, it becomes a plain `OrderedDict` with plain strings as keys.
    """

    @classmethod
    def wrap(cls, state: Any) -> Any:
        """Converts a state dict to a `StateDict`. If the model's own `state_dict` method has returned another class
        than `OrderedDict`, returns its result unchanged.
        """
        if type(state) is not OrderedDict:
            return state
        found = cls(state)
        found.__dict__.update(state.__dict__)
        return found

    def __iter__(self) -> Iterator[str]:
        return map(Name, super().__iter__())

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # a C type, which asks no subclass for its keys
        """Returns the keys as `Name`s."""
        return KeysView(self)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # as keys
        """Returns the items, with their keys as `Name`s."""
        return ItemsView(self)

    def __missing__(self, key: str) -> Any:
        if key.startswith(PREFIX) and (rest := key.removeprefix(PREFIX)) in self:
            return self[rest]
        raise KeyError(key)

    def __copy__(self) -> StateDict:
        found = self.copy()
        found.__dict__.update(self.__dict__)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), self.__dict__ or None, None, iter(super().items())
