"""Regions: the compute between two communications, cut out, and nothing else moved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from embrace_fx.runtime.lower.lower import lower_phase
from embrace_fx.runtime.lower.regions import SMALLEST, Compiled, Region
from embrace_fx.vocabulary.graph import BatchInput, Gradient, Parameter, Result, Saved
from tests.support.graphs import by_op

aten = torch.ops.aten
LOG: list[str] = []


def phase_of(function: Callable[..., Any], *arguments: Tensor, dynamic: bool = False) -> fx.GraphModule:
    """Returns a traced phase with fake values and roles. Its sizes are symbolic if `dynamic`."""
    module = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*arguments)
    for k, node in enumerate(module.graph.find_nodes(op="placeholder")):
        node.meta["role"] = BatchInput(k)
    output = module.graph.output_node()
    output.meta["roles"] = tuple(Result(k) for k, _ in enumerate(output.all_input_nodes))
    return module


class Interpreted:
    """Replaces a code generator: records each region, and runs it unchanged."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def __call__(self, region: Region) -> Compiled | None:
        self.regions.append(region)

        def run(arguments: list[Any]) -> Sequence[Any]:
            LOG.append(f"region of {len(arguments)}")
            values = list(arguments)
            arguments.clear()
            return region.module(*values)

        return run

    def ops(self) -> list[list[str]]:
        return [
            [str(node.target).split(".")[1] for node in region.module.graph.nodes if node.op == "call_function"]
            for region in self.regions
        ]


def four_kernels(x: Tensor) -> Tensor:
    return torch.tanh(torch.exp(x * 2) + 1)


def run_lowered(
    module: fx.GraphModule, arguments: list[Any], launches: dict[str, Callable[..., Any]] | None = None
) -> tuple[tuple[Any, ...], Interpreted]:
    LOG.clear()
    compiler = Interpreted()
    return lower_phase(module, by_op(launches or {}), compiler)(arguments), compiler


def test_what_lies_between_two_regions_happens_between_them() -> None:
    def program(x: Tensor) -> Any:
        first = four_kernels(x)
        packed = torch.ops.embrace.pack_bucket.default([first], 0.5)
        reduced = torch.ops._c10d_functional.wait_tensor.default(
            torch.ops._c10d_functional.all_reduce_.default(packed, "sum", "dense")
        )
        return four_kernels(first), reduced + 1

    def launch(flat: Tensor, op: str, group: str) -> Tensor:
        LOG.append("launch")
        return flat

    def wait(flat: Tensor) -> Tensor:
        LOG.append("wait")
        return flat

    x = torch.randn(3)
    launches: dict[str, Callable[..., Any]] = {
        "_c10d_functional::all_reduce_": launch,
        "_c10d_functional::wait_tensor": wait,
    }
    expected = four_kernels(x)

    (second, reduced), compiler = run_lowered(phase_of(program, x), [x], launches)

    assert LOG == ["region of 1", "launch", "wait", "region of 2"]  # the second region also reads the reduced value
    assert compiler.ops()[0] == ["mul", "exp", "add", "tanh"]
    assert torch.equal(second, four_kernels(expected))
    assert torch.equal(reduced, expected / 2 + 1)


def test_random_numbers_are_drawn_between_regions() -> None:
    def program(x: Tensor) -> Any:
        return (four_kernels(four_kernels(x) * aten.bernoulli.p(x, 0.5)),)

    torch.manual_seed(1)
    x = torch.randn(5)
    module = phase_of(program, x)
    torch.manual_seed(2)
    (expected,) = program(x)
    torch.manual_seed(2)

    (found,), compiler = run_lowered(module, [x])

    assert len(compiler.regions) == 2
    assert "bernoulli" not in chain.from_iterable(compiler.ops())
    assert torch.equal(found, expected)


def test_a_run_of_too_few_kernels_stays_as_it_is() -> None:
    def program(x: Tensor) -> Any:
        return ((x * 2).view(-1).view(6).view(-1) + 1,)

    _, compiler = run_lowered(phase_of(program, torch.ones(2, 3)), [torch.ones(2, 3)])
    assert SMALLEST > 2
    assert compiler.regions == []


def test_a_region_that_is_refused_stays_as_it_is() -> None:
    x = torch.randn(3)
    (found,) = lower_phase(phase_of(lambda x: (four_kernels(x),), x), compile_region=lambda region: None)([x])
    assert torch.equal(found, four_kernels(x))


def test_sizes_that_vary_are_read_from_what_is_there() -> None:
    """The first dimension of the only input is a product: its factors come from where they can be had."""

    def program(x: Tensor) -> Any:
        flat = torch.ops.embrace.split_columns.default(x, 1)
        return (four_kernels(flat),)

    module = phase_of(program, torch.randn(3, 4), dynamic=True)
    x = torch.randn(5, 7)
    (found,), compiler = run_lowered(module, [x])
    assert LOG == ["region of 3"]  # inputs: two sizes and the value
    assert [type(value).__name__ for value in compiler.regions[0].inputs] == ["SymInt", "SymInt", "FakeTensor"]
    assert torch.equal(found, four_kernels(x.reshape(-1)))


def test_a_value_dies_in_the_region_that_reads_it_last() -> None:
    alive: list[bool] = []

    def program(x: Tensor) -> Any:
        return (four_kernels(aten.bernoulli.p(x, 1.0)),)

    def compile_region(region: Region) -> Compiled:
        def run(arguments: list[Any]) -> Sequence[Any]:
            watched = weakref.ref(arguments[0])
            arguments.clear()
            alive.append(watched() is not None)
            return [torch.ones(3)]

        return run

    lower_phase(phase_of(program, torch.ones(3)), compile_region=compile_region)([torch.ones(3)])

    assert alive == [False]


def test_what_a_region_returns_is_not_written_into() -> None:
    """A region may return a view of its input, or one tensor twice."""

    def program(x: Tensor) -> Any:
        kept = four_kernels(x)
        drawn = aten.bernoulli.p(x, 1.0)
        return aten.add.Tensor(kept, drawn), drawn

    def compile_region(region: Region) -> Compiled:
        return lambda arguments: [arguments[0]]

    x = torch.zeros(3)
    lower_phase(phase_of(program, x), compile_region=compile_region)([x])

    assert torch.equal(x, torch.zeros(3))


@pytest.mark.parametrize(("role", "kept"), [(Saved("hidden"), False), (Gradient(Parameter("w")), True)])
def test_only_what_dies_within_the_step_may_be_overwritten_by_the_next(role: Any, kept: bool) -> None:
    module = phase_of(lambda w: (four_kernels(w),), torch.ones(2))
    (weight,) = module.graph.find_nodes(op="placeholder")
    weight.meta["role"] = Parameter("w")
    module.graph.output_node().meta["roles"] = (role,)
    _, compiler = run_lowered(module, [torch.ones(2)])
    assert compiler.regions[0].kept == kept
    assert compiler.regions[0].fixed == (0,)


def test_ops_whose_sizes_depend_on_data_are_left_out() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = torch.ones(4)
        assert mode.shape_env is not None
        module = make_fx(lambda x: (four_kernels(aten.nonzero.default(four_kernels(x)).to(x.dtype)),))(x)
    (placeholder,) = module.graph.find_nodes(op="placeholder")
    placeholder.meta["role"] = BatchInput(0)
    module.graph.output_node().meta["roles"] = (Result(0),)
    _, compiler = run_lowered(module, [torch.ones(4)])
    assert "nonzero" not in chain.from_iterable(compiler.ops())
    assert len(compiler.regions) == 2
