"""Hooks on optimizers, so that their steps also update sharded tables and apply gradients that are still in flight.

Contract
    Optimizers stay what they are; torch calls hooks around their steps. Before one, gradients that torch's step can
    take are left to it, and those that are applied by rows, or later, are hidden, so that the step skips them.
    After it they are applied, or left to the next forward with the options of this moment, and `.grad` is what it was.
    State dicts of an optimizer show parts of sharded tables; whole tensors and parts can be loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from embrace_fx.runtime.flow.bucket_updates import Bucket
from embrace_fx.runtime.flow.comm_pipeline import CommPipeline, within_steps
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.ranks.step_handshake import StepHandshake
from embrace_fx.runtime.step.closures import MeanLoss, find_closure, with_closure
from embrace_fx.runtime.step.delivery import in_supported_layouts
from embrace_fx.runtime.step.row_norms import Step, sum_squares_over_ranks
from embrace_fx.runtime.tables.local_storage import Rows
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.runtime.tables.state_dicts import convert_loaded_state, state_dict_to_load, state_dict_with_shards
from embrace_fx.runtime.tables.table import Member, Table
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.runtime.tables.update_rule import DenseUpdate, KnownOptimizers, SparseUpdate
from embrace_fx.vocabulary.exactness import ELEMENT_WISE, whole_table_reason
from embrace_fx.vocabulary.operation_id import OPTIMIZER, OWN_CODE
from embrace_fx.vocabulary.row_wise import NOT_ON_A_GRID, RowWiseAdagrad


@dataclass
class _OptimizerStep:
    """The state of one optimizer step, from its pre-hook to its post-hook."""

    # For each hidden gradient, (parameter, `.grad` to restore after the step, `.grad` during the step).
    hidden: list[tuple[nn.Parameter, Tensor, Tensor | None]] = field(default_factory=list)
    buckets: dict[int, Bucket] = field(default_factory=dict)  # by `id` of parameters left to the next forward
    late: list[RowExchange] = field(default_factory=list)  # of tables left to the next forward
    joined: list[tuple[Table, Rows]] = field(default_factory=list)  # joined tables to update now, with gradient rows
    rows: list[Member] = field(default_factory=list)  # other tables to update now by rows
    dense: list[Member] = field(default_factory=list)  # tables to update now with a gradient of all rows
    own: list[Member] = field(default_factory=list)  # tables that the optimizer's own step updates
    replicas: list[tuple[Member, Tensor]] = field(default_factory=list)  # unsharded tables to update now by rows

    def hide(self, parameter: nn.Parameter, instead: Tensor | None = None) -> None:
        """Hides a gradient from the optimizer's own step, by setting `.grad` to None or to `instead`."""
        assert parameter.grad is not None
        self.hidden.append((parameter, parameter.grad, instead))
        parameter.grad = instead

    def hide_all(self, tables: Sequence[Member]) -> None:
        """Hides the gradients of tables from the optimizer's own step."""
        for table in tables:
            if (gradient := table.parameter.grad) is not None:
                self.hidden.append((table.parameter, gradient, None))
        for table in tables:
            table.parameter.grad = None

    def restore(self, *, raised: bool) -> None:
        """Restores the hidden gradients. If `raised`, skips those cleared or replaced since the step failed."""
        for parameter, gradient, instead in reversed(self.hidden):
            if not raised or parameter.grad is instead:
                parameter.grad = gradient
        self.hidden = []


