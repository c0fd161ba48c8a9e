"""The model that `compile` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from embrace_fx.session import ddp_attributes
from embrace_fx.setup.options import Options
from embrace_fx.viz import DrawnSchedule, DrawnTimeline
from embrace_fx.viz.graphs import Graphs
from embrace_fx.vocabulary.names import StateDict, wrap_names
from embrace_fx.vocabulary.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from embrace_fx.session.session import Session


def _compile_copy(model: nn.Module, options: Options) -> CompiledModel:
    """Compiles a copied or unpickled model with the original's options, for the default process group and without the
    original's optimizer.
    """
    from embrace_fx.session.session import Session  # noqa: PLC0415  (torch's compiler takes seconds to import)

    return CompiledModel(Session(model, (), None, options), single=True)


class CompiledModel(nn.Module, Joinable):
    """A model that trains data-parallel, as returned by `compile`.

    It has the same parameters, buffers and submodules as the plain model, under the same names. Other attributes of the
    plain model can be read from it, too.
    """

    _session: Session
    _wraps_a_model = True
    _joins_on_hosts = False

    def __init__(self, session: Session, *, single: bool) -> None:
        super().__init__()
        Joinable.__init__(self)
        model = session.model
        self.__dict__["_session"] = session
        self.__dict__["_single"] = single
        # Share the dicts, so that a parameter replaced by its shard is replaced in both modules.
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        # Torch calls these hooks if the compiled model is part of another module.
        self._load_state_dict_pre_hooks = model._load_state_dict_pre_hooks
        self.__dict__["training"] = model.training

    def __getattr__(self, name: str) -> Any:
        try:
            found = super().__getattr__(name)
        except AttributeError:
            if "_session" not in self.__dict__:
                raise
            try:
                found = getattr(self._session.model, name)
            except AttributeError as error:
                found = ddp_attributes.read_attribute(self._session, name, error)
        if isinstance(found, nn.Module | nn.Parameter):
            self._session.programs.apply_pending()
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ddp_attributes.SET and "_session" in self.__dict__:
            ddp_attributes.assign_attribute(self._session, name, value)
        else:
            super().__setattr__(name, value)

    def _has_options(
        self, options: Options, optimizers: tuple[Optimizer, ...], group: dist.ProcessGroup | DeviceMesh | None
    ) -> bool:
        """Returns whether the model was compiled with these options, with this group (or any, if it is None), and with
        each of these optimizers.
        """
        session = self._session
        of_group = group is None or group is session.communicator.group or group is session.device_mesh
        of_optimizers = all(any(each is own for own in session.optimizers) for each in optimizers)
        return options == session.options and of_group and of_optimizers

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Reduces the model to the plain model and the options for `copy.deepcopy` and pickle. Copying or unpickling
        compiles the plain model for the default process group.

        As with DDP, this is collective, and the optimizer is not included.

        Raises:
            TypeError: tables are sharded.
        """
        session = self._session
        session.programs.apply_pending()
        if session.shards:
            name, sharded = type(session.model).__name__, ", ".join(session.shards)
            raise TypeError(
                f"A compiled {name} cannot be copied or pickled while {sharded} are sharded. On every rank, copy or "
                "pickle what `with model.whole() as plain:` yields, or save model.full_state_dict()."
            )
        return _compile_copy, (session.model, session.options)

    # -- running -------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward on one batch, with the plain model's signature.

        Collective: call it on every rank, in training and in evaluation. Before the first training call there is no
        plan, and an evaluation runs the plain model with rank 0's parameters.

        Raises:
            CaptureError: the forward cannot be captured.
            PeerFailure: some rank failed, for example because an id is outside of its table. Raised on every rank.
            DeadRank: some rank no longer runs.
        """
        if self._join_config.enable:
            work = Join.notify_join_context(self)
            self._session.shadow.gather_activities()
            if work is not None:
                work.wait()
        return self._session.call(args, kwargs)

    def lookahead(self, loader: Iterable[Any], batches: int = 1) -> Iterator[Any]:
        """Yields the batches of `loader` unchanged and in order, but reads them from the loader in advance.

        With schedule "vertical" or "2d", the table rows of the next batch are fetched during the current step. Call the
        model with each batch as it is yielded: rows of a batch that was moved or changed are not fetched in advance.

        Args:
            batches: the number of batches to read in advance. More than one helps only tables larger than memory.

        Raises:
            RuntimeError: another `lookahead` of this model is still in use.
        """
        return self._session.lookahead.read_ahead(loader, batches)

    def train(self, mode: bool = True) -> CompiledModel:
        """Sets the training mode of the model."""
        self._session.model.train(mode)
        self.training = mode
        return self

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Opens a context in which gradients accumulate without being reduced, as in DDP. The first backward outside of
        the context reduces the sum.

        Gradients of sharded tables are sent immediately to the ranks that store the shards, and accumulate there.
        """
        state = self._session.state
        before, state.synchronised = state.synchronised, False
        try:
            yield
        finally:
            state.synchronised = before

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Registers a hook that reduces gradients, as in DDP. Call it on every rank, before the first call.

        `allreduce_hook`, `fp16_compress_hook` and `bf16_compress_hook` of
        `torch.distributed.algorithms.ddp_comm_hooks.default_hooks` set the format of gradients, including those of
        table rows. The two compression hooks round to 16 bits, as `report()` shows. Any other hook, such as PowerSGD's,
        is called in the backward for each bucket, as `hook(state, bucket) -> Future[Tensor]`. All tables then stay
        whole.

        Raises:
            TypeError: the hook is not callable.
            ValueError: the strategy requests shards or sparse exchanges, which bypass the hook.
            RuntimeError: the model has been called, or already has a hook.
        """
        self._session.register_comm_hook(state, hook)

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Opens a context in which ranks may have different numbers of batches, as in DDP. Ranks that run out of
        batches take part in the steps of the other ranks.

        Args:
            divide_by_initial_world_size: whether to divide gradients by the number of all ranks, instead of the number
                of ranks that still have batches.
            enable: False makes the context do nothing.
            throw_on_early_termination: whether to raise an error on every rank once one has no more batches.
        """
        if self._session.communicator.group is None:
            yield
            return
        # Let `Join` count ranks on the host: on a device, its collectives would not be ordered with the model's.
        self.__dict__["_joins_on_hosts"] = True
        by_all = divide_by_initial_world_size
        try:
            with Join([self], enable, throw_on_early_termination, divide_by_initial_world_size=by_all):
                yield
        finally:
            self.__dict__["_joins_on_hosts"] = False

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook that `torch.distributed.algorithms.Join` calls on a rank without batches."""
        return self._session.shadow.begin(divides_by_all=kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device on which `torch.distributed.algorithms.Join` counts ranks."""
        if self._joins_on_hosts:
            return torch.device("cpu")
        return next(self._session.model.parameters()).device

    @property
    def join_process_group(self) -> Any:
        """The process group of the ranks that train together, for `torch.distributed.algorithms.Join`."""
        return self._session.communicator.join_group() if self._joins_on_hosts else self._session.communicator.group

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether forwards use rank 0's buffers, as in DDP."""
        return self._session.options.shares_buffers

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that train together, as in DDP, or None for a single process."""
        return self._session.communicator.group

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh that was passed to `compile`, as in DDP."""
        return self._session.device_mesh

    def check_replicas(self) -> None:
        """Checks that unsharded parameters, optimizer state and optimizer options are bitwise equal on all ranks.
        Collective.

        Raises:
            DivergedReplicas: they differ; the message names the values and ranks. Raised on every rank.
        """
        self._session.check_replicas()

    def replan(self) -> None:
        """Requests a new plan. It is made from all ranks' next training batches, and changes are logged. Collective.

        The request is ignored if the last one was less than 100 training calls ago, or if `plan` or `table_memory` of
        `compile` fixes the plan.

        Raises:
            RuntimeError: there is no plan yet, because no training call has run.
        """
        self._session.replan()

    def synchronize(self) -> None:
        """Applies the optimizer updates that the schedule has delayed, and waits for them. Reading a parameter does
        this implicitly.
        """
        self._session.programs.apply_pending()

    def close(self) -> None:
        """Applies all pending updates, and ends the model's threads and process groups. Call it on every rank.

        Parameters, optimizer state and `state_dict()` can still be used, but calling the model raises an error. A model
        is closed automatically when no reference to it is left. If only some ranks of the job train the model, its
        process groups stay until the job ends.
        """
        self._session.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model, like `nn.Module.zero_grad`."""
        self._session.model.zero_grad(set_to_none)  # calls the plain model's method, which reads no parameters
        self._session.state.unreduced.clear()  # gradients accumulated under `no_sync` are dropped too

    # These methods apply pending updates before they return parameters, and drop rows that were fetched in advance,
    # because the caller may write the parameters.

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Applies all pending updates, because the caller may change parameters, and returns an iterator over the
        parameters.
        """
        self._session.programs.apply_pending()
        return self._session.model.parameters(recurse)

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields (name, parameter), with the names of the plain model. The arguments are those of `nn.Module`."""
        self._session.programs.apply_pending()
        return wrap_names(super().named_parameters(prefix, *args, **kwargs), prefix)

    def named_buffers(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, buffer), with the names of the plain model. The arguments are those of `nn.Module`."""
        return wrap_names(super().named_buffers(prefix, *args, **kwargs), prefix)

    def named_modules(self, memo: Any = None, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yields (name, module), with the names of the plain model. The arguments are those of `nn.Module`."""
        self._session.programs.apply_pending()
        return wrap_names(super().named_modules(memo, prefix, *args, **kwargs), prefix)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the model's child modules by name."""
        self._session.programs.apply_pending()
        return super().named_children()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the gradients of all parameters like `torch.nn.utils.clip_grad_norm_`, without waiting for pending
        updates.

        Collective. Returns the total norm before clipping, the same on all ranks.
        """
        return nn.utils.clip_grad_norm_(self._session.model.parameters(), max_norm, norm_type)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The plain model, like `DDP.module`, with all pending updates applied."""
        self._session.programs.apply_pending()
        return self._session.model

    @property
    def optimizer(self) -> Any:
        """The optimizer that was passed to `compile`, a tuple if several were passed, or None."""
        optimizers = self._session.optimizers
        if self.__dict__["_single"]:
            return optimizers[0] if optimizers else None
        return optimizers

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a state dict with the plain model's names, and this rank's shard of each sharded table.

        `torch.distributed.checkpoint` can save the shards, and load them on a different number of ranks. `torch.save`
        refuses them: use `full_state_dict`. A table sharded by rows and columns (`Grid`) is returned as a copy, sharded
        by columns. In this case, the call is collective.
        """
        self._session.programs.apply_pending()
        found = self._session.model.state_dict(*args, **kwargs)
        return found if args or kwargs else StateDict.wrap(found)

    def full_state_dict(self) -> dict[str, Any]:
        """Returns `state_dict()` with every table whole, as a plain tensor, on every rank.

        Collective: call it on every rank, then `torch.save` it on one.
        """
        from embrace_fx.runtime.tables.state_dicts import gather_state_dict  # noqa: PLC0415  (DTensor takes a while to import)

        found: dict[str, Any] = gather_state_dict(self.state_dict())
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict of whole tensors or shards, before or after the first call. Each rank loads only its own
        shard of a sharded table. Returns the missing and unexpected names, like `nn.Module.load_state_dict`.

        Names may begin with "module.", as in a state dict of DistributedDataParallel. The call is collective if the
        state dict contains shards of a table that is whole in this model, or that is sharded by rows and columns
        (`Grid`).
        """
        model = self._session.model
        named_by_ddp = state_dict and all(name.startswith("module.") for name in state_dict)
        if named_by_ddp and "module" not in model._modules:
            state_dict = {name.removeprefix("module."): value for name, value in state_dict.items()}
        return model.load_state_dict(state_dict, strict, assign)

    def save_checkpoint(self, folder: str | Path) -> None:
        """Saves model and optimizers in a folder that all ranks share. Tables larger than memory are written row by
        row. Collective.

        The previous checkpoint stays valid until the new one is complete. This method does not require `table_memory`.
        """
        self._session.save_checkpoint(Path(folder))

    def load_checkpoint(self, folder: str | Path) -> None:
        """Loads a checkpoint that `save_checkpoint` has written, on any number of ranks. Collective.

        If the model has no plan yet, the checkpoint is loaded during the first training call. An evaluation before that
        call raises an error.
        """
        self._session.load_checkpoint(Path(folder))

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Opens a context in which every table is whole on every rank, so that any submodule can be called. Yields the
        plain model. Collective, like FSDP's `summon_full_params`.

        Parameters changed inside keep their new values. The next training step is compiled again, so do not open the
        context around every step.

        Raises:
            RuntimeError: the backward of an earlier call has not run yet, or the tables do not fit into memory. Raised
                on every rank.
        """
        with self._session.whole():
            yield self._session.model

    # -- views --------------------------------------------------------------------------------------------------------

    @property
    def graphs(self) -> Graphs:
        """The model's graph after each compiler pass, by the pass's name. The first is "captured"; the last are the
        graphs that a step runs: "ids", "forward" and "backward".

        `graphs.diff(first, second)` compares two graphs as text. `graphs.save("graphs.svg")` draws the graphs that a
        step runs.
        """
        return self._session.views.graphs

    @property
    def plan(self) -> Plan:
        """The plan: the strategy of every parameter. Available from the first call on."""
        return self._session.views.plan

    @property
    def schedule(self) -> DrawnSchedule:
        """The order in which a step launches its operations, and their predicted timeline. Available after the first
        step. `.save(path)` draws it to a file.

        The first prediction uses the cost model. From the twelfth step on, predictions use measured compute times. On a
        single process the schedule contains only compute.
        """
        views = self._session.views
        return DrawnSchedule.from_schedule(views.schedule, views.background)

    @property
    def timeline(self) -> DrawnTimeline:
        """The operations of all ranks, as measured in the last `record()` context. `.save(path)` draws them next to the
        prediction.
        """
        views = self._session.views
        return DrawnTimeline.from_timeline(views.timeline, views.schedule, views.background)

    def record(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that measures the training steps run inside it, for `timeline`. Collective."""
        return self._session.views.record()

    def report(self) -> str:
        """Returns a text that describes the plan with a reason for each table, how the time of the last steps was
        spent, and this rank's memory.
        """
        return self._session.views.report()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last complete step by name, for a logger. Times are available from the second
        backward on.

        A step lasts from the start of a backward to the start of the next, on this rank's host. `step_ms` is the sum of
        `loader_ms`, `forward_ms`, `backward_ms`, `optimizer_ms`, `your_code_ms`, `between_ms` and the waits:
        `wait_ids_ms`, `wait_embedding_ms`, `wait_dense_ms`, `wait_delayed_ms`, `wait_offload_ms`, `wait_reload_ms`,
        `wait_storage_ms`. `sent_bytes` is the number of bytes that this rank sent. `sent_bytes_predicted` and
        `sent_bytes_ddp` are the predicted numbers for embrace_fx and DDP.
        """
        return self._session.views.metrics()
