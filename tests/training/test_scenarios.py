"""Whatever loops do, they end under a compiled model where they end under DDP: `tests.support.scenarios`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from embrace_fx.vocabulary.plan import Grid
from tests.support.ranks import run_ranks
from tests.support.scenarios import ROOMS, compare
from tests.support.scenarios.heads import Words
from tests.support.sides import Predicting

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides:UserWarning"),  # warned by DDP
    pytest.mark.filterwarnings("ignore:.torch.jit"),  # torch still uses deprecated parts of itself
]

WAYS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {"strategy": "alltoall"}),
    "3 ranks": (3, {"strategy": "alltoall"}),
    "4 ranks, momentum": (4, {"strategy": "alltoall", "optimizer": "momentum"}),
    "sgd": (2, {"strategy": "alltoall", "optimizer": "sgd"}),
    "sweeps": (2, {"strategy": "alltoall", "row_updates": "sweep"}),
    "replays": (2, {"strategy": "alltoall", "row_updates": "replay"}),
    "auto": (2, {"strategy": "auto"}),
    "a grid": (2, {"strategy": Grid(2, 1)}),
    "none": (2, {"strategy": "alltoall", "schedule": "none"}),
    "eager": (2, {"route": "eager"}),
}
QUICK = (
    *("ids outside of a table", "backwards in other order", "backwards without step", "gradients copied", "clipping"),
    *("other data of gradients that nobody has read", "gradients zeroed before the step", "gradients kept"),
    *("rows of a sum are scaled", "read under inference mode", "read under a mode of ops", "given to vmap"),
    *("read under a trace", "gradients read by a forked child", "plain adamw, one cycle"),
    *("plain row-wise adagrad", "schedulers"),
    *("steps taken twice", "the optimizer saved and loaded", "two optimizers with a look in between"),
    *("read by a thread", "state read on one rank", "written through the state dict", "the padding row zeroed"),
    *("a storage from before written", "chunks are scaled", "rows are added by ids", "the slice of data"),
    *("the gradient is gathered", "renormed rows", "its gradient is another", "momentum reset", "other state"),
    *("the first table removed from its group and added again", "made a subclass"),
    *("two optimizers of which one reads what the other updates", "rows are copied by ids", "rows are filled by ids"),
    *("each row is halved", "a mask of elements fills", "one element is set", "the transposed is scaled by column"),
    *("what is small is set", "a row is another", "rows are put back", "unit rows", "a decay by row", "data replaced"),
    *("the mean is taken away", "all of it in a vector", "its data is halved"),
)
"""One of each mechanism, of those that share one model, without those of `BESIDE_A_HEAD`: a capture for all of them."""
NOT_ON_A_GRID = ("state read on one rank", "written through the state dict")
"""There, all ranks together make a state dict, whose tables are copies by columns that refuse writes."""
OF_THEIR_OWN = (
    *("buffers shared by attribute", "attributes that trainers ask for", "hooks of all kinds"),
    *("skip grams of bags", "master weights by hand", "rank 0 evaluates and tells", "tables read by counted ids"),
    *("gradients of inputs then of parameters", "sparse and nested batches", "a fused step that skips"),
    *("a padding row that moves", "a padding row of joined tables"),
)
"""Scenarios of models of their own."""
AS_WRITTEN = (
    *("a scale that the loop applies", "a weight of each rank", "other branches on each rank", "unequal loaders"),
    *("accumulation", "gradients copied", "clipping", "gradients kept", "the optimizer saved and loaded"),
    *("calls that are checkpointed", "a penalty in a backward of its own", "hooks of all kinds"),
    "a loss of dense parameters alone",
)
"""Scenarios of the eager route."""
HEADS = ("heads", "output_layers", "head_loops")
"""Rooms of scenarios of sharded output layers."""
LOSSES_OF_LOGITS = [
    *("a temperature in place", "a teacher", "log probabilities gathered", "smoothed labels in the loop"),
    *("positions behind classes", "scored positions chosen", "a loss of detached logits beside"),
    *("a checkpointed loss", "a function of autograd behind logits", "gradients of logits hooked"),
    *("gradients of logits asked for", "gradients of logits hooked too late"),
    *("a function of autograd behind logits that were written", "a function of autograd behind log softmax"),
    *("read under inference mode before the loss", "columns left out"),
]
OF_OUTPUT_LAYERS = [
    *("a frozen body and a loss of the loop", "data written before the loss", "ranks without labels as written"),
    *("ranks without labels that guard their loss", "sequences of a recurrent layer"),
]
OF_SHARDS = ("parameters", "parts", "rare_optimizers", "states")
"""Rooms of scenarios that ask for this rank's part of a table."""


