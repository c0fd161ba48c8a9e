"""What the order of a backward's compute is worth, simulated on the recorded profiles of the lab's five models.

`python -m benchmarks.compute_order` records, in one process on one core, how long each node of a model takes (medians
of a few passes), then simulates a step of 8 ranks on links that make wire / compute 0.5, 1 and 2, three times: with the
backward as autograd has it, with row gradients advanced, and in the order that the search finds. Nothing is sent: the
figures are simulated, from profiles that are measured.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import embrace_fx
from benchmarks.models import MODELS
from embrace_fx.cost import links as cost
from embrace_fx.passes.node_cost import node_ms
from embrace_fx.passes.overlap.order import BackwardUnits, OrderCompute
from embrace_fx.passes.overlap.submit_early import SubmitGradientsEarly
from embrace_fx.passes.scheduler.compute_order import Atoms, search
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.passes.scheduler.step_graph import Sizes, blocks, build
from embrace_fx.passes.step_memory import step_memory
from embrace_fx.planning.scheduling import MAY_HOLD, cuts
from embrace_fx.session.pipeline import Pass, overlap_passes, run_passes, training_passes
from embrace_fx.vocabulary.graph import BatchInput, Buffer, Parameter, Tangent, TrainingGraph, inputs_of
from embrace_fx.vocabulary.schedule import StepGraph
from embrace_fx.what_if import Forecast

RANKS, PASSES = 8, 5
RATIOS = (0.5, 1.0, 2.0)
"""Time on the wire over time of compute."""

SAME = 0.01
"""How far what is foreseen of an order may be from what its graph comes to: their launches are searched apart."""


class _Clocked(fx.Interpreter):
    """Runs a graph, and takes the time of each of its nodes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def run_node(self, n: fx.Node) -> Any:
        began = time.perf_counter()
        found = super().run_node(n)
        if n.op == "call_function":
            self.seconds[n.name].append(time.perf_counter() - began)
        return found


def record(model: nn.Module, batch: tuple[Tensor, ...], graph: TrainingGraph) -> dict[str, float]:
    """Milliseconds of each node of a captured graph, by name: medians of `PASSES`, after one to warm up."""
    state: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves = pytree.tree_leaves((batch, {}))

    def of_role(node: fx.Node, role: object) -> Any:
        if isinstance(role, Parameter | Buffer):
            return state[role.name].detach().clone()
        if isinstance(role, BatchInput):
            return leaves[role.index]
        assert isinstance(role, Tangent)
        return torch.ones(tuple(map(int, node.meta["val"].shape)))

    clocked = _Clocked(graph.module)
    with torch.no_grad():
        for _ in range(PASSES + 1):
            clocked.run(*(of_role(node, role) for node, role in inputs_of(graph.module)))
    return {name: median(seconds[1:]) * 1e3 for name, seconds in clocked.seconds.items()}


@dataclass(frozen=True)
class Found:
    """Steps of one model on one link, in milliseconds; bytes that the backward holds, as it was over as it is."""

    model: str
    ratio: float
    autograd_ms: float
    advanced_ms: float
    searched_ms: float
    held: float
    moved: int

    @property
    def gain(self) -> float:
        return self.advanced_ms / self.searched_ms


def simulate(model: str, ratio: float, forecast: Forecast, measured: Mapping[str, float]) -> Found:
    """A step's three simulations."""
    compute = forecast.links.compute

    def ms(node: fx.Node) -> float:
        if node.op != "call_function":  # a value that the forward has saved bears its name
            return 0.0
        return measured[node.name] if node.name in measured else node_ms(node, compute, before.graph.expected)

    graph, setting = forecast._graph, forecast._setting
    tables = {table.parameter for table in graph.tables}
    cut = cuts(setting, forecast)
    passes: list[Pass] = [*training_passes(forecast, tables, 0), *overlap_passes(forecast, "2d", 0, cut)]
    before = run_passes(graph, [each for each in passes if not isinstance(each, SubmitGradientsEarly)])
    advanced = run_passes(graph, (SubmitGradientsEarly(),), before).graph

    def steps(of: TrainingGraph) -> StepGraph:
        durations = {block.id: block.ms for block in blocks(of, ms)}
        rows = {t: forecast[t].sent_bytes_per_step // 2 for t in forecast.sharded}
        rows |= {stack.name: sum(rows[t] for t in stack.tables) for stack in forecast.stacks}
        return build(of, Sizes({}, rows, 0), durations, forecast.links, RANKS)

    backward = advanced.phases["backward"]
    units = BackwardUnits.of(backward)
    memory = step_memory(advanced)

    def held(order: Sequence[str]) -> int:
        return memory.backward_peak(units.ordered(order))

    stands = memory.backward_peak([*units.needed_by])
    found, order = search(
        steps(advanced),
        "2d",
        "profile",
        Atoms.of(units, ms, {}),
        held,
        round(stands * MAY_HOLD),
    )
    ordered = schedule(steps(OrderCompute(order)(advanced)), "2d", "profile").diagnostics().step_ms
    if abs(ordered / found.diagnostics().step_ms - 1) > SAME:
        raise AssertionError(f"foreseen were {found.diagnostics().step_ms} ms, the graph in that order takes {ordered}")
    return Found(
        model,
        ratio,
        schedule(steps(before.graph), "2d", "profile").diagnostics().step_ms,
        schedule(steps(advanced), "2d", "profile").diagnostics().step_ms,
        found.diagnostics().step_ms,
        held(order) / stands if order else 1.0,
        sum(a != b for a, b in zip(order, units.units, strict=False)),
    )


def measure(name: str, size: str) -> list[Found]:
    """One model on all links."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    workload = MODELS[name][size]
    model, batch = workload.make(), workload.batch(0, 0, 0)

    def planned(cluster: cost.Cluster) -> Forecast:
        optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
        return embrace_fx.plan(model, batch, world_size=RANKS, cluster=cluster, optimizer=optimizer)

    first = planned(cost.Cluster())
    measured = record(model, batch, first._graph)
    compute_ms = sum(measured.values())
    found = []
    for ratio in RATIOS:
        bandwidth = first.sent_bytes_per_step / (ratio * compute_ms)
        found.append(simulate(name, ratio, planned(cost.Cluster(bandwidth)), measured))
    return found


def page(found: list[Found], size: str) -> str:
    """The results as a table."""
    gains = [each.gain for each in found]
    lines = [
        "# The order of a backward's compute, simulated",
        "",
        f"`python -m benchmarks.compute_order`, models at size `{size}`, {RANKS} ranks. Profiles are "
        f"measured on one core, steps simulated; torch {torch.__version__}. Median gain {median(gains):.3f}, "
        f"best {max(gains):.3f}, "
        f"least {min(gains):.3f}.",
        "",
        "| model | wire / compute | autograd's order, ms | row gradients advanced, ms | searched, ms | gain | "
        "held by the backward | units moved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.model} | {f.ratio:g} | {f.autograd_ms:.2f} | {f.advanced_ms:.2f} | {f.searched_ms:.2f} | {f.gain:.3f} | "
        f"{f.held:.2f} | {f.moved} |"
        for f in found
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("lab", "tiny"), default="lab")
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--output", type=Path, help="the page; printed where it is left out")
    options = parser.parse_args()
    found = [each for name in options.models for each in measure(name, options.size)]
    text = page(found, options.size)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
