"""Recurrent layers kept whole: `rnn_ops`, `rnn_mode` and their kernels compute what eager torch computes.

Shape legend: see `embrace_fx.vocabulary.rnn_ops`; L layers times directions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import embrace_fx.runtime.lower.rnn  # noqa: F401  (registers the kernels)
from embrace_fx.capture import capture
from embrace_fx.capture.rnn_mode import KeepRnnWhole, choose_kernel
from embrace_fx.vocabulary.graph import BatchInput, Gradient, Parameter, Result, Tangent, TrainingGraph
from tests.support.cases import long_but

# Eager mode warns that its fused kernel does not support projections. Here the loop runs in that case, too.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

INPUT, HIDDEN, PROJECTED = 5, 6, 3
NETWORKS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "lstm-projected": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=PROJECTED, **options),
    "gru": nn.GRU,
    "rnn-tanh": nn.RNN,
    "rnn-relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
COVERING = (
    (1, False, False, False),
    (1, True, True, True),
    (2, False, True, True),
    (2, True, False, True),
    (2, True, True, False),
    (1, False, True, False),
)
"""Layers, bidirectional, bias and batch first: each pair of values in one of them."""
RELATIVE_ERROR = {torch.float64: 1e-10, torch.float32: 1e-5}


def build(network: str, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return NETWORKS[network](INPUT, HIDDEN, **options)


def initial_state(model: nn.RNNBase, batch: int) -> tuple[Tensor, ...]:
    """Returns h0 (L, B, P) and, for an LSTM, c0 (L, B, H)."""
    layers = model.num_layers * (2 if model.bidirectional else 1)
    dtype = next(model.parameters()).dtype
    h0 = torch.randn(layers, batch, model.proj_size or HIDDEN, dtype=dtype)
    return (h0, torch.randn(layers, batch, HIDDEN, dtype=dtype)) if isinstance(model, nn.LSTM) else (h0,)


def forward_and_gradients(
    model: nn.RNNBase, x: Tensor, state: Sequence[Tensor], *, whole: bool, lengths: Tensor | None = None
) -> list[Tensor]:
    """Output, final states, and the gradients of the input, the initial states and every weight."""
    x, state = x.clone().requires_grad_(), tuple(s.clone().requires_grad_() for s in state)
    with KeepRnnWhole() if whole else contextlib.nullcontext():
        packed = None if lengths is None else pack_padded_sequence(x, lengths, model.batch_first, enforce_sorted=False)
        output, final = model(x if packed is None else packed, state if len(state) == 2 else state[0])
    results = [output if packed is None else output.data, *(final if isinstance(final, tuple) else (final,))]
    generator = torch.Generator().manual_seed(1)
    tangents = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in results]
    return results + list(torch.autograd.grad(results, (x, *state, *model.parameters()), tangents))


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor], relative_error: float) -> None:
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype
        assert f.shape == e.shape
        assert (f - e).norm() <= relative_error * e.norm()


def run_graph(graph: TrainingGraph, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the first result and the gradients of the parameters, for a tangent of ones."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    arguments: list[Tensor] = []
    for _, role in graph.inputs():
        match role:
            case Parameter(name):
                arguments.append(parameters[name])
            case BatchInput(index):
                arguments.append(batch[index])
            case Tangent():
                arguments.append(torch.ones(()))
    with torch.no_grad():
        values = graph.module(*arguments)
    by_role = dict(zip((role for _, role in graph.outputs()), values, strict=True))
    gradients = {
        role.of.name: value
        for role, value in by_role.items()
        if isinstance(role, Gradient) and isinstance(role.of, Parameter)
    }
    return by_role[Result(0)], gradients


@pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_forward_and_every_gradient_equal_eager(network: str, dtype: torch.dtype, packed: bool) -> None:
    for layers, bidirectional, bias, batch_first in COVERING:
        model = build(
            network, num_layers=layers, bidirectional=bidirectional, bias=bias, batch_first=batch_first, dtype=dtype
        )
        x = torch.randn(4, 7, INPUT, dtype=dtype) if batch_first else torch.randn(7, 4, INPUT, dtype=dtype)
        lengths = torch.tensor([3, 7, 1, 5]) if packed else None
        state = initial_state(model, 4)
        expected = forward_and_gradients(model, x, state, whole=False, lengths=lengths)
        found = forward_and_gradients(model, x, state, whole=True, lengths=lengths)
        assert_equal(found, expected, RELATIVE_ERROR[dtype])


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_kernel_follows_from_what_no_batch_changes() -> None:
    x = torch.empty(7, 4, INPUT)
    assert choose_kernel("lstm", x, projected=False, packed=False) == "mkldnn"
    assert choose_kernel("lstm", x[:, :0], projected=False, packed=False) == "mkldnn"
    assert choose_kernel("lstm", x, projected=True, packed=False) == "loop"
    assert choose_kernel("lstm", x, projected=False, packed=True) == "loop"
    assert choose_kernel("lstm", x.double(), projected=False, packed=False) == "loop"
    assert choose_kernel("gru", x, projected=False, packed=False) == "loop"
    with torch.backends.mkldnn.flags(enabled=False):
        assert choose_kernel("lstm", x, projected=False, packed=False) == "loop"


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("steps", "batch"), [(1, 2), (4, 0), (1, 1)])
def test_one_step_and_no_sequence(network: str, steps: int, batch: int) -> None:
    model = build(network, num_layers=2, bidirectional=True)
    x, state = torch.randn(steps, batch, INPUT), initial_state(model, batch)
    expected = forward_and_gradients(model, x, state, whole=False)
    assert_equal(forward_and_gradients(model, x, state, whole=True), expected, 1e-5)


@pytest.mark.parametrize("network", NETWORKS)
def test_no_time_step_is_refused(network: str) -> None:
    model = build(network)
    with KeepRnnWhole(), pytest.raises(ValueError, match="the input has 0 time step"):
        model(torch.randn(0, 2, INPUT))


@pytest.mark.parametrize("network", NETWORKS)
def test_without_gradients_nothing_is_saved(network: str) -> None:
    model, x = build(network, num_layers=2), torch.randn(7, 3, INPUT)
    with torch.no_grad():
        expected, _ = model(x)
        with KeepRnnWhole():
            found, _ = model(x)
    assert_equal([found], [expected], 1e-5)
    graph = capture(model, (x,), {}, train=False).graph
    (node,) = [n for n in graph.graph.nodes if n.target is torch.ops.embrace.rnn_layer.default][-1:]
    assert len(node.meta["val"]) == (3 if isinstance(model, nn.LSTM) else 2)


def test_input_that_needs_no_gradient_gets_none() -> None:
    for network in NETWORKS:
        model, x = build(network), torch.randn(7, 3, INPUT)
        weights = tuple(model.parameters())
        expected = torch.autograd.grad(model(x)[0].square().sum(), weights)
        with KeepRnnWhole():
            loss = model(x)[0].square().sum()
        assert_equal(torch.autograd.grad(loss, weights), expected, 1e-5)


@pytest.mark.parametrize("network", NETWORKS)
def test_dropout_between_layers_draws_as_eager_draws(network: str) -> None:
    model, x = build(network, num_layers=3, dropout=0.5), torch.randn(7, 3, INPUT)
    state = initial_state(model, 3)
    torch.manual_seed(2)
    expected = forward_and_gradients(model, x, state, whole=False)
    torch.manual_seed(2)
    assert_equal(forward_and_gradients(model, x, state, whole=True), expected, 1e-5)
    model.eval()
    expected = forward_and_gradients(model, x, state, whole=False)
    assert_equal(forward_and_gradients(model, x, state, whole=True), expected, 1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("network", NETWORKS)
def test_bfloat16_autocast_gives_eager_dtypes_and_values(network: str, packed: bool) -> None:
    model, x = build(network, num_layers=2, bidirectional=True), torch.randn(7, 3, INPUT)
    state, lengths = initial_state(model, 3), torch.tensor([7, 5, 2]) if packed else None
    with torch.autocast("cpu", torch.bfloat16):
        try:
            expected = forward_and_gradients(model, x, state, whole=False, lengths=lengths)
        except RuntimeError as error:  # raised by oneDNN on some processors without AVX-512
            if "primitive descriptor" not in str(error):
                raise
            pytest.skip(f"torch itself cannot compute this here: {error}")
        found = forward_and_gradients(model, x, state, whole=True, lengths=lengths)
    assert_equal(found, expected, 0.03)  # a bfloat16 has eight significant bits


class LanguageModel(nn.Module):
    """A table, a recurrent layer that reads its rows, and a scalar loss."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(20, INPUT), rnn

    def forward(self, ids: Tensor) -> Tensor:
        output, _ = self.rnn(self.embedding(ids))
        return output.square().sum()


