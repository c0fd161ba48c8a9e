"""A single process on a device: the host never waits for the number of a batch's rows before the backward ends.

Contract
    For a training step of a single process, whose ids go nowhere. The batch's unique rows are found in tensors as long
    as the batch has ids, behind the rows zeros, which nothing reads: the forward computes with them as they are. Where
    the gradients of the rows go to the optimizer, their number is needed, and has been copied to the host long before.
    An id outside the table reads some other row; its number of rows is -1, and the backward raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from embrace_fx.runtime.kernels import padded_unique_ids
from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.runtime.tables.table import Member
from embrace_fx.vocabulary.graph import Saved, TrainingGraph, inputs_of
from embrace_fx.vocabulary.ops import op_name

_READER_OPS = ("all_gather_ids", "lookup", "coalesce", "all_to_all_rows", "all_to_all_gradients")
_READERS = frozenset(f"embrace::{op}" for op in _READER_OPS)
"""What may read unique rows, or their counts, as long as the batch has ids."""


class SingleProcessRows:
    """Finds the unique rows of batches on a device, in a single process, without waiting until their number is known.

    Args:
        tables: name of a table -> the table, in which the ids of its gradient are recorded.
    """

    def __init__(self, streams: Streams, tables: Mapping[str, Member]) -> None:
        self._streams, self._tables = streams, tables
        # Unique rows -> their number on the device; once it is being copied to the host, (function that reads the
        # numbers of all tables, index of this table, its name, its number of rows).
        self._counts: Any = WeakTensorKeyDictionary()

    def kernel(self, node: fx.Node) -> Callable[..., Any] | None:
        """Returns the function that replaces the kernel of a graph node's op, or None to run the kernel."""
        match op_name(node):
            case "embrace::unique_ids":
                return self.unique_ids
            case "embrace::all_gather_ids":
                tables: tuple[str, ...] = node.meta["tables"]

                def all_gather_ids(unique: Sequence[Tensor], num_rows: Sequence[int], *_: object) -> list[Tensor]:
                    """Returns the unique ids of the only process. Starts copying their number to the host."""
                    copy = self._streams.to_host(torch.stack([self._counts[rows] for rows in unique]))
                    read = cache(partial(self._streams.read, self._streams.record("rows counted"), copy))
                    for k, (rows, *of_table) in enumerate(zip(unique, tables, num_rows, strict=True)):
                        self._counts[rows] = (read, k, *of_table)
                    return list(unique)

                return all_gather_ids
            case "_c10d_functional::wait_tensor" if op_name(node.all_input_nodes[0]) == "embrace::all_gather_ids":
                return lambda unique: unique
            case "embrace::unpack_ids":
                return lambda unique, *_: [
                    t for rows in unique for t in (rows, torch.tensor([rows.numel()], device="cpu"))
                ]
            case "embrace::coalesce":
                return self.coalesce
        return None

    def unique_ids(self, ids: Sequence[Tensor], num_rows: int, padding_idx: int) -> list[Tensor]:
        """Runs the op `unique_ids`, with padding, so that the host knows the size of the unique ids without waiting."""
        rows, count, where = padded_unique_ids(ids, num_rows, padding_idx)
        self._counts[rows] = count
        return [rows, *where]

    def coalesce(
        self, ids: Tensor, flat: Tensor, columns: int, padding_rows: Sequence[int], scale: float
    ) -> list[Tensor]:
        """Runs the op `coalesce` for padded unique ids: removes the padding, and the padding row, which comes first.

        Raises:
            PeerFailure: the batch has an id outside of the table.
        """
        read_counts, k, table, num_rows = self._counts[ids]  # not removed, because another backward may follow
        if (count := read_counts()[k]) < 0:
            outside = f"a lookup in {table} got an id outside of the table: ids go from 0 to {num_rows - 1}"
            raise PeerFailure({0: f"{outside}. Check the batch, or give the table more rows"})
        first = len(padding_rows)
        read, rows = ids[first:count], flat.view(ids.numel(), columns)[first:count]
        if (found := self._tables.get(table)) is not None:
            found.record(read, ids)
        return [read, rows if scale == 1.0 else rows * scale]


def runs_without_counts(graph: TrainingGraph) -> bool:
    """Returns whether a graph can run before the host knows how many unique rows the batch has."""
    phases = graph.phases
    if "backward" not in phases or not any(op_name(n) == "embrace::unpack_ids" for n in phases["ids"].graph.nodes):
        return False
    names = {n.name for p in ("unique", "ids") for n in phases[p].graph.nodes if _is_rows(n)}
    readers = [
        user
        for module in phases.values()
        for node, role in inputs_of(module)
        if isinstance(role, Saved) and role.name in names
        for user in node.users
    ]
    return all(op_name(user) in _READERS for user in readers)


def _is_rows(node: fx.Node) -> bool:
    """Returns whether a node's value is a table's unique rows, or a result of the op `unpack_ids`."""
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    return op_name(source) == "embrace::unpack_ids" or (
        op_name(source) == "embrace::unique_ids" and node.args[1:] == (0,)
    )
