"""Published language models, tiny, whose output layer is the word table or as large, and their batches.

Lengths, and how many positions are scored, differ by rank. A model that sums its losses meets a batch without any
scored position, too: the last rank's in the second step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.support.hugging_face import make_gpt2, make_t5
from tests.support.question_answering import draw_zeros

NUM_WORDS = 67
IGNORED = -100
_WIDTH, _LAYERS = 16, 2
Batch = dict[str, Any]

_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_BERT: dict[str, Any] = {
    "vocab_size": NUM_WORDS,
    "hidden_size": _WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
_LLAMA: Mapping[str, Any] = {
    **_BERT,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _sized(make: Callable[..., nn.Module]) -> Callable[[float], nn.Module]:
    return lambda dropout: make(NUM_WORDS, width=_WIDTH, dropout=dropout)


def _bert(dropout: float) -> nn.Module:
    options = _BERT | dict.fromkeys(_DROPOUTS, dropout)
    return transformers.BertForMaskedLM(transformers.BertConfig(**options))


def _xlm_roberta(dropout: float) -> nn.Module:
    options = _BERT | dict.fromkeys(_DROPOUTS, dropout)
    return transformers.XLMRobertaForMaskedLM(transformers.XLMRobertaConfig(**options))


def _llama(dropout: float, *, tied: bool) -> nn.Module:
    config = transformers.LlamaConfig(**_LLAMA, attention_dropout=dropout, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def _gemma2(dropout: float) -> nn.Module:
    config = transformers.Gemma2Config(**_LLAMA, attention_dropout=dropout, final_logit_softcapping=2.0)
    return transformers.Gemma2ForCausalLM(config)


def _opt(dropout: float) -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=NUM_WORDS,
        hidden_size=_WIDTH,
        word_embed_proj_dim=_WIDTH,
        ffn_dim=24,
        num_hidden_layers=_LAYERS,
        num_attention_heads=2,
        max_position_embeddings=32,
        dropout=dropout,
        attention_dropout=dropout,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.OPTForCausalLM(config)


def _next_word_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor, **options: Any
) -> Tensor:
    """Computes what Hugging Face's models of the next word do, without their cast of logits to float32."""
    shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
    return F.cross_entropy(logits.view(-1, vocab_size), shifted, reduction="sum") / num_items_in_batch


@dataclass(frozen=True)
class PublishedHead:
    """A model and its table.

    Attributes:
        build: makes the model, given the rate of its dropouts.
        table: the parameter that the output layer reads.
        scores: the "next" word, "masked" words, or those of a "translation".
    """

    build: Callable[[float], nn.Module]
    table: str
    scores: str

    def make(
        self, dtype: torch.dtype = torch.float64, seed: int = 0, *, dropout: float = 0.0, own_loss: bool = False
    ) -> nn.Module:
        """Makes the model.

        Args:
            own_loss: keeps a loss that the model casts to float32.
        """
        torch.manual_seed(seed)
        model: Any = self.build(dropout).train().to(dtype)
        draw_zeros(model)
        if self.scores == "next" and not own_loss:
            model.loss_function = _next_word_loss
        return model

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        random = torch.Generator().manual_seed(100 * step + rank)
        words = torch.randint(3, NUM_WORDS, (2, 6 + rank % 2), generator=random)
        targets = words if self.scores == "next" else torch.randint(3, NUM_WORDS, words.shape, generator=random)
        labels = targets.masked_fill(torch.rand(words.shape, generator=random) < _IGNORED_RATE[self.scores], IGNORED)
        if self.scores != "next":
            return {"input_ids": words, "labels": labels}
        if step == 1 and rank == world_size - 1:
            labels.fill_(IGNORED)
        return {"input_ids": words, "labels": labels, "num_items_in_batch": torch.tensor(5.0)}


_IGNORED_RATE = {"next": 0.3, "masked": 0.7, "translation": 0.2}
HEADS: Mapping[str, PublishedHead] = {
    "gpt2": PublishedHead(_sized(make_gpt2), "transformer.wte.weight", "next"),
    "bert": PublishedHead(_bert, "bert.embeddings.word_embeddings.weight", "masked"),
    "t5": PublishedHead(_sized(make_t5), "shared.weight", "translation"),
    "llama": PublishedHead(partial(_llama, tied=True), "model.embed_tokens.weight", "next"),
    "llama, untied": PublishedHead(partial(_llama, tied=False), "lm_head.weight", "next"),
    "gemma2": PublishedHead(_gemma2, "model.embed_tokens.weight", "next"),
    "opt": PublishedHead(_opt, "model.decoder.embed_tokens.weight", "next"),
    "xlm-roberta": PublishedHead(_xlm_roberta, "lm_head.decoder.weight", "masked"),
}
