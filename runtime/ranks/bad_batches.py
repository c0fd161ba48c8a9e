"""Reports of batches that a rank cannot go on with, for all ranks to raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from embrace_fx.runtime.kernels import bad_ids
from embrace_fx.vocabulary.row_space import RowSpace


def unreadable(error: Exception) -> str:
    """Makes the report of a rank that cannot compute its batch's ids."""
    return f"the batch's ids cannot be computed: {type(error).__name__}: {error}. Check the batch"


def bad_id_report(
    ids: Sequence[Tensor], tables: Sequence[str], num_rows: Sequence[int], spaces: Mapping[str, RowSpace] = {}
) -> str | None:
    """Reports the first id outside of its table; None: all are inside.

    Args:
        ids: rows of the tables or row spaces named by `tables`.
        spaces: those of them that are row spaces, by name.
    """
    for found, table, rows in zip(bad_ids(ids, num_rows), tables, num_rows, strict=True):
        if found is not None:
            if (space := spaces.get(table)) is not None:
                table, found = space.outside(found)
                rows = rows if table == space.name else len(space.rows_of(table))
            return (
                f"a lookup of {table} ({rows} rows) got {found}, but ids go from 0 to {rows - 1}. Check the batch, or "
                "give the table more rows"
            )
    return None
