"""Captures of one model's batches: how many there may be, and which sizes are symbolic in them."""

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
"""Captures of one model before it is refused another: each costs seconds, and shapes that never repeat would cost
them at every step. Torch's own limit of recompilations is of this order."""

MOST_UNUSED = {float: 3}
"""Captures in a row of which none has served a second call, by the type of the value that differs: a float that is
another one in each call is annealed, and comes back to none."""

MOST_UNUSED_OF_OTHERS = 8
"""Of other values: a task's number comes back once all tasks have had their turn."""


class Captures:
    """The captures of one model."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.count = 0

    def capture(
        self, kind: Kind, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
    ) -> Captured:
        """Captures a batch, its sizes symbolic where they have varied among the calls of its kind.

        Raises:
            CaptureError: the model cannot be captured, or has been too often.
        """
        changed = kind.variants[-1].captured.changed(leaves) if kind.variants else []
        kind.values |= {each.name for each in changed if each.name and each.can_be_input} - kind.deciding
        constant = next((each for each in changed if each.name not in kind.values), None)
        if self.count >= MAX_CAPTURES:
            raise CaptureError(
                "expected batches whose shapes repeat or vary in ways one graph can take, and whose numbers repeat, in "
                f"forward(), found that {MAX_CAPTURES} captures do not suffice. Pad batches to a few lengths, pass "
                "dynamic=True, or pass numbers that change, attributes of the model too, as tensors.",
                str(constant or f"shapes of its batches keep changing, and {MAX_CAPTURES} captures do not suffice"),
            )
        if constant is not None:
            self._check_repeats(kind, constant)
        kind.shapes.append({i: tuple(leaf.shape) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})
        captured = self._captured(kind, args, kwargs, train)
        return replace(captured, conditions=captured.conditions.unchanged())

    def _captured(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> Captured:
        """A capture whose inputs are the values that have changed, but for those that decide what its graph is."""
        whole = {name: table.shape for name, table in self._setting.state.tables.items()}
        model, dynamic = self._setting.model, _varying(kind, self._setting.options.dynamic)
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
        """Raises where a value that the forward reads is another one in each call.

        Raises:
            RefusedError: naming it.
        """
        most = MOST_UNUSED.get(type(changed.now), MOST_UNUSED_OF_OTHERS)
        if len(kind.variants) >= most and not any(variant.reused for variant in kind.variants[-most:]):
            raise RefusedError(
                f"expected values that repeat from call to call, in {type(self._setting.model).__name__}, found that "
                f"{changed}: each of the last {most} captures has served one call. Pass it as a tensor, keep it in a "
                "buffer, or leave out route='graph': the forward then runs as it is written.",
                str(changed),
            )


def _varying(kind: Kind, dynamic: bool | None) -> frozenset[tuple[int, int]]:
    """Finds the sizes of the last call that may vary, (index of argument, dimension): all, none, or those that have.

    Where any has, the first sizes may as well: a loader whose lengths vary ends in a batch that is short. A first size
    that is as large as one that has varied would be taken for the same by torch, and stays a number.
    """
    current = kind.shapes[-1]
    if dynamic is False:
        return frozenset()
    sizes = {(index, dim): size for index, shape in current.items() for dim, size in enumerate(shape)}
    if dynamic:
        return frozenset(sizes)
    varied = {at for at, size in sizes.items() if any(seen[at[0]][at[1]] != size for seen in kind.shapes)}
    varied_sizes = {sizes[at] for at in varied}
    firsts = {at for at, size in sizes.items() if varied and at[1] == 0 and size not in varied_sizes}
    return frozenset(varied | firsts)
