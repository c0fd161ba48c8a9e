"""Models of the `transformers` library, built from tiny configurations, train as under DistributedDataParallel.

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
from tests.support.beside import Case, check
from tests.support.hugging_face import TRAININGS
from tests.support.inside import captures_of, entries_of, session_of

BERT = {f"bert.embeddings.{of}_embeddings.weight" for of in ("word", "position", "token_type")}
SHARDED = {
    "bert": BERT,
    "bert, large table": BERT,
    "gpt2": {"transformer.wpe.weight"},  # the tied table of GPT-2 is not sharded
    "gpt2, large untied tables": {"transformer.wte.weight", "transformer.wpe.weight"},
    "gpt2 without cache": {"transformer.wpe.weight"},
    # T5's position biases are tables with a row per distance, whose ids depend only on sizes.
    "t5": {f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for part in ("encoder", "decoder")},
    "marian": {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"},
    "bart": {f"model.{part}.embed_{of}.weight" for part in ("encoder", "decoder") for of in ("tokens", "positions")},
}


def _case(name: str) -> Case:
    training = TRAININGS[name]

    def train(model: Any, rank: int) -> list[Any]:
        optimizer, found = training.optimizer(model.parameters()), []
        for step in range(training.steps):
            result = model(**training.batch(step, rank))
            result.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [result.loss.detach(), type(result).__name__, *result.keys()]
        if isinstance(model, embrace_fx.CompiledModel):
            assert {each.parameter for each in model.plan if each.strategy == "alltoall"} == SHARDED[name]
            assert captures_of(model) == 2  # one for the first length, one for all others
        return found

    return training.make_model, train


CASES = {name: _case(name) for name in TRAININGS}


@pytest.mark.long
@pytest.mark.parametrize("name", TRAININGS)
def test_published_models_end_where_ddp_does(name: str) -> None:
    ddp = {"find_unused_parameters": name == "bart"}  # BART has a table that its forward never reads
    check(__name__, name, ddp=ddp, rtol=1e-9, strategy="alltoall")


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
    assert captured == routes  # a forward that logs can be captured; without tables to shard, it runs eagerly


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


def test_a_trainer_smooths_shifted_labels_as_of_the_plain_model() -> None:
    """By the class of what it unwraps, it knows a causal model, whose labels it shifts."""
    model = TRAININGS["gpt2"].make_model()
    accelerator = EmbraceAccelerator(cpu=True)
    compiled = accelerator.prepare_model(model)
    assert accelerator.unwrap_model(compiled) is model
    assert accelerator.unwrap_model(model) is model
    assert accelerator.prepare_model(compiled) is compiled
    assert accelerator._models[-1] is compiled
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