@pytest.mark.parametrize("network", long_but(("lstm-projected",), {each: (each,) for each in NETWORKS}))
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.long), True], ids=["static", "dynamic"])
def test_captured_graph_equals_eager(network: str, dynamic: bool) -> None:
    model = LanguageModel(build(network, num_layers=2, bidirectional=True, batch_first=True))
    dimensions = frozenset({(0, 0), (0, 1)}) if dynamic else frozenset()
    captured = capture(model, (torch.randint(20, (4, 7)),), {}, train=True, dynamic=dimensions)
    assert captured.route == "graph"
    targets = [node.target for node in captured.graph.graph.nodes]
    assert targets.count(torch.ops.embrace.rnn_layer.default) == 4
    assert targets.count(torch.ops.embrace.rnn_layer_backward.default) == 4

    for shape in ((4, 7), (2, 9), (5, 2)) if dynamic else ((4, 7),):
        ids = torch.randint(20, shape)
        assert captured.accepts([ids])
        loss, gradients = run_graph(captured.graph, model, [ids])
        expected = model(ids)
        parameters = dict(model.named_parameters())
        expected_gradients = torch.autograd.grad(expected, list(parameters.values()))
        assert_equal([loss, *(gradients[name] for name in parameters)], [expected, *expected_gradients], 1e-5)
