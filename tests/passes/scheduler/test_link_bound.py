"""What no order of launches can fall below, by hand and against all orders."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings

from embrace_fx.passes.scheduler.link_bound import link_bound_ms
from embrace_fx.vocabulary.schedule import Dependence, Operation, StepGraph
from tests.support import windows
from tests.support.windows import simulate

EXACT = 1e-9


def blocks_that_wait(reduce_ms: tuple[float, ...]) -> StepGraph:
    """backward of the last block to that of the first, 2 ms each, then their forwards, 1 ms each."""
    names = range(len(reduce_ms))
    compute = [Operation(f"backward {k}", "backward", "compute", 2.0) for k in reversed(names)]
    compute += [Operation(f"forward {k}", "forward", "compute", 1.0) for k in names]
    reduces = [Operation(f"reduce {k}", "all_reduce", "dense", ms) for k, ms in enumerate(reduce_ms)]
    dependences = [Dependence(f"backward {k}", f"reduce {k}") for k in names]
    waits = [Dependence(f"reduce {k}", f"forward {k}") for k in names]
    order = tuple(operation.name for operation in compute)
    return StepGraph((*compute, *reduces), (*dependences, *waits), order)


def test_one_link_for_all_transfers() -> None:
    steps = blocks_that_wait((5.0, 5.0))
    assert link_bound_ms(steps) == 13.0  # the first backward (2 ms), both AllReduces (10 ms), the last forward (1 ms)
    delayed = Operation("delayed", "gradients", "delayed", 4.0)  # awaited only by the next step's backward
    further = (Dependence("backward 0", "delayed"), Dependence("delayed", "backward 0", distance=1))
    more = replace(steps, operations=(*steps.operations, delayed), dependences=(*steps.dependences, *further))
    assert link_bound_ms(more) == 14.0  # the total time of all transfers
    assert link_bound_ms(replace(steps, operations=steps.operations[:4], dependences=())) == 6.0


@pytest.mark.parametrize("reduce_ms", [(1.0, 3.0, 1.0), (4.0, 0.5, 2.0, 1.0), (0.5, 0.5, 6.0), (3.0, 3.0, 3.0, 3.0)])
def test_no_order_of_launches_is_below_the_limit_of_one_link(reduce_ms: tuple[float, ...]) -> None:
    steps = blocks_that_wait(reduce_ms)
    launches = [each.name for each in steps.operations if each.is_communication]
    fastest = min(simulate(steps, order).step_ms for order in permutations(launches))
    assert 3 * len(reduce_ms) <= link_bound_ms(steps) <= fastest * (1 + EXACT)
    assert fastest <= 1.2 * link_bound_ms(steps)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(windows.steps(most_launches=4))
def test_no_order_of_any_step_is_below_it(drawn: StepGraph) -> None:
    launches = [each.name for each in drawn.communications]
    for order in permutations(launches):
        try:
            found_ms = simulate(drawn, order).step_ms
        except ValueError:  # the order deadlocks
            continue
        assert link_bound_ms(drawn) <= found_ms * (1 + EXACT)
