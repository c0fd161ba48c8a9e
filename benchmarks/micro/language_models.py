"""Hugging Face's GPT-2, BERT and T5, with two layers and 30,000 words, whose loss is in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

WORDS = 30_000


class WithLoss(nn.Module):
    """Returns the loss of predicting the words of a batch from the same words."""

    def __init__(self, make: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        import transformers  # noqa: PLC0415  (an extra, which takes seconds to import)

        self.model = make(transformers)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def _gpt2(transformers: Any) -> nn.Module:
    shape = {"vocab_size": WORDS, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=1)
    found: nn.Module = transformers.GPT2LMHeadModel(config)
    return found


def _bert(transformers: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    found: nn.Module = transformers.BertForMaskedLM(config)
    return found


def _t5(transformers: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    found: nn.Module = transformers.T5ForConditionalGeneration(config)
    return found


LANGUAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: WithLoss(_gpt2),
    "BERT-MLM": lambda: WithLoss(_bert),
    "T5": lambda: WithLoss(_t5),
}
