"""Turns parameters into shards and back, and initializes parameters on the meta device."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.shard_layout import Layout, make_mesh, own_slices, scatter_table
from embrace_fx.runtime.tables.state_dicts import gather_state
from embrace_fx.runtime.tables.table import Member
from embrace_fx.runtime.tables.table_shard import TableShard, become_shard, become_whole
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.random_state import restored_random_state

_BLOCK_ELEMENTS = 1 << 20
"""Elements of a table initialized at once, about the most that a rank has of whole rows."""


def set_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replaces a parameter by another one in every module that has it."""
    for module in model.modules():
        for key, value in module._parameters.items():
            if value is old:
                module._parameters[key] = new


@contextlib.contextmanager
def whole_parameters(model: nn.Module, sharded: Mapping[str, torch.Size]) -> Iterator[None]:
    """Opens a context in which shards and meta parameters are replaced by whole fake tensors, to capture the model's
    graph: a capture reads no values, and a whole table may exceed the memory.

    Args:
        sharded: name of each sharded table -> the shape of the whole table.
    """
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.get_default_device())
    replaced: list[tuple[nn.Parameter, nn.Parameter]] = []
    names = dict(model.named_parameters())
    for name, parameter in names.items():
        if name in sharded or parameter.is_meta:
            with FakeTensorMode():
                whole = torch.empty(sharded.get(name, parameter.shape), dtype=parameter.dtype, device=device)
            stand_in = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            replaced.append((parameter, stand_in))
            set_parameter(model, parameter, stand_in)
    try:
        yield
    finally:
        for parameter, stand_in in replaced:
            set_parameter(model, stand_in, parameter)


def shard_parameter(
    name: str,
    parameter: nn.Parameter,
    shape: torch.Size,
    communicator: Communicator,
    grid: Grid | None = None,
    mesh: DeviceMesh | None = None,
) -> Layout:
    """Turns a parameter into this rank's shard of rank 0's values, in place. A single process keeps the whole table.
    Returns the table's layout. Collective.

    Args:
        shape: the shape (V, D) of the whole table.
        grid: how to shard the table by rows and columns, or None to shard it by columns.
        mesh: the table's device mesh, if the parameter already is this rank's shard.
    """
    local = parameter.detach()
    if mesh is None and (mesh := make_mesh(communicator, parameter.device.type, grid)) is not None:
        communicator.connect(parameter.device)
        group = communicator.process_group("dense")
        assert group is not None
        local = scatter_table(local, group, grid)
    layout = Layout.of_table(name, shape, mesh, weakref.ref(communicator))
    if mesh is not None:
        become_shard(parameter, local, layout)
    return layout


def unshard_parameter(table: Member, optimizers: Sequence[Optimizer]) -> None:
    """Makes a sharded table whole on every rank, with its gradient and optimizer state. Collective."""
    parameter, gradient = table.parameter, table.whole_gradient()
    parameter.grad = None
    for optimizer in optimizers:
        if parameter in optimizer.state:
            optimizer.state[parameter] = gather_state(parameter, optimizer.state[parameter])
    if isinstance(parameter, TableShard):
        become_whole(parameter, table.layout.whole(table.local), table.name)
    parameter.grad = gradient


def broadcast_state(
    model: nn.Module, except_for: Collection[str], communicator: Communicator, *, buffers: bool = True, source: int = 0
) -> None:
    """Broadcasts the parameters, and with `buffers` the buffers, of rank `source` to all ranks, except those whose
    names are in `except_for`. Collective.
    """
    named = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    communicator.broadcast([tensor.detach() for name, tensor in named if name not in except_for], source)


