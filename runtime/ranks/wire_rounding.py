"""Rounds gradients and rows before they are sent, adds rounding errors to the next gradient, and measures the error.

Contract
    A rank adds the rounding error of a gradient to the next one that it sends (error feedback). For a bucket it keeps
    the whole error. For rows it keeps the errors of the last batch, and adds them if the next batch reads the same
    rows; other errors are lost, because keeping them would take a whole table. State dicts do not contain the errors,
    and a change of the plan drops them. If a GradScaler changes its scale, the error added in that step still has the
    old scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

from embrace_fx.cost.wire import Format, Wire
from embrace_fx.runtime.kernels import column_widths, join_columns, split_columns
from embrace_fx.runtime.kernels.rounding import Pieces, decode_into, encode, round_trip

MEASURED_EVERY = 16
"""Interval of roundings whose error is measured, because that takes another pass over the values."""


@dataclass
class _ErrorSums:
    """Sums over measured roundings, from which the relative rounding error is computed.

    Attributes:
        calls: the number of roundings so far, including those that were not measured.
        of_errors: the sum of squares of the rounding errors.
        of_values: the sum of squares of the exact values.
    """

    calls: int = 0
    of_errors: float | Tensor = 0.0
    of_values: float | Tensor = 0.0

    def add(self, exact: Tensor, arrived: Tensor) -> None:
        """Adds the errors of one rounding.

        Args:
            exact: the values before the rounding.
            arrived: the values after the rounding.
        """
        self.of_errors = self.of_errors + (arrived - exact).float().square().sum()
        self.of_values = self.of_values + exact.float().square().sum()

    @property
    def relative_rms(self) -> float | None:
        """The root mean square of the errors divided by that of the exact values. None if all exact values are zero."""
        return sqrt(float(self.of_errors) / float(self.of_values)) if float(self.of_values) else None


@dataclass
class Rounding:
    """Rounds a model's gradients and table rows before they are sent. Keeps the rounding errors of this rank's
    gradients, to add them to the next gradients.

    Attributes:
        form: the format to round to: "exact", "bf16", "fp16" or "int8".
    """

    form: Format = "exact"
    _left: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _errors: dict[str, _ErrorSums] = field(default_factory=dict)

    def forget(self) -> None:
        """Drops the rounding errors that would be added to the next gradients."""
        self._left.clear()

    def encode_rows(self, columns: Tensor, pieces: Pieces) -> Tensor:
        """Rounds looked-up rows, and returns them encoded for sending.

        Args:
            columns: the rows, as one flat tensor.
            pieces: for each rank, the shape (rows, columns) of the part that is sent to it.
        """
        self._measure("rows", columns, lambda: round_trip(columns, pieces, self.form))
        return encode(columns, pieces, self.form)

    def encode(self, rounded: Tensor, pieces: Pieces) -> Tensor:
        """Encodes gradients of rows for sending. Adds no error, because `round_rows` has already rounded them.

        Args:
            rounded: the gradients, as one flat tensor.
            pieces: for each rank, the shape (rows, columns) of the part that is sent to it.
        """
        return encode(rounded, pieces, self.form)

    def round_rows(self, rows: Tensor, ids: Tensor, form: Format, grid_columns: int, table: str) -> Tensor:
        """Implements the op `round_rows`: rounds gradients of rows, and returns them (U, D). Before the rounding, adds
        the errors of earlier roundings. Stores the new errors.

        Args:
            rows: the gradients (U, D).
            ids: the rows' ids (U,).
            form: the format to round to.
            grid_columns: the number of ranks over which the columns are divided.
            table: the table's name, under which the errors are stored.
        """
        kept = self._left.get(table)
        wanted = rows.float()
        if kept is not None and kept[0].numel():
            places = torch.searchsorted(kept[0], ids).clamp_(max=kept[0].numel() - 1)
            again = kept[0].index_select(0, places) == ids
            wanted = wanted + kept[1].index_select(0, places).mul_(again[:, None])
        pieces = [(rows.shape[0], width) for width in column_widths(rows.shape[1], grid_columns)]
        sent = round_trip(split_columns(wanted, grid_columns), pieces, form)
        sent = join_columns(sent, rows.shape[1], grid_columns)
        ids, order = ids.sort()  # sort the ids for the next searchsorted(), because the padding row comes first
        self._left[table] = ids, _without_nonfinite(wanted - sent).index_select(0, order)
        self._measure("gradients of rows", wanted, lambda: sent)
        return sent.to(rows.dtype)

    def rounded_bucket(self, flat: Tensor, pieces: Pieces, name: str) -> Tensor:
        """Rounds a dense gradient, or a mean of gradients, and returns it encoded for sending. Before the rounding,
        adds the error of its last rounding. Stores the new error.

        Args:
            flat: the gradient, as one flat tensor.
            pieces: the shapes (rows, columns) of its parts, which are rounded separately.
            name: the name under which the error is stored.
        """
        kept = self._left.get(name)
        wanted = flat.float() if kept is None else flat.float() + kept[1]
        coded = encode(wanted, pieces, self.form)
        sent = decode_into(torch.empty_like(wanted), coded, pieces, self.form)
        self._left[name] = flat.new_empty(0), _without_nonfinite(wanted - sent)
        self._measure("buckets", wanted, lambda: sent)
        return coded

    def _measure(self, kind: str, exact: Tensor, arrived: Callable[[], Tensor]) -> None:
        """Measures the error of every `MEASURED_EVERY`-th rounding, and adds it to the sums for `kind`.

        Args:
            kind: what is rounded, such as "rows".
            exact: the values before the rounding.
            arrived: function that returns the values after the rounding.
        """
        error = self._errors.setdefault(kind, _ErrorSums())
        error.calls += 1
        if error.calls % MEASURED_EVERY == 1:
            error.add(exact, arrived())

    def rounds(self, values: Tensor) -> bool:
        """Returns whether values of this dtype are rounded before they are sent."""
        return (
            self.form != "exact" and values.is_floating_point() and Wire(values.element_size(), self.form).is_narrower
        )

    def report(self) -> str:
        """Returns lines for a report, which say what is rounded and how large this rank's rounding errors are. Returns
        "" if nothing is rounded.
        """
        lines = []
        for kind, made_good in (
            ("rows", ""),
            ("gradients of rows", "; the next gradient of the same row corrects it"),
            ("buckets", "; the next gradient corrects it"),
        ):
            error = self._errors.get(kind, _ErrorSums()).relative_rms
            off = "none has been sent yet" if error is None else f"off by {error:.2%} (root mean square, measured)"
            lines.append(f"{kind} are sent as {self.form}: {off}{made_good}\n")
        return "".join(lines) if self.form != "exact" else ""


def _without_nonfinite(error: Tensor) -> Tensor:
    """Replaces inf and nan in a rounding error by zero, so that they are not added to the next gradient."""
    return error.nan_to_num_(0.0, 0.0, 0.0)
