"""Calls under the eager route: the forward runs as it is written, on replicas, and gradients are exchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embrace_fx.passes.take_part import idle_graph
from embrace_fx.planning.replanning import SAMPLED_EVERY
from embrace_fx.runtime.exchanges.blocks import block_bitmap
from embrace_fx.runtime.ranks.failure import TOLD, failure_text, is_of_ranks
from embrace_fx.runtime.step.gradient_hooks import is_hooked
from embrace_fx.session.accumulation import Accumulation
from embrace_fx.session.calls import Kinds, Variant
from embrace_fx.session.first_steps import MEASURED_STEPS, run_as_written, weigh
from embrace_fx.session.gradient_graph import captured_of, gradient_graph, lookup_tables, row_tables
from embrace_fx.session.gradient_step import GradientStep
from embrace_fx.session.plan_in_use import PlanInUse
from embrace_fx.setup.agreement import OtherRoute
from embrace_fx.setup.setting import Setting
from embrace_fx.setup.telling import tell
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import BY_ROWS

ASKED = "route='eager' was asked for"


class EagerCalls:
    """Runs one model's calls, once it is known that no graph holds its forward, or while none is worth its capture.

    Attributes:
        reason: why none does, in a line; empty: calls are captured.
        on_trial: a capture may yet gain.
        leaving: the next capture is to take these calls' place.
    """

    def __init__(self, setting: Setting, planned: PlanInUse, kinds: Kinds) -> None:
        self._tables: list[str] = []
        self._row_tables = frozenset[str]()  # those of them whose gradients autograd makes of rows alone
        self.reason = ASKED if setting.options.route == "eager" else ""
        self.on_trial = self.leaving = False
        self._setting = setting
        setting.stepping.of_any_layout = bool(self.reason)
        self._planned = planned
        self._kinds = kinds
        itself = weakref.ref(self)

        def look(gradients: Mapping[str, Tensor]) -> None:
            if (calls := itself()) is not None:
                calls._look(gradients)

        self._accumulation = Accumulation(look)
        self._rows: dict[str, Tensor] = {}  # of tables, that gradients have had
        self._came: tuple[str, ...] = ()  # parameters whose gradients the first backward has made, in that order
        self._order: tuple[str, ...] = ()  # the same, once a plan is made for it

    def begin(self) -> None:
        """Has a model that takes long to capture run as it is written at first."""
        if not self.reason and (reason := run_as_written(self._setting)):
            self.take_over(reason, on_trial=True)

    def take_over(self, reason: str, *, on_trial: bool = False) -> None:
        """Runs calls eagerly from here on, or until a capture gains."""
        self.reason, self.on_trial, self.leaving = reason, on_trial, False
        self._planned.probes = not on_trial
        self._setting.stepping.of_any_layout = True
        self._kinds.clear()
        self._rows, self._came, self._order = {}, (), ()
        if self._setting.communicator.rank == 0:
            tell("%s runs as it is written, on replicas: %s", type(self._setting.model).__name__, reason)

    def turn(self, found: OtherRoute) -> None:
        """Runs calls on the other route from here on."""
        if not found.captures:
            self.take_over(found.reason)
            return
        state, model = self._setting.state, self._setting.model
        self.reason, self.on_trial, self.leaving = "", False, True
        self._planned.probes = True
        self._setting.stepping.of_any_layout = False
        state.hooked = frozenset(name for name, parameter in model.named_parameters() if is_hooked(parameter))
        self._kinds.clear()
        self.forget()
        if self._setting.communicator.rank == 0:
            tell("%s is captured now: %s", type(model).__name__, found.reason)

    def fit(self) -> None:
        """Has the plan fit some rank's batch; one that no graph holds has all ranks run eagerly. Collective."""
        if reason := self._planned.fit():
            self.take_over(reason)
            variant = self.variant(train=True)
            self._planned.plan_for(variant, self.rows(variant))

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        train: bool,
        make_plan: Callable[[Variant, Sequence[Any]], None],
        check_replicas: Callable[[], None],
    ) -> Any:
        """Runs the model on a batch, as it is written. Collective.

        Args:
            make_plan: makes the first plan.
            check_replicas: has the coming announcement compare replicas, where it is time.

        Raises:
            PeerFailure: a rank cannot go on; on every rank.
            OtherRoute: a capture gains; on every rank, and nothing has run.
        """
        planned, announcements, trained = self._planned, self._setting.announcements, self._trained()
        variant = self._variant(trained, train=train)
        rows = self.rows(variant)
        if planned.plan is None:
            make_plan(variant, rows)
        if train and announcements.asked_to_plan:
            if self.on_trial and planned.calls.count > MEASURED_STEPS:
                self._weigh(variant, rows)
            self._order = self._came
            trained = self._trained()
            variant = self._variant(trained, train=train)
            planned.make_again(variant, rows)
        planned.calls.count += train
        if train:
            check_replicas()
        accumulates = train and not self._setting.state.synchronised
        results = self._run(variant, trained, args, kwargs, accumulates=accumulates)
        if train:
            planned.observe()
            planned.calls.asks_to_plan |= self.on_trial and planned.calls.count > MEASURED_STEPS
        return results

    def evaluates(self) -> bool:
        """Tells whether forwards without gradients run as they are written while others are captured."""
        plan, options = self._planned.plan, self._setting.options
        if plan is None or plan.sharded or plan.renormed or options.backend != "eager":
            return False
        trains = any(parameter.requires_grad for parameter in self._setting.model.parameters())
        return trains and options.route is None and not self._setting.state.ignored

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a forward without gradients as it is written, once every update is applied. Collective."""
        if (flow := self._planned.flow) is not None:
            flow.leave()
        self._planned.synchronize()
        trained = self._trained()
        return self._run(self._variant(trained, train=False), trained, args, kwargs, accumulates=False)

    def variant(self, *, train: bool) -> Variant:
        """Returns the variant that stands for a captured call, and makes it at first."""
        return self._variant(self._trained(), train=train)

    def _variant(self, trained: Mapping[str, nn.Parameter], *, train: bool) -> Variant:
        kind = self._kinds["eager", tuple(trained), train]
        if not kind.variants:
            graph = self._graph(trained) if train else idle_graph(*next(iter(trained.items())))
            kind.variants.append(Variant(captured_of(graph), graph, train))
        return kind.variants[0]

    def rows(self, variant: Variant) -> list[Tensor]:
        """Returns the rows of each table that the last gradient had; before the first one, all that it may have."""
        tables = {t.parameter: 0 if t.parameter in self._row_tables else t.num_rows for t in variant.analysed.tables}
        return [
            self._rows[name] if name in self._rows else torch.arange(size, device="cpu")
            for name, size in tables.items()
        ]

    def _look(self, gradients: Mapping[str, Tensor]) -> None:
        """Notes which rows gradients have, every so many steps; after the first one, has a plan made for its order."""
        if self._came and (not self._tables or self._planned.calls.count % SAMPLED_EVERY):
            return
        self._planned.calls.asks_to_plan |= not self._came and self._setting.options.given_plan is None
        self._came = self._came or tuple(gradients)
        for name in self._tables:
            gradient = gradients.get(name)
            self._rows[name] = torch.arange(0, device="cpu") if gradient is None else _rows_of(gradient).cpu()

    def _weigh(self, variant: Variant, rows: Sequence[Tensor]) -> None:
        """Ends the trial, once it is known whether a capture would gain."""
        found = weigh(self._setting, self._planned, variant, rows)
        if found:
            raise OtherRoute(found, captures=True)
        self.on_trial = found is None
        self._planned.probes = not self.on_trial

    def _trained(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients are exchanged: first those that come last, and before them what has not come.

        Buckets are filled from the end on, and leave as they are filled.
        """
        state, place = self._setting.state, {name: k for k, name in enumerate(self._order)}
        named = sorted(self._setting.model.named_parameters(), key=lambda each: -place.get(each[0], len(place)))
        return {name: p for name, p in named if p.requires_grad and name not in state.ignored}

    def _graph(self, trained: Mapping[str, nn.Parameter]) -> TrainingGraph:
        self._tables = lookup_tables(self._setting.model, trained)
        self._row_tables = row_tables(self._setting.model, self._tables)
        whole = {name: table.shape for name, table in self._setting.state.tables.items()}  # which they are to become
        return gradient_graph(trained, self._tables, whole, self._row_tables)

    def _in_rows(self) -> frozenset[str]:
        """Finds the tables whose gradients stay in rows."""
        plan, alone = self._planned.plan, self._setting.communicator.world_size == 1
        assert plan is not None
        return frozenset(name for name in self._row_tables if alone or plan[name].strategy in BY_ROWS)

    def forget(self) -> None:
        """Leaves the model's parameters alone."""
        self._accumulation.forget()

    def _run(
        self,
        variant: Variant,
        trained: Mapping[str, nn.Parameter],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        accumulates: bool,
    ) -> Any:
        """Announces a call, and runs the forward."""
        setting = self._setting
        if self.reason:
            setting.state.hooked = frozenset()  # autograd calls the hooks of gradients
        program = self._planned.build(variant, accumulates=accumulates)
        step = GradientStep(program, tuple(trained), self.rows(variant) if variant.train else (), self._in_rows())
        step.announce()
        try:
            results = setting.model(*args, **kwargs)
        except Exception as error:
            if setting.communicator.world_size > 1 and not is_of_ranks(error):
                setting.announcements.give_up(failure_text(error))
                error.add_note(TOLD)
            raise
        if variant.train:
            self._accumulation.watch(trained)
            setting.state.awaiting_backward.add(step)
            self._accumulation.expect(step, results)
        return results


def _rows_of(gradient: Tensor) -> Tensor:
    """Returns the rows of a table's gradient that are not zero, or that are there."""
    return gradient._indices()[0].unique() if gradient.is_sparse else block_bitmap(gradient).nonzero().view(-1)
