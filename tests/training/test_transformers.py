"""Models of the `transformers` library, built from tiny configurations, train as in the single-process reference.

They bring what no model of ours does: batches that are dicts, results that are objects with a `.loss`, caches of keys
and values among the results, masks made of sizes, log messages in the forward. Lengths differ between steps and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import embrace_fx
from tests.support.published_models import (
    ADAGRAD,
    ADAM,
    FOUR,
    NUM_WORDS,
    PAD,
    SGD_01,
    START,
    THREE,
    Training,
    check,
)
from tests.support.question_answering import make_bert
from tests.support.reference import assert_same

_ENCODER_DECODER: Mapping[str, Any] = {
    "d_model": 32,
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


def make_gpt2(num_words: int = NUM_WORDS, *, tied: bool = True) -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(
        vocab_size=num_words,
        tie_word_embeddings=tied,
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


def make_t5(layers: int = 2) -> nn.Module:
    general: dict[str, Any] = {"decoder_start_token_id": PAD}
    config = transformers.T5Config(
        vocab_size=NUM_WORDS,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=layers,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=PAD,
        **general,
    )
    return transformers.T5ForConditionalGeneration(config)


def make_marian(layers: int = 2) -> nn.Module:
    """Source and target have tables of their own, and so has the softmax."""
    config = transformers.MarianConfig(
        vocab_size=NUM_WORDS,
        decoder_vocab_size=NUM_WORDS,
        share_encoder_decoder_embeddings=False,
        encoder_layers=layers,
        decoder_layers=layers,
        **_ENCODER_DECODER,
    )
    return transformers.MarianMTModel(config)


def make_bart() -> nn.Module:
    """As Marian, with positions that are learnt."""
    config = transformers.BartConfig(vocab_size=NUM_WORDS, encoder_layers=2, decoder_layers=2, **_ENCODER_DECODER)
    return transformers.BartForConditionalGeneration(config)


BERT = partial(make_bert, NUM_WORDS, hidden=32, intermediate=64, layers=2, max_length=64)
ADAMW = partial(AdamW, lr=0.01, eps=1e-3, weight_decay=0.05)
MANY_WORDS = 5000
"""Rows of a table, of which batches read `NUM_WORDS`: all others move by weight decay alone."""
# Symbolic sizes make a capture three times as long: the pairs of encoder and decoder, one layer deep here, go through
# it once, the others twice (first length, then all lengths).
TRAININGS = {
    "bert": Training(BERT, "question", ADAGRAD, FOUR),
    "gpt2": Training(make_gpt2, "language", ADAM, FOUR),
    "t5": Training(partial(make_t5, 1), "translation", SGD_01, THREE, {"use_cache": False}, dynamic=True),
    "marian": Training(partial(make_marian, 1), "translation", SGD_01, THREE, dynamic=True),
}
LONG = {
    "t5": Training(make_t5, "translation", partial(SGD, lr=0.1, momentum=0.9), THREE),
    "marian": Training(make_marian, "translation", ADAGRAD, THREE),
    "bart": Training(make_bart, "translation", SGD_01, THREE),
    "bert, large table": Training(
        partial(make_bert, MANY_WORDS, hidden=32, intermediate=64, layers=2, max_length=64), "question", ADAMW, FOUR
    ),
    "gpt2, large untied tables": Training(partial(make_gpt2, MANY_WORDS, tied=False), "language", ADAMW, FOUR),
    "gpt2 without cache": Training(make_gpt2, "language", ADAM, THREE, {"use_cache": False}),
}
T5_BIASES = {f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for part in ("encoder", "decoder")}
"""Tables too, of a row per distance; what they are looked up with follows from the sizes."""
SHARDED_IN_LONG = {
    "bert, large table": {f"bert.embeddings.{of}_embeddings.weight" for of in ("word", "position", "token_type")},
    "gpt2, large untied tables": {"transformer.wte.weight", "transformer.wpe.weight"},
    "marian": {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"},
    "bart": {f"model.{part}.embed_{of}.weight" for part in ("encoder", "decoder") for of in ("tokens", "positions")},
}


def test_bert_answers_questions() -> None:
    trained = check(TRAININGS["bert"])
    tables = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    assert trained.sharded == {f"bert.embeddings.{table}.weight" for table in tables}
    assert trained.captures == 2  # the first length, and all others
    assert trained.result == ("QuestionAnsweringModelOutput", ("loss", "start_logits", "end_logits"))


@pytest.mark.long
def test_gpt2_keeps_its_tied_table_data_parallel() -> None:
    trained = check(TRAININGS["gpt2"])
    assert trained.sharded == set()
    assert "dense" in trained.plan["transformer.wte.weight"].reason
    assert trained.captures == 2
    assert trained.result == ("CausalLMOutputWithCrossAttentions", ("loss", "logits", "past_key_values"))


@pytest.mark.long
def test_t5_keeps_its_tied_table_data_parallel() -> None:
    trained = check(TRAININGS["t5"])
    assert trained.sharded == T5_BIASES
    assert "dense" in trained.plan["shared.weight"].reason
    assert trained.captures == 1
    assert trained.result == ("Seq2SeqLMOutput", ("loss", "logits", "encoder_last_hidden_state"))


@pytest.mark.long
def test_marian_translates_with_untied_tables() -> None:
    trained = check(TRAININGS["marian"])
    assert trained.sharded == {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    assert trained.captures == 1


def test_autocast_computes_the_loss_and_the_gradients_of_eager_autocast() -> None:
    training = TRAININGS["bert"]
    model, eager = training.make_model(torch.float32), training.make_model(torch.float32)
    compiled = embrace_fx.compile(model, optimizer=training.optimizer(model.parameters()), strategy="alltoall")
    optimizer = training.optimizer(eager.parameters())

    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(**training.batch(0, 0)), eager(**training.batch(0, 0))
    assert found.start_logits.dtype == expected.start_logits.dtype == torch.bfloat16
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-2)

    found.loss.backward()
    expected.loss.backward()
    compiled.optimizer.step()
    optimizer.step()
    wanted = eager.get_parameter("qa_outputs.weight")
    torch.testing.assert_close(model.get_parameter("qa_outputs.weight"), wanted, rtol=0.02, atol=2e-3)


def test_evaluation_returns_the_objects_that_the_model_returns() -> None:
    training = TRAININGS["gpt2"]
    model, eager = training.make_model(), training.make_model()
    compiled = embrace_fx.compile(model, optimizer=training.optimizer(model.parameters()))
    found, expected = compiled(**training.batch(0, 0)), eager(**training.batch(0, 0))
    _assert_same_cache(found.past_key_values, expected.past_key_values)

    compiled.eval()
    eager.eval()
    with torch.no_grad():
        found, expected = compiled(**training.batch(1, 0)), eager(**training.batch(1, 0))
    assert type(found) is type(expected)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-9, atol=1e-12)
    assert not found.loss.requires_grad
    _assert_same_cache(found.past_key_values, expected.past_key_values)
    routes = [variant.captured.route for kind in compiled._session._kinds.values() for variant in kind.variants]
    assert routes == ["dynamo", "dynamo"]  # the log message in its forward notwithstanding


def _assert_same_cache(found: Any, expected: Any) -> None:
    assert type(found) is type(expected) is transformers.DynamicCache
    assert found.get_seq_length() == expected.get_seq_length()
    for found_layer, expected_layer in zip(found.layers, expected.layers, strict=True):
        assert isinstance(expected_layer, transformers.DynamicLayer)
        assert type(found_layer) is type(expected_layer)
        assert found_layer.dtype == expected_layer.dtype
        torch.testing.assert_close(found_layer.keys, expected_layer.keys, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    training = TRAININGS["gpt2"]
    model, eager = make_gpt2().double(), training.make_model()
    model.load_state_dict(eager.state_dict())
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
    compiled = embrace_fx.compile(model)
    batch = training.batch(0, 0) | {"use_cache": False}
    compiled(**batch).loss.backward()
    eager(**batch).loss.backward()
    assert_same(_gradients(model), _gradients(eager), torch.float64)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_further_models_match_the_reference(name: str) -> None:
    trained = check(LONG[name])
    assert trained.sharded == SHARDED_IN_LONG.get(name, set())
    assert trained.captures == 2
