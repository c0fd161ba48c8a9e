"""Captures a model's batches: decides which sizes are symbolic, and limits the number of captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from embrace_fx.capture import Captured, capture
from embrace_fx.capture.errors import CaptureError, RefusedError
from embrace_fx.capture.read_values import Changed
from embrace_fx.runtime.tables.placement import whole_parameters
from embrace_fx.session.calls import Kind
from embrace_fx.setup.setting import Setting

MAX_CAPTURES = 32
"""Most captures of one model: each takes seconds, and shapes that never repeat would cost them at every step. Torch's
own limit of recompilations is of this order."""

MOST_UNUSED_OF_FLOATS, MOST_UNUSED = 3, 8
"""Most captures in a row, for a value that differs, of which none has served a second call. A float that differs in
each call is annealed, and does not return; a task's number returns after all tasks have had their turn."""


class Captures:
    """The captures of one model."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.count = 0

    def capture(
        self, kind: Kind, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
    ) -> Captured:
        """Captures a batch; sizes that have varied among the calls of its kind are symbolic.

        Raises:
            CaptureError: the model cannot be captured, or has been captured too often.
        """
        changed = kind.variants[-1].captured.changed(leaves) if kind.variants else []
        kind.values |= {each.name for each in changed if each.name and each.can_be_input} - kind.deciding
        constant = next((each for each in changed if each.name not in kind.values), None)
        if self.count >= MAX_CAPTURES:
            raise CaptureError(
                "expected batches whose shapes repeat or vary in ways one graph can take, and whose numbers repeat, in "
                f"forward(), found that {MAX_CAPTURES} captures do not suffice. Pad batches to a few lengths, and pass "
                "numbers that change, attributes of the model too, as tensors.",
                str(constant or f"shapes of its batches keep changing, and {MAX_CAPTURES} captures do not suffice"),
            )
        if constant is not None:
            self._check_repeats(kind, constant)
        kind.shapes.append({i: tuple(leaf.shape) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})
        captured = self._captured(kind, args, kwargs, train)
        return replace(captured, conditions=captured.conditions.unchanged())

    def _captured(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> Captured:
        """Captures with the values that have changed as inputs, except those that decide the graph itself."""
        whole = {name: table.shape for name, table in self._setting.state.tables.items()}
        model, dynamic = self._setting.model, varying_sizes(kind)
        while True:
            try:
                with whole_parameters(model, whole):
                    captured = capture(model, args, kwargs, train=train, dynamic=dynamic, values=kind.values)
            except CaptureError as error:
                if not kind.values or error.raised is not None:
                    raise
                deciding = kind.values
            else:
                deciding = captured.deciding
            if not deciding:
                self.count += 1
                return captured
            kind.values, kind.deciding = kind.values - deciding, kind.deciding | deciding

    def _check_repeats(self, kind: Kind, changed: Changed) -> None:
        """Raises `RefusedError` where a value that the forward reads differs in each call."""
        most = MOST_UNUSED_OF_FLOATS if type(changed.now) is float else MOST_UNUSED
        if len(kind.variants) >= most and not any(variant.reused for variant in kind.variants[-most:]):
            raise RefusedError(
                f"expected values that repeat from call to call, in {type(self._setting.model).__name__}, found that "
                f"{changed}: each of the last {most} captures has served one call. Pass it as a tensor, keep it in a "
                "buffer, or leave out route='graph': the forward then runs as it is written.",
                str(changed),
            )


def varying_sizes(kind: Kind) -> frozenset[tuple[int, int]]:
    """Finds the sizes of the last call that may vary, (index of argument, dimension): those that did.

    Where any size has varied, batch sizes may vary too: a loader whose lengths vary ends with a short batch. A batch
    size that equals a varying size stays constant, because torch would take the two for one symbol.
    """
    current = kind.shapes[-1]
    sizes = {(index, dim): size for index, shape in current.items() for dim, size in enumerate(shape)}
    varied = {at for at, size in sizes.items() if any(seen[at[0]][at[1]] != size for seen in kind.shapes)}
    varied_sizes = {sizes[at] for at in varied}
    firsts = {at for at, size in sizes.items() if varied and at[1] == 0 and size not in varied_sizes}
    return frozenset(varied | firsts)
