"""Reading one batch ahead: the batches stay what they were, and the next one's arguments are found from this one's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.runtime.flow.lookahead import Lookahead


class Loader:
    """Yields batches, and counts those that have been read."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches
        self.read = 0
        self.closed = False

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch in self.batches:
                self.read += 1
                yield batch
        finally:
            self.closed = True


def tensors(count: int) -> list[Tensor]:
    return [torch.tensor([k]) for k in range(count)]


def numbers(following: list[Any] | None) -> list[Any] | None:
    return None if following is None else [v.item() if isinstance(v, Tensor) else v for v in following]


def leaves(*args: Any, **kwargs: Any) -> list[Any]:
    """The flattened arguments of a call."""
    return pytree.tree_leaves((args, kwargs))


@given(st.integers(0, 5))
def test_the_same_batches_one_ahead(count: int) -> None:
    loader, ended = Loader(*tensors(count)), []
    lookahead = Lookahead(lambda: ended.append(loader.read))
    for k, batch in enumerate(lookahead.read_ahead(loader)):
        assert batch is loader.batches[k]
        assert loader.read == min(k + 2, count)
        assert numbers(lookahead.following([batch])) == ([k + 1] if k + 1 < count else None)
        assert not ended
    assert ended == ([count] if count else [])
    assert lookahead.following(tensors(1)) is None


A, B, C, D = tensors(4)


@pytest.mark.parametrize(
    ("current", "coming", "call", "expected"),
    [
        (A, B, leaves(A), [1]),
        ((A, B), (C, D), leaves(A, B), [2, 3]),
        ([A, B], [C, D], leaves(A, B), [2, 3]),
        ((A, B), (C, D), leaves(B, A), [3, 2]),
        ((A, B), (C, D), leaves(B), [3]),
        ((A, B), (C, D), leaves(A, A, B), [2, 2, 3]),
        ({"ids": A, "labels": B}, {"ids": C, "labels": D}, leaves(A, target=B), [2, 3]),
        ({"ids": A, "labels": B}, {"ids": C, "labels": D}, leaves(labels=B, ids=A), [3, 2]),
        ((A, {"mask": B}), (C, {"mask": D}), leaves({"m": B}, A), [3, 2]),
        ((A, B), (C, D), leaves(A, 0.5, flag=True), [2, 0.5, True]),
        ((A, B), (C, D), leaves(A, None), [2, None]),
        ((A, B), (C, D), leaves(0.5), [0.5]),
    ],
)
def test_the_next_call_is_this_one_with_other_tensors(
    current: Any, coming: Any, call: list[Any], expected: list[Any]
) -> None:
    lookahead = Lookahead(lambda: None)
    next(loop := lookahead.read_ahead([current, coming]))
    assert numbers(lookahead.following(call)) == expected
    loop.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("current", "coming", "call"),
    [
        ((A, B), (C, D), leaves(A.clone(), B)),
        ((A, B), (C, D), leaves(A.double(), B)),
        ((A, B), (C, D), leaves(A + 1)),
        ((A, B), (C, D, A), leaves(A, B)),
        ((A, B), [C, D], leaves(A, B)),
        ({"ids": A}, {"tokens": B}, leaves(A)),
        ({"ids": A}, {"ids": B, "labels": C}, leaves(A)),
        (A, (B, C), leaves(A)),
    ],
    ids=["moved", "cast", "changed", "one more", "another sequence", "another key", "one more key", "nested"],
)
def test_where_the_next_call_cannot_be_known(current: Any, coming: Any, call: list[Any]) -> None:
    lookahead = Lookahead(lambda: None)
    for _ in lookahead.read_ahead([current, coming]):
        assert lookahead.following(call) is None


def test_after_a_break_nothing_is_known_and_another_loop_may_begin() -> None:
    ended: list[None] = []
    lookahead, loader = Lookahead(lambda: ended.append(None)), Loader(A, B, C)
    assert lookahead.following([A]) is None
    for _ in lookahead.read_ahead(loader):
        break
    gc.collect()
    assert lookahead.following([A]) is None
    assert not lookahead.active
    assert loader.closed
    assert len(ended) == 1
    assert list(lookahead.read_ahead([C, D])) == [C, D]


def test_only_the_first_other_batch_is_warned_of() -> None:
    lookahead = Lookahead(lambda: None)
    with pytest.warns(UserWarning, match=r"a batch that lookahead\(\) did not yield"):
        lookahead.warn_of_other_batch()
    lookahead.warn_of_other_batch()  # in tests, a second warning would be an error


@pytest.mark.parametrize("started", [False, True])
def test_two_loops_at_once_are_refused(started: bool) -> None:
    lookahead = Lookahead(lambda: None)
    first = lookahead.read_ahead([A, B, C])
    if started:
        next(first)
    with pytest.raises(RuntimeError, match=r"an earlier lookahead\(\) is not exhausted"):
        lookahead.read_ahead([D])
    assert list(first)[-1] is C  # the rejected call has not changed the earlier loop
    assert list(lookahead.read_ahead([D])) == [D]


def test_a_loader_that_writes_into_its_last_batch_is_refused() -> None:
    def reusing() -> Iterator[Tensor]:
        batch = torch.zeros(1)
        for _ in range(3):
            yield batch.add_(1)

    with pytest.raises(RuntimeError, match="wrote the next batch into the tensors"):
        next(Lookahead(lambda: None).read_ahead(reusing()))


def test_an_error_of_the_loader_is_the_loops() -> None:
    def broken() -> Iterator[Tensor]:
        yield A
        yield B
        raise OSError("disk full")

    lookahead = Lookahead(lambda: None)
    loop = lookahead.read_ahead(broken())
    assert next(loop) is A
    with pytest.raises(OSError, match="disk full"):
        list(loop)
    assert not lookahead.active
    assert lookahead.following([B]) is None
