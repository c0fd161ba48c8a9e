"""Values offloaded to pinned memory on a CUDA device: the same bits, no more held than allowed."""

from __future__ import annotations

import torch
from torch import nn

import embrace_fx
from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.runtime.memory.copies import PinnedCopies
from embrace_fx.vocabulary.copy_ops import offload_id, reload_id
from tests.gpu.needs import gpus


@gpus(1)
def test_what_comes_back_is_what_left() -> None:
    device = torch.device("cuda", 0)
    copies = PinnedCopies(Streams(device))
    value = torch.randn(1000, 1000, device=device).t()
    expected = value.clone()
    stored = copies.await_offload(copies.offload(value, offload_id("value"), None))
    del value
    torch.full((1000, 1000), 7.0, device=device)  # may reuse the memory of `value`
    back = copies.await_reload(copies.reload(stored, reload_id("value"), None))
    assert stored.place.is_pinned()
    assert torch.equal(back, expected)
    assert back.stride() == expected.stride()


@gpus(1)
def test_a_step_within_a_budget_has_the_bits_of_one_without() -> None:
    def trained(budget: float | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.Tanh(), nn.LayerNorm(512))]
        model = nn.Sequential(nn.Embedding(1000, 512), *layers).cuda()
        compiled = embrace_fx.compile(model, memory_budget=budget)
        ids = torch.arange(1000, device="cuda").repeat(16)
        for _ in range(3):
            compiled.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            compiled(ids).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None], torch.cuda.max_memory_allocated() - before

    (plain, everything), (found, peak) = trained(None), trained(0.5)

    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert peak < everything
