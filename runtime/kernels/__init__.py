"""Kernels for the package's ops, written with torch ops for any device. On CUDA they call the Triton kernels of `gpu`
where possible.

Worked examples: `embrace_fx/vocabulary/ops.py`, `again_ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from embrace_fx.runtime.kernels import gpu
from embrace_fx.runtime.kernels.grid import join_grid, route_grid, split_grid
from embrace_fx.runtime.kernels.head import KERNELS as OF_HEADS
from embrace_fx.runtime.kernels.membership import isin
from embrace_fx.vocabulary import again_ops  # noqa: F401  (declares the ops)
from embrace_fx.vocabulary.joined_table import OUTSIDE
from embrace_fx.vocabulary.ops import own_columns


def sorted_unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (sorted unique ids, position of each id among them), like `torch.unique` but with fewer Python calls."""
    unique, inverse, _ = torch._unique2(ids, True, True)
    return unique, inverse


def join_ids(
    ids: Sequence[Tensor], tables: Sequence[int], first_rows: Sequence[int], num_rows: Sequence[int], joined: int
) -> list[Tensor]:
    """Implements the op `join_ids`: converts ids of several tables to row numbers of the joined table, which has the
    rows of all of them. Ids outside of their own table stay invalid.

    Args:
        tables, first_rows, num_rows: for each of `ids`, the index of its table in the joined table, the table's first
            row there, and its number of rows.
        joined: how many leading tensors of `ids` are concatenated to one result; the others keep their shapes.
    """
    flat = torch.cat([i.reshape(-1) for i in ids])
    sizes = [i.numel() for i in ids]
    first, last, shift, outside = _bounds_and_shifts(
        tuple(tables), tuple(first_rows), tuple(num_rows), _sizes_if_unequal(sizes), flat.device
    )
    if first.dim() == 2:
        flat = flat.view(len(sizes), sizes[0])
    # clamp() compares each id with both bounds in one kernel.
    rows = (flat + torch.where(flat.clamp(first, last) == flat, shift, outside)).view(-1)
    if joined == len(ids):
        return [rows]
    parts = torch.split_with_sizes(rows, [sum(sizes[:joined]), *sizes[joined:]])
    apart = [part.view(i.shape) for part, i in zip(parts[1:], ids[joined:], strict=True)]
    return [parts[0], *apart] if joined else apart


def _sizes_if_unequal(sizes: list[int]) -> tuple[int, ...]:
    """Returns `sizes`, or () if all of them are equal."""
    return () if sizes.count(sizes[0]) == len(sizes) else tuple(sizes)


