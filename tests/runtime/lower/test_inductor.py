"""The inductor back end: the reference's parameters, the eager back end's launches, few compilations, clear refusals.

Tolerances are the suite's, 1e-9 in float64: fused kernels round differently from eager ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import embrace_fx
from embrace_fx.runtime.lower.regions import Region
from tests.support.beside import take_steps
from tests.support.inside import captures_of
from tests.support.models import MODELS, Workload
from tests.support.ranks import reset_torch_state, run_ranks
from tests.support.reference import assert_same
from tests.support.training import SEED, Trained, expected_parameters, make_optimizers, trained

DTYPE = torch.float64
STEPS = 20
Backend = Literal["eager", "inductor"]
TIMEOUT_S = 500.0
WORKLOADS: dict[str, Workload] = {
    "lstm": dict(MODELS)["two_table_lm"],
    "transformer": dict(MODELS)["transformer_encoder"],
    "recommender": dict(MODELS)["bag_recommender"],
}

REGIONS = {"lstm": 3, "transformer": 4, "recommender": 4}
"""At most, in forward and backward together: what one capture may have compiled."""


def _generator() -> Any:
    """The module under test, with what it imports from torch: importing it takes seconds."""
    return import_module("embrace_fx.runtime.lower.inductor")


@contextmanager
def inductor(cache: Path) -> Iterator[Callable[[], int]]:
    """Inductor with one compiling thread and a cache of its own; yields how many regions it was given."""
    generator = _generator()
    environment = mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(cache))
    threads = generator.config.patch(compile_threads=1)
    counted = mock.patch.object(generator, "compile_fx_inner", wraps=generator.compile_fx_inner)
    with environment, threads, counted as compile_fx_inner:
        yield lambda: compile_fx_inner.call_count


@dataclass(frozen=True)
class Outcome:
    """What one rank has after training under a back end.

    Attributes:
        launches: of some steps, in order.
        captures, compilations: how often the model was captured, how many regions Inductor was given.
    """

    trained: Trained
    launches: tuple[str, ...]
    captures: int
    compilations: int


def _train(rank: int, world_size: int, workload: Workload, backend: Backend, cache: Path) -> Outcome:
    reset_torch_state()
    model = workload.make(DTYPE, seed=SEED + rank)
    optimizers = make_optimizers("adagrad", model)
    compiled = embrace_fx.compile(model, optimizer=optimizers, strategy="alltoall", backend=backend)
    batches = compiled.lookahead([workload.batches(step, rank, SEED) for step in range(STEPS)])

    def train_some(steps: int) -> None:
        take_steps(compiled, compiled.optimizer[0], islice(batches, steps))

    launched: tuple[str, ...] = ()
    with inductor(cache) as compilations:
        train_some(1)
        if world_size > 1:  # record now, because later the order follows a measured profile
            with compiled.record():
                train_some(3)
            launched = _launched(compiled, rank)
        train_some(STEPS)
        return Outcome(trained(compiled), launched, captures_of(compiled), compilations())


def _launched(compiled: embrace_fx.CompiledModel, rank: int) -> tuple[str, ...]:
    own = [span for span in compiled.timeline.spans if span.rank == rank and span.operation.is_communication]
    return tuple(span.operation.name for span in sorted(own, key=lambda span: span.start_ms))


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("model", WORKLOADS)
def test_batches_that_vary_train_as_eagerly_with_few_compilations(model: str, world_size: int, tmp_path: Path) -> None:
    """Launches in the eager back end's order, the reference's parameters; what varies is compiled once, as a symbol."""
    workload = replace(WORKLOADS[model], vary=True)  # type: ignore[type-var]
    expected = expected_parameters(world_size, workload, DTYPE, "adagrad", steps=STEPS)
    eager = run_ranks(world_size, _train, workload, "eager", tmp_path, timeout_s=TIMEOUT_S)
    found = run_ranks(world_size, _train, workload, "inductor", tmp_path, timeout_s=TIMEOUT_S)
    for one, other in zip(found, eager, strict=True):
        assert_same(one.trained.parameters, expected, DTYPE)
        assert one.launches == other.launches
        assert (len(one.launches) > 0) == (world_size > 1)
        assert other.compilations == 0
        assert one.captures <= other.captures + 1
        assert 0 < one.compilations <= REGIONS[model] * one.captures


def test_a_compiler_that_does_not_run() -> None:
    generator = _generator()
    unknown = generator.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with unknown, pytest.raises(ValueError, match="needs a C\\+\\+ compiler") as caught:
        embrace_fx.compile(nn.Linear(2, 2), backend="inductor")
    for part in ("backend='inductor'", "no-such-compiler", "Install g++", "backend='eager'"):
        assert part in str(caught.value)


def test_what_inductor_refuses_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no code for this")

    generator = _generator()

    monkeypatch.setattr(generator, "compile_fx_inner", refuse)
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.GELU(), nn.LayerNorm(4))
    x = torch.randn(2, 3)
    expected = model(x)

    with pytest.warns(UserWarning, match="RuntimeError: no code for this"):
        found = embrace_fx.compile(model, backend="inductor")(x)

    assert torch.equal(found, expected)


def test_a_region_is_compiled_as_it_is_under_the_users_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The casts of an autocast region are in the graph: the call that compiles it must not add more."""
    generator, found = _generator(), []

    def keep(module: Any, *_: Any, **__: Any) -> Any:
        found.append(module.code)
        return module.forward

    monkeypatch.setattr(generator, "compile_fx_inner", keep)
    with FakeTensorMode(shape_env=ShapeEnv()):
        inputs = (torch.ones(2, 3), torch.ones(3, 4))
        module = make_fx(lambda x, w: (torch.tanh(torch.exp(x @ w) + 1),))(*inputs)

    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert generator.RegionCompiler()(Region(module, inputs, fixed=(), kept=True)) is not None

    assert "mm" in found[0]
    assert "bfloat16" not in found[0]


@pytest.mark.parametrize(
    ("device", "kept", "dynamic", "is_graph"),
    [
        ("cuda", False, False, True),
        ("cuda", True, False, False),
        ("cuda", False, True, False),
        ("cpu", False, False, False),
    ],
    ids=["fixed sizes", "a result outlives the step", "sizes vary", "CPU"],
)
def test_regions_that_become_cuda_graphs(
    device: str, kept: bool, dynamic: bool, is_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that would capture and replay a graph; Inductor itself is not reached."""
    generator, asked, begun = _generator(), list[bool](), list[None]()

    def keep(module: Any, *_: Any, cudagraphs: Any, **__: Any) -> Any:
        asked.append(cudagraphs.value)
        return module.forward

    monkeypatch.setattr(generator, "compile_fx_inner", keep)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(None))
    mode, plain = FakeTensorMode(shape_env=ShapeEnv()), torch.ones(2, 3)
    with mode:
        like = mode.from_tensor(plain, static_shapes=not dynamic)
        x = torch.ones(like.shape, device=device)
        module = make_fx(lambda x: (torch.tanh(torch.exp(x) + 1),))(x)

    with generator.config.patch({"triton.cudagraphs": True}):
        compiler = generator.RegionCompiler()
        compiled = [compiler(Region(module, (x,), fixed=(), kept=kept)) for _ in range(2)]
        compiler.begin_step()

    assert all(each is not None for each in compiled)
    assert asked == ([True, True] if is_graph else [False])  # CUDA graphs own their memory, so equal regions need two
    assert len(begun) == is_graph
