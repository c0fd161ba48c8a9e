"""Every op and method of torch's on a part of a table, of its gradient and its state: as of the whole, or refused."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.vocabulary.plan import Grid
from tests.support.golden import check_transcript
from tests.support.parts import Parts, Shown, asked, differs
from tests.support.ranks import run_ranks

Deed = Callable[[Any], Any]
Listed = Iterator[tuple[str, Tensor, Deed]]
"""(name, whole tensor, deed)."""
SHOWN = "shown "
KINDS = ("parameter", "gradient", "state", "shown parameter", "shown state", "shown kept")
"""As made by hand; and as a state dict of the model, one of its optimizer, or its optimizer's state shows them."""
_SAMPLES, _LOOKED_AT = 4, 40
"""Of each op: how many are taken, and among how many that torch makes."""


def _table() -> Tensor:
    return torch.randn((7, 5), dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _ops(share: int, of: int) -> Listed:
    """Samples of a share of torch's own list of ops, of which an operand is a matrix: that one is the part."""
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415  (takes ten seconds)

    for op in op_db[share::of]:
        if torch.float64 not in op.dtypes:
            continue
        taken = 0
        for k, (leaves, structure) in enumerate(_samples(op)):
            place = next((n for n, leaf in enumerate(leaves) if _is_matrix(leaf)), None)
            if place is None or taken == _SAMPLES:
                continue
            taken += 1
            for kind, call in (("", op.op), (" method", op.method_variant), (" in place", op.inplace_variant)):
                if call is not None:
                    deed = partial(_call, call, leaves, structure, place)
                    yield f"{op.name} {op.variant_test_name} {k}{kind}", leaves[place], deed


def _samples(op: Any) -> list[tuple[list[Any], Any]]:
    """Returns PyTorch's sample inputs for an op, or nothing if they need a library that is not installed."""
    torch.manual_seed(0)
    try:
        samples = list(islice(op.sample_inputs("cpu", torch.float64, requires_grad=False), _LOOKED_AT))
    except Exception:
        return []
    return [pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs)) for sample in samples]


def _is_matrix(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.dim() == 2
        and leaf.numel() > 0
        and leaf.layout == torch.strided
        and leaf.dtype == torch.float64
    )


def _call(call: Callable[..., Any], leaves: list[Any], structure: Any, place: int, tensor: Any) -> Any:
    mine = [
        tensor if n == place else leaf.clone() if isinstance(leaf, Tensor) else leaf for n, leaf in enumerate(leaves)
    ]
    args, kwargs = pytree.tree_unflatten(mine, structure)
    return call(*args, **kwargs)


def _methods(share: int, of: int) -> Listed:
    """A share of the methods of a tensor, each with arguments that some of them take."""
    arguments: list[tuple[Any, ...]] = [(), (0,), (1,), (2.0,), (0, 1), (_table(),), (torch.tensor([1, 3]),)]
    arguments += [((7, 5),), (0, torch.tensor([1, 3])), (torch.float32,), (0, torch.tensor([1, 3]), 2.0), ([2, 3], 1)]
    names = [name for name in dir(Tensor) if callable(getattr(Tensor, name)) and name not in _NOT_ASKED]
    for name in names[share::of]:
        for k, given in enumerate(arguments):
            yield f"Tensor.{name} {k}", _table(), partial(_call_method, name, given)


def _call_method(name: str, args: tuple[Any, ...], tensor: Any) -> Any:
    if inspect.getattr_static(Tensor, name, None) is None:
        raise AttributeError(name)
    return getattr(tensor, name)(*args)


