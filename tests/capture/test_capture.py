"""Capturing a model's forward and backward: what becomes an input, an output, a constant, a guard, or an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import embrace_fx
from embrace_fx.capture import capture
from embrace_fx.capture.errors import CaptureError, RefusedError
from embrace_fx.capture.module_tables import possible_rows
from embrace_fx.vocabulary.graph import BatchInput, Buffer, Gradient, Mutation, Parameter, source_of
from tests.support.captures import Model, captured, check_values, inputs, model_of, outputs, plain
from tests.support.golden import check_golden, check_transcript, run_lines
from tests.support.graphs import IDS, classifier, text


def test_golden() -> None:
    model = classifier()
    check_golden("captured", text(capture(model, (IDS,), {}, train=True).graph.module))


def test_values_are_eagers() -> None:
    check_values(plain, IDS)


def test_nothing_of_the_model_runs() -> None:
    with torch.device("meta"):
        model = Model(lambda m, x: m.norm(plain(m, x).flatten(0, 1)))
    found = capture(model, (IDS.to("meta"),), {}, train=True)
    assert Mutation(Buffer("norm.running_mean")) in outputs(found)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_capture_leaves_no_marks() -> None:
    model = model_of(lambda m, x, y: m.norm(plain(m, x).flatten(0, 1)) * y)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = (IDS.clone(), torch.ones(4).double())
    attributes = [set(vars(each)) for each in batch]
    capture(model, batch, {}, train=True, dynamic=frozenset({(0, 0), (0, 1)}))
    assert [set(vars(each)) for each in batch] == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nodes_remember_the_users_line_forward_and_backward() -> None:
    graph = captured(plain, IDS).graph
    line = plain.__code__.co_firstlineno + 1
    for name in ("embedding", "embedding_dense_backward"):
        assert source_of(graph.node(name)).endswith(f"captures.py:{line} in plain")


@pytest.mark.parametrize("call", [lambda f, x: f(x), partial(checkpoint, use_reentrant=False)])
def test_a_linear_layer_is_one_product_with_its_bias(call: Callable[..., Any]) -> None:
    found = check_values(lambda m, x: call(lambda ids: m.linear(m.table(ids).transpose(0, 1)), x), IDS)
    assert "addmm" in text(found.graph.module)


def tied(model: Model, ids: Tensor) -> Tensor:
    return model.head(plain(model, ids))


def test_tied_parameters_stay_tied() -> None:
    found = check_values(tied, IDS)
    assert not any("head" in role.name for role in inputs(found) if isinstance(role, Parameter))
    assert outputs(found).count(Gradient(Parameter("table.weight"))) == 1


def test_a_batch_tensor_written_in_place_comes_back_as_a_mutation() -> None:
    found = captured(lambda m, x, y: m.table(x) * y.add_(1).sum(), IDS, torch.ones(3))
    assert Mutation(BatchInput(1)) in outputs(found)


@pytest.mark.parametrize(
    ("forward", "args", "kwargs", "indices"),
    [
        (lambda m, x, *, y: m.table(x) * y, (IDS,), {"y": torch.ones(4)}, [0, 1]),
        (lambda m, y, x: m.table(x) * y, (), {"y": torch.ones(4), "x": IDS}, [1, 0]),
        (lambda m, x, k, y: m.table(x) * y * k, (IDS, 3, torch.ones(4)), {}, [0, 2]),
        (lambda m, batch: m.table(batch["x"]) * batch["more"][0], ({"x": IDS, "more": [torch.ones(4)]},), {}, [0, 1]),
        (lambda m, x, mode, y=None: m.table(x) if mode == "a" else y, (IDS, "a"), {"y": None}, [0]),
    ],
    ids=["keyword only", "keywords in another order", "a number between", "a dict with a list", "text and None"],
)
def test_where_the_batch_goes(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], indices: list[int]
) -> None:
    """Batch inputs are numbered by their index among all flattened arguments, tensors and others."""
    found = captured(forward, *args, **kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    read = {role.index: node.meta["val"].shape for node, role in found.graph.inputs() if isinstance(role, BatchInput)}
    assert set(read) == set(indices)
    assert all(shape == leaves[index].shape for index, shape in read.items())


def test_a_batch_tensor_that_requires_grad_gets_one() -> None:
    found = captured(lambda m, x, y: m.table(x) * y, IDS, torch.ones(4, dtype=torch.float64, requires_grad=True))
    assert Gradient(BatchInput(1)) in outputs(found)


def test_a_graph_accepts_what_it_is_valid_for() -> None:
    def accepted(*free: tuple[int, int]) -> list[bool]:
        found = capture(model, (IDS,), {}, train=True, dynamic=frozenset(free))
        return [found.accepts([torch.zeros(shape, dtype=torch.int64)]) for shape in ((2, 3), (2, 7), (5, 3), (5, 7))]

    model = model_of(plain)
    assert accepted() == [True, False, False, False]
    assert accepted((0, 1)) == [True, True, False, False]
    assert accepted((0, 0), (0, 1)) == [True, True, True, True]


def test_sizes_that_must_agree_are_guarded() -> None:
    model = model_of(lambda m, x, y: (m.table(x) + m.table(y)).sum(1))
    free = frozenset({(0, 1), (1, 1)})
    found = capture(model, (IDS, IDS.clone()), {}, train=True, dynamic=free)
    assert found.accepts([torch.zeros(2, 5, dtype=torch.int64)] * 2)
    assert not found.accepts([torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int64)])


def test_a_question_about_a_size_is_guarded() -> None:
    def forward(model: Model, ids: Tensor) -> Tensor:
        vectors = plain(model, ids)
        return vectors * 2 if ids.shape[1] > 4 else vectors

    found = capture(model_of(forward), (IDS,), {}, train=True, dynamic=frozenset({(0, 1)}))
    assert found.accepts([torch.zeros(2, 4, dtype=torch.int64)])
    assert not found.accepts([torch.zeros(2, 5, dtype=torch.int64)])


def branches(model: Model, ids: Tensor) -> Tensor:
    vectors = plain(model, ids)
    if vectors.sum() > 0:
        return vectors
    return -vectors


def asks_for_values(model: Model, ids: Tensor) -> Tensor:
    length = max(ids.tolist())[0]
    return plain(model, ids)[:, :length]


def calls_a_higher_order_op(model: Model, ids: Tensor) -> Tensor:
    vectors = plain(model, ids)
    found: Tensor = torch.cond(vectors.sum() > 0, torch.sin, torch.cos, (vectors,))
    return found


def raises(model: Model, ids: Tensor) -> Tensor:
    raise KeyError("an odd batch", ids.shape[0])


def fails(model: Model, ids: Tensor) -> Tensor:
    model.norm(plain(model, ids).flatten(0, 1))
    found: Tensor = model.linear(model.table(ids)[..., :3])
    return found


LAST = IDS


def assigns_a_global(model: Model, ids: Tensor) -> Tensor:
    global LAST  # noqa: PLW0603
    LAST = plain(model, ids)
    return LAST


def hooks_a_parameter(model: Model, ids: Tensor) -> Tensor:
    model.table.weight.register_hook(torch.neg)
    return plain(model, ids)


@pytest.mark.parametrize(
    ("forward", "what"), [(assigns_a_global, "variable LAST"), (hooks_a_parameter, "register_hook")]
)
def test_effects_that_a_graph_cannot_have_are_refused(forward: Callable[[Model, Tensor], Tensor], what: str) -> None:
    with pytest.raises(RefusedError, match=what):
        capture(model_of(forward), (IDS,), {}, train=True)


def test_rows_that_a_batch_may_read() -> None:
    ids = [torch.tensor([0, 9]), torch.tensor([[9, 3]]), torch.tensor([1]), torch.tensor([10]), torch.tensor([-1, 9])]
    assert possible_rows(ids, 10).tolist() == [0, 1, 3, 9]
    assert possible_rows(ids[3:], 10).tolist() == [*range(10)]


def test_golden_of_errors() -> None:
    """An error names the user's line. If the forward raises, its own error is in the message, and nothing is left."""
    refused = ((branches, 2, "cpu"), (asks_for_values, 1, "cpu"), (calls_a_higher_order_op, 2, "cpu"))
    lines = []
    for forward, line, device in (*refused, *((raises, 1, d) for d in ("cpu", "meta")), (fails, 2, "cpu")):
        model = model_of(forward).to(device)
        before = [buffer.clone() for buffer in model.buffers()]
        with pytest.raises(CaptureError) as found:
            capture(model, (IDS.to(device),), {}, train=True)
        error = found.value
        assert f"test_capture.py:{forward.__code__.co_firstlineno + line} in {forward.__name__}" in str(error)
        assert device == "meta" or all(map(torch.equal, model.buffers(), before))
        lines += [f"# {forward.__name__}, {device}", str(error), f"{error.reason}, {error.where}, {error.raised!r}"]
    check_golden("capture_errors", re.sub(r"[^\s']*?(\w+\.py):\d+", r"\1", "\n".join(lines)))


def test_arguments_results_errors_and_values_read() -> None:
    modules = ("arguments", "errors", "result_objects", "read_values")
    check_transcript("arguments", partial(run_lines, "capture", modules))


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return (self.linear(x) * y).sum()


def test_an_argument_that_is_written_must_not_be_another_one_too() -> None:
    twin = WritesItsInput()
    model = embrace_fx.compile(twin, route="graph")
    long = torch.ones(8, 3)
    for x, y in ((torch.ones(4, 3), torch.ones(4, 3)), (long[:4], long[4:])):
        expected = twin(x.clone(), y)
        assert torch.equal(model(x, y), expected)
        assert x[0, 0] == 2
    for x, y in ((long[:4], long[:4]), (long[1:5], long[4:])):
        with pytest.raises(RefusedError, match=r"index 0 in place, and the argument with index 1"):
            model(x, y)
    model = embrace_fx.compile(twin)
    for x, y in ((long[:4], long[:4]), (long[1:5], long[4:])):
        copied = long.clone()
        expected = twin(x, y)
        long.copy_(copied)
        assert torch.equal(model(x, y), expected)  # the forward now runs eagerly
