"""Forward and backward of recurrent layers, captured against eager: `python -m benchmarks.micro.rnn_step`.

Both sides run in pairs, each first in every other pair, on the same weights and inputs. A line gives the median times
in milliseconds, the median of the pairs' ratios (below 1: the captured graph is faster) and the number of nodes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import embrace_fx.runtime.lower.rnn  # noqa: F401  (registers the kernels)
from embrace_fx.capture import capture
from embrace_fx.vocabulary.graph import BatchInput, Parameter, Tangent


@dataclass(frozen=True)
class Case:
    """A recurrent network and the input (T, B, I) it reads."""

    name: str
    build: Callable[[], nn.RNNBase]
    steps: int
    batch: int
    input_size: int


CASES = (
    Case("LSTM 256, 2 layers", lambda: nn.LSTM(256, 256, 2), 100, 32, 256),
    Case("LSTM 256 projected to 128, 2 layers", lambda: nn.LSTM(256, 256, 2, proj_size=128), 100, 32, 256),
    Case("LSTM 1024 projected to 256", lambda: nn.LSTM(256, 1024, proj_size=256), 20, 32, 256),
    Case("LSTM 64, small batch", lambda: nn.LSTM(64, 64), 100, 4, 64),
    Case("LSTM 64 projected to 32, small batch", lambda: nn.LSTM(64, 64, proj_size=32), 100, 4, 64),
    Case("GRU 256, 2 layers", lambda: nn.GRU(256, 256, 2), 100, 32, 256),
    Case("GRU 64, small batch", lambda: nn.GRU(64, 64), 100, 4, 64),
    Case("RNN 256, 2 layers", lambda: nn.RNN(256, 256, 2), 100, 32, 256),
)


class OutputOnly(nn.Module):
    """The network's output without its final states, as language models use it."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x_TBI: Tensor) -> Tensor:
        output: Tensor = self.rnn(x_TBI)[0]
        return output


def steps_of(case: Case) -> tuple[Callable[[], object], Callable[[], object], int]:
    """One eager step, one step of the captured graph, and the number of nodes of the latter."""
    model = OutputOnly(case.build())
    x = torch.randn(case.steps, case.batch, case.input_size, requires_grad=True)
    tangent = torch.randn_like(model(x))
    parameters = dict(model.named_parameters())

    def eager() -> object:
        return torch.autograd.grad(model(x), (x, *parameters.values()), tangent)

    graph = capture(model, (x,), {}, train=True).graph
    arguments: list[Tensor] = []
    for _, role in graph.inputs():
        match role:
            case Parameter(name):
                arguments.append(parameters[name].detach())
            case BatchInput():
                arguments.append(x.detach())
            case Tangent():
                arguments.append(tangent)

    def captured() -> object:
        with torch.no_grad():
            return graph.module(*arguments)

    return eager, captured, len(graph.graph.nodes)


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def pair_of_seconds(
    eager: Callable[[], object], captured: Callable[[], object], eager_first: bool
) -> tuple[float, float]:
    """Both times, taken one after the other; the one that goes second finds other memory warm."""
    if eager_first:
        return seconds(eager), seconds(captured)
    captured_s = seconds(captured)
    return seconds(eager), captured_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=21, help="measured pairs per case, after three unmeasured ones")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--only", default="", help="measure only the cases whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.pairs} pairs, float32")
    print(f"{'case':38}{'eager_ms':>10}{'captured_ms':>13}{'ratio':>8}{'nodes':>7}")
    for case in CASES:
        if options.only not in case.name:
            continue
        eager, captured, nodes = steps_of(case)
        pairs = [pair_of_seconds(eager, captured, eager_first=k % 2 == 0) for k in range(3 + options.pairs)][3:]
        eager_ms, captured_ms = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        print(f"{case.name:38}{eager_ms:10.2f}{captured_ms:13.2f}{ratio:8.3f}{nodes:7}", flush=True)


if __name__ == "__main__":
    main()
