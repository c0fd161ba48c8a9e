"""Derives, from the graph of a step between two others, the graphs of steps without a predecessor or without a known
next batch.

    rewrite of a forward:
        arrives whole     early = await_rows(..., "table early rows"); late = await_rows(..., "table rows")
                          flat = join_rows([early, late], ...)
                      ->  late = await_rows(..., "table rows"); flat = join_rows([late], ...)
        another batch     as `arrives whole`; rows delayed for a batch that did not come are updated as well:
                          updated = update_rows(shard, table, "table prior")
                      ->  prior = update_rows(shard, table, "table prior")
                          updated = update_rows(prior, table, "table delayed [0]")
        none coming       submit_ids([ids], "ids")
                      ->

    rewrite of a backward:
        nothing left      updated = update_rows(shard, table, "table delayed [0]"); submit_rows(updated, ...)
                      ->  submit_rows(shard, ...)
        none coming       await_ids([ids], "ids")
                      ->
        whole             submit_rows(updated, ..., "table early rows"); submit_gradients(..., "table delayed [0]")
                      ->

Contract
    Same values. The remaining launches keep their order, so that one launch order serves all variants. If rows are not
    split, the prior gradients are all gradients and the late rows are all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from embrace_fx.passes.overlap.launches import Phases, calls_of, drop_unread, rewrite_phases
from embrace_fx.passes.rewriter import Rewriter
from embrace_fx.vocabulary.graph import Saved, TrainingGraph
from embrace_fx.vocabulary.operation_id import IDS, OperationId
from embrace_fx.vocabulary.ops import id_of, launch_of
from embrace_fx.vocabulary.step_variant import BackwardVariant, ForwardVariant, StepVariant, VariedPhase
from embrace_fx.vocabulary.submissions import submitted

embrace = torch.ops.embrace


@dataclass(frozen=True)
class DerivePhase:
    """The pass that derives a variant of the forward or backward from the forward or backward of a steady step. For
    example, the first step has no previous gradients to apply.
    """

    variant: StepVariant

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        steady = tuple(submitted(graph.phases["backward"], graph.phases["forward"]))
        varied = VariedPhase(
            self.variant,
            frozenset(steady),
            into_forward=bool(calls_of(graph.phases["forward"], embrace.await_chunk.default)),
        )
        delayed = [launch for launch in steady if launch.part == "delayed"]
        return replace(rewrite_phases(graph, partial(self._rewrite, delayed=delayed)), varied=varied)

    def _rewrite(self, phases: Phases, delayed: Sequence[OperationId]) -> None:
        """Removes from a phase all nodes that the variant does not run.

        Args:
            delayed: the launch ids of delayed gradients (those of rows that the next batch does not read).
        """
        module = phases[self.variant.phase]
        if isinstance(self.variant, ForwardVariant):
            _derive_forward(module, self.variant, delayed)
        else:
            _derive_backward(module, self.variant)
        drop_unread(module, Saved)


def _derive_forward(module: fx.GraphModule, variant: ForwardVariant, delayed: Sequence[OperationId]) -> None:
    """Adapts a forward graph to `variant`, in place.

    If no rows were sent before the forward begins (early rows), removes the waits for early rows. If the early rows
    belong to another batch, inserts updates by the delayed gradients. If the variant does not send the next batch's
    ids, removes their submission.

    Args:
        delayed: the launch ids of delayed gradients (those of rows that the next batch was not expected to read).
    """
    if variant.arrives != "cut":
        for early in [n for n in calls_of(module, embrace.await_rows.default) if id_of(n).part == "early"]:
            (join,) = early.users
            join.args = ([part for part in join.all_input_nodes[:2] if part is not early], *join.args[1:])
            module.graph.erase_node(early)
    if variant.arrives == "other":
        for update in calls_of(module, embrace.update_rows.default):
            table = id_of(update).what
            _update_delayed(Rewriter(module), update, [launch for launch in delayed if launch.what == table])
    if not variant.coming:
        _erase_in_order(module, calls_of(module, embrace.submit_ids.default))


def _update_delayed(rewriter: Rewriter, update: fx.Node, delayed: list[OperationId]) -> None:
    """Inserts one table update for each delayed piece of a gradient. They run after the update with the prior part, and
    before rows are looked up.

    Args:
        update: the update with the prior part, which is sent first.
        delayed: the launch ids of the delayed pieces.
    """
    readers, last = list(update.users), update
    for k, launch in enumerate(delayed):
        with rewriter.before(last.next):
            last = rewriter.launch(update.target, last, launch.what, launch=launch, name=f"{update.name}_delayed_{k}")
    for reader in readers:
        reader.replace_input_with(update, last)


def _derive_backward(module: fx.GraphModule, variant: BackwardVariant) -> None:
    """Removes from a backward the updates, waits and submissions that its variant does not run, in place."""
    if not variant.left:
        for update in calls_of(module, embrace.update_rows.default):
            update.replace_all_uses_with(update.all_input_nodes[0])
            module.graph.erase_node(update)
    if not variant.coming:
        _erase_in_order(module, calls_of(module, embrace.await_ids.default))
    if not variant.cut:
        _erase_in_order(module, calls_of(module, embrace.submit_rows.default))
        gradients = calls_of(module, embrace.submit_gradients.default)
        _erase_in_order(module, [node for node in gradients if id_of(node).part == "delayed"])


def _erase_in_order(module: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Erases nodes that have no users, in the given order."""
    for node in nodes:
        module.graph.erase_node(node)


def splits_rows(graph: TrainingGraph) -> bool:
    """Returns whether a graph splits exchanges of rows in two, so that its steps have variants."""
    return any(launch_of(node) == IDS for node in calls_of(graph.phases["forward"], embrace.submit_ids.default))
