"""BERT with the span of an answer as its target: a model of the `transformers` library at any size, and a workload.

Shape legend
    B examples; L positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from tests.support.models import Batch


def make_bert(num_words: int, hidden: int, intermediate: int, layers: int, max_length: int) -> nn.Module:
    """Without dropout, which ranks and reference would draw apart."""
    config = transformers.BertConfig(
        vocab_size=num_words,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=intermediate,
        max_position_embeddings=max_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForQuestionAnswering(config)


def draw_zeros(model: nn.Module) -> None:
    """Draws parameters that are zero: biases whose gradient is only rounding would become noise."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)


class QuestionAnswering(nn.Module):
    """A small one; a batch goes in, a loss comes out."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.bert = make_bert(num_words, hidden=12, intermediate=16, layers=1, max_length=16)

    def forward(self, ids_BL: Tensor, mask_BL: Tensor, starts_B: Tensor, ends_B: Tensor) -> Tensor:
        answered = self.bert(input_ids=ids_BL, attention_mask=mask_BL, start_positions=starts_B, end_positions=ends_B)
        return answered.loss


@dataclass(frozen=True)
class QuestionAnsweringWorkload:
    """Sentences of which the last words may be padding."""

    num_words: int = 50
    length: int = 8
    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = QuestionAnswering(self.num_words).to(dtype)
        draw_zeros(model)
        return model

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed((seed * 100 + step) * 10 + rank)
        ids = torch.randint(1, self.num_words, (3, self.length), generator=random)
        kept = torch.arange(self.length) < torch.randint(3, self.length + 1, (3, 1), generator=random)
        starts, ends = torch.randint(3, (2, 3), generator=random)
        return ids * kept, kept.long(), starts, ends
