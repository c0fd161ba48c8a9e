"""`outside_of_modes`: an optimizer's step inside of any mode of torch is as anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import _get_current_function_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from embrace_fx.vocabulary.modes import outside_of_modes

Updating = Callable[[Tensor], Tensor]


def _within(mode: Callable[[], Any]) -> Callable[[Updating, Tensor], object]:
    def run(update: Updating, x: Tensor) -> None:
        with mode():
            update(x)

    return run


def _export(update: Updating, x: Tensor) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return update(x)

    torch.export.export(Model(), (x,), strict=False)


def _dual(update: Updating, x: Tensor) -> None:
    with forward_ad.dual_level():
        update(forward_ad.make_dual(x, x))


MODES: dict[str, Callable[[Updating, Tensor], object]] = {
    "none": lambda update, x: update(x),
    "fake": _within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "inference": _within(torch.inference_mode),
    "autocast": _within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "device": _within(lambda: torch.device("meta")),
    "flops": _within(lambda: FlopCounterMode(display=False)),
    "trace": lambda update, x: torch.jit.trace(update, (x,), check_trace=False),
    "make_fx": lambda update, x: make_fx(update)(x),
    "make_fx of fakes": lambda update, x: make_fx(update, tracing_mode="fake")(x),
    "make_fx before autograd": lambda update, x: make_fx(update, pre_dispatch=True)(x),
    "vmap": lambda update, x: vmap(update)(x),
    "grad": lambda update, x: grad(update)(x),
    "jacrev": lambda update, x: jacrev(update)(x),
    "hessian": lambda update, x: hessian(update)(x),
    "jvp": lambda update, x: jvp(update, (x,), (x,)),
    "functionalize": lambda update, x: functionalize(update)(x),
    "vmap of grad": lambda update, x: vmap(grad(update))(torch.stack([x, x])),
    "dual numbers": _dual,
    "export": _export,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODES)
def test_a_step_inside_of_a_mode(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], 0.1)
    seen: list[list[float]] = []

    def update(x: Tensor) -> Tensor:
        with outside_of_modes():
            parameter.grad = torch.ones(3, dtype=torch.float64)
            optimizer.step()
            seen.append(parameter.tolist())
        return x.sum() * 2

    MODES[name](update, torch.ones(3, dtype=torch.float64))
    twin = nn.Parameter(torch.ones(3, dtype=torch.float64))
    plain = torch.optim.AdamW([twin], 0.1)
    for values in seen:
        twin.grad = torch.ones(3, dtype=torch.float64)
        plain.step()
        assert values == twin.tolist()
    (state,) = optimizer.state.values()
    assert all(type(each) is Tensor and not each.is_inference() for each in state.values())
    assert seen


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_nothing_of_it_is_recorded() -> None:
    parameter = nn.Parameter(torch.ones(3))

    def update(x: Tensor) -> Tensor:
        with outside_of_modes(), torch.no_grad():
            parameter.mul_(2)
        return x * 2

    graph = make_fx(update, pre_dispatch=True)(torch.ones(3)).graph
    assert [str(node.target) for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul_.Tensor)] == []
    assert len([node for node in graph.nodes if node.op == "call_function"]) == 1
    assert "mul_" not in str(torch.jit.trace(update, (torch.ones(3),), check_trace=False).graph)


def test_modes_are_back_where_the_code_inside_raises() -> None:
    with torch.device("meta"), torch.autocast("cpu"), torch.no_grad():
        stack = _get_current_function_mode_stack()
        with pytest.raises(RuntimeError), outside_of_modes():
            torch.ones(1).view(2)
        with outside_of_modes():
            assert torch.ones(1).device.type == "cpu"
        assert _get_current_function_mode_stack() == stack
        assert torch.ones(1).is_meta
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