def initialize_meta(
    model: nn.Module,
    sharded: Mapping[str, Grid | None],
    optimizers: Sequence[Optimizer],
    communicator: Communicator,
    leave: Sequence[nn.Parameter] = (),
) -> dict[str, DeviceMesh]:
    """Initializes parameters and buffers on the meta device by calling their modules' `reset_parameters`. Collective.

    Every rank initializes a sharded table block by block and keeps its own shard of each block of rows, so that no rank
    ever stores the whole table. The values do not depend on the number of ranks, because all ranks seed the generator
    equally.

    Args:
        sharded: maps the name of each table to shard to its grid, or to None to shard it by columns.
        optimizers: the optimizers, whose state on the meta device is allocated too.
        leave: parameters to leave on the meta device.

    Returns the device mesh of each table that was sharded, by name. Raises `ValueError` if a module has meta parameters
    and no `reset_parameters`.
    """
    made: dict[str, DeviceMesh] = {}
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return made
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    device_type = torch.get_default_device().type
    seed = torch.tensor([torch.initial_seed() % 2**63], device="cpu")
    communicator.broadcast([seed])
    with restored_random_state(torch.get_default_device()):
        torch.manual_seed(int(seed))
        for path, module in model.named_modules():
            own = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}
            own = {key: p for key, p in own.items() if all(p is not each for each in leave)}
            meta_buffers = any(b is not None and b.is_meta for b in module._buffers.values())
            if not own and not meta_buffers:
                continue
            reset = getattr(module, "reset_parameters", None)
            if reset is None:
                raise ValueError(
                    f"compile(): {path or type(model).__name__} is on the meta device, but has no reset_parameters() "
                    "to initialize its values. Define this method, or build the model on a real device."
                )
            name = names.get(id(next(iter(own.values()), None)), "")
            mesh = make_mesh(communicator, device_type, sharded[name]) if len(own) == 1 and name in sharded else None
            if mesh is not None:
                _initialize_shard(module, next(iter(own)), optimizers, mesh)
                made[name] = mesh
            else:
                _initialize_module(module, own, optimizers)
    return made


def _initialize_module(module: nn.Module, own: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Allocates a module's meta parameters `own` and its buffers, and initializes them by its `reset_parameters`."""
    for parameter in own.values():
        _set_values(optimizers, parameter, torch.empty_like(parameter, device=torch.get_default_device()))
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=torch.get_default_device())
    module.reset_parameters()  # type: ignore[operator]


def _initialize_shard(module: nn.Module, key: str, optimizers: Sequence[Optimizer], mesh: DeviceMesh) -> None:
    """Initializes this rank's shard of the table `key` of a module. Calls the module's `reset_parameters` for one block
    of rows at a time, and copies this rank's elements of the block into the shard.
    """
    whole = module._parameters[key]
    assert whole is not None
    rows, columns = whole.shape
    own_rows, own_columns = own_slices(whole.shape, mesh)
    every = own_rows.step
    own_shape = len(range(rows)[own_rows]), len(range(columns)[own_columns])
    local = torch.empty(own_shape, dtype=whole.dtype, device=torch.get_default_device())
    padding = getattr(module, "padding_idx", None)
    if padding is not None:
        module.padding_idx = None  # type: ignore[assignment]  # the table's shape, not the block's
    blocks = _row_blocks(rows, columns)
    buffer = torch.empty((max(b - a for a, b in blocks), columns), dtype=whole.dtype, device=local.device)
    for start, stop in blocks:
        block = buffer[: stop - start]
        module._parameters[key] = nn.Parameter(block)
        module.reset_parameters()  # type: ignore[operator]
        skipped = (own_rows.start - start) % every
        kept = block[skipped::every, own_columns]
        local[(start + skipped) // every :][: len(kept)] = kept
    if padding is not None:
        module.padding_idx = padding
        if padding % every == own_rows.start:
            local[padding // every] = 0
    module._parameters[key] = whole
    _set_values(optimizers, whole, local)


def _set_values(optimizers: Sequence[Optimizer], parameter: nn.Parameter, values: Tensor) -> None:
    """Replaces a meta parameter by real values in place. Also allocates state that optimizers have already created for
    it on the meta device; raises `ValueError` for an optimizer other than Adagrad.
    """
    torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for key in [k for k, value in state.items() if isinstance(value, Tensor) and value.is_meta]:
            if "initial_accumulator_value" not in optimizer.defaults:
                raise ValueError(
                    f"compile(): {type(optimizer).__name__} already has state {key!r} for a parameter on the meta "
                    "device, where the state has no values. Create a new optimizer, and load its state after the first "
                    "call of the model."
                )
            if state[key].dim():
                fill = optimizer.defaults["initial_accumulator_value"]
                state[key] = torch.full_like(parameter, fill, requires_grad=False)
            else:
                state[key] = torch.zeros(state[key].shape, device="cpu")  # optimizers keep step counters on the CPU


def _row_blocks(rows: int, columns: int) -> list[tuple[int, int]]:
    """Divides a table into blocks (first row, last row + 1), such that drawing random numbers block by block gives the
    same values as for the whole table.

    Torch's CPU generators draw 16 numbers at a time, so each block has a multiple of 16 elements, and the last one at
    least 16.
    """
    size = max(16, _BLOCK_ELEMENTS // max(columns, 1) // 16 * 16)
    starts = range(0, max(rows - 15, 1), size)
    return list(zip(starts, (*starts[1:], rows), strict=True))
