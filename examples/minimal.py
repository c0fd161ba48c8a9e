"""The smallest use of embrace_fx: run it with python, or with torchrun on any number of ranks."""

import torch
from torch import distributed, nn

import embrace_fx

if distributed.is_torchelastic_launched():
    distributed.init_process_group("gloo")
leads = not distributed.is_initialized() or distributed.get_rank() == 0

plain = nn.Sequential(nn.Embedding(100_000, 64), nn.Flatten(), nn.Linear(8 * 64, 1))
model = embrace_fx.compile(plain, optimizer=torch.optim.Adagrad(plain.parameters(), lr=0.01))
words, wanted = torch.randint(100_000, (32, 8)), torch.randn(32, 1)

for _ in range(20):
    loss = nn.functional.mse_loss(model(words), wanted)
    loss.backward()
    model.optimizer.step()
    model.optimizer.zero_grad()
    if leads:
        print(f"loss {loss.item():.4f}")
if leads:
    print(model.report())
