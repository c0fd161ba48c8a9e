"""More published models, built from tiny configurations, train as in the single-process reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.optim import Adagrad
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

import embrace_fx
from tests.support.published_models import ADAGRAD, NUM_WORDS, PAD, SGD_01, START, THREE, Training, check
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same, train_reference

ENCODER: dict[str, Any] = {
    "vocab_size": NUM_WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": PAD,
}


def make_deberta() -> nn.Module:
    config = transformers.DebertaV2Config(relative_attention=True, pos_att_type=["p2c", "c2p"], **ENCODER)
    return transformers.DebertaV2ForQuestionAnswering(config)


def make_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=NUM_WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def make_mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=NUM_WORDS, hidden_size=16, state_size=4, num_hidden_layers=1, tie_word_embeddings=False
    )
    return transformers.MambaForCausalLM(config)


class ClipText(nn.Module):
    """The text tower of Radford et al. 2021, and its side of the contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.CLIPTextConfig(
            vocab_size=NUM_WORDS,
            hidden_size=32,
            intermediate_size=64,
            projection_dim=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            pad_token_id=PAD,
            bos_token_id=START,
            eos_token_id=2,
        )
        self.tower = transformers.CLIPTextModelWithProjection(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> CLIPTextModelOutput:
        found: CLIPTextModelOutput = self.tower(input_ids, attention_mask=attention_mask)
        assert found.text_embeds is not None
        texts = F.normalize(found.text_embeds, dim=-1)
        found["loss"] = F.cross_entropy(texts @ texts.t() / 0.1, torch.arange(len(texts)))
        return found


def make_longt5(attention: str) -> nn.Module:
    """Local attention pads each sequence to whole blocks; transient global tokens stand for blocks of 4."""
    general: dict[str, Any] = {"decoder_start_token_id": PAD}
    config = transformers.LongT5Config(
        vocab_size=NUM_WORDS,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        local_radius=3,
        global_block_size=4,
        encoder_attention_type=attention,
        dropout_rate=0.0,
        pad_token_id=PAD,
        **general,
    )
    return transformers.LongT5ForConditionalGeneration(config)


ZOO: dict[str, Training] = {
    "deberta-v2": Training(make_deberta, "question", ADAGRAD, THREE),
    "llama": Training(make_llama, "language", ADAGRAD, THREE, {"use_cache": False}),
    "mamba": Training(make_mamba, "language", SGD_01, ((5, 5), (5, 5)), {"use_cache": False}),
    "clip text": Training(ClipText, "language", ADAGRAD, THREE),
    "longt5 local": Training(partial(make_longt5, "local"), "translation", SGD_01, THREE, {"use_cache": False}),
    "longt5 global": Training(
        partial(make_longt5, "transient-global"), "translation", SGD_01, THREE, {"use_cache": False}
    ),
}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ZOO)
def test_a_model_trains_as_the_reference(name: str) -> None:
    trained = check(ZOO[name])
    assert any(decision.is_table for decision in trained.plan.values())


# -- DLRM --------------------------------------------------------------------------------------------------------------

ROWS = (50, 7, 20)


class DLRM(nn.Module):
    """Naumov et al. 2019, in the form of its published code: EmbeddingBags in a list, offsets of all of them stacked,
    ids of each in a list; pairwise products of what comes out of them and of the dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode="sum") for rows in ROWS)
        self.bot_l = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        pairs = (len(ROWS) + 1) * len(ROWS) // 2
        self.top_l = nn.Sequential(nn.Linear(8 + pairs, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense_x: Tensor, lS_o: Tensor, lS_i: list[Tensor], target: Tensor) -> Tensor:
        x = self.bot_l(dense_x)
        ly = [bag(ids, offsets) for bag, ids, offsets in zip(self.emb_l, lS_i, lS_o, strict=True)]
        batch_size, d = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        li = torch.tensor([i for i in range(Z.shape[1]) for j in range(i)])
        lj = torch.tensor([j for i in range(Z.shape[1]) for j in range(i)])
        R = torch.cat([x, Z[:, li, lj]], dim=1)
        return F.binary_cross_entropy(self.top_l(R).squeeze(-1), target)


def dlrm_batch(step: int, rank: int) -> tuple[Any, ...]:
    random = torch.Generator().manual_seed(10 * step + rank)
    size, bag = 6, 2
    dense = torch.rand(size, 4, generator=random, dtype=torch.float64)
    offsets = torch.arange(0, size * bag, bag).repeat(len(ROWS), 1)
    ids = [torch.randint(rows, (size * bag,), generator=random) for rows in ROWS]
    target = torch.randint(2, (size,), generator=random).double()
    return dense, offsets, ids, target


def make_dlrm() -> nn.Module:
    torch.manual_seed(0)
    return DLRM().double()


MAKE_OPTIMIZER: Callable[..., Any] = lambda parameters: Adagrad(parameters, lr=0.05, eps=1e-3)  # noqa: E731


def train_dlrm(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[str]]:
    plain = make_dlrm()
    optimizer = MAKE_OPTIMIZER(plain.parameters())
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy="alltoall")
    for step in range(5):
        model(*dlrm_batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict(), list(model.plan.sharded)


@pytest.mark.long
def test_dlrm_trains_as_the_reference() -> None:
    batches = [[dlrm_batch(step, rank) for step in range(5)] for rank in range(2)]
    expected = train_reference(make_dlrm, lambda model: [MAKE_OPTIMIZER(model.parameters())], batches, 5)
    for found, sharded in run_ranks(2, train_dlrm):
        assert sharded == [f"emb_l.{k}.weight" for k in range(len(ROWS))]
        assert_same(found, expected, torch.float64)