@lru_cache(maxsize=16)
def _bounds_and_shifts(
    tables: tuple[int, ...],
    first_rows: tuple[int, ...],
    num_rows: tuple[int, ...],
    sizes: tuple[int, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four tensors that have one element for each id: the first and the last valid id of the id's table, the
    number to add to a valid id, and the number to add to an invalid id.

    The shape is (N,) for N ids. If `sizes` is (), it is (T, 1) for T tables, which broadcasts over the ids of a table.

    Args:
        tables, first_rows, num_rows: as for `join_ids`.
        sizes: the number of ids of each table, or () if all tables have equally many ids.
    """
    last = [rows - 1 for rows in num_rows]
    outside = [-(table + 1) * OUTSIDE for table in tables]
    known = torch.tensor([[0] * len(last), last, first_rows, outside], dtype=torch.int64, device="cpu")
    if sizes:
        known = known.repeat_interleave(torch.tensor(sizes, device="cpu"), 1)
        return tuple(known.to(device).unbind(0))  # type: ignore[return-value]
    return tuple(known.unsqueeze(2).to(device).unbind(0))  # type: ignore[return-value]


def unique_ids(ids: Sequence[Tensor], num_rows: int, padding_idx: int) -> list[Tensor]:
    """Implements the op `unique_ids`. Returns [the unique ids, then for each of `ids` the positions of its ids among
    the unique ids]. The padding row is the first unique id; the others are sorted.

    Args:
        num_rows: the number of rows of the table; not needed here.
        padding_idx: the padding row, or a negative number.
    """
    flat = ids[0].reshape(-1) if len(ids) == 1 else torch.cat([i.reshape(-1) for i in ids])
    flat = flat.to(torch.int64)
    if padding_idx >= 0:
        # Put the padding row first: replace padding ids with a number below all others, and add that number once. The
        # sort of `unique` then puts it first.
        flat = torch.where(flat == padding_idx, _BELOW_ALL, flat)
        flat = torch.cat([flat, flat.new_full((1,), _BELOW_ALL)])
    unique, inverse = sorted_unique(flat)
    if padding_idx >= 0:
        unique[0] = padding_idx
    if len(ids) == 1 and padding_idx < 0:
        return [unique, inverse.view(ids[0].shape)]
    parts = torch.split_with_sizes(inverse[: inverse.numel() - (padding_idx >= 0)], [i.numel() for i in ids])
    return [unique, *(part.view(i.shape) for part, i in zip(parts, ids, strict=True))]


_BELOW_ALL = torch.iinfo(torch.int64).min


def padded_unique_ids(ids: Sequence[Tensor], num_rows: int, padding_idx: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Finds the unique ids of several tensors. The shapes of the results depend only on the shapes of `ids`, so that
    the host need not wait for a device.

    Args:
        ids: ids of one table.
        num_rows: the number of rows of the table.
        padding_idx: the padding row, which comes first, or a negative number.

    Returns:
        (The rows (C,) that this rank reads, padded with zeros; the number of these rows as a 0-d int64 tensor, or -1 if
            an id is outside the table; for each of `ids`, the positions of its ids among the rows).
    """
    flat = ids[0].reshape(-1) if len(ids) == 1 else torch.cat([i.reshape(-1) for i in ids])
    flat, given = flat.to(torch.int64), flat.numel()
    bad = flat.clamp(0, num_rows - 1).ne(flat).any()
    if padding_idx >= 0:
        # As in `unique_ids`, put the padding row first, even if the batch does not contain it.
        flat = torch.where(flat == padding_idx, _BELOW_ALL, flat)
        flat = torch.cat([flat, flat.new_full((1,), _BELOW_ALL)])
    ordered, order = flat.sort(stable=True)
    begins = torch.zeros_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=begins[1:])
    places = begins.cumsum(0)
    where = torch.empty_like(order).scatter_(0, order, places)[:given]
    unique = torch.zeros_like(ordered).scatter_(0, places, ordered)
    if padding_idx >= 0:
        unique[:1].fill_(padding_idx)  # assigning by index would copy a number to the device and wait
    count = torch.where(bad, -1, places[-1] + 1 if places.numel() else places.sum())
    parts = where.split([i.numel() for i in ids])
    return unique.clamp_(0, num_rows - 1), count, [part.view(i.shape) for part, i in zip(parts, ids, strict=True)]


def find_bad_ids(ids: Sequence[Tensor], num_rows: Sequence[int]) -> list[int | None]:
    """Returns, for each tensor of ids, one id that is outside of its table, or None if all of its ids are valid.

    Reads the device only once for all tensors, because each read waits for all enqueued work.

    Args:
        ids: ids of each table.
        num_rows: the number of rows of each table.
    """
    ends = [torch.stack(torch.aminmax(each)).to(torch.int64) for each in ids if each.numel()]
    known = iter(torch.stack(ends).tolist() if ends else ())
    found: list[int | None] = []
    for each, rows in zip(ids, num_rows, strict=True):
        low, high = next(known) if each.numel() else (0, -1)
        found.append(low if low < 0 else high if high >= rows else None)
    return found


def lookup(shard: Tensor, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the rows `ids` (R,) of a shard, cast to `dtype` if given."""
    rows = shard.index_select(0, ids)
    return rows if dtype is None else rows.to(dtype)


def join_columns(flat: Tensor, embedding_dim: int, group_size: int) -> Tensor:
    """Implements the op `join_columns`: assembles whole rows (U, D) from the columns received from each rank.

    Args:
        flat: (U * D,), the received columns, in one block per rank.
        embedding_dim: the number of columns of the table (D).
        group_size: the number of ranks.
    """
    rows = flat.numel() // max(embedding_dim, 1)
    if group_size == 1:
        return flat.view(rows, embedding_dim)
    if flat.is_cuda and gpu.supports(flat):
        return gpu.unpack_columns(flat, flat.new_empty((rows, embedding_dim)), group_size)
    widths = column_widths(embedding_dim, group_size)
    blocks = torch.split_with_sizes(flat, [rows * width for width in widths])
    return torch.cat([block.view(rows, width) for block, width in zip(blocks, widths, strict=True)], dim=1)


def join_columns_into(out: Tensor, positions: Tensor, flat: Tensor, group_size: int) -> None:
    """Assembles whole rows from the columns received from each rank, and writes the rows to `out`.

    Args:
        out: (U', D), written at the rows `positions`.
        positions: (U,), the row of `out` for each received row.
        flat: (U * D,), the received columns, in one block per rank.
        group_size: the number of ranks.
    """
    if flat.is_cuda and gpu.supports(flat) and gpu.supports(out):
        gpu.unpack_columns(flat, out, group_size, positions)
    else:
        out.index_copy_(0, positions, join_columns(flat, out.shape[1], group_size))


def split_columns(rows: Tensor, group_size: int) -> Tensor:
    """Implements the op `split_columns`: splits rows (U, D) into one block of columns for each of `group_size` ranks.
    Returns the blocks in one flat tensor, in rank order.
    """
    if group_size == 1:
        return rows.reshape(-1)
    if rows.is_cuda and gpu.supports(rows):
        return gpu.pack_columns(rows, group_size)
    flat = rows.new_empty((rows.numel(),))
    widths = column_widths(rows.shape[1], group_size)
    blocks = torch.split_with_sizes(flat, [rows.shape[0] * width for width in widths])
    for block, part in zip(blocks, torch.split_with_sizes(rows, widths, 1), strict=True):
        block.view(part.shape).copy_(part)
    return flat


def split_selected_columns(rows: Tensor, selected: Tensor, group_size: int) -> Tensor:
    """Splits some of the rows (U', D) into one block of columns for each of `group_size` ranks. Returns the blocks in
    one flat tensor, in rank order.

    Args:
        selected: the rows to split, as a mask (U',) or as positions (U,) int64.
    """
    if rows.is_cuda and gpu.supports(rows):
        positions = selected.nonzero().view(-1) if selected.dtype == torch.bool else selected
        return gpu.pack_columns(rows, group_size, positions)
    return split_columns(rows[selected], group_size)


@cache
def column_widths(embedding_dim: int, group_size: int) -> tuple[int, ...]:
    """Returns the number of columns that each of `group_size` ranks owns of a table with `embedding_dim` columns."""
    bounds = (own_columns(embedding_dim, group_size, rank) for rank in range(group_size))
    return tuple([last - first for first, last in bounds])


def coalesce(ids: Tensor, flat: Tensor, columns: int, padding_rows: Sequence[int], scale: float) -> list[Tensor]:
    """Implements the op `coalesce`: sums rows with equal ids. Returns [the ids (K,), the sums (K, d) times `scale`].

    Args:
        ids: the id of each row, (R,).
        flat: the rows, (R * d,).
        columns: the number of elements of a row (d).
        padding_rows: ids to leave out.
    """
    return sum_rows(flat, plan_sums(ids, flat, padding_rows), columns, scale)


def plan_sums(ids: Tensor, flat: Tensor, padding_rows: Sequence[int]) -> tuple[Tensor, ...]:
    """Finds which rows have equal ids, for the op `coalesce`. Returns tensors for `sum_rows`. On a device, the host
    waits for the number of different ids.

    Args:
        ids: the id of each row, (R,).
        flat: the rows, (R * d,).
        padding_rows: ids to leave out.
    """
    if flat.is_cuda and gpu.supports(flat):
        return gpu.find_segments(ids, padding_rows)
    unique, inverse = sorted_unique(ids)
    return (unique, inverse, ~isin(unique, tuple(padding_rows))) if padding_rows else (unique, inverse)


def sum_rows(flat: Tensor, sums: tuple[Tensor, ...], columns: int, scale: float) -> list[Tensor]:
    """Sums the rows with equal ids for the op `coalesce`. Returns [the ids (K,), the sums (K, d) times `scale`].

    Args:
        flat: the rows, (R * d,).
        sums: which rows have equal ids, from `plan_sums`.
        columns: the number of elements of a row (d).
    """
    if flat.is_cuda and gpu.supports(flat):
        unique, order, starts, ends = sums
        return gpu.sum_segments(flat, (unique, order, starts, ends), columns, scale)
    unique, inverse, *kept = sums
    rows = flat.view(inverse.numel(), columns)
    summed = rows.new_zeros((unique.numel(), columns)).index_add_(0, inverse, rows, alpha=scale)
    return [unique[kept[0]], summed[kept[0]]] if kept else [unique, summed]


def sum_known_ids(flat: Tensor, sums: tuple[Tensor, Tensor], columns: int, scale: float) -> list[Tensor]:
    """Implements the op `coalesce` if the different ids are already known, so that the host need not wait for a device.
    Returns [the ids (K,), the sums (K, d) times `scale`].

    Args:
        flat: the rows, (R * d,).
        sums: (K,) the different ids, and (R,) the index among them of each row's id, or K for a row to leave out.
        columns: the number of elements of a row (d).
    """
    if flat.is_cuda and gpu.supports(flat):
        return gpu.sum_segments(flat, gpu.known_segments(*sums), columns, scale)
    unique, number = sums
    rows = flat.view(number.numel(), columns)
    summed = rows.new_zeros((len(unique) + 1, columns)).index_add_(0, number, rows, alpha=scale)
    return [unique, summed[:-1]]


def sparse_gradient(gradient: Tensor, ids: Sequence[Tensor], paddings: Sequence[int]) -> Tensor:
    """Implements the op `sparse_gradient`: returns the rows of a dense gradient that lookups have read, as a coalesced
    COO tensor.

    Args:
        gradient: the dense gradient (V, D).
        ids: the ids of each lookup.
        paddings: the padding row of each lookup, which is left out, or -1.
    """
    none = torch.empty(0, dtype=torch.int64, device=gradient.device)
    read = (each[each != padding].to(torch.int64) for each, padding in zip(ids, paddings, strict=True))
    rows = torch.cat([none, *read]).unique()
    values = gradient.index_select(0, rows)
    return torch.sparse_coo_tensor(rows[None], values, gradient.shape, is_coalesced=True, check_invariants=False)


def pack_bucket(gradients: Sequence[Tensor], scale: float) -> Tensor:
    """Implements the op `pack_bucket`: multiplies gradients by `scale`, and concatenates them to one flat tensor."""
    flat = torch.cat([g.reshape(-1) for g in gradients])
    return flat.mul_(scale) if scale != 1.0 else flat


def unpack_bucket(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Implements the op `unpack_bucket`: returns views of a flat tensor with the shapes of `like`."""
    if flat.is_sparse:  # the gradient of a table that has a bucket of its own
        return [flat]
    parts, begin = list[Tensor](), flat.storage_offset()
    # Autograd must not see views, because loops call `detach_()` on gradients, which refuses views.
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        for each in like:  # as_strided() is one op per gradient, where split and view would be two
            shape = each.shape
            parts.append(flat.as_strided(shape, _contiguous_strides(shape), begin))
            begin += each.numel()
    return parts


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


@cache
def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


def unpack_ids(packed: Tensor, tables: int, group_size: int) -> list[Tensor]:
    """Implements the op `unpack_ids`. Returns, for each table, the ids that all ranks read and the number of ids that
    each rank reads.

    Args:
        packed: (N, T + M), with one row per rank: the T counts of the rank, then its ids table after table, then
            padding.
        tables: the number of tables (T).
        group_size: the number of ranks (N).
    """
    host = packed[:, :tables].to("cpu", torch.int64)
    counts: list[list[int]] = host.tolist()
    out: list[Tensor] = []
    starts = [tables] * group_size
    for table in range(tables):
        pieces = [packed[r, starts[r] : starts[r] + counts[r][table]] for r in range(group_size)]
        starts = [starts[r] + counts[r][table] for r in range(group_size)]
        out += [torch.cat(pieces).to(torch.int64), host[:, table].contiguous()]
    return out


def random_state(device: torch.device) -> Tensor:
    """Implements the op `random_state`: returns the state of a device's random number generator."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def begin_replay(state: Tensor, device: torch.device) -> Tensor:
    """Implements the op `begin_replay`: sets a device's random state to `state`, and returns the previous one."""
    now = random_state(device)
    end_replay(state, device)
    return now


def end_replay(state: Tensor, device: torch.device) -> None:
    """Implements the op `end_replay`: restores a device's random state after a replay of random draws."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


LOCAL: dict[str, Callable[..., object]] = {
    "embrace::join_ids": join_ids,
    "embrace::unique_ids": unique_ids,
    "embrace::lookup": lookup,
    "embrace::join_columns": join_columns,
    "embrace::split_columns": split_columns,
    "embrace::route_grid": route_grid,
    "embrace::join_grid": join_grid,
    "embrace::split_grid": split_grid,
    "embrace::coalesce": coalesce,
    "embrace::sparse_gradient": sparse_gradient,
    "embrace::pack_bucket": pack_bucket,
    "embrace::unpack_bucket": unpack_bucket,
    "embrace::unpack_ids": unpack_ids,
    "embrace::random_state": random_state,
    "embrace::begin_replay": begin_replay,
    "embrace::end_replay": end_replay,
    "embrace::copy_unwritten": torch.clone,
    **OF_HEADS,
}
"""Op name -> kernel, which a lowered graph calls without the dispatcher."""

for _name, _kernel in LOCAL.items():
    torch.library.impl(_name, "default")(_kernel)
