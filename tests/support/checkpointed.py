"""Models under every form of checkpointing, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

WIDTH, WORDS = 32, 20

IDS = torch.randint(WORDS, (8, 12), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """What regions are made of: dropout twice, a residual, a write in place, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x).mul_(2.0))
        h = self.dropout(h.tanh())
        return x + self.dropout(self.down(h.view(-1, 4 * WIDTH)).view_as(x))


class Model(nn.Module):
    """A table, blocks under some form of checkpointing, a sum for a loss."""

    def __init__(self, through: Callable[..., Tensor], blocks: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(blocks() for _ in range(3))
        self.through = through

    def forward(self, ids: Tensor) -> Tensor:
        return self.through(self, ids).square().sum()


def all_in_one(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def one_by_one(model: Model, ids: Tensor, **options: Any) -> Tensor:
    x: Tensor = model.table(ids)
    for block in model.blocks:
        x = checkpoint(block, x, **options)
    return x


def keeps_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def nested(model: Model, ids: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False) + 1.0
        return x

    return checkpoint(outer, model.table(ids), use_reentrant=False)


def lookup_within(model: Model, ids: Tensor) -> Tensor:
    return checkpoint(lambda i: all_in_one(model, model.table(i)), ids, use_reentrant=False)


FORMS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "not reentrant": functools.partial(one_by_one, use_reentrant=False),
    "reentrant": functools.partial(one_by_one, use_reentrant=True),
    "selective": functools.partial(
        one_by_one,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, keeps_products),
    ),
    "sequential": lambda model, ids: checkpoint_sequential(
        list(model.blocks), 3, model.table(ids), use_reentrant=False
    ),
    "nested": nested,
    "a lookup within": lookup_within,
}


def gradients(model: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    result = call(*args, **kwargs)
    (result if isinstance(result, Tensor) else result.loss).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


class Normalised(nn.Module):
    """Convolution and batch norm, whose statistics move once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x.transpose(1, 2))).relu().transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


@torch.library.custom_op("embrace_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2.0


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, g: g * 2.0)


class Odd(nn.Module):
    """A custom op, numbers drawn without gradients, a value that is used twice, a selection by values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = doubled(self.linear(x)).sigmoid()
        with torch.no_grad():
            noise = torch.rand_like(x) * h.mean()
        y = torch.nn.functional.dropout(h, 0.3) * h + noise
        return torch.where(y > 0.5, y, h.exp()) + torch.randn(WIDTH)
