"""Models of the `transformers` library from tiny configurations, with their optimizers and batches.

Batches are dicts of padded examples, results are objects with a `.loss`; lengths differ between steps and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from tests.support.question_answering import make_bert

NUM_WORDS = 120
PAD, START = 0, 1
IGNORED = -100
BATCH_SIZE = 3

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


def make_gpt2(
    num_words: int = NUM_WORDS, *, tied: bool = True, width: int = 32, dropout: float = 0.0
) -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(
        vocab_size=num_words,
        tie_word_embeddings=tied,
        n_embd=width,
        n_layer=2,
        n_head=2,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=START,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def make_t5(num_words: int = NUM_WORDS, *, width: int = 32, dropout: float = 0.0) -> nn.Module:
    general: dict[str, Any] = {"decoder_start_token_id": PAD}
    config = transformers.T5Config(
        vocab_size=num_words,
        d_model=width,
        d_kv=width // 2,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        dropout_rate=dropout,
        pad_token_id=PAD,
        **general,
    )
    return transformers.T5ForConditionalGeneration(config)


def make_marian() -> nn.Module:
    """Makes a Marian model with separate tables for source, target and output layer."""
    config = transformers.MarianConfig(
        vocab_size=NUM_WORDS,
        decoder_vocab_size=NUM_WORDS,
        share_encoder_decoder_embeddings=False,
        encoder_layers=2,
        decoder_layers=2,
        **_ENCODER_DECODER,
    )
    return transformers.MarianMTModel(config)


def make_bart() -> nn.Module:
    """Makes a BART model, which has learned positions."""
    config = transformers.BartConfig(vocab_size=NUM_WORDS, encoder_layers=2, decoder_layers=2, **_ENCODER_DECODER)
    return transformers.BartForConditionalGeneration(config)


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

    @property
    def steps(self) -> int:
        return len(self.lengths[0])

    def make_model(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().train().to(dtype)

    def batch(self, step: int, rank: int) -> dict[str, Any]:
        return make_batch(self.kind, self.lengths[rank][step], 100 * step + rank) | dict(self.extra)


def make_batch(kind: str, length: int, seed: int) -> dict[str, Any]:
    """Padded examples: the first is `length` tokens long, the others shorter."""
    random = torch.Generator().manual_seed(seed)

    def text(longest: int, padding: int) -> tuple[Tensor, Tensor]:
        real = torch.randint(max(1, longest // 2), longest + 1, (BATCH_SIZE,), generator=random)
        real[0] = longest
        mask = (torch.arange(longest) < real.unsqueeze(1)).long()
        ids = torch.randint(3, NUM_WORDS, mask.shape, generator=random)
        return torch.where(mask.bool(), ids, padding), mask

    ids, mask = text(length, PAD)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if kind == "question":
        batch["start_positions"] = torch.randint(0, length, (BATCH_SIZE,), generator=random)
        batch["end_positions"] = torch.randint(0, length, (BATCH_SIZE,), generator=random)
    elif kind == "language":
        batch["labels"] = torch.where(mask.bool(), ids, IGNORED)
    else:
        batch["labels"] = text(length + 2, IGNORED)[0]
    return batch


BERT = partial(make_bert, NUM_WORDS, hidden=32, intermediate=64, layers=2, max_length=64)
SGD_01 = partial(SGD, lr=0.1)
ADAGRAD = partial(Adagrad, lr=0.05, eps=1e-3)
ADAM = partial(Adam, lr=0.01, eps=1e-3)
ADAMW = partial(AdamW, lr=0.01, eps=1e-3, weight_decay=0.05)
FOUR = ((9, 12, 7, 9), (11, 6, 8, 10))
THREE = ((9, 5, 8), (6, 10, 7))
MANY_WORDS = 5000
"""Rows of a table, of which batches read `NUM_WORDS`: all others move by weight decay alone."""
TRAININGS = {
    "bert": Training(BERT, "question", ADAGRAD, FOUR),
    "bert, large table": Training(
        partial(make_bert, MANY_WORDS, hidden=32, intermediate=64, layers=2, max_length=64), "question", ADAMW, FOUR
    ),
    "gpt2": Training(make_gpt2, "language", ADAM, FOUR),
    "gpt2, large untied tables": Training(partial(make_gpt2, MANY_WORDS, tied=False), "language", ADAMW, FOUR),
    "gpt2 without cache": Training(make_gpt2, "language", ADAM, THREE, {"use_cache": False}),
    "t5": Training(make_t5, "translation", partial(SGD, lr=0.1, momentum=0.9), THREE, {"use_cache": False}),
    "marian": Training(make_marian, "translation", ADAGRAD, THREE),
    "bart": Training(make_bart, "translation", SGD_01, THREE),
}
