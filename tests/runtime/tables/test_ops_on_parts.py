"""Every op of torch on a part of a table, of its gradient and of its state: as of the whole, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.parts import Parts, asked, differs
from tests.support.ranks import run_ranks

Deed = Callable[[Any], Any]
KINDS = ("parameter", "gradient", "state")


def _ops() -> Iterator[tuple[str, Tensor, Deed]]:
    """(name, input, deed) of samples of torch's own list of ops whose input is a matrix."""
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415  (takes ten seconds)

    for op in op_db:
        if torch.float64 not in op.dtypes:
            continue
        taken = 0
        torch.manual_seed(0)
        try:
            samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
        except Exception:  # some want libraries that are not here
            continue
        for k, sample in enumerate(samples):
            first = sample.input
            if (
                not isinstance(first, Tensor)
                or first.dim() != 2
                or not first.numel()
                or taken == 4
                or first.layout != torch.strided
            ):
                continue
            taken += 1
            for kind, call in (("", op.op), (" method", op.method_variant), (" in place", op.inplace_variant)):
                if call is not None:
                    deed = partial(_call, call, sample.args, sample.kwargs)
                    yield f"{op.name} {op.variant_test_name} {k}{kind}", first, deed


def _call(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Any) -> Any:
    return call(tensor, *args, **kwargs)


def _call_method(name: str, args: tuple[Any, ...], tensor: Any) -> Any:
    return getattr(tensor, name)(*args)


def _compared(rank: int, world_size: int, kind: str) -> dict[str, str]:
    """What is wrong with answers, by deed."""
    parts, wrong, counts = Parts(), {}, {"answer": 0, "refused": 0}
    for name, whole, deed in _ops():
        torch.manual_seed(1)
        expected_kind, expected = asked(whole.clone, deed)
        torch.manual_seed(1)
        found_kind, found = asked(partial(getattr(parts, kind), whole), deed)
        if found_kind == "answer" and expected_kind == "answer":
            if name.split()[0] not in _OF_NO_VALUES and (how := differs(found, expected)):
                wrong[name] = how
        elif found_kind == "answer" or (found_kind == "error" and expected_kind == "answer"):
            wrong[name] = f"{found_kind} {found}, of the whole {expected_kind}"
        counts[found_kind] = counts.get(found_kind, 0) + 1
    parts.close()
    assert counts["answer"] > 100
    return wrong


_OF_NO_VALUES = frozenset({"empty_like", "new_empty", "new_empty_strided", "empty"})


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_an_op_on_a_part_is_of_the_whole_or_refused(kind: str) -> None:
    for wrong in run_ranks(2, _compared, kind):
        assert not wrong
