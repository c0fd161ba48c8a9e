"""What a model is called with and what it returns: objects, optional and keyword arguments, packed and nested tensors.

Shape legend
    B examples; T words of each; D columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.optim import SGD
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

import embrace_fx
from tests.support.beside import check
from tests.support.ranks import run_ranks

B, T, D = 4, 5, 8


@dataclass
class Sample:
    ids: Tensor
    weight: Tensor
    name: str = "plain"


@dataclass
class Output:
    loss: Tensor
    rows: Tensor
    extra: Tensor | None = None


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Holder:
    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self.note = "held"


class Slotted:
    __slots__ = ("ids",)

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(50, D)
        self.rnn = nn.LSTM(D, D, batch_first=True)

    def encode(self, ids_BT: Tensor) -> Tensor:
        return self.rnn(self.words(ids_BT))[0].mean(1)


class OfDataclass(Words):
    def forward(self, sample: Sample) -> Output:
        rows_BD = self.encode(sample.ids) * sample.weight[:, None] * (2 if sample.name == "heavy" else 1)
        return Output(rows_BD.square().mean(), rows_BD)


class OfEncoding(Words):
    def forward(self, encoding: BatchEncoding) -> BaseModelOutput:
        rows_BD = self.encode(encoding["input_ids"]) * encoding["attention_mask"].sum(1, keepdim=True)
        return BaseModelOutput(last_hidden_state=rows_BD.square().mean(), hidden_states=(rows_BD,))


class OfObjects(Words):
    def forward(self, holder: Holder, pairs: dict[str, list[Pair]], scale: Tensor | None = None) -> Any:
        rows_BD = self.encode(holder.ids) + self.encode(pairs["all"][0].first)
        if scale is not None:
            rows_BD = rows_BD * scale
        return rows_BD.square().mean(), None, {"rows": [rows_BD]}


class OfPacked(Words):
    def forward(self, ids: PackedSequence) -> Tensor:
        _, (last, _) = self.rnn(PackedSequence(self.words(ids.data), *ids[1:]))
        return last.square().mean()


class OfJagged(Words):
    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(self.words(ids), offsets)
        rnn: Any = self.rnn
        weight, bias = rnn.weight_hh_l0, rnn.bias_hh_l0
        found: Tensor = nn.functional.linear(rows, weight, bias).values().square().mean()
        return found + sum(parameter.sum() for parameter in self.rnn.parameters())


def draw(rank: int, step: int) -> tuple[Tensor, list[int]]:
    random = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(50, (B, T), generator=random), torch.randint(1, T + 1, (B,), generator=random).tolist()


def parts(rank: int, step: int) -> list[Tensor]:
    ids_BT, lengths = draw(rank, step)
    return [row[:length] for row, length in zip(ids_BT, lengths, strict=True)]


def objects(rank: int, step: int) -> Any:
    ids_BT, _ = draw(rank, step)
    scale = {} if step == 1 else {"scale": torch.tensor(1.0 + step)}
    return (Holder(ids_BT), {"all": [Pair(ids_BT.flip(1), ids_BT)]}), scale


def jagged(rank: int, step: int) -> Any:
    own = parts(rank, step)
    ends = torch.tensor([0, *map(len, own)]).cumsum(0)
    return (torch.cat(own), ends), {}


def of_result(get: Callable[[int, int], Any], loss_of: Callable[[Any], Tensor]) -> Callable[[Any, int], list[Tensor]]:
    """A loop over arguments whose loss is one of a result's values."""

    def loop(model: Any, rank: int) -> list[Tensor]:
        optimizer, losses = SGD(model.parameters(), lr=0.3), []
        for step in range(3):
            args, kwargs = get(rank, step)
            loss = loss_of(model(*args, **kwargs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return loop


def samples(rank: int, step: int) -> Any:
    return (Sample(draw(rank, step)[0], torch.ones(B) + step, ("plain", "heavy")[step % 2]),), {}


def encodings(rank: int, step: int) -> Any:
    return (BatchEncoding({"input_ids": draw(rank, step)[0], "attention_mask": torch.ones(B, T)}),), {}


def packed(rank: int, step: int) -> Any:
    return (pack_sequence(parts(rank, step), enforce_sorted=False),), {}


CASES = {
    "a dataclass": (OfDataclass, of_result(samples, lambda found: found.loss + found.rows.mean())),
    "an encoding": (
        OfEncoding,
        of_result(encodings, lambda found: found.last_hidden_state + found["hidden_states"][0].mean()),
    ),
    "objects": (OfObjects, of_result(objects, lambda found: found[0] + found[2]["rows"][0].mean())),
    "a packed sequence": (OfPacked, of_result(packed, lambda found: found)),
    "a jagged tensor": (OfJagged, of_result(jagged, lambda found: found)),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_arguments_and_results_in_any_form_train_as_under_ddp() -> None:
    check(__name__, strategy="alltoall", rtol=1e-5)


class PacksItself(Words):
    def forward(self, ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(ids_BT), lengths_B, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.rnn(packed)
        return last.square().mean()


class OfOneValue(Words):
    def forward(self, value: Any) -> Tensor:
        ids = value.ids if isinstance(value, Slotted) else value.values() if isinstance(value, Tensor) else None
        found: Tensor = self.words(torch.zeros(2, dtype=torch.int64) if ids is None else ids).mean()
        return found if value is Pair or callable(value) else -found


def told(model: nn.Module, *args: Any) -> str:
    with pytest.raises(embrace_fx.CaptureError) as caught:
        embrace_fx.compile(model, strategy="alltoall", route="graph")(*args)
    return str(caught.value)


def refuse(rank: int, world_size: int) -> list[str]:
    ids_BT, lengths = draw(rank, 0)
    nested = torch.nested.nested_tensor(parts(rank, 0), layout=torch.jagged)
    return [
        told(PacksItself(), ids_BT, torch.tensor(lengths)),
        told(OfOneValue(), nested),
        told(OfOneValue(), Slotted(ids_BT)),
        told(OfOneValue(), ids_BT.to_sparse()),
        told(OfOneValue(), ids_BT.to_sparse_csr()),
        told(OfOneValue(), Pair),
        told(OfOneValue(), nn.ReLU()),
    ]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning", "ignore:Sparse CSR tensor:UserWarning")
def test_others_are_refused_with_what_to_do() -> None:
    expected = (
        ("pack_padded_sequence()", "test_arguments.py"),
        ("is a NestedTensor",),
        ("of type Slotted has tensors in __slots__",),
        ("is a sparse tensor",),
        ("is a sparse tensor (torch.sparse_csr)",),
        ("is the class Pair", "attribute of the model"),
        ("is a ReLU", "attribute of the model"),
    )
    for found in run_ranks(2, refuse):
        for line, words in zip(found, expected, strict=True):
            assert all(word in line for word in words), line
