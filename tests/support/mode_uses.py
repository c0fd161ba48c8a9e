"""What loops read of dense parameters inside of torch's modes, in other processes, and by functions that ask no class.

Each reads first what an update is pending for: it enters `uses_between.USES`.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.support.sides import DTYPE, Side
from tests.support.uses_between import Use, dense, use


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "another device": lambda: torch.device("meta"),
    "a mode of functions": _Functions,
    "a mode of ops": _Ops,
    "a counter of operations": lambda: FlopCounterMode(display=False),
    "writes to saved tensors": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


def _under(mode: Callable[[], Any]) -> Use:
    def read(side: Side, step: int) -> Any:
        with mode():
            return [p.sum().item() for p in dense(side)]

    return read


def _through(transform: Callable[[Callable[..., Any]], Callable[..., Any]], *shape: int) -> Use:
    """A transform of a function that reads the weight of a layer."""

    def read(side: Side, step: int) -> Any:
        layer = side.plain.first
        found = transform(lambda x: F.linear(x, layer.weight, layer.bias).sin().sum())(torch.ones(shape, dtype=DTYPE))
        return found.detach()

    return read


def _given(transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Use:
    """A transform of a function that is given the weight of a layer."""
    return lambda side, step: transform(lambda weight: weight.sin().sum())(side.plain.first.weight).detach()


for _name, _mode in MODES.items():
    use(_under(_mode), f"read under {_name}")
TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
TRANSFORMS = {"grad": grad, "jacrev": jacrev, "hessian": hessian}
for _name, _transform in TRANSFORMS.items():
    use(_through(_transform, 6), f"read under {_name}")
    use(_given(_transform), f"given to {_name}")
use(_through(vmap, 2, 6), "read under vmap")
use(_given(vmap), "given to vmap")
use(_given(functionalize), "given to functionalize")
use(_through(lambda f: lambda x: make_fx(f)(x)(x), 2, 6), "read under make_fx")
use(
    lambda side, step: jvp(lambda w: w.sin(), (side.plain.first.weight,), (torch.ones(8, 6, dtype=DTYPE),))[1],
    "given to jvp",
)


@use
def read_under_fake_tensors(side: Side, step: int) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert [mode.from_tensor(p).shape for p in dense(side)] == [p.shape for p in dense(side)]
    return [p.sum().item() for p in dense(side)]


@use
def read_under_a_trace(side: Side, step: int) -> Any:
    return torch.jit.trace(side.plain.first, torch.ones(2, 6, dtype=DTYPE))(torch.ones(2, 6, dtype=DTYPE)).detach()


@use
def read_under_an_export(side: Side, step: int) -> Any:
    x = torch.ones(2, 6, dtype=DTYPE)
    return torch.export.export(side.plain.first, (x,)).module()(x).detach()


# -- functions that ask no class ---------------------------------------------------------------------------------------


def _doubled(x: Tensor) -> Tensor:
    return x * 2.0


class _Tagged(Tensor):
    pass


@use
def read_by_a_scripted_function(side: Side, step: int) -> Any:
    return torch.jit.script(_doubled)(side.plain.first.weight).detach()


@use
def read_by_a_scripted_module(side: Side, step: int) -> Any:
    return torch.jit.script(side.plain.second)(torch.ones(2, 8, dtype=DTYPE)).detach()


@use
def read_by_a_scripted_module_from_before(side: Side, step: int) -> Any:
    if not hasattr(side, "scripted"):
        side.scripted = torch.jit.script(side.plain.second)  # type: ignore[attr-defined]
    return side.scripted(torch.ones(2, 8, dtype=DTYPE)).detach()  # type: ignore[attr-defined]


def _with_data(parameter: Tensor) -> Tensor:
    other = torch.zeros(1)
    other.data = parameter
    return other


def _set_to(parameter: Any) -> Tensor:
    return torch.empty(0, dtype=DTYPE).set_(parameter.detach() if parameter.grad_fn else parameter)


TAKERS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "given as data": _with_data,
    "given to set": _set_to,
    "made a subclass": lambda p: Tensor._make_subclass(_Tagged, p),
    "seen as a subclass": lambda p: p.as_subclass(_Tagged),
    "made a parameter": nn.Parameter,
}
for _name, _take in TAKERS.items():
    use(lambda side, step, take=_take: take(side.plain.first.weight).detach().clone().as_subclass(Tensor), _name)  # type: ignore[misc]


# -- other processes ---------------------------------------------------------------------------------------------------


def in_a_child(read: Callable[[], Any]) -> Any:
    """What a forked child reads, or the text of its error."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()

    def tell() -> None:
        try:
            told.put(read())
        except RuntimeError as error:
            told.put(str(error))

    child = context.Process(target=tell)
    child.start()
    found = told.get(timeout=30)
    child.join()
    return found


@use
def read_by_a_forked_child(side: Side, step: int) -> Any:
    return in_a_child(lambda: [p.sum().item() for p in dense(side)])


@use
def state_read_by_a_forked_child(side: Side, step: int) -> Any:
    return in_a_child(lambda: [side.optimizer.state[p]["exp_avg"].sum().item() for p in dense(side)])


@use
def read_by_a_child_that_a_thread_forks(side: Side, step: int) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read_by_a_forked_child(side, step)))
    thread.start()
    thread.join()
    return found
