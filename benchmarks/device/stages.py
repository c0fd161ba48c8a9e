"""The lab's models as stages: what each reads, what it makes, and its parameters.

A stage is what a framework runs as one layer, and what an emulated device runs as one block. Run one after the other,
on the rows that a batch reads, a model's stages compute its loss; `run` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.base import Batch, TableModel
from benchmarks.models.bert import Bert
from benchmarks.models.gnmt import Gnmt
from benchmarks.models.language_model import LanguageModel
from benchmarks.models.recommender import Recommender
from benchmarks.models.transformer import Transformer


@dataclass(frozen=True)
class Stage:
    """One layer.

    Attributes:
        reads: names of the lookups whose rows it reads, and of the earlier stages whose outputs it reads.
        call: function of the batch and of the values read.
        parameters: the parameters that no other stage has.
    """

    name: str
    reads: tuple[str, ...]
    call: Callable[..., Tensor]
    parameters: tuple[nn.Parameter, ...] = ()


def stages(model: TableModel) -> tuple[Stage, ...]:
    """Returns the stages of a model, in the order of its forward. The last one computes the loss."""
    return tuple(_STAGES[type(model)](model))


def run(model: TableModel, rows: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
    """Computes the loss from the rows of every lookup, as `model.loss` does."""
    values = dict(rows)
    for stage in stages(model):
        values[stage.name] = stage.call(batch, *(values[name] for name in stage.reads))
    return values[stage.name]


def _of(name: str, reads: tuple[str, ...], module: nn.Module, call: Callable[..., Tensor]) -> Stage:
    """Returns a stage with the parameters of a module."""
    return Stage(name, reads, call, tuple(module.parameters()))


def _rnn(name: str, read: str, lstm: nn.LSTM) -> Stage:
    return _of(name, (read,), lstm, lambda _, x: lstm(x)[0])


def _language_model(model: LanguageModel) -> list[Stage]:
    lstm, read, found = model.lstm, "input", []
    for k in range(lstm.num_layers):
        layer = nn.LSTM(lstm.proj_size or lstm.input_size, lstm.hidden_size, proj_size=lstm.proj_size, batch_first=True)
        for name in [name for name, _ in layer.named_parameters()]:
            setattr(layer, name, getattr(lstm, name.replace("_l0", f"_l{k}")))
        found.append(_rnn(f"lstm{k}", read, layer))
        read = f"lstm{k}"
    return [*found, Stage("softmax", (read, "target", "sampled"), model.of_words)]


def _transformer(model: Transformer) -> list[Stage]:
    def placed(x: Tensor) -> Tensor:
        return x * model.scale + model.positions_LD[: x.shape[1]]

    def encode(layer: nn.Module, first: bool, _: Batch, x: Tensor) -> Tensor:
        made: Tensor = layer(placed(x) if first else x)
        return made

    def decode(layer: nn.Module, first: bool, _: Batch, x: Tensor, memory: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        made: Tensor = layer(placed(x) if first else x, memory, tgt_mask=later)
        return made

    def loss(batch: Batch, x: Tensor) -> Tensor:
        return F.cross_entropy(model.project(x).flatten(0, 1), batch[1][:, 1:].flatten())

    found, read = [], "source"
    for k, layer in enumerate(model.encoder):
        found.append(_of(f"encoder{k}", (read,), layer, partial(encode, layer, k == 0)))
        read = f"encoder{k}"
    memory, read = read, "target"
    for k, layer in enumerate(model.decoder):
        found.append(_of(f"decoder{k}", (read, memory), layer, partial(decode, layer, k == 0)))
        read = f"decoder{k}"
    return [*found, _of("project", (read,), model.project, loss)]


def _bert(model: Bert) -> list[Stage]:
    def embed(batch: Batch, words: Tensor) -> Tensor:
        of_segment = torch.where(batch[1].unsqueeze(-1), model.segments_2D[1], model.segments_2D[0])
        made: Tensor = model.norm(words + model.positions_LD[: words.shape[1]] + of_segment)
        return made

    def loss(batch: Batch, x: Tensor) -> Tensor:
        start, end = model.answer(x).unbind(-1)
        return (F.cross_entropy(start, batch[2]) + F.cross_entropy(end, batch[3])) / 2

    own = (model.positions_LD, model.segments_2D, *model.norm.parameters())
    found, read = [Stage("embed", ("words",), embed, own)], "embed"
    for k, layer in enumerate(model.layers):
        found.append(_of(f"layer{k}", (read,), layer, lambda _, x, layer=layer: layer(x)))
        read = f"layer{k}"
    return [*found, _of("answer", (read,), model.answer, loss)]


def _gnmt(model: Gnmt) -> list[Stage]:
    def residual(lstm: nn.LSTM, _: Batch, x: Tensor) -> Tensor:
        found: Tensor = x + lstm(x)[0]
        return found

    def decode(lstm: nn.LSTM, first: bool, _: Batch, x: Tensor, context: Tensor) -> Tensor:
        made: Tensor = lstm(torch.cat([x, context], -1))[0]
        return made if first else x + made

    def loss(batch: Batch, x: Tensor) -> Tensor:
        return F.cross_entropy(model.classify(x).flatten(0, 1), batch[1][:, 1:].flatten())

    found, read = [_rnn("both_ways", "source", model.encode_both_ways)], "both_ways"
    for k, lstm in enumerate(model.encode):
        assert isinstance(lstm, nn.LSTM)
        one = _rnn(f"encode{k}", read, lstm)
        found.append(one if k == 0 else _of(f"encode{k}", (read,), lstm, partial(residual, lstm)))
        read = f"encode{k}"
    found.append(_rnn("attend_from", "target", model.attend_from))
    attend = model.attention
    found.append(_of("attention", ("attend_from", read), attend, lambda _, query, keys: attend(query, keys)))
    read = "attend_from"
    for k, lstm in enumerate(model.decode):
        assert isinstance(lstm, nn.LSTM)
        found.append(_of(f"decode{k}", (read, "attention"), lstm, partial(decode, lstm, k == 0)))
        read = f"decode{k}"
    return [*found, _of("classify", (read,), model.classify, loss)]


def _recommender(model: Recommender) -> list[Stage]:
    def interact(_: Batch, dense: Tensor, *rows: Tensor) -> Tensor:
        return model.interact(dense, list(rows))

    def loss(batch: Batch, x: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model.click(x).squeeze(-1), batch[2])

    def layers(name: str, perceptron: nn.Sequential, read: str | None) -> tuple[list[Stage], str]:
        found = []
        for k, linear in enumerate(list(perceptron)[::2]):
            reads = () if read is None else (read,)
            found.append(_of(f"{name}{k}", reads, linear, partial(_rectified, linear)))
            read = f"{name}{k}"
        assert read is not None
        return found, read

    bottom, of_dense = layers("bottom", model.bottom, None)
    top, of_top = layers("top", model.top, "interaction")
    products = Stage("interaction", (of_dense, *model.categories), interact)
    return [*bottom, products, *top, _of("click", (of_top,), model.click, loss)]


def _rectified(linear: nn.Module, batch: Batch, x: Tensor | None = None) -> Tensor:
    made: Tensor = linear(batch[0] if x is None else x)
    return made.relu()


_STAGES: dict[type[TableModel], Callable[[Any], list[Stage]]] = {
    LanguageModel: _language_model,
    Transformer: _transformer,
    Bert: _bert,
    Gnmt: _gnmt,
    Recommender: _recommender,
}
