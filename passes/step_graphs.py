"""Derives the graphs of a training program's step variants, such as the first step's, from the steady step's graph.

A step is a variant if its batch is the first or last of an epoch, or not the expected one, or if gradients accumulate.
All ranks choose the same variant by the handshake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import fx

from embrace_fx.passes.overlap.variants import DerivePhase, splits_rows
from embrace_fx.passes.pipeline import CompiledGraph, Pass, run_passes
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.step_variant import VARIANTS, StepVariant


class StepGraphs:
    """Derives the graph of each variant of a training step, such as the first step, from the graph of a steady step.
    Caches the graphs.

    Attributes:
        steady: the compiled graph of a steady step, which has a previous and a next step and knows the next batch.
    """

    def __init__(self, steady: CompiledGraph, analysed: TrainingGraph) -> None:
        self.steady = steady
        self._analysed = analysed
        self._derived: dict[StepVariant, TrainingGraph] = {}

    @property
    def have_variants(self) -> bool:
        """Whether steps have variants. They do only if the exchange of a batch's table rows is split in two."""
        return "backward" in self.steady.graph.phases and splits_rows(self.steady.graph)

    def graph(self, variant: StepVariant) -> TrainingGraph:
        """Returns the graph for a variant of a step.

        Raises:
            VerificationError: the variant's phase breaks an invariant.
        """
        if variant not in self._derived:
            self._derived[variant] = run_passes(self._analysed, [DerivePhase(variant)], self.steady).graph
        return self._derived[variant]

    def reorder(self, passes: Sequence[Pass]) -> None:
        """Runs passes that reorder the steady step. Drops the cached graphs of backward variants, which are derived
        again when needed.
        """
        self.steady = run_passes(self._analysed, passes, self.steady)
        self._derived = {variant: each for variant, each in self._derived.items() if variant.phase == "forward"}

    def modules(self) -> Mapping[str, Callable[[], fx.GraphModule]]:
        """Maps the name of each step variant to a function that builds the graph module that differs from a steady
        step. The map is empty if steps have no variants.
        """
        if not self.have_variants:
            return {}
        return {str(variant): partial(self._phase_module, variant) for variant in VARIANTS if not variant.is_steady}

    def _phase_module(self, variant: StepVariant) -> fx.GraphModule:
        """Returns the graph module of the phase, forward or backward, in which `variant` differs from a steady step."""
        return self.graph(variant).phases[variant.phase]