class OptimizerHooks:
    """Hooks on a model's optimizers, so that their steps also update sharded tables and apply gradients in flight.

    Args:
        unshard: called with (names of tables, reason) to unshard tables that an optimizer cannot update by shards.
            Collective.

    Attributes:
        known_optimizers: the optimizers that have hooks.
        replicas: unsharded tables of which only rows with a gradient are updated.
        of_any_layout: whether to convert gradients whose layout (sparse or dense) the optimizer does not support.
    """

    def __init__(
        self, state: ModelState, announcements: StepHandshake, unshard: Callable[[Sequence[str], str], None]
    ) -> None:
        self.known_optimizers = KnownOptimizers()
        self.replicas: list[Member] = []
        self.of_any_layout = False
        self.follow(within_steps(announcements))
        self._state = state
        self._communicator = announcements.communicator
        self._unshard = unshard
        self._steps: dict[int, _OptimizerStep] = {}  # id of an optimizer -> its step

    def follow(self, flow: CommPipeline) -> None:
        """Sets the pipeline whose in-flight gradients the hooks apply."""
        self._flow, self.recorder = flow, flow.recorder

    def listen(self) -> None:
        """Starts to add hooks to every optimizer that is about to step a parameter of the model."""
        handle = register_optimizer_step_pre_hook(_make_hook(self, OptimizerHooks._before_any_step))
        weakref.finalize(self, handle.remove)

    # -- optimizers ----------------------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        """Adds the hooks to an optimizer, so that its steps and state dicts include sharded tables."""
        if not self.known_optimizers.add(optimizer):
            return
        for parameter, state in list(optimizer.state.items()):  # state that was loaded before the optimizer was adopted
            if isinstance(parameter, nn.Parameter) and isinstance(state, dict):
                optimizer.state[parameter] = convert_loaded_state(parameter, state, self._state)
        optimizer.register_step_pre_hook(_make_hook(self, OptimizerHooks._before_step))
        optimizer.register_step_post_hook(_make_hook(self, OptimizerHooks._after_step))
        optimizer.register_state_dict_pre_hook(_make_hook(self, OptimizerHooks._apply_all))
        optimizer.register_state_dict_post_hook(_make_hook(self, OptimizerHooks._on_state_dict))
        optimizer.register_load_state_dict_pre_hook(_make_hook(self, OptimizerHooks._on_load_state_dict))

    def _before_any_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Adds hooks to an optimizer that is about to step, if it has a parameter of the model."""
        if not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
            return  # `optimizer` wraps another optimizer, whose own step runs this hook
        if not self.known_optimizers.has(optimizer):
            own = {id(parameter) for parameter in self._state.parameters()}
            if own.isdisjoint([id(p) for group in optimizer.param_groups for p in group["params"]]):
                return
            self.adopt(optimizer)
        # Run the user's hooks before ours hide gradients and after ours restore them, so that they see ordinary ones.
        _move_hook(optimizer._optimizer_step_pre_hooks, self, last=True)
        _move_hook(optimizer._optimizer_step_post_hooks, self, last=False)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Waits for gradients that an optimizer's step reads, and hides those that its class cannot apply. Returns new
        (args, kwargs) for the step if it has a closure, otherwise None.
        """
        # An earlier step is still recorded if it raised, or if it is a subclass's step that calls its base class's
        # step.
        if (last := self._steps.pop(id(optimizer), None)) is not None:
            last.restore(raised=True)
        self.recorder.mark(OWN_CODE)
        found: tuple[Any, ...] | None = None
        closure = find_closure(args, kwargs)
        if closure is None and self._state.awaiting_backward:
            _refuse_without_gradients(optimizer)
        elif closure is not None and not isinstance(closure, MeanLoss):
            closure = self._wrap_closure(closure, decides=bool(whole_table_reason(type(optimizer))))
            found = with_closure(args, kwargs, closure)
        self._sort_gradients(optimizer)
        if self.of_any_layout:
            for parameter, gradient in in_supported_layouts(optimizer):
                self._steps[id(optimizer)].hide(parameter, gradient)
        return found

    def _wrap_closure(self, closure: Callable[[], Any], *, decides: bool) -> Callable[[], Any]:
        """Returns a closure that returns the loss after its gradients have arrived.

        Args:
            decides: whether the optimizer's step depends on the loss and may evaluate the closure several times, as
                LBFGS does. If False, `closure` is evaluated now.
        """

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._flow.apply()
            self._flow.wait()
            return loss

        if decides:
            return MeanLoss(evaluate, self._communicator)
        # Evaluate the closure now, because gradients must be known before the optimizer's own step begins.
        loss = evaluate()
        return lambda: loss

    def _sort_gradients(self, optimizer: Optimizer) -> None:
        """Decides whether each gradient is applied by the optimizer's own step, by rows, or in the next forward."""
        held = self._held_tables(optimizer)
        self._state.pending.close_for(optimizer)
        step = self._steps[id(optimizer)] = _OptimizerStep()
        tables = self._take_over_tables(optimizer, held)
        replicas = self._row_updated_replicas(optimizer) if self.replicas else []
        may_wait = self._may_defer(optimizer)
        own = set(map(id, tables))
        for exchange in self._exchanges_of(tables):
            if may_wait and own.issuperset(map(id, exchange.table.members)) and exchange.gradient.may_defer():
                step.late.append(exchange)
            if exchange.gradient.step is not None:
                exchange.gradient.apply()  # apply the previous step's gradient first
        self._sort_tables(step, tables, optimizer)
        for table in replicas:
            if (gradient := table.parameter.grad) is not None:
                step.replicas.append((table, gradient))
                step.hide(table.parameter)
        if may_wait and not replicas and type(optimizer) in ELEMENT_WISE:
            hidden = self._flow.buckets.hide_late(optimizer, {id(table.parameter) for table in tables})
            step.buckets = {key: bucket for key, (_, _, bucket) in hidden.items()}
            step.hidden += [(parameter, gradient, None) for parameter, gradient, _ in hidden.values()]
        else:  # the optimizer's own step reads all gradients, or rows must be taken from dense gradients now
            self._flow.buckets.release(optimizer)

    def _held_tables(self, optimizer: Optimizer) -> list[Member]:
        """Returns the sharded tables among an optimizer's parameters. Raises `RuntimeError` if a table has gradients
        only from backwards under `no_sync`, which differ between ranks.
        """
        by_id = {id(table.parameter): table for table in self._state.tables.values()}
        held, names = list[Member](), list[str]()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (table := by_id.get(id(parameter))) is not None:
                    held.append(table)
                    gradient = parameter.grad
                    if type(gradient) is TableShard and gradient.held.unreduced:
                        names.append(table.name)
        if names:
            raise RuntimeError(
                f"optimizer.step(): the sharded tables {', '.join(names)} have gradients only from backwards under "
                "no_sync(). DDP would let each rank update its own copy with such gradients, but a sharded table has "
                "no copies. Run the last backward of each step outside of no_sync(), with a batch that reads these "
                f"tables. Or do not shard them: strategy={{{names[0]!r}: 'allreduce'}}."
            )
        return held

    def _sort_tables(self, step: _OptimizerStep, tables: Sequence[Member], optimizer: Optimizer) -> None:
        """Stores in `step` how each table's gradient is applied. Hides it unless the optimizer's own step does that."""
        done: set[int] = set()
        for exchange in step.late:
            done.update(map(id, exchange.table.members))
            step.hide_all(exchange.table.members)
        own = set(map(id, tables)) if optimizer.__dict__.get("grad_scale") is None else set[int]()
        for space in self._state.spaces.values() if type(optimizer) is not RowWiseAdagrad else ():
            rows = space.gradient.rows() if own.issuperset(map(id, space.members)) else None
            if rows is not None and space.can_defer():
                step.hide_all(space.members)
                step.joined.append((space, rows))
                done.update(map(id, space.members))
        for table in tables:
            if id(table) in done or table.parameter.grad is None:
                continue
            held = table.open_gradient()
            if type(optimizer) is RowWiseAdagrad or not (held.is_of_all_rows or table.rule is DenseUpdate):
                held.wait()
                step.hide(table.parameter)
                step.rows.append(table)
            elif type(optimizer) in ELEMENT_WISE:
                held.wait()
                step.hide(table.parameter)
                step.dense.append(table)
            else:
                table.flush()
                dense = held.memory()
                if table.layout.mesh is None:
                    step.hide(table.parameter, dense)
                step.own.append(table)

    def _take_over_tables(self, optimizer: Optimizer, held: Sequence[Member]) -> Sequence[Member]:
        """Records that `optimizer` updates the sharded tables `held`, and unshards those that it cannot update by
        shards. Returns the tables that stay sharded.
        """
        whole: list[str] = []
        if reason := whole_table_reason(type(optimizer)):
            whole = [table.name for table in held]
        elif type(optimizer) is RowWiseAdagrad:
            whole, reason = [table.name for table in held if table.grid is not None], NOT_ON_A_GRID
        if whole:
            self._unshard(whole, reason)
        for table in held:
            if table.optimizer is not optimizer:
                for exchange in self._exchanges_of([table]):
                    exchange.gradient.apply()  # apply the step of another optimizer first
                if table.optimizer is not None:
                    table.flush()
                table.optimizer = optimizer
        return [table for table in held if table.name not in whole] if whole else held

    def _row_updated_replicas(self, optimizer: Optimizer) -> list[Member]:
        """Returns an optimizer's unsharded tables of which its step changes only rows with a gradient."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = [table for table in self.replicas if id(table.parameter) in own]
        for table in found:
            table.optimizer = optimizer
        return [table for table in found if not table.rule.moves_all]

    def _may_defer(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer's update may be left to the next forward: its class is known, and neither a
        `GradScaler` nor hooks of the user take part in its step.
        """
        own = *optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()
        hooks = *own, *_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()
        return (
            type(optimizer) in (*ELEMENT_WISE, RowWiseAdagrad)  # others may write into their groups while they step
            # A GradScaler lets this step unscale the gradients or skip the update, so the step must run now.
            and optimizer.__dict__.get("found_inf") is None
            and all(map(hasattr, hooks, repeat("optimizer_hooks")))
        )

    def _exchanges_of(self, tables: Sequence[Member]) -> list[RowExchange]:
        """Returns the objects that exchange these tables' rows and gradients, without duplicates."""
        of_table = self._flow.of_table
        return list(dict.fromkeys([of_table[table.name] for table in tables if table.name in of_table]))

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Restores hidden gradients after an optimizer's step, and applies or defers updates of tables and buckets."""
        if isinstance(closure := find_closure(args, kwargs), MeanLoss):
            closure.restore()
        step = self._steps.pop(id(optimizer), None)
        if step is None:  # the hook has run already, after the base class's step that this step has called
            return
        step.restore(raised=False)
        self._count_step(optimizer)
        if step.buckets:
            self._flow.buckets.step(optimizer, step.buckets)
        is_row_wise = type(optimizer) is RowWiseAdagrad
        for exchange in () if is_row_wise else step.late:
            exchange.record_step(moved_all=exchange.gradient.begin_step().moves_all)
        if self._unscale(optimizer, step):
            self._step_tables(optimizer, step)
        self._state.pending.open()
        self.recorder.mark(OPTIMIZER)

    def _step_tables(self, optimizer: Optimizer, step: _OptimizerStep) -> None:
        """Updates the tables whose gradients were hidden from the optimizer's own step."""
        moved_all, rewritten = set(map(id, step.own + step.dense)), set[int]()
        for table in step.dense + step.rows:
            held = table.open_gradient()
            if not held.is_in_flight and held.is_dense:  # the training loop has made the gradient dense
                rewritten.add(id(table))
        if type(optimizer) is RowWiseAdagrad:
            self._step_row_wise(step)
        else:
            for unit, rows in (*step.joined, *(self._state.group_by_joined_table(step.rows) if step.rows else ())):
                rule = unit.begin_step()
                rule.finish([rows])
                if rule.moves_all:
                    moved_all.update(map(id, unit.members))
        for table in step.dense:
            table.step_dense()
        for table, gradient in step.replicas:
            table.begin_step().finish([_gradient_rows(gradient, every=table.is_read_densely)])
        of_spaces = [table for space, _ in step.joined for table in space.members]
        for exchange in self._exchanges_of(stepped := step.own + step.dense + step.rows + of_spaces):
            tables = set(map(id, exchange.table.members))
            of_all, rewrote = tables.issubset(map(id, stepped)), bool(tables & rewritten)
            exchange.record_step(moved_all=bool(tables & moved_all), of_all=of_all, rewritten=rewrote)

    def _step_row_wise(self, step: _OptimizerStep) -> None:
        """Updates the tables of a `RowWiseAdagrad`: those in `step.rows` now, and those in `step.late` in the next
        forward.

        Ranks may differ in which tables they update now, but all ranks sum the norms of gradient rows in the same
        order.
        """
        found, at_once = list[Step](), list[SparseUpdate]()
        exchanges = tuple(self._flow.exchanges.values())
        alone = [[t for t in exchange.table.members if t in step.rows] for exchange in exchanges] or [step.rows]
        for k, tables in enumerate(alone):
            now = [(table.begin_step(), table.open_gradient().rows()) for table in tables]
            found += now
            at_once += [rule for rule, _ in now]
            if exchanges and exchanges[k] in step.late:
                exchanges[k].record_step(moved_all=exchanges[k].gradient.begin_step().moves_all)
                found.append(exchanges[k].gradient.with_rows())
        sum_squares_over_ranks(found, self._communicator, self.recorder)
        for rule in at_once:
            rule.finish([])

    def _count_step(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer that has gradients. Ranks compare their counts at the model's next call."""
        grads = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        if grads.count(None) < len(grads):
            self._communicator.progress.optimizer_steps += 1
            self._state.reads.record_step(optimizer)

    @staticmethod
    def _unscale(optimizer: Optimizer, step: _OptimizerStep) -> bool:
        """Divides gradients of tables by the scale of a `GradScaler`. Returns False if the step must be skipped."""
        found_inf, scale = optimizer.__dict__.get("found_inf"), optimizer.__dict__.get("grad_scale")
        if found_inf is not None and bool(torch.as_tensor(found_inf).item() > 0):
            return False
        if scale is not None:
            for table in (*step.rows, *step.dense):
                table.open_gradient().map(lambda values: values / scale)
            for _, gradient in step.replicas:
                gradient.div_(scale)
        return True

    # -- state dicts ---------------------------------------------------------------------------------------------------

    def _apply_all(self, *_: Any) -> None:
        """Applies all pending updates before code reads the optimizer's state."""
        self._state.pending.close()
        self._flow.apply()
        self._state.flush_tables()

    def _on_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns an optimizer's state dict that contains, for sharded tables, the state of this rank's shard."""
        return state_dict_with_shards(optimizer, state_dict, self._state, self._communicator)

    def _on_load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Applies pending updates. Returns the state dict to load, with this rank's part for sharded tables."""
        self._apply_all()
        self._flow.resend_rows()
        return state_dict_to_load(optimizer, state_dict, self._state, self._communicator)


def _gradient_rows(gradient: Tensor, *, every: bool) -> Rows:
    """Returns the ids and rows of an unsharded table's gradient: of a dense one, all rows if `every`, else those not
    zero.
    """
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return gradient.indices()[0], gradient.values()
    ids = torch.arange(len(gradient), device=gradient.device) if every else gradient.ne(0).any(1).nonzero().view(-1)
    return ids, gradient.index_select(0, ids)


def _refuse_without_gradients(optimizer: Optimizer) -> None:
    """Raises `RuntimeError` if no parameter of the optimizer has a gradient, because the step would do nothing."""
    if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
        raise RuntimeError(
            "optimizer.step(): no parameter has a gradient, and a call of the model waits for its backward. "
            "backward(inputs=...) and torch.autograd.grad() do not compute gradients of the parameters of a captured "
            "model. Call loss.backward(), or pass route='eager' to compile()."
        )


def _make_hook(optimizer_hooks: OptimizerHooks, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method as a hook that runs with gradients disabled and has only a weak reference to `optimizer_hooks`."""
    itself = weakref.ref(optimizer_hooks)

    def call(*args: Any) -> Any:
        if (found := itself()) is None:
            return None
        had_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # `torch.no_grad` would make eight Python calls
        try:
            return method(found, *args)
        finally:
            torch._C._set_grad_enabled(had_gradients)

    call.optimizer_hooks = itself  # type: ignore[attr-defined]
    return call


def _move_hook(hooks: Any, optimizer_hooks: OptimizerHooks, *, last: bool) -> None:
    """Moves this model's hook to the end of an optimizer's ordered dict of hooks, or to its start if not `last`."""
    for key, hook in list(hooks.items()):
        owner = getattr(hook, "optimizer_hooks", None)
        if owner is not None and owner() is optimizer_hooks:
            hooks.move_to_end(key, last=last)
