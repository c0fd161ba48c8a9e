"""Reads the data loader ahead, and derives the next call's arguments from how the current batch was passed to the
model.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.vocabulary.operation_id import LOADER, OWN_CODE
from embrace_fx.vocabulary.version_snapshot import VersionSnapshot


class Lookahead:
    """Yields the batches of a data loader, and reads the loader one or more batches ahead.

    Args:
        at_end: called when the loop over the batches ends, including by `break` or an error.
        recorder: function that returns the recorder, which records the time that the loader takes.

    Attributes:
        batches: how many batches ahead the loader is read.
    """

    def __init__(self, at_end: Callable[[], None], recorder: Callable[[], Recorder] = Recorder) -> None:
        self._at_end, self._recorder = at_end, recorder
        self._active: Callable[[], Any] = lambda: None
        # The flattened batches. Their tensors are those of the loader, even if the loop puts others in a batch.
        self._current_flat = self._coming_flat = _NOTHING
        self._further: deque[Any] = deque()
        self._warned = False

    @property
    def known(self) -> bool:
        """Whether the next batch has been read."""
        return self._coming_flat is not _NOTHING

    @property
    def active(self) -> bool:
        """Whether a training loop is reading the loader ahead."""
        active = self._active()
        return active is not None and active.gi_frame is not None

    def warn_of_other_batch(self) -> None:
        """Warns, once, that the model was called with a batch other than the one that the loader yielded."""
        if not self._warned:
            warnings.warn(
                "the model was called with a batch that lookahead() did not yield, or that was moved or modified "
                "afterwards. The results are correct, but the exchange of rows does not overlap with compute. Move and "
                "prepare batches in the loader.",
                stacklevel=2,
            )
        self._warned = True

    def read_ahead(self, loader: Iterable[Any], batches: int = 1) -> Iterator[Any]:
        """Yields a loader's batches in order, and reads the loader `batches` batches ahead.

        Raises:
            RuntimeError: another loop is still reading.
        """
        if self.active:
            raise RuntimeError(
                "lookahead(): an earlier lookahead() is not exhausted. Finish its loop, or call close() on its "
                "iterator, before you start another one."
            )
        self.batches = batches
        iterator = self._hold_one_batch(loader)
        self._active = weakref.ref(iterator)  # a weak reference, so that leaving the loop deletes its iterator
        return iterator

    def _hold_one_batch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches of a loader. Reads the next batch before it yields one."""
        iterator = self._read_batches(loader)
        try:
            current = next(iterator)
        except StopIteration:
            return
        self._current_flat = _flatten(current)
        seen, recorder = VersionSnapshot.of_tensors_in(self._current_flat[0]), self._recorder()
        try:
            for coming in iterator:
                recorder.mark(LOADER)
                self._coming_flat = _flatten(coming)
                leaves, _ = self._coming_flat
                _check_separate_memory(seen, [*leaves, *pytree.tree_leaves([*self._further])])
                seen = VersionSnapshot.of_tensors_in(leaves)
                yield current
                recorder = self._recorder()  # look it up again, because the first step replaces the recorder
                recorder.mark(OWN_CODE)
                current, self._current_flat = coming, self._coming_flat
            self._coming_flat = _NOTHING
            yield current
        finally:
            self._current_flat = self._coming_flat = _NOTHING
            if not sys.is_finalizing():  # at interpreter exit, other ranks may be gone and tensors are being freed
                self._at_end()

    def _read_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches of a loader, beginning with those already read ahead."""
        self._further = deque()
        for batch in loader:
            self._further.append(batch)
            if len(self._further) >= self.batches:
                yield self._further.popleft()
        while self._further:
            yield self._further.popleft()

    def begin_call(self) -> None:
        """Records the time since the last call: as the loop's own code if a lookahead is active, or the loader's."""
        if torch.is_grad_enabled():
            self._recorder().mark(OWN_CODE if self.active else LOADER)

    def following(self, leaves: Sequence[Any], *, farthest: bool = False) -> list[Any] | None:
        """Predicts the flattened arguments of the model's next call, or of the `farthest` one, which is `batches` calls
        later. They are the arguments of this call (`leaves`), with each tensor of the current batch replaced by the
        corresponding one of that batch.

        Returns None if the batch is not known or has another structure, or if this call has tensors that are not in its
        batch.
        """
        if not self.known:
            return None
        current, spec = self._current_flat
        if farthest and len(self._further) < self.batches - 1:
            return None
        is_farther = farthest and bool(self._further)
        coming, coming_spec = _flatten(self._further[-1]) if is_farther else self._coming_flat
        if spec is not coming_spec and spec != coming_spec:
            return None
        next_of = {id(old): new for old, new in zip(current, coming, strict=True) if isinstance(old, Tensor)}
        if any(isinstance(leaf, Tensor) and id(leaf) not in next_of for leaf in leaves):
            return None
        return [next_of[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]


_NOTHING = pytree.tree_flatten(None)


def _flatten(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Flattens a batch like `pytree.tree_flatten`, but with fewer Python calls for a tuple or list of tensors."""
    if type(batch) in (tuple, list) and set(map(type, batch)) == {Tensor}:
        return list(batch), _spec_of_tensors(len(batch), is_list=type(batch) is list)
    return pytree.tree_flatten(batch)


@cache
def _spec_of_tensors(count: int, *, is_list: bool) -> pytree.TreeSpec:
    """Returns the tree structure of a tuple or list of `count` tensors."""
    leaves = [0] * count
    return pytree.tree_structure(leaves if is_list else tuple(leaves))


def _check_separate_memory(current: VersionSnapshot, coming: Iterable[Any]) -> None:
    """Raises `RuntimeError` if the loader has written a later batch into the current batch's tensors."""
    if not {*map(id, coming)}.isdisjoint(map(id, current.written())):
        raise RuntimeError(
            "lookahead(): the loader wrote the next batch into the tensors of the current batch, which has not been "
            "trained on yet. Return new tensors for each batch, or train without lookahead()."
        )
