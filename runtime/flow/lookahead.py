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
from itertools import chain, repeat
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

    batches = 1

    def __init__(self, at_end: Callable[[], None], recorder: Callable[[], Recorder] = Recorder) -> None:
        self._at_end, self._recorder = at_end, recorder
        self._active: Callable[[], Any] = lambda: None
        self._held: deque[_Held] = deque()  # the current batch, and those that were read ahead
        self._warned = False

    @property
    def known(self) -> bool:
        """Whether the next batch has been read."""
        return len(self._held) > 1

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
        iterator = self._hold_batches(loader)
        self._active = weakref.ref(iterator)  # a weak reference, so that leaving the loop deletes its iterator
        return iterator

    def _hold_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches of a loader. Reads the next ones before it yields one."""
        source, held, recorder = chain(loader, repeat(_END)), self._held, self._recorder()
        if not self._read(source):
            return
        try:
            while held:
                while len(held) <= self.batches and self._read(source):
                    pass
                recorder.mark(LOADER)
                _check_separate_memory(*held)
                yield held[0][0]
                recorder = self._recorder()  # look it up again, because the first step replaces the recorder
                recorder.mark(OWN_CODE)
                held.popleft()
        finally:
            held.clear()
            if not sys.is_finalizing():  # at interpreter exit, other ranks may be gone and tensors are being freed
                self._at_end()

    def _read(self, source: Iterator[Any]) -> bool:
        """Reads one batch, and returns whether there was one."""
        if (batch := next(source)) is _END:
            return False
        leaves, spec = _flatten(batch)
        self._held.append((batch, leaves, spec, VersionSnapshot.of_tensors_in(leaves)))
        return True

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
        ahead = self.batches if farthest else 1
        if len(self._held) <= ahead:
            return None
        (_, current, spec, _), (_, coming, coming_spec, _) = self._held[0], self._held[ahead]
        if spec is not coming_spec and spec != coming_spec:
            return None
        next_of = {id(old): new for old, new in zip(current, coming, strict=True) if isinstance(old, Tensor)}
        if any(isinstance(leaf, Tensor) and id(leaf) not in next_of for leaf in leaves):
            return None
        return [next_of[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]


_END = object()

_Held = tuple[Any, list[Any], pytree.TreeSpec, VersionSnapshot]
"""A batch, its leaves as the loader has made them, its structure, and a snapshot of its tensors."""


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


def _check_separate_memory(current: _Held, *coming: _Held) -> None:
    """Raises `RuntimeError` if the loader has written a later batch into the current batch's tensors."""
    written = current[3].written()
    if written and not {id(leaf) for _, leaves, *_ in coming for leaf in leaves}.isdisjoint(map(id, written)):
        raise RuntimeError(
            "lookahead(): the loader wrote the next batch into the tensors of the current batch, which has not been "
            "trained on yet. Return new tensors for each batch, or train without lookahead()."
        )
