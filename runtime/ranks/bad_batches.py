"""Error texts for batches that a rank cannot process. All ranks raise them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from embrace_fx.runtime.kernels import find_bad_ids
from embrace_fx.vocabulary.joined_table import JoinedTable


def unreadable_batch(error: Exception) -> str:
    """Returns the text of the error for a batch whose ids this rank could not compute."""
    return f"the batch's ids cannot be computed: {type(error).__name__}: {error}. Check the batch"


def describe_bad_id(
    ids: Sequence[Tensor], tables: Sequence[str], num_rows: Sequence[int], spaces: Mapping[str, JoinedTable] = {}
) -> str | None:
    """Returns an error text for the first id that is not a row of its table. Returns None if all ids are valid.

    Args:
        ids: for each table, the ids to look up.
        tables: the names of the tables.
        num_rows: for each table, its number of rows.
        spaces: name of a joined table (several tables of the model stored as one) -> its description.
    """
    for found, table, rows in zip(find_bad_ids(ids, num_rows), tables, num_rows, strict=True):
        if found is not None:
            if (space := spaces.get(table)) is not None:
                table, found = space.decode_invalid_id(found)
                rows = rows if table == space.name else len(space.rows_of(table))
            return (
                f"a lookup in {table} ({rows} rows) got id {found}, but ids go from 0 to {rows - 1}. Check the batch, "
                "or give the table more rows"
            )
    return None
