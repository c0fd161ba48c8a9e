"""The data loader read one batch ahead, and the next batch found from how the model was called with this one."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.vocabulary.as_seen import AsSeen
from embrace_fx.vocabulary.operation_id import LOADER, OWN_CODE


class Lookahead:
    """Yields a training loop's batches, and reads the loader one batch ahead.

    Args:
        at_end: called when a loop has read its last batch and comes back for more, or is left: no batch is known then.
        recorder: is told of the loader's time; asked for each time.
    """

    def __init__(self, at_end: Callable[[], None], recorder: Callable[[], Recorder] = Recorder) -> None:
        self._at_end = at_end
        self._recorder = recorder
        self._active: Callable[[], Any] = lambda: None
        self._current: Any = None
        self._coming: Any = None
        self._coming_flat = _NOTHING  # before anyone else has seen it
        self._further: deque[Any] = deque()
        self._known = False
        self._warned = False
        self.batches = 1

    @property
    def known(self) -> bool:
        """Tells whether the next batch is known."""
        return self._known

    @property
    def active(self) -> bool:
        """Tells whether a loop is reading."""
        active = self._active()
        return active is not None and active.gi_frame is not None

    def warn_of_other_batch(self) -> None:
        """Warns, once, of a call that was not given the batch that it was to be given."""
        if not self._warned:
            warnings.warn(
                "expected the batch that lookahead() yielded, as it was, in the model's call, found another one, or "
                "one that was moved or written since. The step is exact, but its communication is not hidden. Let the "
                "loader itself move and prepare batches.",
                stacklevel=2,
            )
        self._warned = True

    def over(self, loader: Iterable[Any], batches: int = 1) -> Iterator[Any]:
        """The same batches in the same order, so many ahead.

        Raises:
            RuntimeError: another loop is still reading.
        """
        if self.active:
            raise RuntimeError(
                "expected one lookahead at a time, in lookahead(), found an earlier one that is not exhausted; two "
                "would disagree on which batch is next. Finish that loop, or `close()` its iterator, before starting "
                "another."
            )
        self.batches = batches
        iterator = self._one_ahead(loader)
        self._active = weakref.ref(iterator)  # a loop that was left drops its iterator
        return iterator

    def _one_ahead(self, loader: Iterable[Any]) -> Iterator[Any]:
        iterator = self._read(loader)
        try:
            self._current = next(iterator)
        except StopIteration:
            return
        seen = AsSeen.of(pytree.tree_leaves(self._current))
        try:
            for self._coming in iterator:
                self._recorder().mark(LOADER)
                self._coming_flat = pytree.tree_flatten(self._coming)
                leaves, _ = self._coming_flat
                _check_apart(seen, leaves if not self._further else [*leaves, *pytree.tree_leaves([*self._further])])
                seen = AsSeen.of(leaves)
                self._known = True
                yield self._current
                self._recorder().mark(OWN_CODE)
                self._current = self._coming
            self._known = False
            self._coming, self._coming_flat = None, _NOTHING
            yield self._current
        finally:
            self._known, self._current, self._coming, self._coming_flat = False, None, None, _NOTHING
            if not sys.is_finalizing():  # else the ranks have parted, and tensors are being taken down
                self._at_end()

    def _read(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields a loader's batches, while those that come after each are kept in `_further`."""
        self._further = deque()
        for batch in loader:
            self._further.append(batch)
            if len(self._further) >= self.batches:
                yield self._further.popleft()
        while self._further:
            yield self._further.popleft()

    def begin_call(self) -> None:
        """Tells the recorder what came before a call for training: a loader that is not read through this, or none."""
        if torch.is_grad_enabled():
            self._recorder().mark(OWN_CODE if self.active else LOADER)

    def following(self, leaves: Sequence[Any], *, farthest: bool = False) -> list[Any] | None:
        """Returns the flattened arguments of the next call, if the batches differ in nothing but their tensors.

        Args:
            leaves: flattened arguments of this call.
            farthest: of the call `batches` calls from now, in its place.

        Returns: None where the next batch is not known, or this call's tensors are not those of the batch.
        """
        if not self._known:
            return None
        current, spec = pytree.tree_flatten(self._current)
        if farthest and len(self._further) < self.batches - 1:
            return None
        is_farther = farthest and bool(self._further)
        coming, coming_spec = pytree.tree_flatten(self._further[-1]) if is_farther else self._coming_flat
        if spec != coming_spec:
            return None
        position: dict[int, int] = {}
        for k, leaf in enumerate(current):
            if isinstance(leaf, Tensor):
                position.setdefault(id(leaf), k)
        if any(isinstance(leaf, Tensor) and id(leaf) not in position for leaf in leaves):
            return None
        return [coming[position[id(leaf)]] if isinstance(leaf, Tensor) else leaf for leaf in leaves]


_NOTHING = pytree.tree_flatten(None)


def _check_apart(current: AsSeen, coming: Iterable[Any]) -> None:
    """Raises where a loader has written the next batch into the one that is still to be trained on.

    Args:
        coming: what the batches to come are made of.

    Raises:
        RuntimeError: it yields the same tensor each time, with other values.
    """
    again = {id(leaf) for leaf in coming}
    if any(id(leaf) in again for leaf in current.written()):
        raise RuntimeError(
            "expected a loader that yields each batch in tensors of its own, in lookahead(), found that the next batch "
            "was written into the one before, which is still to be trained on. Let it yield copies, or train without "
            "lookahead()."
        )
