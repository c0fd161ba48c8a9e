"""Models of the `transformers` library from tiny configurations, with their optimizers and batches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import transformers
from torch import nn
from torch.optim import SGD, AdamW

from tests.support.published_models import ADAGRAD, ADAM, FOUR, NUM_WORDS, PAD, SGD_01, START, THREE, Training
from tests.support.question_answering import make_bert

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
# Each is captured twice: for the first length, and with symbolic sizes, which takes three times as long. The pairs of
# encoder and decoder are one layer deep here.
TRAININGS = {
    "bert": Training(BERT, "question", ADAGRAD, FOUR),
    "gpt2": Training(make_gpt2, "language", ADAM, FOUR),
    "t5": Training(partial(make_t5, 1), "translation", SGD_01, THREE, {"use_cache": False}),
    "marian": Training(partial(make_marian, 1), "translation", SGD_01, THREE),
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