OF_HEAD: Mapping[str, Any] = {
    "strategy": {"words.weight": "alltoall", "items.weight": "vocabulary"},
    "module": Predicting,
}
"""A table that an output layer reads, too, in the model that scenarios share."""
BESIDE_A_HEAD = (
    *("closures", "two losses in one backward", "all gradients logged", "all gradients replaced", "gradients changed"),
    *("clipping by other norms", "clipping of data", "a gradient scaler with clipping", "columns are zeroed"),
    *("rows that were not read given gradients", "read by functions", "data clamped", "the data is broadcast"),
    *("weights saved and loaded", "kept state halved"),
)
"""Scenarios that do something else with such a table."""
OF_LOGITS: Mapping[str, Any] = {"strategy": {"words.weight": "vocabulary"}, "module": Words}
"""A model that returns logits of its sharded table, in the scenarios of heads."""


def _check(names: list[str], ranks: int, options: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    for wrong in run_ranks(ranks, compare, names, options, timeout_s=280.0):
        assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())


def test_scenarios_of_one_model_end_where_ddp_does() -> None:
    _check([*QUICK], *WAYS["2 ranks"])


def test_scenarios_of_an_output_layer_end_where_ddp_does() -> None:
    _check([*BESIDE_A_HEAD], 2, OF_HEAD)


@pytest.mark.long
@pytest.mark.parametrize("room", ["gradients", "modes", "optimizers"])
def test_scenarios_of_an_output_layer_end_where_ddp_does_in_every_room(room: str) -> None:
    _check(ROOMS[room], 2, OF_HEAD)


def test_losses_of_logits_end_where_those_of_ddp_do() -> None:
    _check(LOSSES_OF_LOGITS, 2, OF_LOGITS)


def test_models_with_output_layers_end_where_ddp_does() -> None:
    _check(OF_OUTPUT_LAYERS, 2, {})


@pytest.mark.long
@pytest.mark.parametrize("room", HEADS)
@pytest.mark.parametrize(("ranks", "schedule"), [(2, "none"), (3, "2d"), (4, "vertical")])
def test_every_output_layer_ends_where_ddp_does(room: str, ranks: int, schedule: str) -> None:
    _check(ROOMS[room], ranks, {**OF_LOGITS, "schedule": schedule})


def test_scenarios_of_their_own_models_end_where_ddp_does() -> None:
    _check(list(OF_THEIR_OWN), *WAYS["2 ranks"])


def test_scenarios_of_models_that_run_as_written_end_where_ddp_does() -> None:
    _check(list(AS_WRITTEN), *WAYS["eager"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("room", "way"),
    [
        (room, way)
        for room in ROOMS
        if room not in HEADS
        for way in WAYS
        if (way != "eager" or room not in OF_SHARDS) and (way not in ("auto", "a grid") or room != "parts")
    ],
)
def test_scenarios_end_where_ddp_does_in_every_way(room: str, way: str) -> None:
    left_out = NOT_ON_A_GRID if way == "a grid" else ()
    _check([name for name in ROOMS[room] if name not in left_out], *WAYS[way])
