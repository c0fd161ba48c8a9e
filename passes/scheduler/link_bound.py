"""Computes a lower bound of a step's time over all launch orders, if all network transfers share one link.

Contract
    A pure function of a step, for its present order of compute. No schedule of it is faster, in any launch
    order and however its transfers are cut: all transfers submitted after some operation and needed before another
    must be sent between these two, one at a time; the compute outside of the two comes on top. The bound is the
    maximum over all pairs of operations.

Source: heads, bodies and tails on one machine (Carlier 1982), here in a step that repeats itself.
"""

from __future__ import annotations

import numpy as np

from embrace_fx.vocabulary.schedule import StepGraph


def link_bound_ms(steps: StepGraph) -> float:
    """Returns a lower bound of the step time in milliseconds, if all network transfers share one link. Copies between
    device and host are ignored.
    """
    chain, size = steps.compute_order, len(steps.compute_order)
    place = {name: k for k, name in enumerate(chain)}
    released: dict[str, int] = {}  # transfer -> index of the last operation it waits for, from its window's start
    needed: dict[str, int] = {}  # transfer -> index of the first operation that waits for it, from its window's start
    for each in steps.dependences:
        if each.before in place and each.after not in place:
            at = place[each.before] - each.distance * size
            released[each.after] = max(released.get(each.after, at), at)
        elif each.before not in place and each.after in place:
            at = place[each.after] + each.distance * size
            needed[each.before] = min(needed.get(each.before, at), at)
    ms = {each.name: each.duration_ms for each in steps.operations}
    sent = [each.name for each in steps.communications]
    total_ms = sum(ms[name] for name in chain)
    least_ms = max(total_ms, sum(ms[name] for name in sent))
    bound = [name for name in sent if name in released and name in needed]
    if not bound:
        return least_ms
    firsts, of_first = np.unique([released[name] for name in bound], return_inverse=True)
    lasts, of_last = np.unique([needed[name] for name in bound], return_inverse=True)
    between_ms = np.zeros((len(firsts), len(lasts)))
    np.add.at(between_ms, (of_first, of_last), [ms[name] for name in bound])
    # [first, last]: the total time of all transfers that start at `first` or later and are needed by `last`.
    between_ms = between_ms[::-1].cumsum(0)[::-1].cumsum(1)
    durations_ms = np.array([ms[name] for name in chain])
    ends_ms = durations_ms.cumsum()
    leaves_ms = firsts // size * total_ms + ends_ms[firsts % size]
    needed_ms = lasts // size * total_ms + ends_ms[lasts % size] - durations_ms[lasts % size]
    beside_ms = needed_ms[None, :] - leaves_ms[:, None]
    fits = (lasts[None, :] > firsts[:, None]) & (lasts[None, :] <= firsts[:, None] + size)
    steps_ms = np.where(fits, between_ms + total_ms - beside_ms, 0.0)
    return float(max(least_ms, steps_ms.max()))
