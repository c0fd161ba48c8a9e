"""Calls that need another graph while the loop zeroes gradients between forward and backward, as most tutorials do."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.scenario import Training
from tests.support.scenarios.schemes import DIM, NUM_IDS, Words, adam, ids_of, scheme

_TYPES = torch.int64, torch.int32
Before = Callable[[Any, int], None]
"""(the plain model, step) -> changes the model."""
Call = Callable[[Any, int, int], Any]
"""(model, rank, step) -> the loss."""


def _nothing(plain: Any, step: int) -> None:
    pass


def zeroed_between(name: str, make: Callable[[], Any], call: Call, before: Before = _nothing) -> None:
    """Enters a loop of eight steps."""

    def run(training: Training) -> None:
        plain = make()
        model = training.wrap(plain)
        optimizer = adam(training, model)
        for step in range(8):
            before(plain, step)
            loss = call(model, training.rank, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            training.note(loss)

    run.__name__ = name
    scheme(run)


class Many(Words):
    """Takes what a trainer may give: several inputs, a scale, a way to pool by its name, weights by keys."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.act, self.drop = nn.Embedding(NUM_IDS, DIM), torch.tanh, nn.Dropout(0.0)

    def forward(
        self,
        *ids: Tensor,
        pool: str = "mean",
        scale: float = 1.0,
        extra: dict[str, Tensor] | None = None,
        hidden: bool = False,
    ) -> Any:
        x = self.drop(self.act(reduce(torch.add, map(self.encode, ids))))
        for key, weight in (extra or {}).items():
            x = x + (self.tags(ids[0]) if key == "tags" else x) * weight
        x = x.mean() if pool == "mean" else x.flatten().logsumexp(0)
        return {"loss": x.square() * scale, "hidden": x} if hidden else x.square() * scale


def _curriculum(model: Any, rank: int, step: int) -> Any:
    return model(ids_of(rank, step, 4, 1 + step // 2 + (step + rank) % 2))


def _extra(model: Any, rank: int, step: int) -> Any:
    found = {"tags": torch.tensor(0.5), "other": torch.tensor(0.3)}
    return model(ids_of(rank, step), extra={key: found[key] for key in list(found)[: (step + rank) % 3]} or None)


def _results(model: Any, rank: int, step: int) -> Any:
    found = model(ids_of(rank, step), hidden=step % 3 == 1)
    return found["loss"] + found["hidden"] if isinstance(found, dict) else found


def _evaluated(model: Any, rank: int, step: int) -> Any:
    loss = model(ids_of(rank, step))
    model.eval()
    with torch.no_grad():
        found = model(ids_of(0, step, 2 + step % 3))
    model.train()
    return loss * found


def _accumulated(model: Any, rank: int, step: int) -> Any:
    with model.no_sync():
        model(ids_of(rank, 50 + step, 3 + step % 2)).backward()
    return model(ids_of(rank, step, 2 + step % 3))


def _two(model: Any, rank: int, step: int) -> Any:
    return model(ids_of(rank, step, 3)) + model(ids_of(rank, 20 + step, 4 + step // 3))


def _more(model: Any, rank: int, step: int) -> Any:
    return model(*(ids_of(rank, step + k) for k in range(1 + step // 3)))


def _drop(plain: Any, step: int) -> None:
    plain.drop.p = float(step % 4 == 3)


def _activation(plain: Any, step: int) -> None:
    plain.act = (torch.tanh, torch.sigmoid)[step // 3 % 2]


class _Hooks:
    """Adds hooks to a layer and to a table, and removes them."""

    def __init__(self) -> None:
        self.handle: Any = None

    def __call__(self, plain: Any, step: int) -> None:
        if step % 2:
            module = plain.words if step % 4 == 1 else plain.hidden
            self.handle = module.register_forward_hook(lambda module, given, found: found * 1.5)
        elif self.handle is not None:
            self.handle.remove()


def _frozen(plain: Any, step: int) -> None:
    plain.words.requires_grad_(step % 3 != 1)
    plain.hidden.bias.requires_grad_(step % 4 != 2)


def _pad(plain: Any, step: int) -> None:
    plain.words.padding_idx = step // 3


def _of(**options: Any) -> Callable[[Any, int, int], Any]:
    return lambda model, rank, step: model(ids_of(rank, step), **{k: of(step) for k, of in options.items()})


LOOPS: dict[str, tuple[Call, Before]] = {
    "a_curriculum_of_lengths": (_curriculum, _nothing),
    "a_pool_by_its_name": (_of(pool=lambda step: ("mean", "most")[step // 2 % 2]), _nothing),
    "a_scale_that_warms_up": (_of(scale=lambda step: 0.1 * (1 + step)), _nothing),
    "a_scale_that_is_a_number_or_a_tensor": (_of(scale=lambda step: torch.tensor(0.5) if step % 3 else 2), _nothing),
    "keys_that_come_and_go": (_extra, _nothing),
    "results_of_other_kinds": (_results, _nothing),
    "more_inputs_than_before": (_more, _nothing),
    "ids_of_two_types": (lambda model, rank, step: model(ids_of(rank, step).to(_TYPES[step % 2])), _nothing),
    "an_evaluation_before_the_backward": (_evaluated, _nothing),
    "lengths_that_are_accumulated": (_accumulated, _nothing),
    "two_calls_of_other_lengths": (_two, _nothing),
    "a_dropout_that_is_switched": (_of(), _drop),
    "an_activation_that_is_replaced": (_of(), _activation),
    "a_padding_row_that_moves": (_of(extra=lambda step: {"tags": torch.tensor(0.5)}), _pad),
    "hooks_that_come_and_go": (_curriculum, _Hooks()),
    "parts_frozen_in_turn": (_curriculum, _frozen),
}
for _name, (_call, _before) in LOOPS.items():
    zeroed_between(_name, Many, _call, _before)
JOINED = type("Joined", (Many,), {"encode": lambda self, ids: self.words(ids) * self.tags(ids)})
zeroed_between("a_padding_row_of_joined_tables", JOINED, _of(), _pad)


class Late(Words):
    """Reads a table, and decides by values, in some calls alone."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.bag = nn.Embedding(NUM_IDS, DIM), nn.EmbeddingBag(NUM_IDS, DIM)

    def forward(self, ids: Tensor, late: str = "") -> Tensor:
        x = self.encode(ids)
        if "table" in late:
            x = x + self.late(ids)
        if "bag" in late:
            x = x * self.bag(ids[None])
        if late and x.sum().item() > 0:
            x = x * 0.5
        return x.square().mean()


LATE: dict[str, Callable[[int, int], str]] = {
    "two_late_tables": lambda rank, step: "table bag" if step > 3 else "",
    "late_tables_in_turn": lambda rank, step: "table" if step % 3 == 2 else "bag" if step == 4 else "",
    "a_late_table_on_one_rank": lambda rank, step: "table" if step > 2 and rank == step % 2 else "",
    "a_late_branch_and_a_bag": lambda rank, step: "now" if step == 2 else "bag" if step > 4 else "",
    "a_late_table_that_thaws": lambda rank, step: "table" if step > 3 else "",
}


def _thaw(plain: Any, step: int) -> None:
    plain.late.requires_grad_(step > 4)
    plain.words.requires_grad_(step != 5)


for _name, _late in LATE.items():
    zeroed_between(
        _name,
        Late,
        lambda model, rank, step, late=_late: model(ids_of(rank, step), late(rank, step)),  # type: ignore[misc]
        _thaw if "thaws" in _name else _nothing,
    )
