"""Rounds gradients and rows for the wire, keeps what rounding leaves out, and measures its error.

Contract
    A rank adds what it has left out of a gradient to the next one that it sends (error feedback). Of a bucket it keeps
    everything; of rows it keeps those of the last batch, and adds them where the next batch reads the same rows. The
    rest is lost, because keeping it would take a whole table. No state dict holds what is kept, and a change of the
    plan drops it. A GradScaler changes its scale untold: in that step, what is added is still of the old scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

from embrace_fx.cost.wire import Format, Wire
from embrace_fx.runtime.kernels import column_widths, join_columns, split_columns
from embrace_fx.runtime.kernels.rounding import Pieces, decode_into, encode, rounded

MEASURED_EVERY = 16
"""One rounding in so many is measured, because that takes another pass over the values."""


@dataclass
class _Error:
    """Sums of squares of errors and of values, over the roundings that were measured."""

    calls: int = 0
    of_errors: float | Tensor = 0.0
    of_values: float | Tensor = 0.0

    def add(self, values: Tensor, arrived: Tensor) -> None:
        self.of_errors = self.of_errors + (arrived - values).float().square().sum()
        self.of_values = self.of_values + values.float().square().sum()

    @property
    def relative(self) -> float | None:
        """Root mean square of the error, relative to the values'."""
        return sqrt(float(self.of_errors) / float(self.of_values)) if float(self.of_values) else None


@dataclass
class Rounding:
    """One model's format on the wire, and what its rounding has left out on this rank.

    Attributes:
        form: the format of tables' rows, their gradients, and dense gradients.
    """

    form: Format = "exact"
    _left: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _errors: dict[str, _Error] = field(default_factory=dict)

    def forget(self) -> None:
        """Drops what rounding has left out."""
        self._left.clear()

    def encode_rows(self, columns: Tensor, pieces: Pieces) -> Tensor:
        """Rounds looked-up rows."""
        self._measure("rows", columns, lambda: rounded(columns, pieces, self.form))
        return encode(columns, pieces, self.form)

    def encode(self, rounded: Tensor, pieces: Pieces) -> Tensor:
        """Puts gradients of rows, rounded already, into their form on the wire."""
        return encode(rounded, pieces, self.form)

    def round_rows(self, rows: Tensor, ids: Tensor, form: Format, grid_columns: int, table: str) -> Tensor:
        """The op `embrace::round_rows`."""
        kept = self._left.get(table)
        wanted = rows.float()
        if kept is not None and kept[0].numel():
            places = torch.searchsorted(kept[0], ids).clamp_(max=kept[0].numel() - 1)
            again = kept[0].index_select(0, places) == ids
            wanted = wanted + kept[1].index_select(0, places).mul_(again[:, None])
        pieces = [(rows.shape[0], width) for width in column_widths(rows.shape[1], grid_columns)]
        sent = rounded(split_columns(wanted, grid_columns), pieces, form)
        sent = join_columns(sent, rows.shape[1], grid_columns)
        ids, order = ids.sort()  # the padding row comes first
        self._left[table] = ids, _finite(wanted - sent).index_select(0, order)
        self._measure("gradients of rows", wanted, lambda: sent)
        return sent.to(rows.dtype)

    def rounded_bucket(self, flat: Tensor, pieces: Pieces, name: str) -> Tensor:
        """Rounds a dense gradient, or a mean of it, to its form on the wire; keeps what that leaves out."""
        kept = self._left.get(name)
        wanted = flat.float() if kept is None else flat.float() + kept[1]
        coded = encode(wanted, pieces, self.form)
        sent = decode_into(torch.empty_like(wanted), coded, pieces, self.form)
        self._left[name] = flat.new_empty(0), _finite(wanted - sent)
        self._measure("buckets", wanted, lambda: sent)
        return coded

    def _measure(self, kind: str, wanted: Tensor, arrived: Callable[[], Tensor]) -> None:
        error = self._errors.setdefault(kind, _Error())
        error.calls += 1
        if error.calls % MEASURED_EVERY == 1:
            error.add(wanted, arrived())

    def rounds(self, values: Tensor) -> bool:
        """Whether a tensor travels in fewer bits than it has."""
        return self.form != "exact" and values.is_floating_point() and Wire(values.element_size(), self.form).rounds

    def report(self) -> str:
        """Reports what is rounded, and this rank's error; "" if nothing is."""
        lines = []
        for kind, made_good in (
            ("rows", ""),
            ("gradients of rows", ", which the next gradient makes good of a row that is read again"),
            ("buckets", ", which the next gradient makes good"),
        ):
            error = self._errors.get(kind, _Error()).relative
            off = "none has been sent yet" if error is None else f"off by {error:.2%} (root mean square, measured)"
            lines.append(f"{kind} are sent as {self.form}: {off}{made_good}\n")
        return "".join(lines) if self.form != "exact" else ""


def _finite(left: Tensor) -> Tensor:
    """Replaces inf and nan by zero in what is left out, so that the next gradient is finite."""
    return left.nan_to_num_(0.0, 0.0, 0.0)
