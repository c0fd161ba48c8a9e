"""The state of one compiled model: sets it up with the other ranks, runs its calls, saves and loads its state, closes
it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from embrace_fx.capture.arguments import flatten_arguments
from embrace_fx.capture.bypasses import close_bypasses
from embrace_fx.capture.gc_pause import pause_garbage_collection
from embrace_fx.capture.model_watch import ModelWatch
from embrace_fx.passes.planner.plan_fit import PlanViolation
from embrace_fx.planning.placing import gather_buffers
from embrace_fx.runtime.flow.lookahead import Lookahead
from embrace_fx.runtime.ranks.checksums import compare_checksums
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.default_group import check_call, check_group, default_group, group_of_mesh
from embrace_fx.runtime.ranks.failure import PlanDoesNotFit
from embrace_fx.runtime.ranks.forks import FORKED, watch_forks
from embrace_fx.runtime.ranks.step_handshake import HandshakeMessage, StepHandshake
from embrace_fx.runtime.ranks.wire_rounding import Rounding
from embrace_fx.runtime.step.external_gradients import ExternalGradients
from embrace_fx.runtime.step.hooked_buckets import CommHook
from embrace_fx.runtime.step.optimizer_hooks import OptimizerHooks
from embrace_fx.runtime.tables.model_state import ModelState, ignored_names
from embrace_fx.runtime.tables.placement import broadcast_state
from embrace_fx.runtime.tiers import checkpoint
from embrace_fx.session.comm_hooks import register_hook
from embrace_fx.session.eager_calls import EagerCalls
from embrace_fx.session.graph_calls import GraphCalls
from embrace_fx.session.program_cache import Arguments
from embrace_fx.session.programs import MODULE, ONCE_IN, USER, Programs
from embrace_fx.session.route import reason_to_run_eagerly
from embrace_fx.session.shadow_rank import ShadowRank
from embrace_fx.session.state_hooks import add_state_hooks, release_from_session
from embrace_fx.session.views import Views
from embrace_fx.session.whole_tables import whole_tables
from embrace_fx.setup.agreement import RunsEagerly, agree_on_first_call, agree_on_set_up, give_up, replicated_values
from embrace_fx.setup.context import Context
from embrace_fx.setup.log import log, stage
from embrace_fx.setup.options import Options


class Session:
    """The state of one compiled model: its calls, programs and tables, from `compile` to `close`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        group: dist.ProcessGroup | DeviceMesh | None,
        options: Options,
    ) -> None:
        self.model, self.optimizers, self.options = model, optimizers, options
        self.lookahead = Lookahead(self._end_lookahead, lambda: self._context.optimizer_hooks.recorder)
        self.device_mesh = group if isinstance(group, DeviceMesh) else None
        self._given_group = group_of_mesh(group) if isinstance(group, DeviceMesh) else group
        self.communicator = Communicator(self._given_group or default_group(), Rounding(options.rows))
        self._begun = False
        self._to_load: Path | None = None  # a checkpoint to load when tables have been placed
        self._hook = ""
        self.announcements = StepHandshake(self.communicator)
        with stage("agreeing with the other ranks", self.communicator.rank):
            agree_on_set_up(self.communicator, model, optimizers, options, self.device_mesh)
        self.announcements.watch()
        release_from_session(model)
        self._send_first_state()
        self.state = ModelState(model)
        self._watch = ModelWatch(model, self.state)
        self._context = Context(model, self._make_optimizer_hooks(), self.state, self.announcements, options)
        self._placed = add_state_hooks(self)
        self._outside = ExternalGradients(self.state, self.communicator)
        self.programs = Programs(self._context, self.lookahead.warn_of_other_batch, self._after_placing)
        self._eager = EagerCalls(self._context, self.programs)
        self.state.pending.watch(self.programs.pending_updates(), self.programs.late_optimizers)
        close_bypasses()
        watch_forks(self)
        self._graphs = GraphCalls(self._context, self.programs, self.lookahead, self._watch)
        self.views = Views(self._context, self.programs, self._eager)
        self.shadow = ShadowRank(self._context, self.programs, self._eager.extend_plan)

    def _send_first_state(self) -> None:
        """Broadcasts rank 0's parameters and buffers, except embeddings, as DDP's constructor does. Collective.

        Embeddings, which may be large, are sent later, once the plan says which rank needs which part.
        """
        layers = [module for module in self.model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
        later = {id(parameter) for layer in layers for parameter in layer.parameters()}
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        apart = {name for name, each in named if id(each) in later or each.is_meta}
        apart |= ignored_names(self.model)
        broadcast_state(self.model, apart, self.communicator, buffers=self.options.broadcast_buffers is not False)

    def _make_optimizer_hooks(self) -> OptimizerHooks:
        """Adds hooks to the optimizers that step the model: to the given ones now, and to others at their first step.
        Returns the object that manages the hooks.
        """
        optimizer_hooks = OptimizerHooks(self.state, self.announcements, self._unshard)
        if self.communicator.rank == 0:
            optimizer_hooks.known_optimizers.on_new = _log_empty_groups
        optimizer_hooks.listen()
        for optimizer in self.optimizers:
            optimizer_hooks.adopt(optimizer)
        return optimizer_hooks

    def _unshard(self, names: Sequence[str], reason: str) -> None:
        """Makes the tables `names` whole on all ranks, because an optimizer needs them whole. Collective."""
        self.programs.unshard(names, reason)

    @property
    def shards(self) -> tuple[str, ...]:
        """The names of the model's sharded tables."""
        plan = self.programs.plan
        return () if plan is None else plan.divided

    @property
    def is_training(self) -> bool:
        """Whether the compiled model has been called and is not closed."""
        return self._begun and self.communicator.is_open

    def before_fork(self) -> None:
        """Applies pending updates before the process forks. On the main thread, also waits for gradients in flight."""
        self.state.pending.apply()
        if threading.current_thread() is threading.main_thread():
            self.programs.flow.wait()

    def in_fork(self) -> None:
        """Disconnects the model from the other ranks, in the child process of a fork."""
        self.communicator.leave_fork()
        self.programs.flow.launcher.queue.error = RuntimeError(FORKED)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Registers a communication hook that reduces buckets, as in DDP. The hook is called with `state` and each
        bucket.
        """
        self._hook = register_hook(self.communicator, CommHook(state, hook), self.options, self._begun, self._hook)

    # -- calling -------------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        """Checks, at the first call, that the ranks agree on model, optimizers and options. Collective."""
        if self._given_group is None:
            group = default_group()
            check_group(group, self.communicator.group)
            if self.communicator.group is None and group is not None:
                self.communicator.join(group)
                self._send_first_state()
        # Check the optimizers again, because they may have changed since `compile`.
        own = self.model, self.optimizers, self.options
        agree_on_set_up(self.communicator, *own, hook=self._hook, is_called=True)
        self._record_model()
        self._begun = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile does not trace into it
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call of the model and returns its output. Inside `functional_call`, which replaces all parameters by
        other tensors, runs the plain model.
        """
        if self._watch.all_replaced(buffers=self.options.shares_buffers):
            return self.model(*args, **kwargs)
        self.lookahead.begin_call()
        with self.state.pending.closed(grows=False):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call of the model. The first call also sets the model up.

        Repeats the call if the plan has changed, or if the forward cannot be captured and must run eagerly.
        """
        is_first = self.programs.pipeline is None
        with contextlib.ExitStack() as first_step:
            if is_first:
                # Report the first step as a whole: its stages may be short one by one, but long together.
                first_step.enter_context(stage("preparing the first step", self.communicator.rank))
                first_step.enter_context(pause_garbage_collection())
            check_call(self.communicator.group, begun=self._begun)
            if is_first:
                self.announcements.announce(HandshakeMessage())  # raises if another rank fails before this call
            if not self._begun:
                self._set_up()
            arguments = Arguments(args, kwargs, *flatten_arguments(args, kwargs), torch.is_grad_enabled())
            count = self.programs.counters.calls
            while True:
                try:
                    return self._call(arguments)
                except RunsEagerly as found:
                    self._eager.take_over(str(found))
                except PlanDoesNotFit:
                    self.programs.counters.calls = count
                    self._eager.extend_plan()
                    if self._watch.renamed():
                        gather_buffers(self.model)
                        self._take_over_renames()

    def _call(self, call: Arguments) -> Any:
        """Runs the model on a batch.

        As long as no parameter is trainable, runs the plain model: a GAN's discriminator may be frozen at its first
        calls.

        Raises:
            PlanDoesNotFit: the plan must be changed before this call; raised on every rank.
        """
        self.communicator.check_open()
        self._check_model(call.train)
        if self.programs.pipeline is None:
            if not (call.train and self._watch.trains):
                if self._to_load is not None:
                    raise RuntimeError(
                        "The first call after load_checkpoint() must be a training call: it places the tables and "
                        "reads the checkpoint. Call the model once with gradients enabled before you evaluate."
                    )
                return self._eager.evaluate_unplanned(call)
            if not self._eager.reason:
                with stage("looking at the model", self.communicator.rank):
                    if reason := reason_to_run_eagerly(self._context, self.programs, call.leaves):
                        self._eager.take_over(reason)
        if not call.train and self._eager.evaluates():
            return self._eager.evaluate(call)
        return self._eager.call(call) if self._eager.reason else self._graphs.call(call)

    def _check_model(self, train: bool) -> None:
        """Compares the model with what was captured. Drops all captures if modules have changed.

        Raises:
            RuntimeError: parameters were added, removed, replaced or converted.
            PlanDoesNotFit: parameters were renamed, as pruning does, or a hook was registered on a sharded table.
                Raised on every rank.
        """
        programs = self.programs
        if (changed := self._watch.refusal()) is not None:
            if not (names := self._watch.renamed()):
                if programs.pipeline is None:  # no announcements are exchanged before the first training call
                    agree_on_first_call(self.communicator, self._context.activity(train=train), changed)
                give_up(self.announcements, changed)
            if programs.pipeline is not None:
                programs.check_fit(PlanViolation(renamed=tuple(names.items())), self._context.activity(train=train))
            self._take_over_renames()
        if self._watch.modules_changed():
            self.programs.apply_pending()
            self._record_model()
            programs.cache.clear()
            if programs.pipeline is not None:
                programs.ask_to_replan(MODULE)
        if self.state.hooked and programs.plan is not None:
            whole = tuple(sorted(self.state.hooked.intersection(programs.plan.sharded)))
            programs.check_fit(PlanViolation((), whole), self._context.activity(train=train))

    def _record_model(self) -> None:
        """Records the model's current modules and parameters, to compare them at the next call."""
        self.state.refresh(self.model)
        self._watch.record()

    def _take_over_renames(self) -> None:
        """Updates the names of parameters in this session, after the user has renamed them in the model."""
        self._record_model()
        self.programs.cache.clear()
        self._eager.remove_hooks()
        if self.programs.pipeline is not None:
            self._after_placing(first=False)

    def _end_lookahead(self) -> None:
        """Applies pending updates, and drops the prepared next batch, because the loop over the loader has ended."""
        self.programs.flow.expect_no_batch()
        self.programs.apply_pending()

    # -- state ---------------------------------------------------------------------------------------------------------

    def parameters_were_loaded(self) -> None:
        """Looks up parameters again after `load_state_dict`, which may have replaced them by new objects."""
        self.state.parameters_were_loaded()
        self.communicator.progress.optimizer_steps = 0  # counts anew, because ranks are equal again
        self._watch.record_parameters()
        if self.programs.pipeline is not None:
            self._after_placing(first=False)

    def _after_placing(self, first: bool) -> None:
        """Updates the session after a plan has placed parameters. The first time, loads a requested checkpoint."""
        self._placed.record(self)
        if self._eager.reason:  # autograd itself accumulates all gradients in `.grad`
            self._outside.stop()
        else:
            plan = self.programs.in_use.plan
            self._outside.watch(frozenset(d.parameter for d in plan if d.strategy in ("unused", "frozen")))
        if first and self._to_load is not None:
            checkpoint.load(*self._checkpointed(), self._to_load)
        if first:
            self._watch.record_parameters()

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which sharded tables are whole on all ranks."""
        return whole_tables(self._context, self.programs)

    def replan(self) -> None:
        """Requests another plan, to be made with the next training batch."""
        if self.programs.pipeline is None:
            raise RuntimeError("replan(): there is no plan yet. Run a training call first.")
        if not self.programs.ask_to_replan(USER) and self.communicator.rank == 0:
            log(_STAYS, ONCE_IN)

    def check_replicas(self) -> None:
        """Raises if replicated parameters differ between ranks. Collective."""
        self.programs.apply_pending()
        compare_checksums(
            replicated_values(self.state, self._context.optimizer_hooks.known_optimizers.optimizers), self.communicator
        )

    def _checkpointed(self) -> tuple[nn.Module, ModelState, Sequence[Optimizer], Communicator]:
        """Returns the arguments that `checkpoint.save` and `checkpoint.load` share: model, tables, optimizers and
        communicator.
        """
        return self.model, self.state, self._context.optimizer_hooks.known_optimizers.optimizers, self.communicator

    def save_checkpoint(self, folder: Path) -> None:
        """Saves a checkpoint into a folder. Collective."""
        self.programs.apply_pending()
        checkpoint.save(*self._checkpointed(), folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Loads a checkpoint. If no training call has run yet, the first one loads it. Collective."""
        if self.programs.pipeline is None:
            self._to_load = folder
            return
        self.programs.apply_pending()
        checkpoint.load(*self._checkpointed(), folder)
        self.parameters_were_loaded()

    def close(self) -> None:
        """Applies pending updates, and ends the threads and process groups of this session."""
        self._eager.remove_hooks()
        self.programs.close()
        self.state.flush_tables()
        self.programs.cache.clear()
        self.communicator.close()
        self._placed.kept = None

    def release(self) -> None:
        """Makes tables whole and ends this session, because the model is compiled again. Collective."""
        self.programs.apply_pending()
        self.programs.leave_model()
        gather_buffers(self.model)
        self._outside.stop()
        for handle in self._placed.handles:
            handle.remove()
        self.close()


_STAYS = "the plan is kept, because plan= or table_memory= fixes it, or replan() changed it less than %d calls ago"


def _log_empty_groups(optimizer: Optimizer) -> None:
    """Logs which param groups of an optimizer are empty. A likely cause is code that selects parameters by names that
    begin with "module.", as under DDP.
    """
    if empty := [k for k, group in enumerate(optimizer.param_groups) if not group["params"]]:
        log(
            "param group(s) %s of %s have no parameters: if they select parameters by name, the names in a compiled "
            "model do not begin with 'module.'",
            ", ".join(map(str, empty)),
            type(optimizer).__name__,
        )
