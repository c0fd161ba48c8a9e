"""Models of the `transformers` library, built from tiny configurations, train as in the single-process reference.

They bring what no model of ours does: batches that are dicts, results that are objects with a `.loss`, caches of keys
and values among the results, masks made of sizes, log messages in the forward. Lengths differ between steps and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import embrace_fx
from embrace_fx.plan import Decision
from tests.ranks import run_ranks
from tests.reference import assert_same, train_reference
from tests.training import whole

NUM_WORDS = 120
PAD, START = 0, 1
IGNORED = -100
BATCH_SIZE = 3
TIMEOUT_S = 110.0
Batch = dict[str, Any]

_ENCODER_DECODER: Mapping[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": 2,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}


def make_bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=NUM_WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForQuestionAnswering(config)


def make_gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=NUM_WORDS,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=START,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def make_t5(tied: bool = True) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=NUM_WORDS,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
        tie_word_embeddings=tied,
    )
    return transformers.T5ForConditionalGeneration(config)


def make_marian() -> nn.Module:
    """Source and target have tables of their own, and so has the softmax."""
    config = transformers.MarianConfig(
        vocab_size=NUM_WORDS, decoder_vocab_size=NUM_WORDS, share_encoder_decoder_embeddings=False, **_ENCODER_DECODER
    )
    return transformers.MarianMTModel(config)


def make_bart() -> nn.Module:
    """Source and target share a table, the softmax has its own."""
    return transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=NUM_WORDS, **_ENCODER_DECODER))


@dataclass(frozen=True)
class Training:
    """A model, its optimizer, and its batches: `lengths[rank][step]` tokens in the longest example.

    Attributes:
        kind: what a batch holds beside the ids: "question" (start and end), "language" or "translation" (labels).
        extra: further arguments of the model's call.
    """

    make: Callable[[], nn.Module]
    kind: str
    optimizer: Callable[..., Optimizer]
    lengths: tuple[tuple[int, ...], ...]
    extra: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None

    @property
    def steps(self) -> int:
        return len(self.lengths[0])

    def make_model(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().train().to(dtype)

    def batch(self, step: int, rank: int) -> Batch:
        return make_batch(self.kind, self.lengths[rank][step], 100 * step + rank) | dict(self.extra)


def make_batch(kind: str, length: int, seed: int) -> Batch:
    """Padded examples: the first is `length` tokens long, the others shorter."""
    random = torch.Generator().manual_seed(seed)

    def text(longest: int, padding: int) -> tuple[Tensor, Tensor]:
        real = torch.randint(max(1, longest // 2), longest + 1, (BATCH_SIZE,), generator=random)
        real[0] = longest
        mask = (torch.arange(longest) < real.unsqueeze(1)).long()
        ids = torch.randint(3, NUM_WORDS, mask.shape, generator=random)
        return torch.where(mask.bool(), ids, padding), mask

    ids, mask = text(length, PAD)
    batch: Batch = {"input_ids": ids, "attention_mask": mask}
    if kind == "question":
        batch["start_positions"] = torch.randint(0, length, (BATCH_SIZE,), generator=random)
        batch["end_positions"] = torch.randint(0, length, (BATCH_SIZE,), generator=random)
    elif kind == "language":
        batch["labels"] = torch.where(mask.bool(), ids, IGNORED)
    else:
        batch["labels"] = text(length + 2, IGNORED)[0]
    return batch


TRAININGS = {
    "bert": Training(make_bert, "question", partial(Adagrad, lr=0.05, eps=1e-3), ((9, 12, 7, 9), (11, 6, 8, 10))),
    "gpt2": Training(make_gpt2, "language", partial(Adam, lr=0.01, eps=1e-3), ((9, 12, 7, 9), (11, 6, 8, 10))),
    "t5": Training(
        make_t5,
        "translation",
        partial(SGD, lr=0.1, momentum=0.9),
        ((9, 5, 8), (6, 10, 7)),
        extra={"use_cache": False},
        dynamic=True,
    ),
    "marian": Training(make_marian, "translation", partial(SGD, lr=0.1), ((9, 5, 8), (6, 10, 7)), dynamic=True),
}
LONG = {
    "t5 with cache": Training(make_t5, "translation", partial(SGD, lr=0.1), ((9, 5, 8), (6, 10, 7))),
    "t5 untied": Training(partial(make_t5, tied=False), "translation", partial(SGD, lr=0.1), ((9, 5, 8), (6, 10, 7))),
    "bart": Training(make_bart, "translation", partial(Adagrad, lr=0.05, eps=1e-3), ((9, 5, 8), (6, 10, 7))),
    "gpt2 without cache": Training(
        make_gpt2, "language", partial(Adam, lr=0.01, eps=1e-3), ((9, 12), (11, 6)), extra={"use_cache": False}
    ),
}


@dataclass(frozen=True)
class Trained:
    """What a rank has after training.

    Attributes:
        losses: one per step.
        captures: how many graphs were captured.
        result: type of a result, and its fields.
    """

    parameters: dict[str, Tensor]
    plan: dict[str, Decision]
    losses: list[float]
    captures: int
    result: tuple[str, tuple[str, ...]]

    @property
    def sharded(self) -> set[str]:
        return {name for name, decision in self.plan.items() if decision.strategy == "alltoall"}


def train_compiled(rank: int, world_size: int, training: Training) -> Trained:
    """Trains a compiled model as a user would, from initial values that only rank 0 has right."""
    model = training.make_model(seed=rank)
    optimizer = training.optimizer(model.parameters())
    compiled = embrace_fx.compile(model, optimizer=optimizer, strategy="alltoall", dynamic=training.dynamic)
    losses = []
    for step in range(training.steps):
        result = compiled(**training.batch(step, rank))
        result.loss.backward()
        compiled.optimizer.step()
        compiled.optimizer.zero_grad()
        losses.append(result.loss.item())
    plan = {decision.parameter: decision for decision in compiled.plan}
    kind = type(result).__name__, tuple(result.keys())
    return Trained(whole(compiled.named_parameters()), plan, losses, compiled._session._captures, kind)


class LossOnly(nn.Module):
    """A model whose forward returns its loss, as the reference wants it; `losses` are those of all calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def forward(self, **batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss


def _check(training: Training) -> Trained:
    """Trains on two ranks and asserts losses and parameters of the reference; returns what rank 0 has."""
    results = run_ranks(2, train_compiled, training, timeout_s=TIMEOUT_S)
    reference = LossOnly(training.make_model())
    batches = [[training.batch(step, rank) for step in range(training.steps)] for rank in range(2)]
    expected = train_reference(
        lambda: reference, lambda model: [training.optimizer(model.parameters())], batches, training.steps
    )
    for rank, result in enumerate(results):
        assert result.losses == pytest.approx(reference.losses[rank::2], rel=1e-9)
        assert_same(result.parameters, {n.removeprefix("model."): v for n, v in expected.items()}, torch.float64)
        assert (result.plan, result.captures) == (results[0].plan, results[0].captures)
    return results[0]


def test_bert_answers_questions() -> None:
    trained = _check(TRAININGS["bert"])
    tables = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    assert trained.sharded == {f"bert.embeddings.{table}.weight" for table in tables}
    assert trained.captures == 2  # the first length, and all others
    assert trained.result == ("QuestionAnsweringModelOutput", ("loss", "start_logits", "end_logits"))


def test_gpt2_keeps_its_tied_table_data_parallel() -> None:
    trained = _check(TRAININGS["gpt2"])
    assert trained.sharded == set()
    assert "dense" in trained.plan["transformer.wte.weight"].reason
    assert trained.captures == 2
    assert trained.result == ("CausalLMOutputWithCrossAttentions", ("loss", "logits", "past_key_values"))


def test_t5_keeps_its_tied_table_data_parallel() -> None:
    trained = _check(TRAININGS["t5"])
    assert trained.sharded == set()
    assert "dense" in trained.plan["shared.weight"].reason
    assert trained.captures == 1
    assert trained.result == ("Seq2SeqLMOutput", ("loss", "logits", "encoder_last_hidden_state"))


def test_marian_translates_with_untied_tables() -> None:
    trained = _check(TRAININGS["marian"])
    assert trained.sharded == {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    assert trained.captures == 1


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_further_models_match_the_reference(name: str) -> None:
    trained = _check(LONG[name])
    assert trained.sharded == ({"model.shared.weight"} if name == "bart" else {"shared.weight"} if name == "t5 untied" else set())
    assert trained.captures == 2
