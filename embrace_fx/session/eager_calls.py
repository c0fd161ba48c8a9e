"""Runs calls under the eager route: the user's forward on replicas, with an exchange of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embrace_fx.capture.gradient_graph import gradient_graph, wrap_as_captured
from embrace_fx.capture.module_tables import lookup_tables, possible_ids, possible_rows, possible_tables
from embrace_fx.passes.join_exchanges import idle_graph
from embrace_fx.passes.planner.replanning import SAMPLED_EVERY
from embrace_fx.runtime.exchanges.blocks import block_bitmap
from embrace_fx.runtime.ranks.failure import TOLD, failure_text, is_known_to_all_ranks
from embrace_fx.runtime.ranks.step_handshake import EVALUATING
from embrace_fx.runtime.step.accumulation import Accumulation
from embrace_fx.runtime.step.gradient_step import GradientStep
from embrace_fx.runtime.tables.placement import broadcast_state
from embrace_fx.session.program_cache import Arguments, Entry
from embrace_fx.session.programs import ORDER, Programs
from embrace_fx.setup.agreement import agree_on_first_call
from embrace_fx.setup.context import Context
from embrace_fx.setup.log import log
from embrace_fx.vocabulary.graph import TrainingGraph


class EagerCalls:
    """Runs calls of a model whose forward is not captured. Forward and backward run eagerly, then gradients are
    exchanged.

    Attributes:
        reason: why calls run eagerly, in one line, or "" if they are captured.
    """

    def __init__(self, context: Context, programs: Programs) -> None:
        self._tables: list[str] = []
        self._row_tables = frozenset[str]()  # the tables of `_tables` with sparse gradients
        self._logged_written = False
        self._replicated = False  # whether rank 0's parameters were sent, for evaluations before the first plan
        self.reason = "route='eager' was requested" if context.options.route == "eager" else ""
        self._context = context
        context.optimizer_hooks.of_any_layout = bool(self.reason)
        self._programs = programs
        self._accumulation = Accumulation(weakref.WeakMethod(self._sample_rows))
        self._rows: dict[str, Tensor] = {}  # table -> rows of a recent gradient
        self._came: tuple[str, ...] = ()  # parameters in the order of their gradients in the first backward
        self._order: tuple[str, ...] = ()  # the order of gradients for which the plan was made
        # A cache: the state's names, and the same names in the order of buckets.
        self._sorted: tuple[tuple[str, ...], list[str]] | None = None

    def take_over(self, reason: str) -> None:
        """Makes all later calls of the model run eagerly, and logs the reason."""
        self.reason = reason
        self._context.optimizer_hooks.of_any_layout = True
        self._programs.cache.clear()
        self._rows, self._came, self._order, self._sorted = {}, (), (), None
        if self._context.communicator.rank == 0:
            log("%s runs eagerly, with whole tables: %s", type(self._context.model).__name__, reason)

    def extend_plan(self) -> None:
        """Changes the plan to fit all ranks' batches. If a rank could not capture its forward, makes all calls run
        eagerly instead. Collective.
        """
        if reason := self._programs.extend_plan():
            self.take_over(reason)
            entry = self._entry(self._trained(), train=True)
            self._programs.replan(entry, self._rows_of(entry), reason)

    def call(self, call: Arguments) -> Any:
        """Runs the user's forward eagerly on a batch, as a step of the model. Collective.

        A call inside a backward, such as when activation checkpointing recomputes the model, only runs the forward.
        """
        if call.train and self._accumulation.backward is not None:
            return self._context.model(*call.args, **call.kwargs)
        programs, announcements, trained = self._programs, self._context.announcements, self._trained()
        # A model without trained parameters has no step, but autograd may pass gradients through it.
        train = call.train and bool(trained)
        # Wait for the last call's handshake here, because a call without gradients has no backward that would wait.
        announcements.wait()
        entry = self._entry(trained, train=train)
        rows = self._rows_of(entry, call.leaves)
        if programs.pipeline is None:
            programs.make_first_plan(entry, rows)
        if train and announcements.asked_to_plan:
            self._order, self._sorted = self._came, None
            trained = self._trained()
            entry = self._entry(trained, train=train)
            programs.replan(entry, rows)
        programs.counters.calls += train
        accumulates = train and not self._context.state.synchronised
        results = self._run(entry, trained, call, accumulates=accumulates)
        if train:
            programs.observe()
        return results

    def evaluate_unplanned(self, call: Arguments) -> Any:
        """Runs a forward without gradients before the first training call, with whole parameters. Collective."""
        context, model = self._context, self._context.model
        agree_on_first_call(context.communicator, EVALUATING, None)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise RuntimeError(
                "The model is on the meta device and has no values yet. Call it once with gradients enabled before the "
                "first evaluation: the first training call creates its values."
            )
        if not self._replicated:
            buffers = context.options.shares_buffers
            broadcast_state(model, context.state.ignored, context.communicator, buffers=buffers)
        self._replicated = True
        return model(*call.args, **call.kwargs)

    def evaluates(self) -> bool:
        """Returns whether forwards without gradients run eagerly. They can, even if training runs captured graphs."""
        plan, options = self._programs.plan, self._context.options
        if plan is None or plan.sharded or plan.renormed or options.backend != "eager":
            return False
        if self.reason or (options.route is None and not self._programs.buffers.shared_names()):
            return True
        trains = any(parameter.requires_grad for parameter in self._context.model.parameters())
        return trains and options.route is None and not self._context.state.ignored

    def evaluate(self, call: Arguments) -> Any:
        """Runs a forward without gradients eagerly, after applying all pending optimizer updates.

        Collective if ranks share buffers. Otherwise one rank may evaluate while the others wait.
        """
        self._programs.flow.finish_pending()
        self._programs.apply_pending()
        if not self._programs.buffers.shared_names():
            return self._context.model(*call.args, **call.kwargs)
        trained = self._trained()
        return self._run(self._entry(trained, train=False), trained, call, accumulates=False)

    def _entry(self, trained: Mapping[str, nn.Parameter], *, train: bool) -> Entry:
        """Returns the cache entry of eager calls, and makes it at the first call.

        Args:
            trained: the parameters whose gradients are exchanged, by name.
            train: whether the calls train.
        """
        kind = self._programs.cache["eager", tuple(trained), train]
        if not kind.found:
            name = self._context.state.names[0]
            graph = self._graph(trained) if train else idle_graph(name, self._context.state.parameter(name))
            kind.found.append(Entry(wrap_as_captured(graph), graph, train))
        return kind.found[0]

    def _rows_of(self, entry: Entry, leaves: Sequence[Any] = ()) -> list[Tensor]:
        """Returns, for each table of an entry, the row ids (K,) of a recent gradient. For a table without a gradient so
        far, returns the rows that the batch may read.

        Args:
            leaves: the flattened batch.
        """
        tables, rows = entry.analysed.tables, self._rows
        if unknown := [table for table in tables if table.parameter not in rows]:
            ids, untied = possible_ids(leaves), possible_tables(self._context.model)
            rows = rows | {
                t.parameter: possible_rows(ids if t.parameter in untied else (), t.num_rows) for t in unknown
            }
        return [rows[table.parameter] for table in tables]

    def _sample_rows(self, gradients: Mapping[str, Tensor]) -> None:
        """Records, every few steps, the row ids of the tables' gradients.

        At the first backward, also records the order of the gradients, and requests that buckets be filled in this
        order.

        Args:
            gradients: the gradients of a backward by parameter name, in the order in which autograd computed them.
        """
        if self._came and (not self._tables or self._programs.counters.calls % SAMPLED_EVERY):
            return
        if not self._came:
            self._programs.ask_to_replan(ORDER)
        self._came = self._came or tuple(gradients)
        for name in self._tables:
            gradient = gradients.get(name)
            self._rows[name] = torch.arange(0, device="cpu") if gradient is None else _nonzero_rows(gradient).cpu()

    def _trained(self) -> dict[str, nn.Parameter]:
        """Returns the parameters whose gradients are exchanged, by name. Parameters without a gradient in the first
        backward come first, then all others in the reverse order of their gradients in that backward.

        Buckets are filled from the end of this order, and launched once they are full.
        """
        state = self._context.state
        if self._sorted is None or self._sorted[0] is not state.names:
            first: dict[int, str] = {}
            for name in state.names:
                first.setdefault(id(state.parameter(name)), name)  # a tied parameter is listed by its first name
            place = {name: k for k, name in enumerate(self._order)}
            names = sorted(first.values(), key=lambda name: -place.get(name, len(place)))
            self._sorted = state.names, [name for name in names if name not in state.ignored]
        names = self._sorted[1]
        found = zip(names, state.parameters(names), strict=True)
        return {name: parameter for name, parameter in found if parameter.requires_grad}

    def _graph(self, trained: Mapping[str, nn.Parameter]) -> TrainingGraph:
        """Returns a graph that only exchanges the gradients of `trained`. Also records which of these are tables."""
        if self._context.communicator.comm_hook is None:
            self._tables = lookup_tables(self._context.model, trained)
            self._row_tables = frozenset(lookup_tables(self._context.model, trained, only_sparse=True))
        # Gather sharded tables, because eager forwards read whole ones.
        whole = {name: table.shape for name, table in self._context.state.tables.items()}
        return gradient_graph(trained, self._tables, whole, self._row_tables)

    def remove_hooks(self) -> None:
        """Removes the hooks that collect gradients from the model's parameters."""
        self._accumulation.forget()

    def _run(self, entry: Entry, trained: Mapping[str, nn.Parameter], call: Arguments, *, accumulates: bool) -> Any:
        """Runs the eager forward of a call and returns its result. Announces the step to the other ranks, and prepares
        the exchange of gradients.

        Args:
            entry: the cache entry of the call.
            trained: the parameters whose gradients are exchanged, by name.
            accumulates: whether gradients are accumulated instead of reduced (`no_sync`).
        """
        context = self._context
        if self.reason:
            context.state.hooked = frozenset()  # autograd itself calls the gradient hooks
        program = self._programs.build(entry, accumulates=accumulates)
        rows = self._rows_of(entry, call.leaves) if entry.train else ()
        plan = self._programs.in_use.plan
        sparse = frozenset(name for name in self._row_tables if not plan.makes_dense(name))
        step = GradientStep(program, tuple(trained), rows, sparse)
        step.announce()
        tables = [name for name in self._tables if name in trained]
        versions = [trained[name]._version for name in tables]
        try:
            results = context.model(*call.args, **call.kwargs)
        except Exception as error:
            if context.communicator.world_size > 1 and not is_known_to_all_ranks(error):
                context.announcements.give_up(failure_text(error))
                error.add_note(TOLD)
            raise
        if written := [n for n, before in zip(tables, versions, strict=True) if trained[n]._version != before]:
            self._log_written(written)
        if entry.train:
            self._accumulation.watch(trained)
            context.state.awaiting_backward.add(step)
            self._accumulation.expect(step, results)
        return results

    def _log_written(self, tables: list[str]) -> None:
        """Logs that a forward writes these tables, so that replicas may differ. Logs only once."""
        if not self._logged_written and self._context.communicator.rank == 0:
            log(_WRITTEN, ", ".join(tables))
        self._logged_written = True


_WRITTEN = (
    "this forward runs eagerly and writes a table (%s), as lookups with max_norm do. If the written values depend on "
    "the batch, replicas differ from now on, as under DDP. With route='graph', all ranks rescale the same rows"
)


def _nonzero_rows(gradient: Tensor) -> Tensor:
    """Returns the ids (K,) of a gradient's nonzero rows if the gradient is dense, or of all its stored rows if it is
    sparse.
    """
    return gradient._indices()[0].unique() if gradient.is_sparse else block_bitmap(gradient).nonzero().view(-1)
