"""Models of the `transformers` library, built from tiny configurations, train as in the single-process reference.

They bring what no model of ours does: batches that are dicts, results that are objects with a `.loss`, caches of keys
and values among the results, masks made of sizes, log messages in the forward. Lengths differ between steps and ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import embrace_fx
from embrace_fx.integrations.accelerate import EmbraceAccelerator
from tests.support.hugging_face import LONG, TRAININGS
from tests.support.inside import entries_of, session_of
from tests.support.published_models import check

T5_BIASES = {f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for part in ("encoder", "decoder")}
"""Tables too, of a row per distance; what they are looked up with follows from the sizes."""
SHARDED_IN_LONG = {
    "bert, large table": {f"bert.embeddings.{of}_embeddings.weight" for of in ("word", "position", "token_type")},
    "gpt2, large untied tables": {"transformer.wte.weight", "transformer.wpe.weight"},
    "gpt2 without cache": {"transformer.wpe.weight"},
    "t5": T5_BIASES,
    "marian": {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"},
    "bart": {f"model.{part}.embed_{of}.weight" for part in ("encoder", "decoder") for of in ("tokens", "positions")},
}


@pytest.mark.long
def test_bert_answers_questions() -> None:
    trained = check(TRAININGS["bert"])
    tables = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    assert trained.sharded == {f"bert.embeddings.{table}.weight" for table in tables}
    assert trained.captures == 2  # the first length, and all others
    assert trained.result == ("QuestionAnsweringModelOutput", ("loss", "start_logits", "end_logits"))


@pytest.mark.long
def test_gpt2_keeps_its_tied_table_data_parallel() -> None:
    trained = check(TRAININGS["gpt2"])
    assert trained.sharded == {"transformer.wpe.weight"}
    assert "dense" in trained.plan["transformer.wte.weight"].reason
    assert trained.captures == 2
    name, (*keys, cache) = trained.result
    assert (name, keys) == ("CausalLMOutputWithCrossAttentions", ["loss", "logits"])
    assert cache in ("past_key_values", "cache")  # the latter since transformers 5.24


@pytest.mark.long
def test_t5_keeps_its_tied_table_data_parallel() -> None:
    trained = check(TRAININGS["t5"])
    assert trained.sharded == T5_BIASES
    assert "dense" in trained.plan["shared.weight"].reason
    assert trained.captures == 2
    assert trained.result == ("Seq2SeqLMOutput", ("loss", "logits", "encoder_last_hidden_state"))


@pytest.mark.long
def test_marian_translates_with_untied_tables() -> None:
    trained = check(TRAININGS["marian"])
    assert trained.sharded == {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    assert trained.captures == 2


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "routes"), [("auto", ["graph"]), ("alltoall", ["graph", "graph"])])
def test_evaluation_returns_the_objects_that_the_model_returns(strategy: str, routes: list[str]) -> None:
    training = TRAININGS["gpt2"]
    model, eager = training.make_model(), training.make_model()
    compiled = embrace_fx.compile(model, optimizer=training.optimizer(model.parameters()), strategy=strategy)
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
    captured = [entry.captured.route for entry in entries_of(session_of(compiled))]
    assert captured == routes  # the log message in its forward notwithstanding; no table sharded: as written


def _assert_same_cache(found: Any, expected: Any) -> None:
    assert type(found) is type(expected) is transformers.DynamicCache
    assert found.get_seq_length() == expected.get_seq_length()
    for found_layer, expected_layer in zip(found.layers, expected.layers, strict=True):
        assert isinstance(expected_layer, transformers.DynamicLayer)
        assert type(found_layer) is type(expected_layer)
        assert found_layer.keys is not None
        assert expected_layer.keys is not None
        assert found_layer.keys.dtype == expected_layer.keys.dtype
        torch.testing.assert_close(found_layer.keys, expected_layer.keys, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_further_models_match_the_reference(name: str) -> None:
    trained = check(LONG[name])
    assert trained.sharded == SHARDED_IN_LONG.get(name, set())
    assert trained.captures == 2


def test_a_trainer_smooths_shifted_labels_as_of_the_plain_model() -> None:
    """By the class of what it unwraps, it knows a causal model, whose labels it shifts."""
    model = TRAININGS["gpt2"].make_model()
    accelerator = EmbraceAccelerator(cpu=True)
    assert accelerator.unwrap_model(accelerator.prepare_model(model)) is model
    assert accelerator.unwrap_model(model) is model