_NOT_ASKED = frozenset(
    {
        *("__class__", "__new__", "__subclasshook__", "__getattribute__", "__setattr__", "__delattr__", "__dir__"),
        *("__sizeof__", "__hash__", "__repr__", "__str__", "__format__", "__reduce__", "__reduce_ex__", "__getstate__"),
        *("__setstate__", "__torch_function__", "__torch_dispatch__", "_make_wrapper_subclass", "_make_subclass"),
        *("as_subclass", "_make_dtensor", "__deepcopy__", "register_hook", "backward", "_backward_hooks"),
        *("register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "_use_count", "_view_func"),
        *("_view_func_unsafe", "_rev_view_func_unsafe", "_fix_weakref", "_clear_non_serializable_cached_data"),
        *("__init__", "__init_subclass__", "__iter__"),
    }
)
"""What Python asks of every object, or autograd: none of its answers is of the elements."""


def _compared(rank: int, world_size: int, kind: str, listed: str, share: int, of: int) -> dict[str, str]:
    """What is wrong with answers, by deed."""
    deeds = list({"ops": _ops, "methods": _methods}[listed](share, of))
    wrong, counts = dict[str, str](), {"answer": 0, "refused": 0}
    parts: Any = Shown(whole.shape for _, whole, _ in deeds) if kind.startswith(SHOWN) else Parts()
    kind = kind.removeprefix(SHOWN)
    for name, whole, deed in deeds:
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
    assert counts["answer"] > 20
    return wrong


_OF_NO_VALUES = frozenset({"Tensor.new", "empty_like", "new_empty", "new_empty_strided", "empty", "Tensor.new_empty"})


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", range(3))
def test_an_op_on_a_part_is_of_the_whole_or_refused(kind: str, share: int) -> None:
    for wrong in run_ranks(2, _compared, kind, "ops", share, 3):
        assert not wrong


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_method_of_a_part_is_of_the_whole_or_refused(kind: str) -> None:
    for wrong in run_ranks(2, _compared, kind, "methods", 0, 1):
        assert not wrong


def _answers(rank: int, world_size: int, questions: list[str]) -> list[str]:
    """Returns how the value of each expression, and what it has written, differ from those of whole tensors."""
    answers, columns, rows = [], Parts(), Parts(Grid(2, 1))
    of_whole: dict[str, Any] = dict.fromkeys("tprsghk", torch.clone)
    of_parts: dict[str, Any] = {**dict.fromkeys("tp", columns.parameter), **dict.fromkeys("rs", rows.parameter)}
    of_parts |= {**dict.fromkeys("gh", columns.gradient), "k": rows.gradient}
    for question in questions:
        whole, found = (
            asked(partial(_operands, question, of), partial(_evaluate, question)) for of in (of_whole, of_parts)
        )
        if whole[0] == found[0] == "answer":
            answers.append(differs(found[1], whole[1]))
        else:
            answers.append("" if whole[0] == found[0] else str(found[1]).split(",")[0])
    columns.close()
    rows.close()
    return answers


def _operands(question: str, make: dict[str, Callable[[Tensor], Any]]) -> dict[str, Any]:
    values, some = _table(), _table().flip(0) * torch.tensor([1.0, 0, 0, 1, 1, 0, 1])[:, None]
    wholes = {"t": values, "r": values, "p": some, "s": some, "g": some, "k": some, "h": some.flip(0)}
    return {name: make[name](whole) for name, whole in wholes.items() if re.search(rf"\b{name}\b", question)}


def _evaluate(question: str, operands: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    names = {"ids": torch.tensor([5, 0, 5, -2]), "at": torch.tensor([5, 0, 2]), "cols": torch.tensor([4, 1, -5, 2])}
    found = eval(question, {"torch": torch, "math": math, "w": _table() + 0.1, **names}, operands)
    if "_(" not in question and "out=" not in question:
        operands.clear()  # nothing has been written
    return found


def test_ops_on_parts_are_of_the_whole_or_refused_as_their_transcript_shows() -> None:
    def on_all_ranks(questions: list[str]) -> list[str]:
        return [
            " on rank 0, ".join(dict.fromkeys(each)) for each in zip(*run_ranks(2, _answers, questions), strict=True)
        ]

    check_transcript("ops_on_parts", on_all_ranks)


def _norms_reduced(rank: int, world_size: int) -> int:
    shown = Shown(torch.Size(shape) for shape in ((6, 5), (7, 5)))
    with mock.patch.object(Layout, "reduce", autospec=True, side_effect=Layout.reduce) as reduce:
        torch.nn.utils.clip_grad_norm_(shown.model.parameters(), 1.0)
    shown.close()
    return reduce.call_count


def test_norms_of_all_tables_are_reduced_at_once() -> None:
    assert run_ranks(2, _norms_reduced) == [1, 1]
