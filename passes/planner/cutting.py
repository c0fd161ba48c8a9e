"""Cuts a plan's communication into pieces, once, for the plan's links."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from torch import Tensor

from embrace_fx.cost import links as cost
from embrace_fx.passes.planner.step_cost import one_way_bytes
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import LOOKS_AHEAD, Cuts


def cuts(plan: Plan, parameter: Callable[[str], Tensor]) -> Cuts:
    """Cuts buckets into chunks, and delayed row gradients into pieces. With a single process, there are none.

    Pieces are sized as if all of the first batch's rows were delayed.

    Args:
        parameter: returns a parameter by its name.
    """
    if plan.world_size == 1:
        return Cuts((), ())
    chunks = tuple(tuple(_chunks(plan, bucket, [*map(parameter, bucket)])) for bucket in plan.buckets)
    piece_bytes = cost.chunk_bytes(plan.links, plan.world_size, "all_to_all") * (plan.world_size - 1)
    exchanged = plan.overlapped.items() if plan.schedule_name in LOOKS_AHEAD else ()
    own = {name: one_way_bytes(plan, tables) * plan.world_size for name, tables in exchanged}
    return Cuts(chunks, tuple((name, max(1, round(nbytes / piece_bytes))) for name, nbytes in own.items()))


def _chunks(plan: Plan, bucket: tuple[str, ...], parameters: list[Tensor]) -> list[int]:
    """Returns the count of elements of each chunk of a bucket's AllReduce, with equal chunks of about the cost model's
    size.

    Schedule "none" reduces whole buckets, because no launch overtakes another. A sparse exchange, which sends in
    rounds, takes a whole gradient.
    """
    elements = sum(parameter.numel() for parameter in parameters)
    if plan.schedule_name == "none" or bucket[0] in plan.exchanged:
        return [elements]
    wanted = cost.chunk_bytes(plan.links, plan.world_size) / parameters[0].element_size()
    size = ceil(elements / max(1, round(elements / wanted)))
    return [min(size, elements - start) for start in range(0, elements, size)]
