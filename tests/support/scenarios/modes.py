"""What loops read of dense parameters inside of torch's modes, in other processes, and by functions that ask no class.

Each reads first what an update is pending for.
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
from torch.autograd.functional import jacobian
from torch.func import functional_call, functionalize, grad, hessian, jacrev, jvp, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.support.scenario import OPTIMIZERS, Training, Use, after_each_step, before_each_step, enter_all, scenario
from tests.support.scenarios.states import AVERAGING


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
    "values saved on the host": torch.autograd.graph.save_on_cpu,
    "a profiler": torch.profiler.profile,
}


def _under(mode: Callable[[], Any]) -> Use:
    def read(training: Training, step: int) -> Any:
        with mode():
            return [p.sum().item() for p in training.dense]

    return read


def _through(transform: Callable[[Callable[..., Any]], Callable[..., Any]], *shape: int) -> Use:
    """Returns a use that transforms a function that reads a layer's weight."""

    def read(training: Training, step: int) -> Any:
        layer = training.module.first
        found = transform(lambda x: F.linear(x, layer.weight, layer.bias).sin().sum())(torch.ones(shape))
        return found.detach()

    return read


def _given(transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Use:
    """Returns a use that transforms a function whose argument is a layer's weight."""
    return lambda training, step: transform(lambda weight: weight.sin().sum())(training.module.first.weight).detach()


def _by_functional_call(training: Training, step: int) -> Any:
    layer = training.module.first
    return functional_call(layer, dict(layer.named_parameters()), (torch.ones(2, 6),)).detach()


def _by_jacobian(training: Training, step: int) -> Any:
    weight, bias = training.module.first.weight, training.module.first.bias.detach()
    return jacobian(lambda each: F.linear(torch.ones(2, 6), weight, each).sin(), bias)


TRANSFORMS: Any = {"grad": grad, "jacrev": jacrev, "hessian": hessian}
USES: dict[str, Use] = {
    **{f"read under {name}": _under(mode) for name, mode in MODES.items()},
    **{f"read under {name}": _through(transform, 6) for name, transform in TRANSFORMS.items()},
    **{f"given to {name}": _given(transform) for name, transform in TRANSFORMS.items()},
    "read under vmap": _through(vmap, 2, 6),
    "given to vmap": _given(vmap),
    "given to functionalize": _given(functionalize),
    "read by a functional call": _by_functional_call,
    "read by a jacobian of autograd's": _by_jacobian,
    "stacked for an ensemble": lambda training, step: stack_module_state([training.module.first])[0]["weight"].detach(),
    "read under make_fx": _through(lambda f: lambda x: make_fx(f)(x)(x), 2, 6),
    "given to jvp": lambda training, step: jvp(lambda w: w.sin(), (training.module.first.weight,), (torch.ones(8, 6),))[
        1
    ],
}
enter_all(after_each_step, USES)


@after_each_step()
def read_under_fake_tensors(training: Training, step: int) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert [mode.from_tensor(p).shape for p in training.dense] == [p.shape for p in training.dense]
    return [p.sum().item() for p in training.dense]


@after_each_step()
def read_under_a_trace(training: Training, step: int) -> Any:
    return torch.jit.trace(training.module.first, torch.ones(2, 6))(torch.ones(2, 6)).detach()


@after_each_step()
def read_under_an_export(training: Training, step: int) -> Any:
    x = torch.ones(2, 6)
    return torch.export.export(training.module.first, (x,)).module()(x).detach()


def _doubled(x: Tensor) -> Tensor:
    return x * 2.0


class _Tagged(Tensor):
    pass


@after_each_step()
def read_by_a_scripted_function(training: Training, step: int) -> Any:
    return torch.jit.script(_doubled)(training.module.first.weight).detach()


@after_each_step()
def read_by_a_scripted_module(training: Training, step: int) -> Any:
    return torch.jit.script(training.module.second)(torch.ones(2, 8)).detach()


@after_each_step()
def read_by_a_scripted_module_from_before(training: Training, step: int) -> Any:
    if not hasattr(training, "scripted"):
        training.scripted = torch.jit.script(training.module.second)  # type: ignore[attr-defined]
    return training.scripted(torch.ones(2, 8)).detach()  # type: ignore[attr-defined]


def _with_data(parameter: Tensor) -> Tensor:
    other = torch.zeros(1)
    other.data = parameter
    return other


def _set_to(parameter: Any) -> Tensor:
    return torch.empty(0).set_(parameter.detach() if parameter.grad_fn else parameter)


def _taken_by(take: Callable[[nn.Parameter], Tensor]) -> Use:
    return lambda training, step: take(training.module.first.weight).detach().clone().as_subclass(Tensor)


TAKERS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "given as data": _with_data,
    "given to set": _set_to,
    "made a subclass": lambda p: Tensor._make_subclass(_Tagged, p),
    "seen as a subclass": lambda p: p.as_subclass(_Tagged),
    "made a parameter": nn.Parameter,
}
enter_all(after_each_step, {name: _taken_by(take) for name, take in TAKERS.items()})


def in_a_child(read: Callable[[], Any]) -> Any:
    """Returns the result of `read` in a forked child, or the text of its error."""
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


@after_each_step()
def read_by_a_forked_child(training: Training, step: int) -> Any:
    return in_a_child(lambda: [p.sum().item() for p in training.dense])


@after_each_step(optimizer=AVERAGING)
def state_read_by_a_forked_child(training: Training, step: int) -> Any:
    return in_a_child(lambda: [training.optimizer.state[p]["exp_avg"].sum().item() for p in training.dense])


@after_each_step()
def read_by_a_child_that_a_thread_forks(training: Training, step: int) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read_by_a_forked_child(training, step)))
    thread.start()
    thread.join()
    return found


@before_each_step()
def gradients_read_by_a_forked_child(training: Training) -> Any:
    return in_a_child(lambda: [p.grad.sum().item() for p in training.dense if p.grad is not None])


@scenario(optimizer=OPTIMIZERS["adamw"])
def a_child_of_one_rank_reads_while_the_others_go_on(training: Training) -> None:
    for batch in training.batches(5):
        training.model(*batch).backward()
        if training.rank == 1:
            training.note(in_a_child(lambda: [p.grad.sum().item() for p in training.dense if p.grad is not None]))
        training.optimizer.step()
        if training.rank == 1:
            training.note(in_a_child(lambda: [p.sum().item() for p in training.dense]))
        training.optimizer.zero_grad()
